"""SIGTERM and Ctrl-C in every window of a run: the last finished step is saved, and a resume shows
no trace of the stop."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import signal
import threading
import time
from pathlib import Path

import pytest

from tests.conftest import cli
from tests.fake_runs import read_jsonl
from tests.faults.stalls import STALL, WINDOWS, stalled
from tests.launch import wait_until

BUILDING = (
    STALL
    + """
import efftrain_cli.training.session as session
build_state = session.build_state

def stalled_build(*args):
    stall()
    return build_state(*args)

session.build_state = stalled_build
"""
)


def test_sigterm_while_the_model_is_built(lab):
    """F18, before step 1: of a new run nothing is left, and a resumed one is as it was."""
    recipe = lab.recipe()
    new = (*lab.words("r", recipe), "--steps", "5")
    for command in (new, ("pretrain", "--resume", "r", "--no-probe")):
        (lab.folder / "stalled").unlink(missing_ok=True)
        process = lab.start(*command, inject=BUILDING)
        process.wait_for((lab.folder / "stalled").exists)
        process.kill(signal.SIGTERM)
        assert process.wait(25) == 75
        errors = process.errors
        assert "stopped by SIGTERM while data and model were prepared: no step was" in errors
        assert lab.run("r").exists() == (command != new)
        lab.call(*command)
    assert lab.last_step("r") == 20


SLOW = [(window, signal.SIGTERM) for window in WINDOWS if window != "evaluation"]


@pytest.mark.parametrize(
    "window, number",
    [
        ("evaluation", signal.SIGTERM),
        ("data", signal.SIGHUP),
        *(pytest.param(*row, marks=pytest.mark.slow) for row in [*SLOW, ("data", signal.SIGINT)]),
    ],
)
def test_a_signal_in_every_window(lab, window, number):
    """F18; F20: one Ctrl-C; F60: a terminal that was closed."""
    inject, last = WINDOWS[window]
    recipe = lab.recipe(windows='4\nsample = "the"') if window == "sampling" else lab.recipe()
    process = stalled(lab, recipe, inject)
    process.kill(number)
    assert process.wait(25) == 75
    assert process.errors == (
        f"stopped by {number.name} after step {last}, which is saved\n"
        "  continue: efftrain pretrain --resume cut\n"
    )
    assert lab.last_step("cut") == last
    assert lab.checkpoints("cut")[-1] == f"step-{last:08d}"
    assert [event["status"] for event in lab.events("cut", "end")] == ["stopped"]
    cli("runs verify cut")

    lab.resume("cut")
    lab.train_whole(recipe)
    lab.assert_equal_runs("cut", "whole", 20)


def status(name: str) -> str:
    """Return how `runs list` calls a run."""
    (run,) = json.loads(cli(f"runs list {name} --format json").output)
    return run["status"]


def test_a_last_evaluation_that_was_stopped_is_made_up_for_once(lab):
    """F102: the run counts as stopped until it is resumed."""
    last = WINDOWS["evaluation"][0].replace("calls == 3", "calls == 5")
    process = stalled(lab, lab.recipe(), last)
    process.kill(signal.SIGTERM)
    assert process.wait() == 75 and lab.last_step("cut") == 20
    assert status("cut") == "stopped"
    first = lab.call("pretrain --resume cut")
    second = lab.resume("cut")
    assert status("cut") == "finished"
    assert first.code == second.code == 0
    assert "result " in first.output and "probed" not in first.output
    assert "nothing to train" in second.output
    losses = [row["val_loss"] for row in read_jsonl(lab.run("cut") / "metrics.jsonl")]
    assert len(losses) == 22 and losses[-1] is not None and losses[-2] is None
    lab.train_whole()
    lab.assert_equal_runs("cut", "whole", 20)


def test_sigterm_while_data_is_prepared(lab):
    """F18: nothing is saved because nothing was trained, and nothing is torn."""
    (lab.folder / "text.txt").write_text(
        (lab.folder / "text.txt").read_text()[::-1]
    )  # text that no cache knows
    inject = """
import efftrain_cli.data.building as building
train = building.train_tokenizer
building.train_tokenizer = lambda size, sample: stall() or train(size, sample)
"""
    recipe = lab.recipe()
    process = stalled(lab, recipe, inject)
    process.kill(signal.SIGTERM)
    assert process.wait(25) == 75
    assert "no step was trained" in process.errors
    assert not lab.run("cut").exists()
    lab.train("cut", "--steps", "1", recipe=recipe)


def test_ctrl_c_twice(lab):
    """F20: at once, even in the middle of writing a checkpoint; what stands is valid, and the
    terminal, whose progress bar hid the cursor, has it back."""
    outer, inner = pty.openpty()
    shown = bytearray()

    def read() -> None:
        with contextlib.suppress(OSError):
            while part := os.read(outer, 65536):
                shown.extend(part)

    threading.Thread(target=read, daemon=True).start()
    inject, _ = WINDOWS["checkpoint"]
    process = lab.zygote.start(
        *lab.words("cut"),
        cwd=lab.folder,
        out=Path(os.ttyname(inner)),
        err=lab.folder / "err",
        inject=STALL + inject.replace("stall()", "stall(60)"),
        TERM="xterm",
    )
    process.wait_for((lab.folder / "stalled").exists)
    process.kill(signal.SIGINT)
    time.sleep(0.2)  # nothing can be awaited: the first one must not end it
    assert not process.ended()
    while not process.ended():  # two that arrive at once count as one
        process.kill(signal.SIGINT)
        time.sleep(0.5)
    assert process.code == 130
    assert any(name.startswith(".step-00000010.efftrain-") for name in lab.checkpoints("cut"))
    wait_until(lambda: shown.endswith(b"\n"))
    assert b"\x1b[?25l" in shown, "the cursor was hidden"
    assert shown.rfind(b"\x1b[?25h") > shown.rfind(b"\x1b[?25l")
    lab.resume("cut", "--steps", "11")
    assert lab.checkpoints("cut") == ["step-00000010", "step-00000011"]


@pytest.mark.slow
def test_sigterm_while_compiling(lab):
    """F18: in a compilation after two trained steps, which is abandoned: they are saved."""
    inject = """
import time
from pathlib import Path
import efftrain_cli.training.compiling as compiling
import efftrain_cli.training.loop as loop
update = loop.update

def updating(state, recipe, plan, loss):
    if plan.step == 2:
        Path("trained").touch()
    return update(state, recipe, plan, loss)

def backend(module, inputs):
    if Path("trained").exists():
        Path("stalled").touch()
        time.sleep(120)
    return module.forward

loop.update = updating
compiling.BACKEND = backend
"""
    warmup = '[seq_len_warmup]\npacing = "discrete"\nlengths = [16, 32]\nuntil = [2]\n'
    recipe = lab.recipe(extra=warmup)
    process = lab.start(*lab.words("cut", recipe), "--set", "train.compile=on", inject=inject)
    process.wait_for((lab.folder / "stalled").exists, timeout=200)
    process.kill(signal.SIGTERM)
    assert process.wait(25) == 75
    assert "Traceback" not in process.errors
    assert "stopped by SIGTERM after step 2, which is saved" in process.errors
    lab.resume("cut", "--steps", "3", "--set", "train.compile=off", "--override-resume")
