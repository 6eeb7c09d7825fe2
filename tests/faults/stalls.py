"""Runs that stall in one window of a step, for signals to arrive there."""

from __future__ import annotations

from tests.launch import Laboratory, Process

# Each stalls one window of a step, and says so by a file. Signals arrive while it sleeps. A step's
# batch is read during the step before: where the batch of step 9 stalls, step 7 is the last
# finished one.
STALL = """
import time
from pathlib import Path

def stall(seconds=120):
    Path("stalled").touch()
    time.sleep(seconds)
"""
IN_STEP = """
from torch import is_grad_enabled
from efftrain_cli.model.gpt import GPT
embed = GPT.embed
calls = 0

def stalled_embed(self, tokens, position=0):
    global calls
    calls += self.training and tokens.requires_grad is False and is_grad_enabled()
    if calls == CALL:
        stall()
    return embed(self, tokens, position)

GPT.embed = stalled_embed
"""
WINDOWS = {
    # (injected, last finished step)
    "step": (IN_STEP.replace("CALL", "13"), 6),  # two micro-batches a step: the first of step 7
    "accumulation": (IN_STEP.replace("CALL", "14"), 6),
    "evaluation": (
        """
import efftrain_cli.training.trainer as trainer
evaluate, calls = trainer.evaluate, 0

def stalled_evaluate(*args):
    global calls
    calls += 1
    if calls == 3:  # steps 0, 5, 10
        stall()
    return evaluate(*args)

trainer.evaluate = stalled_evaluate
""",
        10,
    ),
    "data": (
        """
from efftrain_cli.data.windows import Windows
batch = Windows.batch

def stalled_batch(self, plan, *rest):
    if plan.step == 9:
        stall()
    return batch(self, plan, *rest)

Windows.batch = stalled_batch
""",
        7,
    ),
    "checkpoint": (
        """
import efftrain_cli.training.state as state
fsync, calls = state.fsync, 0

def stalled_fsync(path):
    global calls
    calls += 1
    if "step-00000010" in str(path) and not Path("stalled").exists():
        stall(2)
    return fsync(path)

state.fsync = stalled_fsync
""",
        10,
    ),
    "sampling": (
        """
import efftrain_cli.training.logger as logger
generate_text, calls = logger.generate_text, 0

def stalled_text(*args):
    global calls
    calls += 1
    if calls == 3:  # steps 0, 5, 10
        stall()
    return generate_text(*args)

logger.generate_text = stalled_text
""",
        10,
    ),
    "update": (
        """
from efftrain_cli.optim.adamw import AdamW
step, calls = AdamW.step, 0

def stalled_step(self, lr, found_inf):
    global calls
    calls += 1
    if calls == 7:
        stall(2)
    return step(self, lr, found_inf)

AdamW.step = stalled_step
""",
        7,
    ),
    "a call into C that never looks at signals": (
        """
import hashlib
import efftrain_cli.foundation.signals as stop
from efftrain_cli.data.windows import Windows
stop.PATIENCE = 0.5
batch = Windows.batch

def stalled_batch(self, plan, *rest):
    if plan.step == 9:
        Path("stalled").touch()
        hashlib.pbkdf2_hmac("sha512", b"", b"", 200_000_000)
    return batch(self, plan, *rest)

Windows.batch = stalled_batch
""",
        7,
    ),
}


def stalled(lab: Laboratory, recipe: str, inject: str, *, name: str = "cut") -> Process:
    """A run that has reached the injected stall."""
    (lab.folder / "stalled").unlink(missing_ok=True)
    process = lab.start(*lab.words(name, recipe), inject=STALL + inject)
    process.wait_for((lab.folder / "stalled").exists)
    return process
