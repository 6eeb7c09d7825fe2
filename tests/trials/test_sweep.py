"""`efftrain sweep` as a user gives it: its plan, real training stopped on the way, curves and the
comparison."""

from __future__ import annotations

import json
import math
import re
import signal

import pytest

from efftrain_cli.compare.inference import ONE_SEED, Estimate
from efftrain_cli.foundation.errors import UsageError
from efftrain_cli.foundation.why import Why
from efftrain_cli.run.small_files import read_run
from efftrain_cli.sweep import compare_trials, grid_lines
from efftrain_cli.trials.curves import name_trials
from efftrain_cli.trials.screen import _gain
from efftrain_cli.trials.trial import grid
from tests.conftest import cli
from tests.fake_runs import read_jsonl, write_sealed
from tests.launch import start_efftrain, wait_until
from tests.trials.stubs import write_trial

WORDS = [
    "sweep",
    "--recipe",
    "plain.toml",
    "--recipe",
    "warm.toml",
    "--seeds",
    "0..1",
    "--device",
    "cpu",
]


def test_the_plan_as_a_table_and_as_json(folder):
    shown = cli(*WORDS, "--plan", "--jobs", "2")
    assert "4 of 4 runs to train, at most 10.2K tokens; time unknown" in shown.output
    found = json.loads(cli(*WORDS, "--plan", "--format", "json").output)
    assert [run["run"] for run in found["runs"]] == [
        "plain-seed0",
        "warm-seed0",
        "plain-seed1",
        "warm-seed1",
    ]
    assert {run["tokens_left"] for run in found["runs"]} == {2560}
    with pytest.raises(UsageError, match="does not apply to a plan\n  give table or json"):
        cli(*WORDS, "--plan", "--format", "latex")
    assert not (folder / "runs").exists()


def test_learning_rates_are_kept_as_curves(folder):
    trials = grid(["plain.toml", "warm.toml"], (0, 1), [("optim.lr", ["1e-3", "2e-3", "4e-3"])])
    for trial in trials:
        write_trial(trial, 4 if trial.name == "plain-lr4e-3-seed1" else 0)
    text = "\n".join(grid_lines(trials, "plain", plot=True, figures=folder / "figures"))
    assert "plain" in text and "sensitivity" in text
    row = next(line for line in text.splitlines() if line.startswith("0.004"))
    assert "1 of 2 without a loss" in row
    assert (
        "warm" in text and "the best learning rate, 0.002" not in text
    )  # warm's best lies inside the grid
    assert (folder / "figures" / "learning-rate.png").stat().st_size > 10_000
    assert "<svg" in (folder / "figures" / "learning-rate.svg").read_text()


def test_curves_are_named_without_the_settings_of_all_trials(folder):
    axes = [
        ("eval.windows", ["2"]),
        ("train.batch_size", ["2", "4"]),
        ("optim.lr", ["1e-3", "2e-3"]),
    ]
    named = name_trials(grid(["plain.toml"], (0,), axes), ("optim.lr",))
    assert {name for name, _ in named} == {"plain train.batch_size=2", "plain train.batch_size=4"}


def test_each_recipe_is_compared_at_its_own_best_setting(folder):
    trials = grid(["plain.toml", "warm.toml"], (0, 1), [("optim.lr", ["1e-3", "2e-3"])])
    for trial in trials:
        write_trial(trial, 4 if trial.name == "plain-lr2e-3-seed1" else 0)
    found = compare_trials(trials, baseline=None, target_loss=None, allow=False)
    assert {tried.label: tried.chosen for tried in found.trials} == {
        "plain optim.lr=0.001": True,  # with the other, a seed diverged
        "plain optim.lr=0.002": False,
        "warm optim.lr=0.001": False,
        "warm optim.lr=0.002": True,
    }
    assert [group.label for group in found.groups] == [
        "plain optim.lr=0.001",
        "warm optim.lr=0.002",
    ]


def test_one_recipe_is_shown_at_the_best_setting_of_each_budget(folder):
    settings = [("optim.lr", ["1e-3", "2e-3"]), ("train.tokens", ["1280", "2560"])]
    trials = grid(["warm.toml"], (0, 1), settings)
    for trial in trials:
        write_trial(trial)
    found = compare_trials(trials, baseline=None, target_loss=None, allow=False)
    # The stubs' losses are lower at 2e-3.
    assert {(run.recipe["optim.lr"], run.recipe["train.tokens"]) for run in found.runs} == {
        (2e-3, 1280),
        (2e-3, 2560),
    }


