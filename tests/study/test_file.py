"""The study file: every mistake at once, what is hashed and what is not, and the runs it stands
for."""

from __future__ import annotations

import pytest

from efftrain_cli.foundation.errors import RecipeError, UsageError
from efftrain_cli.study.load import read_study
from efftrain_cli.study.phases import judged_trials
from tests.study.conftest import all_tuning, choose, write_study


def test_the_runs_of_a_study(file):
    tuned = [each.trial for each in all_tuning(file)]
    assert len(tuned) == 2 * 2 * 3 and [trial.seed for trial in tuned] == [0] * 6 + [1] * 6
    assert tuned[0].name == "study-plain-lr0.001-tune-seed0"
    assert tuned[4].settings == ("seq_len_warmup.start=16", "optim.lr=0.002")
    judged = [each.trial for each in judged_trials(choose(file, warm="0.004"), file.seeds)]
    assert [trial.name for trial in judged[:3]] == [
        "study-plain-seed10",
        "study-warm-seed10",
        "study-plain-seed11",
    ]
    assert judged[1].settings == ("seq_len_warmup.start=16", "optim.lr=0.004")
    assert file.looks == (3, 5)
    assert len({trial.name for trial in (*tuned, *judged)}) == 12 + 10


def test_all_mistakes_at_once_with_their_lines(folder):
    mistakes = [
        ("looks = 2", "looks = 9"),
        ('baseline = "plain"', 'baseline = "plane"'),
        ('direction = "different"', 'direction = "noninferior"'),
        ('seeds = "0..1"', 'seeds = "9..11"'),
        ("[1e-3, 2e-3, 4e-3]", "[1e-3, 1e-3]"),
        ("seq_len_warmup.start=16", "seq_len_warmup.begin=16"),
        ('recipe = "plain.toml"', 'recipe = "plan.toml"'),
    ]
    with pytest.raises(RecipeError) as error:
        write_study(folder, *mistakes)
    keys = {problem.key: problem for problem in error.value.problems}
    assert keys.keys() == {
        "looks",
        "baseline",
        "primary.0.margin",
        "tuning.seeds",
        "tuning.grid",
        "arms.0.recipe",
        "arms.1.recipe",
    }
    assert (
        keys["baseline"].rule == "must be one of the arms: plain, warm"
        and keys["baseline"].source == "study.toml:4"
    )
    assert "(10, 11)" in keys["tuning.seeds"].rule
    assert "at least 11 seeds" in keys["looks"].rule
    assert "seq_len_warmup.begin" in keys["arms.1.recipe"].rule
    assert "study 'study' has 7 mistakes" in str(error.value)


@pytest.mark.parametrize(
    ("old", "new", "key", "rule"),
    [
        ('seeds = "10..14"', 'seeds = "10"', "seeds", "two seeds"),
        ('seeds = "10..14"', 'seeds = "10-14"', "seeds", "write 0..4"),
        ("looks = 2", "looks = 0", "looks", "at least 1"),
        ("looks = 2", "alpha = 0.7", "alpha", "less than 0.5"),
        (
            'direction = "different"',
            'direction = "better"\nmargin = 0.1',
            "primary.0.margin",
            "no meaning for better",
        ),
        (
            'direction = "different"',
            'direction = "diferent"',
            "primary.0.direction",
            "must be one of",
        ),
        (
            'direction = "different"',
            'direction = "different"\ntarget = 3.0',
            "primary.0.target",
            "is for a cost",
        ),
        (
            'measure = "final_loss"',
            'measure = "lr_sensitivity"',
            "primary.0.rates",
            "two or more learning rates",
        ),
        (
            'measure = "final_loss"',
            'measure = "final_loss"\nrates = [1e-3, 2e-3]',
            "primary.0.rates",
            "is for lr_sensitivity",
        ),
        ('measure = "final_loss"', 'measure = "best_loss"', "primary.0.measure", "must be one of"),
        ('name = "warm"', 'name = "plain"', "arms.1.name", "another arm"),
        ('name = "warm"', 'name = "../x"', "arms.1.name", "letters, digits"),
        ('name = "warm"', 'name = "' + "w" * 40 + '"', "arms.1.name", "too long"),
        (
            '{ "optim.lr" = [1e-3, 2e-3, 4e-3] }',
            '{ "checkpoint.every" = [5, 10] }',
            "tuning.grid",
            "cannot be tuned",
        ),
        (
            '{ "optim.lr" = [1e-3, 2e-3, 4e-3] }',
            '{ "optim.lr" = [1e-3, -1.0] }',
            "arms.0.recipe",
            "greater than 0",
        ),
        ('set = ["seq_len_warmup.start=16"]', 'set = ["eval.windows=5"]', "arms", "eval.windows"),
        ('question = "', 'qestion = "', "qestion", "unknown key"),
        ('baseline = "plain"', "", "baseline", "is required"),
    ],
)
def test_one_mistake(folder, old, new, key, rule):
    with pytest.raises(RecipeError) as error:
        write_study(folder, (old, new))
    assert rule in {problem.key: problem.rule for problem in error.value.problems}[key]


