"""Training by any command: what is replaced, what is read, and what stops a race."""

from __future__ import annotations

import fcntl
import sys
import threading
import time

import pytest

from efftrain_cli.foundation.errors import EfftrainError, UsageError
from efftrain_cli.study.plans import read_study
from efftrain_cli.trials.command import curve_of, fill_in
from efftrain_cli.trials.trial import Trial
from tests.conftest import cli, invoke

PROGRAM = """\
import os, sys
seed, arm = int(sys.argv[1]), sys.argv[2]
assert os.environ["SEED"] == str(seed)
with open("calls.txt", "a") as file:
    file.write(f"{arm}{seed} ")
if os.path.exists("crash") and seed == 101:
    print(*"abcdef", sep="\\n")
    sys.exit(9)
if arm == "dead":
    sys.exit(1)
noise = seed * 7 % 5 / 20 + seed * len(arm) % 7 / 1000
for step in range(1, 8):
    print(f"step {step} val_loss: {4 - 0.1 * step + noise - 0.1 * (arm == 'better')}")
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    return tmp_path


COMMAND = f"{sys.executable} -IS program.py {{seed}} {{arm}}"


def words(*more, command=COMMAND):
    return ["race", *more, "--command", command]


def race(*more):
    return cli(*words(*more))


def test_only_seed_and_arm_are_replaced():
    trial = Trial("awk '{print $1}' {arm} {seed} {x}", (), 7, "n", arm="adam")
    assert fill_in(trial.recipe, trial) == "awk '{print $1}' adam 7 {x}"


def test_the_last_match_is_the_final_loss_and_steps_make_a_curve():
    output = "val loss 5.0\nval loss 4.7\nval loss 4.5\n"
    assert curve_of(r"val loss (\S+)", output).val_loss.tolist() == [4.5]
    stepped = "step 1 loss 5\nstep 2 loss 4\nstep 2 loss 3\n"
    curve = curve_of(r"step (?P<step>\d+) loss (?P<val_loss>\S+)", stepped)
    assert curve.val_loss.tolist() == [5, 3] and curve.step.tolist() == [1, 2]
    assert curve_of("(x)", "no match").empty


def test_a_race_of_commands_and_the_same_command_again(folder):
    """The noise adds 5 - 1, 4 - 5 and 3 - 2 thousandths to the lead of 0.1."""
    first = race("base", "better")
    assert first.stdout.startswith("better is better than base in final loss: -0.09867 [")
    assert "stopped early" in first.stdout and "rates as written" not in first.stdout
    told = first.stderr.splitlines()
    assert told[0] == "3, 5, then 8 pairs: 6 to 16 runs" and told[6] == "[6/6] better seed 102"
    (table,) = (folder / "runs").glob("race-commands-*/runs.csv")
    assert table.read_text().startswith("val_loss,failed,run,arm,seed\n")
    calls = (folder / "calls.txt").read_text().split()
    assert calls == ["base100", "better100", "base101", "better101", "base102", "better102"]
    again = race("base", "better")
    assert again.stdout == first.stdout
    assert len((folder / "calls.txt").read_text().split()) == 6, "nothing is trained twice"


def test_a_crash_stops_the_race_with_its_last_lines_and_it_continues(folder):
    (folder / "crash").touch()
    lines = "its last lines:\n    b\n    c\n    d\n    e\n    f$"
    with pytest.raises(EfftrainError, match=f"failed with exit code 9.*{lines}") as error:
        race("base", "better")
    assert error.value.exit_code == 1
    (folder / "crash").unlink()
    race("base", "better")
    calls = (folder / "calls.txt").read_text().split()
    assert calls.count("base100") == calls.count("better100") == 1
    assert calls.count("base101") == 2


def test_an_exit_code_may_mean_that_training_diverged(folder):
    with pytest.raises(EfftrainError, match="failed with exit code 1"):
        race("base", "dead")
    found = race("base", "dead", "--failed-exit", "1")
    assert invoke("", *words("base", "dead", "--failed-exit", "0")).exit_code == 2
    # Fisher: 2 of the 252 ways to choose five of ten, over the look's share 25 / 98.
    assert found.stdout.startswith("dead is worse than base in final loss: p = 0.031; failed")
    assert "failed or stuck: 5 of 5, baseline 0 of 5; by Fisher's exact test" in found.stdout


def test_larger_may_be_better(folder):
    """The race's file says so: as a study of its own it comes to the same."""
    found = race("better", "base", "--maximize")
    assert found.stdout.startswith("base is better than better in final score: +0.09867 [")
    (written,) = (folder / "runs").glob("race-better-*/study.toml")
    study = read_study(written).study
    assert study.maximize and "maximize" in written.read_text()


def test_a_metric_that_never_matches_is_an_error_of_usage(folder):
    with pytest.raises(UsageError, match="printed nothing that matches --metric; its last lines:"):
        race("base", "better", "--metric", r"accuracy (\S+)")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (words("a", "b", command="train {seed}"), r"has no \{arm\}"),
        (words("a", "b", "--metric", "("), "no regular expression"),
        (words("a", "b", "--metric", "loss"), "does not say which group"),
        (words("a", "b", "--metric", "(?P<loss>x)"), "does not say which group"),
        (words("a", "b", "--pairs", "x"), "--pairs 'x': write"),
        (words("a", "b", "--set", "optim.lr=1"), "write the settings into the command"),
        (["race", "a", "b", "--maximize"], "give --command too"),
        (["race", "a", "b", "--tune", "optim.lr=1"], "use --set optim.lr=1"),
    ],
)
def test_words_that_do_not_go_together(folder, line, message):
    with pytest.raises(UsageError, match=message):
        cli(*line)
    assert not (folder / "calls.txt").exists()


def test_the_plan_says_how_many_pairs_a_difference_needs(folder):
    text = race("base", "better", "--plan").stdout
    assert "16 to judge (8 pairs); looks at 3, 5, 8 pairs" in text
    # A one-sample t test at 5 % and 80 %: 15, 8 and 5 pairs.
    assert "pairs   for a true difference of 0.8 sd: 15, 1.2 sd: 8, 2 sd: 5" in text


def test_a_race_waits_for_another_of_its_command_which_trains_the_baseline(folder):
    race("base", "better", "--pairs", "3")
    (path,) = (folder / "runs").glob("race-commands-*/lock")
    with path.open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        threading.Timer(0.2, lambda: fcntl.flock(lock, fcntl.LOCK_UN)).start()
        start = time.monotonic()
        second = race("base", "other", "--pairs", "3")
        assert time.monotonic() - start >= 0.2
    calls = (folder / "calls.txt").read_text().split()
    assert calls.count("base100") == 1 and calls.count("other100") == 1
    assert "as race 2 against base" in second.stdout
