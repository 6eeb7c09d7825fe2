"""Killed, stopped and continued runs end as undisturbed ones, bit for bit."""

from __future__ import annotations

import random
import signal
import time

import pytest

from tests.launch import Laboratory

SLW = """
[seq_len_warmup]
start = 8
steps = 10
"""


def start_or_resume(lab: Laboratory, recipe: str, name: str, **env: str):
    """What a scheduler does with a run that was cut off."""
    if (lab.run(name) / "recipe.toml").exists():
        return lab.start("pretrain", "--resume", name, "--no-probe", **env)
    return lab.start("pretrain", "--recipe", recipe, "--name", name, "--no-probe", **env)


def test_a_stop_and_a_resume_move_no_bit(lab: Laboratory) -> None:
    recipe = lab.recipe()
    assert lab.call("pretrain", "--recipe", recipe, "--name", "whole").code == 0
    assert lab.call("pretrain", "--recipe", recipe, "--name", "cut", "--steps", "3").code == 0
    assert lab.call("pretrain", "--resume", "cut", "--steps", "10").code == 0
    assert lab.call("pretrain", "--resume", "cut", "--steps", "17").code == 0
    assert lab.call("pretrain", "--resume", "cut").code == 0
    rows = lab.rows("cut")
    for row in rows:  # --steps evaluates the step it ends with
        if row["step"] in (3, 17):
            assert row["val_loss"] is not None
            row["val_loss"] = None
    assert rows == lab.rows("whole")
    lab.rows = lambda name: []
    lab.assert_equal_runs("cut", "whole", 20)


@pytest.mark.slow
def test_fifty_kills(lab: Laboratory) -> None:
    """F1: SIGKILL at random instants; every restart succeeds by itself, and nothing differs in the end."""
    recipe = lab.recipe(tokens="6400")  # 50 steps
    assert lab.call("pretrain", "--recipe", recipe, "--name", "whole", "--no-probe").code == 0
    generator = random.Random(1)
    kills, runs = 0, 0
    while kills < 50:
        name = f"killed-{runs}"
        runs += 1
        while True:
            process = start_or_resume(lab, recipe, name)
            before = lab.last_step(name)
            end = time.monotonic() + generator.uniform(0.05, 1.2)
            while time.monotonic() < end and not process.ended():
                time.sleep(0.002)
            if process.ended():
                assert process.code == 0, process.err.read_text()
                break
            process.kill(signal.SIGKILL)
            process.wait()
            kills += 1
            saved = [int(path[5:]) for path in lab.checkpoints(name) if not path.endswith(".tmp")]
            assert lab.last_step(name) - max(saved, default=0) <= 5, "more than one interval of work is lost"
            assert lab.last_step(name) >= before
        lab.assert_equal_runs(name, "whole", 50)
        assert not [path for path in lab.checkpoints(name) if path.endswith(".tmp")]
        assert not list((lab.folder / "runs").glob(".*.tmp"))