def test_no_file_and_no_toml(folder):
    with pytest.raises(UsageError, match="there is no study file"):
        read_study(folder / "other.toml")
    with pytest.raises(UsageError, match=r"study\.yaml is no study\n  name a TOML file"):
        read_study(folder / "study.yaml")
    (folder / "broken.toml").write_text("seeds = [1,\n")
    with pytest.raises(RecipeError, match="not TOML"):
        read_study(folder / "broken.toml")


def test_comments_order_and_words_are_free(folder, file):
    sha256 = file.sha256
    same = write_study(
        folder,
        ("looks = 2\n", "# more\n"),
        ('seeds = "10..14"', 'looks = 2\nseeds = "10..14"'),
        ("Is warm", "Is it"),
    )
    assert same.sha256 == sha256
    (folder / "plain.toml").write_text(
        (folder / "plain.toml").read_text().replace("every = 5\n", "every = 5 # steps\n")
    )
    assert read_study(same.path).sha256 == sha256


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('seeds = "10..14"', 'seeds = "10..15"'),
        ("looks = 2", "looks = 1"),
        ("looks = 2", "looks = 2\nalpha = 0.1"),
        ('direction = "different"', 'direction = "better"'),
        ("4e-3] }", "5e-3] }"),
        ("start=16", "start=24"),
        ('baseline = "plain"', 'baseline = "warm"'),
    ],
)
def test_everything_that_decides_is_hashed(folder, file, old, new):
    sha256 = file.sha256
    assert write_study(folder, (old, new)).sha256 != sha256


def test_the_recipes_are_part_of_the_hash_and_checkpoints_are_not(folder, file):
    sha256 = file.sha256
    recipe = (folder / "plain.toml").read_text()
    (folder / "plain.toml").write_text(
        recipe.replace("[checkpoint]\nevery = 5", "[checkpoint]\nevery = 7")
    )
    assert read_study(file.path).sha256 == sha256
    (folder / "plain.toml").write_text(recipe.replace("tokens = 2560", "tokens = 5120"))
    assert read_study(file.path).sha256 != sha256


def test_an_arm_may_have_a_grid_of_its_own_or_none(folder):
    plain = 'recipe = "plain.toml"'
    file = write_study(folder, (plain, f"{plain}\ngrid = {{}}"))
    assert {each.arm for each in all_tuning(file)} == {"warm"}
    file = write_study(folder, (plain, f'{plain}\ngrid = {{ "optim.lr" = [3e-3] }}'))
    settings = [each.trial.settings[-1] for each in all_tuning(file) if each.arm == "plain"]
    assert settings == ["optim.lr=0.003"] * 2
