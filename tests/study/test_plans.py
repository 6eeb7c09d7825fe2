"""Study files: what they fix, and their mistakes."""

from __future__ import annotations

import re
from functools import partial

import pytest

from efftrain_cli.foundation.errors import RecipeError, StoppedError, UsageError
from efftrain_cli.run.lock import take_lock
from efftrain_cli.study.conduct import conduct
from efftrain_cli.study.plans import read_study
from efftrain_cli.study.registration import register
from efftrain_cli.study.text import status_lines
from efftrain_cli.study.tuning import tuning_trials
from efftrain_cli.trials.runner import TrialRunner
from tests.conftest import cli
from tests.study.fake import Fake, recipes
from tests.study.test_race import STUDY
from tests.trials.stubs import STUDY as WARM
from tests.trials.stubs import write_recipes, write_trial
from tests.tune_warmup.search import train_here

PRIMARY = '[[primary]]\nmeasure = "final_loss"\ndirection = "different"\n'
TO_TARGET = '[[primary]]\nmeasure = "tokens_to_target"\ntarget = 4.5\n'


@pytest.fixture
def folder(tmp_path):
    recipes(tmp_path, "a", "b")
    return tmp_path


def study(folder, text=STUDY):
    path = folder / "s.toml"
    path.write_text(text)
    return path


def test_a_plan_has_the_baseline_first(folder):
    plan = read_study(study(folder))
    assert [arm.name for arm in plan.arms] == ["a", "b"]
    assert {arm.seeds for arm in plan.arms} == {(5, 6, 7, 8, 9)}
    assert (plan.looks, plan.study.tuning_seeds) == ((3, 5), (0,))
    assert plan.values["recipe of a: optim.lr"] == 1e-3
    assert plan.values["arms.0.recipe"] == "b.toml" and "question" not in plan.values
    trial = plan.arms[1].trial(5, ("optim.lr=2e-3",))
    assert (trial.name, trial.arm) == ("s-b-lr2e-3-seed5", "b")


@pytest.mark.parametrize(
    ("old", "new", "rule"),
    [
        ('baseline = "a"', 'baseline = "x"', "must be one of the arms"),
        ("[3, 5]", "[3, 4]", "must rise and end at all 5 seeds"),
        ('seeds = "0"', 'seeds = "5"', "must differ from the study's"),
        ('seeds = "5..9"', 'seeds = "5"', r"2 mistakes(.|\n)*must be two or more: one pair"),
        ('direction = "different"', 'direction = "equivalent"', "is required for equivalent"),
        (
            'measure = "final_loss"\ndirection = "different"',
            'measure = "tokens_to_match"\ndirection = "noninferior"\nmargin = 0.1',
            "of a cost must be different or better",
        ),
        ('measure = "final_loss"', 'measure = "tokens_to_target"', "is required for a cost to"),
        ('measure = "final_loss"', 'measure = "lr_sensitivity"', "lr_sensitivity"),
        ("[tuning]", "[[primary]]\n[tuning]", "must name each measure once"),
        (
            "[tuning]",
            TO_TARGET + TO_TARGET.replace("tokens", "flops").replace("4.5", "4") + "[tuning]",
            "one target at most",
        ),
        ('name = "b"', 'name = "a"', "each arm needs its own name"),
        ('[[arms]]\nname = "b"\nrecipe = "b.toml"\n', "", "at least 2 items"),
        (PRIMARY, "primary = []\n", "at least 1 item"),
        (
            "[[primary]]",
            "alpha = 0\ngive_up = 0\ntokens_per_parameter = 0\n[[primary]]",
            "3 mistakes",
        ),
        ("[[primary]]", "alpha = 0.5\ngive_up = 1.1\n[[primary]]", "2 mistakes"),
        (
            "[[primary]]",
            'command = "x {seed} {arm}"\n[[primary]]',
            "3 mistakes(.|\n)*cannot be comb",
        ),
        ('baseline = "a"', 'baseline = "a"\nmaximize = true', "final scores that a command"),
        ('seeds = "5..9"', 'seeds = "5..9"\nblocks = 2', "unknown key"),
    ],
)
def test_mistakes_of_a_file(folder, old, new, rule):
    with pytest.raises(RecipeError, match=rule):
        read_study(study(folder, STUDY.replace(old, new)))


