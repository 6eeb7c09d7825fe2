"""Races, studies and sweeps of real runs, killed at random instants: the same command continues."""

from __future__ import annotations

import random
import signal
import subprocess

import pytest

from efftrain_cli.run.small_files import read_run
from tests.conftest import typed
from tests.launch import start_efftrain
from tests.trials.stubs import STUDY

COMMANDS = {
    "sweep": "sweep plain.toml warm.toml --seeds 0..1 --jobs 2 --device cpu",
    "race": "race plain.toml warm.toml --pairs 2,3 --device cpu",
    "study": "study small.toml --device cpu",
}


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_killed_at_random_continues(folder, command):
    """F78: no run is begun twice, and each comes to its end."""
    (folder / "small.toml").write_text(STUDY)
    words = typed(COMMANDS[command])
    draw = random.Random(command)
    kills = 0
    for _ in range(6):
        process = start_efftrain(folder, *words)
        try:
            out, err = process.communicate(timeout=draw.uniform(0.5, 12))
            break
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.communicate()
            kills += 1
    else:
        out, err = start_efftrain(folder, *words).communicate(timeout=300)
    assert "in final loss" in out and kills, err
    for path in (folder / "runs").glob("*-seed*"):
        events = [event["event"] for event in read_run(path).events]
        assert events.count("start") == 1 and events[-1] == "end"
