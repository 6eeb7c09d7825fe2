"""`efftrain sweep` as a user gives it: its plan, its table of settings, its ladder."""

from __future__ import annotations

import json
import re

import pytest

from efftrain_cli.foundation.errors import RunLockedError, UsageError
from efftrain_cli.foundation.files import make_folder
from efftrain_cli.run.lock import take_lock
from efftrain_cli.sweep import folder_of
from efftrain_cli.trials.trial import Trial, grid
from tests.conftest import cli
from tests.fake_runs import val_loss
from tests.trials.stubs import both, plain, write_trial

WORDS = ["sweep", "plain.toml", "warm.toml", "--seeds", "0..1", "--device", "cpu"]


def test_the_plan_as_a_table_and_as_json(folder, monkeypatch):
    """A run keeps 3 checkpoints of 12 bytes a parameter, and rows."""
    costs = "4 runs, 10.2K tokens, time unknown: nothing was measured here, 3.49 MB of disk"
    plan = [
        "run          state  tokens",
        "plain-seed0  new     2,560",
        "warm-seed0   new     2,560",
        "plain-seed1  new     2,560",
        "warm-seed1   new     2,560",
        costs,
    ]
    needed = 4 * (3 * 12 * 24_032 + 11 * 700)
    monkeypatch.setattr("efftrain_cli.trials.costs.free_bytes", lambda folder: needed)
    assert cli(*WORDS, "--plan", "--jobs", "2").stdout.splitlines() == plan
    monkeypatch.setattr("efftrain_cli.trials.costs.free_bytes", lambda folder: needed - 1)
    assert cli(*WORDS, "--plan").stdout.splitlines()[6:] == [
        "warning: 3.49 MB needed, 3.49 MB free: lower checkpoint.keep, or set EFFTRAIN_RUNS to"
        " another disk"
    ]
    found = json.loads(cli(*WORDS, "--plan", "--format", "json").output)
    assert found[1] == {"run": "warm-seed0", "state": "new", "tokens": 2560} and len(found) == 4
    with pytest.raises(UsageError, match="does not apply to a plan\n  give table or json"):
        cli(*WORDS, "--plan", "--format", "latex")
    assert not (folder / "runs").exists()


def test_several_values_end_with_a_table_of_them(folder):
    """warm learns faster at 2e-3, the largest value; one run of plain diverged at 4e-3."""
    rates = ["1e-3", "2e-3"]
    for trial in grid(["plain.toml", "warm.toml"], (0, 1), {"optim.lr": rates}):
        write_trial(trial, 4 if trial.name == "plain-lr2e-3-seed1" else 0)
    lines = cli(*WORDS, "--set", "optim.lr=1e-3,2e-3").stdout.splitlines()
    assert lines[0].startswith("warm is better than plain in final loss: ")
    (head,) = [line for line in lines if line.startswith("optim.lr")]
    assert head.split() == ["optim.lr", "plain", "warm"]
    low, high = (line.split() for line in lines[lines.index(head) + 1 :][:2])
    assert low[0] == "0.001" and low[1].endswith("*!")
    assert high[:2] == ["0.002", "failed"] and high[2].endswith("*!")
    assert "note: warm: best at the edge of its grid; add optim.lr=0.004" in lines
    assert "note: warm: the best of 2 settings by these seeds: looks too good" in lines
    alone = ["sweep", "warm.toml", *WORDS[3:], "--set", "optim.lr=1e-3,2e-3"]
    table = cli(*alone).stdout
    assert table.split()[:2] == ["optim.lr", "warm"] and "add optim.lr=0.004" in table
    judged = cli(*alone, "--baseline", "warm-lr1e-3*").stdout
    assert "warm-lr2e-3 is better than warm-lr1e-3 in final loss" in judged


def test_several_budgets_end_with_the_ladder(folder):
    budgets = ["2560", "5120"]
    for trial in grid(["plain.toml", "warm.toml"], (0, 1), {"train.tokens": budgets}):
        write_trial(trial)
    text = cli(*WORDS, "--set", "train.tokens=2560,5120").stdout
    (head,) = [line for line in text.splitlines() if line.startswith("arm")]
    assert head.split()[:6] == ["arm", "parameters", "D/N", "seeds", "s", "sigma/s"]


def test_a_sweep_without_a_name_is_named_after_its_arms(folder):
    trials = [Trial("", (), 0, "n", arm=letter * 40) for letter in "ab"]
    assert re.fullmatch("a{40}-b{5}-[0-9a-f]{8}-[0-9a-f]{6}", folder_of(trials, None).name)


def test_one_recipe_at_one_setting_is_a_line_a_run(folder):
    """Also at several budgets. A sweep with a name lists its runs."""
    budgets = {"train.tokens": ["2560", "5120"]}
    for trial in grid(["plain.toml"], (0,), budgets, "mine"):
        write_trial(trial, 4 if "5120" in trial.name else 0)
    words = "sweep plain.toml --seeds 0 --name mine --set train.tokens=2560"
    cli(words)
    assert cli(f"{words},5120").stdout.splitlines() == [
        "run                          status    final_loss",
        f"mine-plain-tokens2560-seed0  finished      {val_loss(100, 0, 1.0):.4f}",
        "mine-plain-tokens5120-seed0  diverged           -",
    ]
    write_trial(*plain(0))
    cli("sweep plain.toml --seeds 0")
    (members,) = (folder / "runs").rglob("runs.txt")
    assert members.parent.name == "mine-sweep"
    assert members.read_text() == "mine-plain-tokens2560-seed0\nmine-plain-tokens5120-seed0\n"


def test_two_at_once_on_one_folder(folder):
    """F78: the second of one sweep ends with 7; a sweep of other runs does not."""
    for trial in both(0, 1):
        write_trial(trial)
    place = folder_of(both(0, 1), None)
    make_folder(place)
    with take_lock(place / "lock"):
        with pytest.raises(RunLockedError, match="is owned by process"):
            cli(*WORDS)
        cli("sweep plain.toml --seeds 0")