def test_the_plan_prints_what_is_needed(folder, monkeypatch):
    """The last of two looks may spend 25/34 of 2.5 %, of two claims about two arms each: 3.2 sd of
    five pairs (noncentral t, two-sided). Each run keeps 3 checkpoints of 12 bytes for each of
    24,032 parameters, and 11 rows of about 700 bytes."""
    monkeypatch.setenv("EFFTRAIN_CACHE", str(folder / "empty"))
    margin = PRIMARY.replace("different", "noninferior") + "margin = 0.04\n" + TO_TARGET
    third = '[tuning]\nseeds = "0..1"'
    text = STUDY.replace(PRIMARY, "alpha = 0.025\n" + margin).replace(
        '[tuning]\nseeds = "0"', third
    )
    study(folder, f'{text}[[arms]]\nname = "c"\nrecipe = "b.toml"\n')
    assert cli("study s.toml --plan").stdout.splitlines() == [
        "Is it?",
        "runs    12 to tune (2 seeds), 15 to judge (5 pairs); looks at 3, 5 pairs",
        "costs   27 runs, 69.1K tokens, time unknown: nothing was measured here, 23.6 MB of disk",
        "judged  b, c against a: final_loss noninferior by 0.04, at 2.5 %",
        "judged  b, c against a: tokens_to_target different 4.5, at 2.5 %",
        "shows   in 80 % of cases 3.2 standard deviations of a pair's difference",
    ]
    with pytest.raises(UsageError, match="exclude each other"):
        cli("study s.toml --plan --check --status")


def test_the_status_of_a_study_names_its_looks(folder):
    plan = read_study(study(folder))
    assert status_lines(plan) == ["s  not begun"]
    leads = {5: 0.3, 7: 0.4, 8: 0.3, 9: 0.3}
    conduct(plan, Fake(lambda trial: 4.0 - (trial.arm == "b") * leads.get(trial.seed, 0.0)))
    registered, *rest = status_lines(plan)
    assert registered.endswith(", unchanged")
    assert rest == [
        "tuning  0 of 4 runs",
        "look    3 pairs: b undecided in final loss",
        "look    5 pairs: b better in final loss",
    ]
    changed = read_study(study(folder, STUDY.replace("2e-3", "3e-3")))
    assert status_lines(changed)[0].endswith(", changed since: tuning.grid.optim.lr")


def test_the_status_of_a_tuned_study(folder):
    """Of equal settings the first is chosen; one of the judged runs is under way."""
    write_recipes(folder)
    plan = read_study(study(folder, WARM))
    for trial in tuning_trials(plan):
        write_trial(trial)
    register(plan.folder / "plan.json", plan.values)
    judged = plan.arms[0].trial(5, ("optim.lr=0.001",))
    write_trial(judged, 75)
    with take_lock(folder / "runs" / judged.name / "lock"):
        told = cli("study s.toml --status").stdout.splitlines()
    assert told[0].startswith("s  registered 20") and told[0].endswith(", unchanged")
    assert told[1:] == [
        "tuning  4 of 4 runs: warm 0.001, plain 0.001",
        f"judging 0 of 4 runs; {judged.name} at step 50",
    ]


def test_a_check_trains_two_steps_of_each_recipe(folder, monkeypatch):
    trained_here = partial(TrialRunner, launch=train_here)
    monkeypatch.setattr("efftrain_cli.study.conduct.TrialRunner", trained_here)
    write_recipes(folder)
    study(folder, WARM)
    told = cli("study s.toml --check --device cpu").stdout
    losses = re.findall(r"^(plain|warm): 2 steps, validation loss (\d\.\d{4})$", told, re.M)
    assert [name for name, _ in losses] == ["plain", "warm"]
    # Near ln 300, as of weights that have hardly moved.
    assert all(float(loss) == pytest.approx(5.7, abs=0.2) for _, loss in losses)
    assert not (folder / "runs").exists()
    with pytest.raises(StoppedError, match="tuning: 4 of 4 runs left, 2 at once"):
        cli("study s.toml --array --jobs 2")
    (script,) = (folder / "runs" / "s-study").glob("*.sbatch")
    assert "EFFTRAIN_STUDY=s " in script.read_text()


def test_a_study_that_cannot_be_judged_is_refused(folder):
    text = STUDY.replace('recipe = "b.toml"', 'recipe = "b.toml"\ngrid = {}')
    with pytest.raises(UsageError, match="s cannot be judged: every arm is tuned over another"):
        cli("study", str(study(folder, text)), "--plan")


def test_a_study_of_commands(folder):
    """Losses 4.0, 4.4, 4.1 against 5.0, 5.5, 5.3."""
    text = """\
question = "Is 5 better than 4?"
baseline = "4"
seeds = "0..2"
command = "echo val loss {arm}.$(({seed} * {arm} % 7))"
[[primary]]
[[arms]]
name = "4"
[[arms]]
name = "5"
"""
    study(folder, text)
    with pytest.raises(UsageError, match="--array trains recipes"):
        cli("study s.toml --array")
    assert cli("study s.toml").stdout.splitlines()[:2] == [
        "Is 5 better than 4?",
        "5 is worse than 4 in final loss: +1.1 [+0.8516, +1.348]; p = 0.0027; 3 pairs.",
    ]
    assert (folder / "runs" / "s-study" / "commands" / "runs.csv").is_file()
    with pytest.raises(UsageError, match=r"has no \{seed\}"):
        read_study(study(folder, text.replace("{seed}", "")))
