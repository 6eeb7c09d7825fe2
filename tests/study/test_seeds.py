"""Seeds that the tool draws: which, what they avoid, and that a registered study keeps them."""

from __future__ import annotations

import hashlib
import json

import pytest

from efftrain_cli.foundation.errors import RecipeError, UsageError
from efftrain_cli.run.directory import runs_root
from efftrain_cli.study.file import StudyFile
from efftrain_cli.study.judge import StudyState, judge_runs
from efftrain_cli.study.load import read_study
from efftrain_cli.study.phases import all_trials
from efftrain_cli.study.records import read_plan
from efftrain_cli.study.registration import check_registered, draw_seeds, register
from tests.conftest import invoke
from tests.fake_runs import write_run
from tests.study.conftest import STUDY, write_study
from tests.trials.stubs import write_trial

DRAWN = STUDY.replace('seeds = "10..14"\n', "").replace('seeds = "0..1"\n', "")


def expect_seeds(file: StudyFile, numbers: range) -> list[int]:
    """The seeds that a study's values stand for, by the rule of docs/studies.md."""
    texts = [json.dumps([file.sha256, i]) for i in numbers]
    return [int(hashlib.sha256(text.encode()).hexdigest()[:12], 16) % 1_000_000 for text in texts]


def test_five_seeds_and_five_for_tuning_follow_from_the_file(folder):
    file = write_study(folder, text=DRAWN)
    assert [*file.seeds, *file.tuning_seeds] == expect_seeds(file, range(10))
    assert file.looks == (3, 5) and len({*file.seeds, *file.tuning_seeds}) == 10
    assert read_study(file.path).seeds == file.seeds
    other = write_study(folder, ("looks = 2", "looks = 2\nalpha = 0.01"), text=DRAWN)
    assert not {*other.seeds} & {*file.seeds}


def test_seeds_that_runs_or_studies_have_seen_are_not_drawn(folder):
    file = write_study(folder, text=DRAWN)
    first, second, third, *_ = expect_seeds(file, range(5))
    run = write_run(runs_root(), "other", first)
    changes = [('"10..14"', f'"{second},7"'), ("looks = 2", "looks = 1")]
    register(write_study(folder, *changes, name="seen"), allow=False)
    again = read_study(file.path)
    assert again.seeds == (third, *expect_seeds(file, range(3, 7)))
    assert read_study(file.path).seeds == again.seeds
    assert invoke("runs", "rm", run.name, "--yes").exit_code == 0 and not run.exists()
    assert read_study(file.path).seeds == again.seeds


def test_tuning_seeds_are_drawn_beside_given_seeds(folder):
    file = write_study(folder, ('seeds = "0..1"', "n_seeds = 3"))
    first, *others = expect_seeds(file, range(4))
    assert file.seeds == (10, 11, 12, 13, 14) and file.tuning_seeds == (first, *others[:2])
    assert file.values()["seeds"] == "10..14" and "tuning.seeds" not in file.values()


def test_a_registered_study_keeps_its_seeds(folder):
    file = write_study(folder, text=DRAWN)
    assert register(file, allow=False).exploratory == []
    for each in all_trials(file)[:4]:
        write_trial(each.trial)
    again = read_study(file.path)
    assert (again.seeds, again.tuning_seeds) == (file.seeds, file.tuning_seeds)
    assert register(again, allow=False).exploratory == []
    plan = read_plan("study")
    assert plan is not None and plan.drawn["seeds"] == ",".join(map(str, file.seeds))
    assert "seeds" not in plan.values


def test_seeds_are_those_of_the_registration_even_if_others_were_drawn_before(folder):
    """Of two machines that begin at once, the second read its file before the first registered."""
    file = write_study(folder, text=DRAWN)
    assert draw_seeds(file).seeds == file.seeds
    write_run(runs_root(), "other", file.seeds[0])
    register(write_study(folder, text=DRAWN), allow=False)
    plan = read_plan("study")
    assert plan is not None and file.seeds != read_study(file.path).seeds
    again = draw_seeds(draw_seeds(file))
    assert again.drawn == plan.drawn and again.seeds == read_study(file.path).seeds


def test_a_study_trains_the_seeds_that_it_registered(folder, monkeypatch):
    write_study(folder, text=DRAWN)
    drawn = []

    def train(file: StudyFile, *_: object, **__: object) -> StudyState:
        drawn.append(file.drawn)
        return judge_runs(file, allow=False)

    monkeypatch.setattr("efftrain_cli.study.main.conduct", train)
    for _ in range(2):
        done = invoke("study", "study.toml", "--device", "cpu")
        assert done.exit_code == 0, done.output
    plan = read_plan("study")
    assert plan is not None and drawn == [plan.drawn, plan.drawn]


def test_another_name_draws_other_seeds_and_is_labelled(folder):
    file = write_study(folder, text=DRAWN)
    register(file, allow=False)
    renamed = write_study(folder, text=DRAWN, name="renamed")
    assert not {*renamed.seeds, *renamed.tuning_seeds} & {*file.seeds, *file.tuning_seeds}
    (reason,) = register(renamed, allow=False).exploratory
    assert "asked the same of the same arms" in reason


def test_an_allowed_change_keeps_the_seeds_drawn_before_it(folder):
    file = write_study(folder, text=DRAWN)
    register(file, allow=False)
    more = write_study(folder, ("looks = 2", "looks = 2\nn_seeds = 7"), text=DRAWN)
    assert more.seeds[:5] == file.seeds and more.tuning_seeds == file.tuning_seeds
    with pytest.raises(UsageError, match="n_seeds was absent, is 7"):
        check_registered(more, allow=False)
    register(more, allow=True)
    register(write_study(folder, name="seen"), allow=False)
    assert read_study(more.path).seeds == more.seeds
    # The two seeds that only the change has seen are in the ledger too.
    changes = [('"10..14"', f'"{more.seeds[5]},{more.seeds[6]}"'), ("looks = 2", "looks = 1")]
    last = write_study(folder, *changes, name="last")
    reasons = register(last, allow=False).exploratory
    low, high = sorted(more.seeds[5:])
    assert f"seeds {low}, {high} of plain, warm were seen by study 'study'" in reasons


def test_the_plan_names_seeds_once_they_are_registered(folder):
    file = write_study(folder, text=DRAWN)
    done = invoke("study", "study.toml", "--plan")
    assert "seeds      5 drawn when registered, judged after 3 and 5 seeds" in done.output
    assert (
        "tuning     seeds 5 drawn when registered; grids may grow at their edges, to 70 tuning runs"
        " at most" in done.output
    )
    register(file, allow=False)
    done = invoke("study", "study.toml", "--plan")
    seeds = ",".join(map(str, file.seeds))
    assert f"seeds      {seeds}, drawn, judged after 3 and 5 seeds" in done.output


@pytest.mark.parametrize(
    ("old", "new", "key"),
    [
        ("looks = 2", "looks = 2\nn_seeds = 5", "n_seeds"),
        ('seeds = "0..1"', 'seeds = "0..1"\nn_seeds = 2', "tuning.n_seeds"),
        ('seeds = "10..14"', "n_seeds = 1", "n_seeds"),
        ('seeds = "10..14"', "n_seeds = 2", "looks"),
        ('seeds = "0..1"', "n_seeds = 0", "tuning.n_seeds"),
        ('seeds = "0..1"', "grow = 3", "tuning.grow"),
    ],
)
def test_wrong_numbers_of_seeds(folder, old, new, key):
    with pytest.raises(RecipeError) as error:
        write_study(folder, (old, new))
    assert [problem.key for problem in error.value.problems] == [key]
