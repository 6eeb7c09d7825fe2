"""SIGTERM and Ctrl-C in every window of a run: the last finished step is saved, and a resume shows no trace of the
stop."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from efftrain_cli.foundation import signals
from efftrain_cli.foundation.signals import (
    Stop,
    end_undisturbed,
    interruptible,
    rescued_by,
    stop_before_training,
    stop_on_signals,
)
from tests.conftest import REPOSITORY
from tests.launch import Laboratory, Process, start_efftrain, wait_until

# Each stalls one window of a step, and says so by a file. Signals arrive while it sleeps. A step's batch is read during
# the step before: where the batch of step 9 stalls, step 7 is the last finished one.
STALL = """
import time
from pathlib import Path

def stall(seconds=120):
    Path("stalled").touch()
    time.sleep(seconds)
"""
IN_STEP = """
from efftrain_cli.model.gpt import GPT
embed = GPT.embed
calls = 0

def stalled_embed(self, tokens, position=0):
    global calls
    calls += self.training and tokens.requires_grad is False and __import__("torch").is_grad_enabled()
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
    process = lab.start("pretrain", "--recipe", recipe, "--name", name, "--no-probe", inject=STALL + inject)
    process.wait_for((lab.folder / "stalled").exists)
    return process


@pytest.mark.parametrize(
    "window", ["evaluation", *(pytest.param(w, marks=pytest.mark.slow) for w in WINDOWS if w != "evaluation")]
)
def test_sigterm(lab: Laboratory, window: str) -> None:
    """F18."""
    inject, last = WINDOWS[window]
    recipe = lab.recipe(windows='4\nsample = "the"') if window == "sampling" else lab.recipe()
    process = stalled(lab, recipe, inject)
    process.kill(signal.SIGTERM)
    assert process.wait(25) == 75
    assert "Traceback" not in process.err.read_text()
    assert f"stopped by SIGTERM after step {last}" in process.err.read_text()
    assert lab.last_step("cut") == last
    assert lab.checkpoints("cut")[-1] == f"step-{last:08d}"
    assert [event["status"] for event in lab.events("cut", "end")] == ["stopped"]
    assert lab.call("checkpoint", "verify", "cut").code == 0

    assert lab.call("pretrain", "--resume", "cut").code == 0
    assert lab.call("pretrain", "--recipe", recipe, "--name", "whole", "--no-probe").code == 0
    lab.assert_equal_runs("cut", "whole", 20)


def test_a_last_evaluation_that_was_stopped_is_made_up_for_once(lab: Laboratory) -> None:
    process = stalled(
        lab, lab.recipe(), WINDOWS["evaluation"][0].replace("calls == 3", "calls == 5")
    )  # that of step 20
    process.kill(signal.SIGTERM)
    assert process.wait() == 75 and lab.last_step("cut") == 20
    first, second = (lab.call("pretrain", "--resume", "cut") for _ in range(2))
    assert first.code == second.code == 0
    assert "result " in first.out.read_text() and "nothing to train" in second.out.read_text()
    losses = [json.loads(line)["val_loss"] for line in (lab.run("cut") / "metrics.jsonl").read_text().splitlines()]
    assert len(losses) == 22 and losses[-1] is not None and losses[-2] is None


def test_sigterm_while_data_is_prepared(lab: Laboratory) -> None:
    """F18: nothing is saved because nothing was trained, and nothing is torn."""
    (lab.folder / "text.txt").write_text((lab.folder / "text.txt").read_text()[::-1])  # text that no cache knows
    inject = """
import efftrain_cli.data.prepare as prepare
prepare.train_tokenizer = lambda size, sample: stall()
"""
    recipe = lab.recipe()
    process = stalled(lab, recipe, inject)
    process.kill(signal.SIGTERM)
    assert process.wait(25) == 75
    assert "no step was trained" in process.err.read_text()
    assert not lab.run("cut").exists()
    assert lab.call("pretrain", "--recipe", recipe, "--name", "cut", "--steps", "1").code == 0


