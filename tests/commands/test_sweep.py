"""The grid, continuing it, the choice of each recipe's best setting, and the comparison at the end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from efftrain_cli.foundation.errors import EfftrainError, StoppedError, UsageError
from efftrain_cli.recipe.recipe import dump_recipe
from efftrain_cli.run.rows import read_run
from efftrain_cli.sweep.trials import (
    Trial,
    check_comparable,
    choose,
    grid,
    parse_seeds,
    parse_settings,
    pretrain_arguments,
    recipe_of,
    run_trials,
)
from tests.fake_runs import rows_of, write_run

TINY = """\
[model]
n_layer = 1
n_head = 1
n_embd = 32
seq_len = 32
[data]
train = "text.txt"
valid = "valid.txt"
tokenizer = "bpe:300"
repeat = true
[optim]
lr = 1e-3
[train]
tokens = 2560
batch_size = 8
micro_batch_tokens = 1024
dtype = "fp32"
[eval]
every = 5
windows = 4
[checkpoint]
every = 5
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two recipes that can be trained in a second, and the folder of runs."""
    monkeypatch.setenv("EFFTRAIN_RUNS", str(tmp_path / "runs"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plain.toml").write_text(TINY)
    (tmp_path / "warm.toml").write_text('base = "plain.toml"\n[seq_len_warmup]\nstart = 8\nsteps = 4\n')
    words = [f"word{i % 97} and line{i % 31}" for i in range(4000)]
    (tmp_path / "text.txt").write_text("\n".join(words))
    (tmp_path / "valid.txt").write_text("\n".join(reversed(words[:800])))
    return tmp_path


class Pretrain:
    """Stands for the child process: writes the run that `pretrain` would write, or ends with an exit code."""

    def __init__(self, trials: Sequence[Trial], codes: dict[str, int] | None = None) -> None:
        self.by_name = {trial.name: trial for trial in trials}
        self.codes = codes or {}
        self.calls: list[str] = []

    def __call__(self, arguments: Sequence[str]) -> int:
        resumed = "--resume" in arguments
        name = arguments[list(arguments).index("--resume" if resumed else "--name") + 1]
        self.calls.append(("resume " if resumed else "") + name)
        code = self.codes.pop(name, 0)
        trial, root = self.by_name[name], Path(os.environ["EFFTRAIN_RUNS"])
        path = root / name
        if not resumed:
            path = write_run(root, Path(trial.recipe).stem, trial.seed, name=name, rows=[])
            (path / "recipe.toml").write_text(dump_recipe(recipe_of(trial)))
        speed = 1.3 if "warm" in trial.recipe else 1.0
        speed += 0.5 if "optim.lr=2e-3" in trial.settings and "warm" in trial.recipe else 0
        rows = rows_of(50 if code else 100, trial.seed, speed)
        for row in rows:
            # The budget of the tiny recipes is 2560 tokens.
            row["tokens"] = row["step"] * 2560 / 100
        if code == 4:
            rows[-1]["nonfinite"] = True
        (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return code


def quiet(text: str) -> None:
    """Says nothing."""


def test_seeds() -> None:
    assert parse_seeds("0..4") == (0, 1, 2, 3, 4)
    assert parse_seeds("7") == (7,)
    assert parse_seeds("1, 3 ,5..6") == (1, 3, 5, 6)
    for wrong in ("", "4..0", "a", "1..", "-1", "1,1", "0..2,1"):
        with pytest.raises(UsageError, match="--seeds"):
            parse_seeds(wrong)


def test_settings() -> None:
    assert parse_settings(["optim.lr=1e-3,2e-3", "optim.betas=[0.9,0.95],[0.8,0.9]", 'data.train="a,b"']) == [
        ("optim.lr", ["1e-3", "2e-3"]),
        ("optim.betas", ["[0.9,0.95]", "[0.8,0.9]"]),
        ("data.train", ['"a,b"']),
    ]
    for wrong in ("optim.lr", "optim.lr=", "optim.lr=1,", "=1", "seed=1", "base=x", "wandb.mode=off,online"):
        with pytest.raises(UsageError, match="--set"):
            parse_settings([wrong])
    with pytest.raises(UsageError, match="twice"):
        parse_settings(["optim.lr=1", "optim.lr=2"])


def test_grid_has_seeds_outermost_and_names_that_tell(folder: Path) -> None:
    trials = grid(["plain.toml", "warm.toml"], (0, 1), [("optim.lr", ["1e-3", "2e-3"])])
    assert [trial.name for trial in trials[:4]] == [
        "plain-lr1e-3-seed0",
        "plain-lr2e-3-seed0",
        "warm-lr1e-3-seed0",
        "warm-lr2e-3-seed0",
    ]
    assert [trial.seed for trial in trials] == [0] * 4 + [1] * 4
    assert [trial.name for trial in grid(["plain.toml"], (3,), [], "mine")] == ["mine-plain-seed3"]
    assert grid(["plain.toml"], (3,), [("wandb.mode", ["offline"])])[0].name == "plain-seed3"
    long = grid(["plain.toml"], (0, 1), [("data.train", ["x" * 80, "y" * 80])])
    assert len({trial.name for trial in long}) == 4 and max(len(trial.name) for trial in long) <= 64
    with pytest.raises(UsageError, match="twice"):
        grid(["plain.toml", "sub/plain.toml"], (0,), [])


def test_arguments(folder: Path) -> None:
    (trial,) = grid(["plain.toml"], (3,), [("optim.lr", ["1e-3"])])
    words = pretrain_arguments(trial, "new", "cpu")
    assert words[3:] == ["pretrain", "--device", "cpu", "--recipe", "plain.toml", "--seed", "3", "--name", "plain-lr1e-3-seed3", "--set", "optim.lr=1e-3"]
    assert pretrain_arguments(trial, "unfinished", "cpu")[-2:] == ["--resume", "plain-lr1e-3-seed3"]


def test_a_stopped_sweep_continues_without_training_anything_twice(folder: Path) -> None:
    trials = grid(["plain.toml", "warm.toml"], (0, 1), [])
    first = Pretrain(trials, {"plain-seed1": 75})
    with pytest.raises(StoppedError, match="plain-seed1 was stopped"):
        list(run_trials(trials, train=first, say=quiet))
    assert first.calls == ["plain-seed0", "warm-seed0", "plain-seed1"]
    second = Pretrain(trials)
    ends = [end for _, end in run_trials(trials, train=second, say=quiet)]
    assert second.calls == ["resume plain-seed1", "warm-seed1"] and ends == ["finished"] * 4
    third = Pretrain(trials)
    list(run_trials(trials, train=third, say=quiet))
    assert third.calls == []


def test_a_run_that_diverges_is_a_result(folder: Path) -> None:
    trials = grid(["plain.toml", "warm.toml"], (0,), [])
    train = Pretrain(trials, {"plain-seed0": 4})
    assert [end for _, end in run_trials(trials, train=train, say=quiet)] == ["diverged", "finished"]
    again = Pretrain(trials)
    assert [end for _, end in run_trials(trials, train=again, say=quiet)] == ["diverged", "finished"]
    assert again.calls == []


def test_a_failure_ends_the_sweep_with_its_exit_code(folder: Path) -> None:
    trials = grid(["plain.toml", "warm.toml"], (0,), [])
    with pytest.raises(EfftrainError, match="exit code 6") as error:
        list(run_trials(trials, train=Pretrain(trials, {"plain-seed0": 6}), say=quiet))
    assert error.value.exit_code == 6


def test_a_taken_name_is_found_before_anything_is_trained(folder: Path) -> None:
    trials = grid(["plain.toml", "warm.toml"], (0,), [])
    list(run_trials(trials, train=Pretrain(trials), say=quiet))
    (folder / "warm.toml").write_text('base = "plain.toml"\n[seq_len_warmup]\nstart = 16\nsteps = 4\n')
    train = Pretrain(trials)
    with pytest.raises(UsageError, match=r"'warm-seed0' exists with another recipe \(seq_len_warmup\.start differ"):
        list(run_trials(trials, train=train, say=quiet))
    assert train.calls == []


def test_a_start_that_was_killed_leaves_nothing_in_the_way(folder: Path) -> None:
    trials = grid(["plain.toml"], (0,), [])
    (folder / "runs" / "plain-seed0").mkdir(parents=True)
    (folder / "runs" / "plain-seed0" / "lock").touch()
    assert [end for _, end in run_trials(trials, train=Pretrain(trials), say=quiet)] == ["finished"]


def test_each_recipe_is_compared_at_its_own_best_setting(folder: Path) -> None:
    trials = grid(["plain.toml", "warm.toml"], (0, 1), [("optim.lr", ["1e-3", "2e-3"])])
    list(run_trials(trials, train=Pretrain(trials, {"plain-lr2e-3-seed1": 4}), say=quiet))
    best = {(choice.recipe, choice.settings[0]): choice.best for choice in choose(trials)}
    assert best == {
        ("plain.toml", "optim.lr=1e-3"): True,  # with the other, a seed diverged
        ("plain.toml", "optim.lr=2e-3"): False,
        ("warm.toml", "optim.lr=1e-3"): False,
        ("warm.toml", "optim.lr=2e-3"): True,
    }


def test_what_could_not_be_compared_is_refused_before_training(folder: Path) -> None:
    (folder / "long.toml").write_text('base = "plain.toml"\n[model]\nseq_len = 64\n')
    with pytest.raises(UsageError, match=r"model\.seq_len: 32 in plain\.toml; 64 in long\.toml"):
        check_comparable(grid(["plain.toml", "long.toml"], (0, 1), []))
    check_comparable(grid(["plain.toml", "warm.toml"], (0, 1), []))
    with pytest.raises(UsageError, match="validation text"):
        check_comparable(grid(["plain.toml"], (0,), [("data.valid", ["valid.txt", "text.txt"])]))


@pytest.mark.slow
def test_sweep_end_to_end(folder: Path, efftrain: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    """Real training: two recipes, two seeds, ended by SIGTERM on the way, continued, compared."""
    words = ["sweep", "--recipe", "plain.toml", "--recipe", "warm.toml", "--seeds", "0..1", "--device", "cpu"]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent.parent)}
    child = subprocess.Popen(
        [sys.executable, "-m", "efftrain_cli", *words, "--set", "train.tokens=25600"],
        env=env,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    metrics = folder / "runs" / "plain-tokens25600-seed0" / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (metrics.exists() and metrics.read_text().count("\n") > 3) and time.monotonic() < deadline:
        time.sleep(0.05)
    child.send_signal(signal.SIGTERM)
    _, errors = child.communicate(timeout=120)
    assert child.returncode == 75, errors.decode()
    done = efftrain(*words, "--set", "train.tokens=25600", "--format", "json", timeout=400)
    assert done.returncode == 0, done.stderr
    assert "[1/4] plain-tokens25600-seed0: continuing" in done.stderr
    found = json.loads(done.stdout)
    assert [group["label"] for group in found["groups"]] == ["plain", "warm"]
    assert [run["status"] for group in found["groups"] for run in group["runs"]] == ["finished"] * 4
    assert any("resumed once" in label["text"] for label in found["labels"])
    again = efftrain(*words, "--set", "train.tokens=25600", "--format", "json")
    assert json.loads(again.stdout) == found
    assert read_run(folder / "runs" / "warm-tokens25600-seed1").origin["recipe"] == "warm"
