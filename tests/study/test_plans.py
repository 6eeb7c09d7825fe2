"""Study files: what they fix, and their mistakes."""

from __future__ import annotations

import re

import pytest

from efftrain_cli.foundation.errors import RecipeError, UsageError
from efftrain_cli.run.lock import take_lock
from efftrain_cli.study.plans import read_study
from efftrain_cli.study.registration import register
from efftrain_cli.study.text import pairs_needed, plan_lines, status_lines, visible
from efftrain_cli.study.tuning import tuning_trials
from tests.conftest import cli
from tests.study.fake import recipes
from tests.study.test_race import STUDY
from tests.trials.stubs import STUDY as WARM
from tests.trials.stubs import write_recipes, write_trial


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EFFTRAIN_RUNS", str(tmp_path / "runs"))
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
        ('baseline = "a"', 'baseline = "a"\nmaximize = true', "final scores that a command"),
        ('seeds = "5..9"', 'seeds = "5..9"\nblocks = 2', "unknown key"),
    ],
)
def test_mistakes_of_a_file(folder, old, new, rule):
    with pytest.raises(RecipeError, match=rule):
        read_study(study(folder, STUDY.replace(old, new)))


def test_what_a_plan_could_see_is_a_power_of_80_percent(folder):
    """One look at n pairs at 5 %: 1.68 sd of five pairs, 3.26 of three (noncentral t)."""
    one_look = STUDY.replace("looks = [3, 5]\n", "")
    assert visible(read_study(study(folder, one_look))) == pytest.approx(1.682, abs=1e-3)
    assert pairs_needed(1.683) == 5 and pairs_needed(3.27) == 3


def test_the_plan_and_the_status_print_what_is_needed(folder):
    path = study(folder)
    lines = plan_lines(read_study(path))
    assert lines[0] == "Is it?"
    assert lines[1] == "runs    4 to tune (1 seed), 10 to judge (5 pairs); looks at 3, 5 pairs"
    assert lines[2].startswith("costs   14 runs, 35.8K tokens, ")
    assert lines[3] == "judged  b against a: final_loss different, at 5 %"
    half = STUDY.replace('baseline = "a"', 'baseline = "a"\nalpha = 0.025')
    assert plan_lines(read_study(study(folder, half)))[3].endswith(", at 2.5 %")
    assert status_lines(read_study(path)) == ["s  not begun"]
    assert "runs    4 to tune" in cli("study", "s.toml", "--plan").stdout
    with pytest.raises(UsageError, match="exclude each other"):
        cli("study", "s.toml", "--plan", "--status")


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


@pytest.mark.slow
def test_a_check_trains_two_steps_of_each_recipe(folder, efftrain):
    write_recipes(folder)
    study(folder, WARM)
    told = efftrain("study s.toml --check --device cpu").stdout
    losses = re.findall(r"^(plain|warm): 2 steps, validation loss (\d\.\d{4})$", told, re.M)
    assert [name for name, _ in losses] == ["plain", "warm"]
    # Near ln 300, as of weights that have hardly moved.
    assert all(float(loss) == pytest.approx(5.7, abs=0.2) for _, loss in losses)
    assert not (folder / "runs").exists()


def test_a_study_that_cannot_be_judged_is_refused(folder):
    text = STUDY.replace('recipe = "b.toml"', 'recipe = "b.toml"\ngrid = {}')
    with pytest.raises(UsageError, match="s cannot be judged: every arm is tuned over another"):
        cli("study", str(study(folder, text)), "--plan")


def test_a_study_of_commands(folder):
    text = """\
baseline = "a"
seeds = "0..2"
command = "echo val loss {seed} {arm}"
[[primary]]
[[arms]]
name = "a"
[[arms]]
name = "b"
"""
    plan = read_study(study(folder, text))
    assert [arm.recipe for arm in plan.arms] == ["echo val loss {seed} {arm}"] * 2
    with pytest.raises(UsageError, match=r"has no \{seed\}"):
        read_study(study(folder, text.replace(" {seed}", "")))