@pytest.mark.slow
def test_ctrl_c_once(lab: Laboratory) -> None:
    """F20."""
    process = stalled(lab, lab.recipe(), WINDOWS["data"][0])
    process.kill(signal.SIGINT)
    assert process.wait(25) == 75
    assert lab.checkpoints("cut")[-1] == "step-00000007"


def test_ctrl_c_twice(lab: Laboratory) -> None:
    """F20: at once, even in the middle of writing a checkpoint; what stands is valid."""
    process = stalled(lab, lab.recipe(), WINDOWS["checkpoint"][0].replace("stall(2)", "stall(60)"))
    process.kill(signal.SIGINT)
    time.sleep(0.2)  # nothing can be awaited: the first one must not end it
    assert not process.ended()
    process.kill(signal.SIGINT)
    assert process.wait(25) == 130
    assert "step-00000010.tmp" in lab.checkpoints("cut")
    assert lab.call("pretrain", "--resume", "cut", "--steps", "11").code == 0
    assert lab.checkpoints("cut") == ["step-00000010", "step-00000011"]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
def test_sigterm_while_compiling(lab: Laboratory) -> None:
    """F18: in the middle of the first compilation; eager steps before it are not needed to have something to save."""
    inject = """
from pathlib import Path
import torch._inductor.graph as graph
codegen = graph.GraphLowering.codegen

def noted(self):
    Path("stalled").touch()
    return codegen(self)

graph.GraphLowering.codegen = noted
"""
    recipe = lab.recipe()
    args = ("pretrain", "--recipe", recipe, "--name", "cut", "--no-probe", "--set", "train.compile=on")
    process = lab.start(*args, inject=inject, TORCHINDUCTOR_CACHE_DIR=str(lab.folder / "inductor"))
    process.wait_for((lab.folder / "stalled").exists, timeout=200)
    process.kill(signal.SIGTERM)
    assert process.wait(25) == 75
    assert "Traceback" not in process.err.read_text()
    assert "stopped by SIGTERM" in process.err.read_text()
    assert (
        lab.call("pretrain", "--resume", "cut", "--steps", "1", "--set", "train.compile=off", "--override-resume").code
        == 0
    )


# --- from the first moment to the last -------------------------------------------------------------------------------


def test_sigterm_before_anything_is_imported(tmp_path: Path) -> None:
    """F60: while PyTorch is being imported nothing was trained, and the exit code says that it can be asked for
    again."""
    code = """
import builtins, os, signal, sys
import efftrain_cli.__main__ as program
sys.argv = ["efftrain", "pretrain", "--recipe", "small"]
real = builtins.__import__

def importing(name, *rest, **options):
    if name == "MODULE":
        os.kill(os.getpid(), signal.SIGTERM)
    return real(name, *rest, **options)

builtins.__import__ = importing
program.main()
"""
    for module in ("typer", "torch"):
        result = subprocess.run(
            [sys.executable, "-c", code.replace("MODULE", module)],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY), "EFFTRAIN_RUNS": str(tmp_path / "runs")},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert result.returncode == 75, (module, result.stderr)
        assert "stopped by SIGTERM outside of training: nothing is lost; give the same command again" in result.stderr
        assert not (tmp_path / "runs").exists()


def in_a_child(body: Callable[[], None]) -> int:
    """Exit code of `body` in a forked process, 0 where it returns; negative for a signal."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            body()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_after_the_end_changes_nothing(number: int) -> None:
    """F60: everything is saved by then: 75, or the exit code that the process has already."""

    def body(ending: bool) -> None:
        stop_before_training()
        with stop_on_signals():
            pass
        if ending:
            end_undisturbed()
        os.kill(os.getpid(), number)
        time.sleep(0.05)

    assert in_a_child(lambda: body(False)) == 75
    assert in_a_child(lambda: body(True)) == 0


def test_nohup_is_respected() -> None:
    def body() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        stop_before_training()
        with stop_on_signals(), interruptible():
            os.kill(os.getpid(), signal.SIGHUP)
            time.sleep(0.05)

    assert in_a_child(body) == 0


def test_work_that_is_part_of_the_state_is_not_saved_by_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long call into C that is not rescuable is waited for, however long it takes."""

    def body() -> None:
        monkeypatch.setattr(signals, "PATIENCE", 0.05)
        with stop_on_signals(), rescued_by(lambda: os._exit(3)):
            threading.Timer(0.05, lambda: os.kill(os.getpid(), signal.SIGTERM)).start()
            with pytest.raises(Stop), interruptible():
                hashlib.pbkdf2_hmac("sha512", b"", b"", 600_000)
        os._exit(4)

    assert in_a_child(body) == 4


