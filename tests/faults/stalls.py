"""Runs that stall in one window of a step, for signals to arrive there."""

from __future__ import annotations

from tests.launch import Laboratory, Process

# Each stalls one window of a step until a signal is noted, and says so by a file. A step's batch
# is read during the step before.
STALL = """
import time
from pathlib import Path
from efftrain_cli.foundation.signals import stop_asked

def stall(seconds=0):
    Path("stalled").touch()
    while not stop_asked():
        time.sleep(0.005)
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
    "accumulation": (IN_STEP.replace("CALL", "14"), 7),  # the last one of step 7
    "evaluation": (
        """
import efftrain_cli.training.loop as loop
evaluate, calls = loop.evaluate, 0

def stalled_evaluate(*args):
    global calls
    calls += 1
    if calls == 3:  # steps 0, 5, 10
        stall()
    return evaluate(*args)

loop.evaluate = stalled_evaluate
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
        8,
    ),
    "checkpoint": (
        """
import efftrain_cli.training.checkpoint as checkpoint
fsync, calls = checkpoint.fsync, 0

def stalled_fsync(path):
    global calls
    calls += 1
    if "step-00000010" in str(path) and not Path("stalled").exists():
        stall()
    return fsync(path)

checkpoint.fsync = stalled_fsync
""",
        10,
    ),
    "sampling": (
        """
import efftrain_cli.training.logbook as logbook
generate_text, calls = logbook.generate_text, 0

def stalled_text(*args):
    global calls
    calls += 1
    if calls == 3:  # steps 0, 5, 10
        stall()
    return generate_text(*args)

logbook.generate_text = stalled_text
""",
        10,
    ),
    "update": (
        """
from efftrain_cli.optim.adamw import AdamW
step, calls = AdamW.step, 0

def stalled_step(self, lr, found_inf, beta2=None):
    global calls
    calls += 1
    if calls == 7:
        stall()
    return step(self, lr, found_inf, beta2)

AdamW.step = stalled_step
""",
        7,
    ),
    "a call into C that never looks at signals": (
        """
import hashlib
from efftrain_cli.data.windows import Windows
batch = Windows.batch

def stalled_batch(self, plan, *rest):
    if plan.step == 9:
        Path("stalled").touch()
        hashlib.pbkdf2_hmac("sha512", b"", b"", 3_000_000)
    return batch(self, plan, *rest)

Windows.batch = stalled_batch
""",
        8,
    ),
}


def stalled(lab: Laboratory, recipe: str, inject: str, *, name: str = "cut") -> Process:
    """A run that has reached the injected stall."""
    (lab.folder / "stalled").unlink(missing_ok=True)
    process = lab.start(*lab.words(name, recipe), inject=STALL + inject)
    process.wait_for((lab.folder / "stalled").exists)
    return process
