"""Ladders as studies: which runs they are, what is refused, and what they come to."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from efftrain_cli.foundation.errors import RecipeError, UsageError
from efftrain_cli.run.reading import Run
from efftrain_cli.study.conduct import conduct
from efftrain_cli.study.plans import Plan, read_study
from efftrain_cli.study.sizes import flops_of
from efftrain_cli.study.text import plan_lines
from efftrain_cli.study.tuning import CARRIED, carried, tuning_trials
from efftrain_cli.trials.trial import Trial, Trunk, recipe_of
from tests.compare.runs import make_run
from tests.conftest import REPOSITORY
from tests.study.fake import Fake, recipes

STUDY = """
seeds = "5..6"
baseline = "a"
set = ["optim.schedule=wsd", "optim.decay_share=0.25"]
branches = [0.5, 1, 2]

[[primary]]
measure = "compute_multiplier"
direction = "better"

[[sizes]]
name = "narrow"
tokens = 10_240

[[sizes]]
name = "wide"
set = ["model.n_embd=64"]
tokens = 20_480

[[arms]]
name = "a"
recipe = "a.toml"

[[arms]]
name = "b"
recipe = "b.toml"
"""
"""Steps have 8 sequences of 32 tokens: 256."""
TUNED = """
[tuning]
seeds = "0"
grid = { "optim.lr" = [1e-3, 2e-3] }
"""


@pytest.fixture
def folder(tmp_path):
    recipes(tmp_path, "a", "b")
    return tmp_path


def plan_of(folder: Path, text: str = STUDY) -> Plan:
    path = folder / "s.toml"
    path.write_text(text)
    return read_study(path)


def test_a_size_is_a_trunk_and_branches_where_their_decay_begins(folder):
    """5,120 tokens are 20 steps, of which 5 decay; 10,240 are 40 and 10."""
    plan = plan_of(folder)
    assert plan.values["size of b wide"][-3:] == [10_240, 20_480, 40_960]
    trials = plan.trials(1)
    assert [trial.name for trial in trials[:4]] == [
        "s-a-narrow-trunk-seed5",
        "s-a-narrow-at15-seed5",
        "s-a-narrow-at30-seed5",
        "s-a-wide-trunk-seed5",
    ]
    trunk, first, second, wide = trials[:4]
    assert recipe_of(trunk).train.tokens == 20_480
    assert recipe_of(trunk).checkpoint.at == (15, 30)
    assert first.trunk == Trunk(trunk.name, 15, 3840)
    assert second.trunk == Trunk(trunk.name, 30, 7680)
    assert [recipe_of(each).train.tokens for each in (first, second)] == [5120, 10_240]
    assert recipe_of(wide).model.n_embd == 64 and recipe_of(wide).train.tokens == 40_960
    assert len(trials) == 2 * 2 * 3


def test_sizes_by_a_range_are_those_of_the_rule(folder):
    """docs/sizes.md: of 300 tokens, padded to 320, depth 2 has 2 x 12 x 32^2 weights in blocks and
    32 x 320 in the head, besides norms and biases."""
    text = STUDY[: STUDY.index("[[sizes]]")] + STUDY[STUDY.index("[[arms]]") :]
    plan = plan_of(folder, f'sizes = "60K..240K x2"\ntokens_per_parameter = 30\n{text}')
    sizes = [arm.size for arm in plan.of("a")]
    assert [size.name for size in sizes] == ["60K", "120K", "240K"]
    widths = [recipe_of(arm.trial(5)).model.n_embd for arm in plan.of("a")]
    assert widths == [32, 48, 64]
    assert sizes[0].parameters == pytest.approx(2 * 12 * 32**2 + 32 * 320, rel=0.03)
    assert sizes[0].middle == 30 * sizes[0].parameters


WSD = '"optim.schedule=wsd", "optim.decay_share=0.25"'
WRONG = [
    ("", "", WSD, "set optim.schedule=wsd"),
    ("", "branches = [1]", "branches = [0.5, 1, 2]", "at least 2 items"),
    ("", "branches = [1, 1]", "branches = [0.5, 1, 2]", "beyond the next shorter budget"),
    ("", "branches = [0, 1]", "branches = [0.5, 1, 2]", "must be positive"),
    ("optim.decay_steps=19", "", "", "set optim.schedule=wsd"),
    ("", 'set = ["model.n_embd=32"]', 'set = ["model.n_embd=64"]', "sizes must rise"),
    ("", "tokens = 512", "tokens = 10_240", "decays from step 0"),
    ("optim.warmup_steps=15", "", "", "lie beyond the warmup of 15 steps"),
    ("", 'name = "narrow"', 'name = "wide"', "different names"),
    ("", 'tokens = 10_240\nseeds = "3"', "tokens = 10_240", "one pair supports no claim"),
    (
        "",
        f'{TUNED}sizes = ["wide"]\n[[arms]]',
        "[[arms]]",
        "must be the first sizes",
    ),
    ("", 'sizes = "1M to 2M"', "", 'write sizes as "0.1M..1.6M x2"'),
    ("", 'sizes = "1M..2M x1"', "", 'write sizes as "0.1M..1.6M x2"'),
]


@pytest.mark.parametrize(("setting", "new", "old", "message"), WRONG)
def test_mistakes_are_found_before_anything_is_trained(folder, setting, new, old, message):
    text = STUDY.replace("set = [", f'set = ["{setting}", ' if setting else "set = [", 1)
    if old:
        text = text.replace(old, new, 1)
    elif new:
        text = new + text[: text.index("[[sizes]]")] + text[text.index("[[arms]]") :]
    with pytest.raises((RecipeError, UsageError), match=message) as refused:
        plan_of(folder, text)
    assert refused.value.exit_code == 2


class Losses(Fake):
    """Final losses 8 - 0.3 ln(cost), where arm b needs `gain` times less; every trial of b prefers
    its higher rate."""

    def __init__(self, gain: float, failed: str = "") -> None:
        super().__init__(lambda _: None)
        self.gain = gain
        self.failed = failed

    def run_of(self, trial: Trial) -> Run:
        recipe = recipe_of(trial)
        size = 1000.0 * recipe.model.n_embd
        lead = math.log(self.gain) if "-b-" in trial.name else 0.0
        final = 8 - 0.3 * (math.log(recipe.train.tokens * size) + lead)
        noise = math.sin(trial.seed * (2 + ("-b-" in trial.name)) + recipe.train.tokens)
        final += 0.001 * noise - recipe.optim.lr
        status = "diverged" if trial.name == self.failed else "finished"
        settings = {
            "optim.schedule": "wsd",
            "optim.lr": recipe.optim.lr,
            "model.n_embd": recipe.model.n_embd,
            "size": size,
        }
        run = make_run(
            trial.arm,
            trial.seed,
            [9, final],
            status=status,
            tokens=float(recipe.train.tokens),
            flops=6 * size,
            **settings,
        )
        return replace(run, name=trial.name)


def test_flops_of_runs_add_up(folder):
    """A branch costs what it trains itself: of 20 steps the last 5."""
    trunk, branch = plan_of(folder).trials(1)[:2]
    whole = flops_of([replace(branch, trunk=None)])
    assert flops_of([branch]) == pytest.approx(whole / 4, rel=1e-12)
    assert flops_of([trunk, branch]) == flops_of([trunk]) + flops_of([branch])


def test_the_ladder_is_judged_at_its_largest_size(folder):
    losses = Losses(1.5)
    comparison = conduct(plan_of(folder), losses)
    trunks, branches = losses.asked
    assert len(trunks) == 8 and len(branches) == 16, "trunks come first"
    (row,) = comparison.verdicts
    assert (row.measure, row.arm, row.n) == ("compute_multiplier", "b", 2)
    assert row.estimate == pytest.approx(1.5, rel=0.03)
    assert comparison.gains["size"].tolist() == [32_000, 64_000]
    assert comparison.gains.seeds.tolist() == [2, 2]


def test_the_branches_of_a_failed_trunk_are_left_out(folder):
    losses = Losses(1.5, failed="s-b-wide-trunk-seed5")
    comparison = conduct(plan_of(folder), losses)
    of_seed = [name for name in losses.trained if "-b-wide-" in name and name.endswith("seed5")]
    assert of_seed == ["s-b-wide-trunk-seed5"]
    assert comparison.gains.seeds.tolist() == [2, 1]


def test_rates_are_tuned_per_size_and_arm_at_the_middle_budget(folder):
    losses = Losses(1.5)
    plan = plan_of(folder, STUDY + TUNED)
    conduct(plan, losses)
    assert losses.asked[0][:2] == ["s-a-narrow-lr0.001-tune-seed0", "s-a-narrow-lr0.002-tune-seed0"]
    assert "s-b-wide-lr0.001-at30-seed5" not in losses.trained
    assert "s-b-wide-lr0.002-at30-seed5" in losses.trained
    budgets = {trial.arm: recipe_of(trial).train.tokens for trial in tuning_trials(plan)}
    assert budgets == {"a narrow": 10_240, "a wide": 20_480, "b narrow": 10_240, "b wide": 20_480}


def test_rates_are_carried_to_sizes_that_are_not_tuned(folder):
    """Arm b prefers .002; wide has 3.1 times the parameters of narrow, whose cube root is 1.45."""
    losses = Losses(1.5)
    plan = plan_of(folder, STUDY + TUNED + 'sizes = ["narrow"]\n')
    comparison = conduct(plan, losses)
    narrow, wide = (arm.size.parameters for arm in plan.of("a"))
    rate = f"{0.002 * (narrow / wide) ** (1 / 3):.3g}"
    assert f"s-b-wide-lr{rate}-trunk-seed5" in losses.trained
    assert {trial.arm for trial in tuning_trials(plan)} == {"a narrow", "b narrow"}
    assert "rates are carried from narrow unchecked: tune the next size too" in comparison.caveats
    assert comparison.verdicts[0].p < 1, "both arms are tuned alike"


def test_only_learning_rates_are_carried_by_the_rule():
    """Eight times the parameters: half the rate. Other keys whose names end in lr stay."""
    point = ("optim.lr=2e-3", "optim.muon_lr=0.02", "optim.min_lr=1e-4", "x.other_lr=1", "y=no")
    assert carried(point, 8**CARRIED) == (
        "optim.lr=0.001", "optim.muon_lr=0.01", "optim.min_lr=5e-05", "x.other_lr=1", "y=no",
    )  # fmt: skip


def test_the_rule_that_carries_rates_is_checked_at_the_next_tuned_size(folder):
    third = '[[sizes]]\nname = "wider"\nset = ["model.n_embd=96"]\ntokens = 40_960\n\n[[arms]]'
    text = STUDY.replace("[[arms]]", third, 1) + TUNED + 'sizes = ["narrow", "wide"]\n'
    caveats = conduct(plan_of(folder, text), Losses(1.5)).caveats
    (note,) = [caveat for caveat in caveats if "carried" in caveat and not caveat.startswith("a ")]
    assert note == "b wide: carried from narrow optim.lr=0.00138, best optim.lr=0.002"


def test_the_plan_of_the_example_on_the_page(folder):
    """A branch costs its decay alone: 6 x (1.02M + 0.2 x 765K) tokens, in whole steps.

    By a noncentral t of 2 degrees of freedom, a size's ln M has the error sigma/s x (2/3)^0.5;
    the claim's t test of three pairs has as many."""
    few = "slope   fewer than 4 sizes: M per size, no verdict over sizes"
    assert few in plan_lines(plan_of(folder))
    plan = read_study(REPOSITORY / "docs" / "studies" / "ladder.toml")
    question, runs, costs, *rest = plan_lines(plan)
    assert question == plan.study.question and costs.startswith("costs   72 runs, 7.08M tokens, ")
    assert [runs, *rest] == [
        "runs    72 to judge (3 pairs)",
        "size    10K: 11,504 parameters, 30K, 60K, 120K tokens",
        "size    40K: 41,856 parameters, 50K, 100K, 200K tokens",
        "size    110K: 109,488 parameters, 75K, 150K, 300K tokens",
        "size    230K: 232,832 parameters, 100K, 200K, 400K tokens",
        "flops   6.76 TFLOPs in all",
        "slope   in 80 % of cases 7.4 %, 15 %, 33 % of M per doubling of the size, if sigma/s is"
        " 0.05, 0.1, 0.2 and rates are tuned well",
        "judged  muon against adamw: compute_multiplier different, at 5 %",
        "shows   in 80 % of cases 3.3 standard deviations of a pair's difference",
    ]