@pytest.mark.parametrize("second", [signal.SIGTERM, pytest.param(signal.SIGHUP, marks=pytest.mark.slow)])
def test_a_second_signal_during_the_save(lab: Laboratory, second: int) -> None:
    """F60: the save is finished all the same."""
    process = stalled(lab, lab.recipe(), WINDOWS["checkpoint"][0].replace("stall(2)", "stall(0.5)"))
    process.kill(signal.SIGTERM)
    process.kill(second)
    assert process.wait(30) == 75
    assert lab.checkpoints("cut")[-1] == "step-00000010"
    assert lab.call("checkpoint", "verify", "cut").code == 0


def test_sighup_is_as_sigterm(lab: Laboratory) -> None:
    """F60: the terminal was closed, and with it standard output."""
    inject = WINDOWS["data"][0]
    process = stalled(lab, lab.recipe(), inject)
    process.kill(signal.SIGHUP)
    assert process.wait(30) == 75
    assert "stopped by SIGHUP after step 7" in process.err.read_text()
    assert lab.checkpoints("cut")[-1] == "step-00000007"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent has died")
def test_the_runs_of_a_killed_sweep_are_asked_to_stop(tmp_path: Path) -> None:
    """F78: SIGKILL to the parent is SIGTERM to what it has started; what a run does then is F18."""
    child = """
import pathlib, signal, time
signal.signal(signal.SIGTERM, lambda *_: (pathlib.Path("asked").touch(), exit(75)))
pathlib.Path("ready").touch()
time.sleep(60)
"""
    parent = f"""
import os, pathlib, signal, sys, time
from efftrain_cli.sweep.runner import launch
launch([sys.executable, "-c", {child!r}], {{}}, pathlib.Path("log"))
while not pathlib.Path("ready").exists():
    time.sleep(0.01)
os.kill(os.getpid(), signal.SIGKILL)
"""
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    result = subprocess.run([sys.executable, "-c", parent], cwd=tmp_path, env=environment, timeout=60, check=False)
    assert result.returncode == -signal.SIGKILL
    wait_until((tmp_path / "asked").exists, timeout=30)


@pytest.mark.slow
def test_sigterm_at_any_instant_and_again_every_100_ms(lab: Laboratory) -> None:
    """F60: from the moment that Python runs our first line: 75 and saved where a step was trained; 0 where all was
    done."""
    recipe = lab.recipe(tokens="12_800")
    codes = set()
    for number in range(8):
        name = f"r{number}"
        process = start_efftrain(lab.folder, "pretrain", "--recipe", recipe, "--name", name, "--no-probe")
        wait_until(lambda: _catches_sigterm(process.pid), process)  # noqa: B023  awaited here
        if number < 4:  # while it is being imported
            time.sleep(0.3 * number)
        else:  # while it trains
            wait_until(lambda: lab.last_step(name) >= 20 * (number - 4) or process.poll() is not None)  # noqa: B023
        while process.poll() is None:
            process.send_signal(signal.SIGTERM)
            time.sleep(0.1)
        errors = process.stderr.read()
        codes.add(process.returncode)
        assert process.returncode in (0, 75), errors
        assert "Traceback" not in errors
        trained = lab.last_step(name)
        if trained > 0:
            assert lab.checkpoints(name)[-1] == f"step-{trained:08d}"
    assert 75 in codes


def _catches_sigterm(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    (caught,) = [line.split()[1] for line in status.splitlines() if line.startswith("SigCgt")]
    return bool(int(caught, 16) >> (signal.SIGTERM - 1) & 1)
