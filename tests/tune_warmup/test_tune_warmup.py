"""tune-warmup with real probes: its files, its end, and a search that is killed half-way."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from efftrain_cli.foundation.errors import DivergedError, UsageError
from efftrain_cli.recipe.recipe import Recipe, load_recipe
from efftrain_cli.training.trainer import train
from efftrain_cli.tune_warmup import tune as tune_warmup
from efftrain_cli.tune_warmup.search import Search
from tests.conftest import REPOSITORY
from tests.trained_run import TEXT

SETTINGS = {
    "data.valid_fraction": "0.3",
    "data.tokenizer": '"bpe:300"',
    "data.repeat": "true",
    "model.n_layer": "1",
    "model.n_embd": "16",
    "model.n_head": "2",
    "model.seq_len": "32",
    "optim.warmup_steps": "4",
    "optim.lr": "1e-1",
    "train.tokens": "8000",
    "train.batch_size": "8",
    "eval.windows": "4",
    "checkpoint.every": "2",
}


@pytest.fixture
def overrides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setenv("EFFTRAIN_RUNS", str(tmp_path / "runs"))
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    return [f"data.train={json.dumps(str(text))}", *(f"{key}={value}" for key, value in SETTINGS.items())]


@pytest.fixture
def recipe(overrides: list[str]) -> Recipe:
    return load_recipe("small", overrides)


def lines(folder: Path) -> list[dict[str, str]]:
    with (folder / "receipts.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_search_leaves_receipts_curves_and_a_recipe_that_trains(recipe: Recipe, capsys: pytest.CaptureFixture) -> None:
    from efftrain_cli.pretrain import start

    folder = tune_warmup.tune(Search(recipe=recipe), recipe_name="tiny")
    assert folder.name == "tiny-tune"
    receipts = lines(folder)
    assert receipts
    for receipt in receipts:
        points = [point.split(":") for point in receipt["perplexity_by_step"].split()]
        values = [float(perplexity) for _, perplexity in points]
        worst = max(value / min(values[:i]) for i, value in enumerate(values) if i)
        assert worst == pytest.approx(float(receipt["max_fluctuation"]), rel=1e-3)
        assert receipt["verdict"] == ("unstable" if worst > 1.3 else "stable")
        assert int(points[-1][0]) == int(receipt["stopped_at_step"])
        if receipt["verdict"] == "stable":
            assert receipt["stopped_at_step"] == receipt["horizon"]
        assert not (folder / "probes" / receipt["probe"] / "checkpoints").exists()
    shown = capsys.readouterr().out
    assert f"cost       {len(receipts)} probes" in shown
    assert "settings probed would be" in shown
    assert "log10 of the validation perplexity" in shown
    assert (folder / "probes.png").stat().st_size > 5000
    tuned = load_recipe(str(folder / "tuned.toml"))
    assert tuned.seq_len_warmup is not None
    assert replace(tuned, seq_len_warmup=None) == recipe
    run = start(tuned, recipe_name="tuned", steps=2)
    assert (run / "checkpoints" / "step-00000002").is_dir()


def test_the_batch_ramp_is_searched_too(overrides: list[str]) -> None:
    ramp = ["batch_size_warmup.start=2", "batch_size_warmup.increment=2", "batch_size_warmup.sequences=40"]
    folder = tune_warmup.tune(Search(recipe=load_recipe("small", overrides + ramp), multiples=1), recipe_name="ramp")
    tuned = load_recipe(str(folder / "tuned.toml"))
    assert tuned.batch_size_warmup is not None
    assert tuned.seq_len_warmup is None
    assert {receipt["sequences"] for receipt in lines(folder)} >= {str(tuned.batch_size_warmup.sequences)}


class Killed(BaseException):
    """Stands for a process that is gone from one line to the next."""


def test_a_killed_search_goes_on_without_repeating_a_probe(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    search = Search(recipe=recipe)
    whole = tune_warmup.tune(search, recipe_name="whole")
    expected = lines(whole)
    assert len({receipt["verdict"] for receipt in expected}) == 2
    trained: list[int] = []

    def train_until_killed(state, *rest) -> Iterator:  # type: ignore
        for record in train(state, *rest):
            trained.append(record.progress.step)
            if len(trained) % 7 == 0:
                raise Killed
            yield record

    monkeypatch.setattr(tune_warmup, "train", train_until_killed)
    kills = 0
    while True:
        try:
            folder = tune_warmup.tune(search, recipe_name="killed")
            break
        except Killed:
            kills += 1
            assert kills < 100
    assert kills > len(expected)
    found = lines(folder)
    for receipt in (*expected, *found):
        del receipt["seconds"]
    assert found == expected
    assert load_recipe(str(folder / "tuned.toml")) == load_recipe(str(whole / "tuned.toml"))
    # Checkpoints come every two steps, so a kill costs a probe two steps at most: no probe began anew after its fourth.
    for receipt in found:
        events = [json.loads(line) for line in (folder / "probes" / receipt["probe"] / "events.jsonl").open()]
        starts = [event["event"] for event in events if event["event"] in ("start", "resume")]
        assert starts[0] == "start"
        assert set(starts[1:]) <= {"resume"}
        assert all(event["step"] >= 4 for event in events if event["event"] == "resume" and event["segment"] > 1)


@pytest.mark.slow
def test_a_search_killed_from_outside_goes_on(overrides: list[str], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "efftrain_cli", "tune-warmup", "--recipe", "small"]
    for override in overrides:
        command += ["--set", override]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    process = subprocess.Popen([*command, "--name", "killed"], env=environment, stdout=subprocess.DEVNULL)
    probes = tmp_path / "runs" / "killed" / "probes"
    deadline = time.monotonic() + 100
    while len(list(probes.glob("*/probe.json"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    finished = {path: path.stat().st_mtime_ns for path in probes.glob("*/probe.json")}
    assert len(finished) >= 2
    assert not (tmp_path / "runs" / "killed" / "tuned.toml").exists()
    for name in ("killed", "whole"):
        subprocess.run([*command, "--name", name], env=environment, check=True, capture_output=True)
    assert all(path.stat().st_mtime_ns == written for path, written in finished.items())
    found, expected = lines(probes.parent), lines(tmp_path / "runs" / "whole")
    for receipt in (*expected, *found):
        del receipt["seconds"]
    assert found == expected


def test_a_directory_of_another_search_is_refused(recipe: Recipe, overrides: list[str]) -> None:
    tune_warmup._claim(folder := Path(os.environ["EFFTRAIN_RUNS"]) / "x-tune", Search(recipe=recipe))
    tune_warmup._claim(folder, Search(recipe=recipe))
    for other in (Search(recipe=recipe, threshold=1.2), Search(recipe=load_recipe("small", [*overrides, "seed=3"]))):
        with pytest.raises(UsageError, match="another recipe or other options"):
            tune_warmup._claim(folder, other)


def test_where_nothing_is_stable_the_search_says_so_and_fails(recipe: Recipe, capsys: pytest.CaptureFixture) -> None:
    search = Search(recipe=recipe)
    # A learning rate at which any training makes the perplexity rise.
    search = replace(search, recipe=replace(recipe, optim=replace(recipe.optim, lr=1.0)))
    with pytest.raises(DivergedError, match="no stable warmup"):
        tune_warmup.tune(search, recipe_name="hopeless")
    assert "No start is stable" in capsys.readouterr().out
    folder = Path(os.environ["EFFTRAIN_RUNS"]) / "hopeless-tune"
    assert {receipt["verdict"] for receipt in lines(folder)} == {"unstable"}
    assert not (folder / "tuned.toml").exists()


def test_the_plan_is_printed_and_nothing_trained(efftrain, tmp_path: Path) -> None:
    result = efftrain("tune-warmup", "--recipe", "gpt2-117m-slw", "--plan")
    assert result.returncode == 0, result.stderr
    assert "at most 19 probes" in result.stdout
    assert "(53.3% of a full run)" in result.stdout
    assert not (tmp_path / "runs").exists()