def test_gains_have_the_baseline_of_the_comparison(folder):
    """The only recipe without a method, although it is named last."""
    words = ["--recipe", "warm.toml", "--recipe", "plain.toml", "--seeds", "0..1"]
    trials = grid(["warm.toml", "plain.toml"], (0, 1), [("train.tokens", ["1280", "2560"])])
    for trial in trials:
        write_trial(trial)
    shown = cli("sweep", *words, "--set", "train.tokens=1280,2560").output
    assert "warm: cost at which plain reaches the same loss" in shown
    assert "against A plain" in shown
    named = cli("sweep", *words, "--set", "train.tokens=1280,2560", "--baseline", "warm").output
    assert "plain: cost at which warm reaches the same loss" in named


def test_budgets_become_a_ladder_and_never_a_choice(folder):
    trials = grid(["plain.toml", "warm.toml"], (0, 1), [("train.tokens", ["1280", "2560"])])
    for trial in trials:
        write_trial(trial)
    text = "\n".join(grid_lines(trials, "plain", plot=False, figures=None))
    assert "every point a finished run of its own budget" in text
    (folder / "plain.toml").write_text(
        (folder / "plain.toml").read_text().replace("lr = 1e-3", "lr = 1e-3\ndecay_tokens = 2560")
    )
    trials = grid(
        ["plain.toml", "warm.toml"], (0, 1), [("train.tokens", ["1280", "2560"])], "fixed"
    )
    for trial in trials:
        write_trial(trial)
    text = "\n".join(grid_lines(trials, "plain", plot=False, figures=None))
    assert (
        "no speed-up at matched loss: optim.decay_tokens = 2,560 is another budget than"
        " train.tokens = 1,280" in text
    )


@pytest.mark.parametrize(
    "estimate, shown",
    [
        (Estimate(1.2, 1.1, 1.31, n=3), "1.20x [1.10, 1.31]"),
        (Estimate(1.2, n=1, why=ONE_SEED), "1.20x (one seed: no claim)"),
        (Estimate(math.nan, n=3, why=Why("beyond", "it ends there")), "- (it ends there)"),
    ],
)
def test_a_gain_at_a_rung_is_shown_with_its_interval(estimate, shown):
    assert _gain(estimate) == shown


def test_a_ladder_of_muon_from_before_has_no_flops(folder):
    """Rows of older runs lack `optimizer_flops`."""
    (folder / "muon.toml").write_text(
        'base = "plain.toml"\n[optim]\nname = "muon"\nmuon_lr = 0.02\n'
    )
    units = {}
    for method in ("warm.toml", "muon.toml"):
        trials = grid(["plain.toml", method], (0, 1), [("train.tokens", ["1280", "2560"])])
        for trial in trials:
            write_trial(trial)
            metrics = folder / "runs" / trial.name / "metrics.jsonl"
            rows = read_jsonl(metrics)
            for row in rows:
                row.pop("optimizer_flops", None)  # the row of step 0 has none
            write_sealed(metrics, rows)
        text = "\n".join(grid_lines(trials, "plain", plot=False, figures=None))
        units[method] = {unit for unit in ("FLOPs", "tokens") if f"  {unit} " in text}
    assert units == {"warm.toml": {"FLOPs", "tokens"}, "muon.toml": {"tokens"}}


@pytest.mark.slow
def test_sweep_end_to_end(folder, efftrain):
    """Real training: two recipes, two seeds, ended by SIGTERM on the way, continued two at once,
    compared."""
    budget = ["--set", "train.tokens=25600"]
    child = start_efftrain(folder, *WORDS, *budget)
    metrics = folder / "runs" / "plain-tokens25600-seed0" / "metrics.jsonl"
    wait_until(lambda: metrics.exists() and metrics.read_text().count("\n") > 3, child)
    child.send_signal(signal.SIGTERM)
    _, errors = child.communicate(timeout=120)
    assert child.returncode == 75, errors
    done = efftrain(*WORDS, *budget, "--jobs", "2", "--format", "json", timeout=600)
    ends = re.findall(r"^\[(.)/4\] (\S+): val loss", done.stderr, flags=re.MULTILINE)
    assert [count for count, _ in ends] == ["1", "2", "3", "4"]
    assert {name for _, name in ends} == {
        f"{recipe}-tokens25600-seed{seed}" for recipe in ("plain", "warm") for seed in (0, 1)
    }
    found = json.loads(done.stdout)
    assert [group["label"] for group in found["groups"]] == ["plain", "warm"]
    assert [run["status"] for group in found["groups"] for run in group["runs"]] == ["finished"] * 4
    assert any("resumed 1 time" in label["text"] for label in found["labels"])
    assert json.loads(efftrain(*WORDS, *budget, "--format", "json").stdout) == found
    assert read_run(folder / "runs" / "warm-tokens25600-seed1").origin["recipe"] == "warm"
