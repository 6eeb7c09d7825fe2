"""Studies, sweeps and races of real runs, killed at random instants: the same command continues."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time

import pytest

from efftrain_cli.run.small_files import read_run
from tests.conftest import typed
from tests.launch import wait_until
from tests.trials.stubs import STUDY

COMMANDS = {
    "sweep": "sweep plain.toml warm.toml --seeds 0..1 --jobs 2 --device cpu",
    "study": "study small.toml --device cpu",
    "race": "race plain.toml warm.toml --pairs 2,3 --device cpu",
}


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_killed_at_random_continues(folder, command, efftrain, zygote):
    """F78: no run is begun twice, and each comes to its end."""
    (folder / "small.toml").write_text(STUDY)
    words = typed(COMMANDS[command])
    draw = random.Random(command)
    kills = 0
    for _ in range(6):
        process = zygote.start(*words, cwd=folder, out=folder / "out", err=folder / "err")
        end = time.monotonic() + draw.uniform(0.3, 3)
        while time.monotonic() < end and not process.ended():
            time.sleep(0.01)
        if process.ended():
            break
        process.kill(signal.SIGKILL)
        kills += process.wait() == -signal.SIGKILL
    assert "in final loss" in efftrain(COMMANDS[command], timeout=300).stdout and kills
    for path in (folder / "runs").glob("*-seed*"):
        events = [event["event"] for event in read_run(path).events]
        assert events.count("start") == 1 and events[-1] == "end"
    if command == "race":
        race_again(folder, efftrain)


def race_again(folder, efftrain):
    """Runs of a race keep their last weights alone; a second race trains the baseline no more, and
    is removed without it."""
    runs = folder / "runs"
    weights = sorted(path.parents[2].name for path in runs.rglob("model.safetensors"))
    assert len({*weights}) == len(weights) and not list(runs.rglob("optimizer.safetensors"))
    assert "no damage" in efftrain("runs verify", weights[0]).stdout
    (folder / "other.toml").write_text('base = "warm.toml"\n[optim]\nlr = 2e-3\n')
    second = efftrain("race plain.toml other.toml --pairs 2 --device cpu", timeout=500)
    assert "as race 2 against plain" in second.stdout or "not judged" in second.stdout
    assert "of an earlier race are used" in second.stdout
    (race,) = (path.parent.name for path in runs.glob("race-plain-other-*/plan.json"))
    assert len(list(runs.glob("race-other-*-seed*"))) == 2
    efftrain("runs rm", race, "--yes")
    assert not list(runs.glob("race-other-*")) and not (runs / race).exists()
    assert sorted(path.name for path in runs.glob("race-*-seed*")) == weights


@pytest.mark.slow
def test_a_second_ctrl_c_ends_a_sweep_whose_runs_are_saved_all_the_same(folder, zygote):
    """F20: with 130, while they are being saved."""
    words = typed("sweep plain.toml warm.toml --seeds 0 --jobs 2 --set train.tokens=1000000")
    process = zygote.start(*words, cwd=folder, out=folder / "out", err=folder / "err")
    runs = [folder / "runs" / f"{arm}-tokens1000000-seed0" for arm in ("plain", "warm")]
    process.wait_for(lambda: all((run / "metrics.jsonl").exists() for run in runs), timeout=300)
    process.wait_for(lambda: all((run / "lock").read_text() for run in runs))
    numbers = [int((run / "lock").read_text().split()[1]) for run in runs]
    for number in numbers:
        os.kill(number, signal.SIGSTOP)  # no run is saved before it goes on
    process.kill(signal.SIGINT)
    process.wait_for(lambda: "stopping: " in process.errors)
    process.kill(signal.SIGINT)
    assert process.wait() == 130
    for number in numbers:
        # The system wakes stopped orphans itself: one may have ended already.
        with contextlib.suppress(ProcessLookupError):
            os.kill(number, signal.SIGCONT)
    for run in runs:
        wait_until(lambda: read_run(run).events[-1]["event"] == "end", timeout=60)  # noqa: B023
        assert read_run(run).events[-1]["status"] == "stopped"
