"""tune-warmup with real probes: its files, its end, and a search that is killed half-way."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from efftrain_cli.foundation.errors import DivergedError
from efftrain_cli.recipe.recipe import load_recipe
from efftrain_cli.training import logger
from efftrain_cli.training.stages import train_stages
from efftrain_cli.tune_warmup import tune as tune_warmup
from efftrain_cli.tune_warmup.search import Search
from tests.conftest import sets
from tests.launch import start_efftrain, wait_until
from tests.tiny import changed
from tests.tune_warmup.conftest import lines


def test_a_search_leaves_receipts_curves_and_a_recipe_that_trains(recipe, capsys):
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
        assert (receipt["verdict"] == "unstable") == (worst > 1.3)
        assert int(points[-1][0]) == int(receipt["stopped_at_step"])
        if receipt["verdict"] == "stable":
            assert receipt["stopped_at_step"] == receipt["horizon"]
        assert float(receipt["max_grad_norm"]) > 0 and float(receipt["max_adam_sqrt_v"]) > 0
        assert not (folder / "probes" / receipt["probe"] / "checkpoints").exists()
    shown = capsys.readouterr().out
    assert f"cost       {len(receipts)} probes" in shown
    assert "settings probed would be" in shown
    assert "validation perplexity (full length)" in shown
    assert (folder / "probes.png").stat().st_size > 5000
    tuned = load_recipe(str(folder / "tuned.toml"))
    assert tuned.seq_len_warmup is not None
    assert replace(tuned, seq_len_warmup=None) == recipe
    run = start(tuned, recipe_name="tuned", steps=2)
    assert (run / "checkpoints" / "step-00000002").is_dir()


def test_the_batch_ramp_is_searched_too(overrides, capsys):
    ramp = [
        "batch_size_warmup.start=2",
        "batch_size_warmup.increment=2",
        "batch_size_warmup.sequences=40",
    ]
    folder = tune_warmup.tune(
        Search(recipe=load_recipe("small", overrides + ramp), multiples=1), recipe_name="ramp"
    )
    assert {receipt["sequences"] for receipt in lines(folder)} >= {"40", ""}
    # Nothing was unstable, training without the ramp included.
    assert {receipt["verdict"] for receipt in lines(folder)} == {"stable"}
    assert "tuned      no warmup" in capsys.readouterr().out
    tuned = load_recipe(str(folder / "ramp-tuned.toml"))
    assert tuned.batch_size_warmup is None and tuned.seq_len_warmup is None
    assert (folder / "ramp-tuned.toml").read_text() == (folder / "tuned.toml").read_text()


class Killed(BaseException):
    """Stands for a process that is gone from one line to the next."""


def test_a_killed_search_goes_on_without_repeating_a_probe(recipe, monkeypatch):
    search = Search(recipe=recipe)
    whole = tune_warmup.tune(search, recipe_name="whole")
    expected = lines(whole)
    assert len({receipt["verdict"] for receipt in expected}) == 2
    trained: list[int] = []

    def train_until_killed(state, *rest) -> Iterator:  # type: ignore
        for record in train_stages(state, *rest):
            trained.append(record.progress.step)
            if len(trained) % 7 == 0:
                raise Killed
            yield record

    monkeypatch.setattr(logger, "train_stages", train_until_killed)
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
    # Checkpoints come every two steps, so a kill costs a probe two steps at most: no probe began
    # anew after its fourth.
    for receipt in found:
        events = [
            json.loads(line)
            for line in (folder / "probes" / receipt["probe"] / "events.jsonl").open()
        ]
        starts = [event["event"] for event in events if event["event"] in ("start", "resume")]
        assert starts[0] == "start"
        assert set(starts[1:]) <= {"resume"}
        assert all(
            event["step"] >= 4
            for event in events
            if event["event"] == "resume" and event["segment"] > 1
        )


@pytest.mark.slow
def test_a_search_killed_from_outside_goes_on(overrides, efftrain, tmp_path):
    command = ["tune-warmup", "--recipe", "small", *sets(*overrides)]
    process = start_efftrain(tmp_path, *command, "--name", "killed")
    probes = tmp_path / "runs" / "killed" / "probes"
    wait_until(lambda: len(list(probes.glob("*/probe.json"))) >= 2, process)
    process.send_signal(signal.SIGKILL)
    process.wait()
    finished = {path: path.stat().st_mtime_ns for path in probes.glob("*/probe.json")}
    assert len(finished) >= 2
    assert not (tmp_path / "runs" / "killed" / "tuned.toml").exists()
    for name in ("killed", "whole"):
        efftrain(*command, "--name", name, timeout=600)
    assert all(path.stat().st_mtime_ns == written for path, written in finished.items())
    found, expected = lines(probes.parent), lines(tmp_path / "runs" / "whole")
    for receipt in (*expected, *found):
        del receipt["seconds"]
    assert found == expected


def test_where_nothing_is_stable_the_search_says_so_and_fails(recipe, capsys):
    search = Search(recipe=recipe)
    # A learning rate at which any training makes the perplexity rise.
    search = replace(search, recipe=changed(recipe, "optim.lr=1.0"))
    advice = r"a lower optim.lr, .* \(--tune lr searches it\), a longer seq_len_warmup.start"
    with pytest.raises(DivergedError, match=f"no stable setting(.|\n)*{advice}"):
        tune_warmup.tune(search, recipe_name="hopeless")
    shown = " ".join(capsys.readouterr().out.split())
    assert "No seq_len_warmup.start that was probed is stable" in shown
    folder = Path(os.environ["EFFTRAIN_RUNS"]) / "hopeless-tune"
    assert {receipt["verdict"] for receipt in lines(folder)} == {"unstable"}
    # The setting to begin with is there for who wants it, marked.
    assert "NOT STABLE" in (folder / "tuned.toml").read_text()
    assert load_recipe(str(folder / "tuned.toml")) == search.recipe_with(*search.own)
    assert load_recipe(str(folder / "search.toml"), ["optim.lr=0.5"]) == changed(
        search.recipe, "optim.lr=0.5"
    )


def test_probes_that_fail_in_their_first_step_are_receipts(recipe):
    search = Search(recipe=changed(recipe, "optim.lr=1e30"))
    with pytest.raises(DivergedError, match="no stable setting"):
        tune_warmup.tune(search, recipe_name="hopeless")
    receipts = lines(Path(os.environ["EFFTRAIN_RUNS"]) / "hopeless-tune")
    assert {(receipt["verdict"], receipt["max_fluctuation"]) for receipt in receipts} == {
        ("unstable", "inf")
    }


def test_a_survivor_whose_checkpoint_is_gone_begins_anew(recipe):
    """As after the end of a search that other seeds continue."""
    search = Search(recipe=recipe)
    folder = tune_warmup.tune(
        replace(search, budget=search.smallest_budget() - 1), recipe_name="tiny"
    )
    (first,) = lines(folder)
    assert first["horizon"] == first["stopped_at_step"] == "4"
    shutil.rmtree(folder / "probes" / first["probe"] / "checkpoints")
    tune_warmup.tune(search, recipe_name="tiny")
    receipts = lines(folder)
    whole = lines(tune_warmup.tune(search, recipe_name="whole"))
    for receipt in (*receipts, *whole):
        del receipt["seconds"]
    assert receipts == whole


def test_rivals_are_tuned_by_the_same_command(overrides, recipe):
    assert recipe.seq_len_warmup is None
    folder = tune_warmup.tune(Search(recipe=recipe, tune="lr", budget=8000), recipe_name="lr")
    assert folder.name == "lr-tune-lr"
    tuned = load_recipe(str(folder / "tuned.toml"))
    assert replace(tuned, optim=recipe.optim) == recipe
    assert {receipt["start"] for receipt in lines(folder)} == {"0"}
    two = load_recipe(
        "small", [*overrides, "seq_len_warmup={pacing='discrete', lengths=[8, 32], until=[6]}"]
    )
    folder = tune_warmup.tune(Search(recipe=two, multiples=1, max_share=0.2), recipe_name="two")
    tuned = load_recipe(str(folder / "tuned.toml"))
    assert tuned.seq_len_warmup is not None and tuned.seq_len_warmup.pacing == "discrete"
    for receipt in lines(folder):
        if receipt["verdict"] == "stable" and receipt["stopped_at_step"] != "4":
            assert int(receipt["stopped_at_step"]) >= int(receipt["steps"])


def test_the_plan_is_printed_and_nothing_trained(efftrain, tmp_path):
    result = efftrain("tune-warmup", "--recipe", "gpt2-117m-slw", "--plan", "--budget", "10%")
    assert (
        "cost       8.58B tokens (5.5% of a full run) to verify start 8, 20,000 steps"
        in result.stdout
    )
    assert "           at most " in result.stdout
    assert (
        "budget     15.7B tokens (10.0% of a full run): no probe begins that could exceed it"
        in result.stdout
    )
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("budget", ["0%", "ten", "-5%", "0", "1e400%"])
def test_a_budget_that_is_none_is_refused(efftrain, budget):
    result = efftrain(
        "tune-warmup", "--recipe", "unstable-slw", "--plan", "--budget", budget, code=2
    )
    assert "give a share of a full run, such as 10%" in result.stderr


def test_an_empty_budget_is_refused(efftrain):
    result = efftrain("tune-warmup", "--recipe", "unstable-slw", "--plan", "--budget", "", code=2)
    assert "--budget is empty\n  give it a value, or leave it out" in result.stderr


def test_budgets_are_shares_or_tokens():
    from efftrain_cli.cli.tune_warmup import parse_budget

    assert parse_budget("10%", 600_000) == 60_000
    assert parse_budget(" 2.5 % ", 600_000) == 15_000
    assert parse_budget("500M", 600_000) == 500_000_000
