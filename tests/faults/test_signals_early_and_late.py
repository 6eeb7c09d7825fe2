"""Signals from the first moment of a process to the last, one after another, and to a parent."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from efftrain_cli.foundation.signals import (
    Stop,
    abandonable,
    check_stop,
    describe_end,
    end_undisturbed,
    end_with,
    stop_asked,
    stop_before_training,
    stop_on_signals,
    stop_reason,
)
from tests.conftest import cli, python
from tests.faults.damage import in_a_child
from tests.faults.stalls import WINDOWS, stalled
from tests.launch import start_efftrain, wait_until


def test_sigterm_before_anything_is_imported(tmp_path):
    """F60: while PyTorch is being imported nothing was trained, and the exit code says that it can
    be asked for again."""
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
        runs = str(tmp_path / "runs")
        early = code.replace("MODULE", module)
        result = python(early, cwd=tmp_path, code=75, EFFTRAIN_RUNS=runs)
        assert (
            "stopped by SIGTERM outside of training: nothing is lost\n  give the same command again"
            in result.stderr
        )
        assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_after_the_end_changes_nothing(number):
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


def test_nohup_is_respected():
    def body() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        stop_before_training()
        with stop_on_signals():
            os.kill(os.getpid(), signal.SIGHUP)
            time.sleep(0.05)
            check_stop()

    assert in_a_child(body) == 0


def test_only_the_main_thread_handles_signals():
    before = signal.getsignal(signal.SIGTERM)
    with stop_on_signals():
        assert signal.getsignal(signal.SIGTERM) != before
    assert signal.getsignal(signal.SIGTERM) == before
    seen = []

    def body() -> None:
        with stop_on_signals():
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert seen == [before]


def test_a_signal_is_noted_until_it_is_asked_for():
    for name in ("SIGTERM", "SIGINT", "SIGINT"):
        with stop_on_signals():
            with abandonable():
                pass
            check_stop()
            os.kill(os.getpid(), signal.Signals[name])
            assert stop_asked() and stop_reason() == name
            with pytest.raises(Stop):
                check_stop()
        assert not stop_asked()


def test_a_child_whose_parent_has_ended_ends_too():
    assert in_a_child(lambda: end_with(os.getppid())) == 0
    assert in_a_child(lambda: end_with(os.getpid())) == 143
    assert describe_end(-35) == ("was ended by signal 35", 163), "a real-time signal has no name"


def test_a_second_signal_during_the_save(lab):
    """F60: the save is finished all the same."""
    process = stalled(lab, lab.recipe(), WINDOWS["checkpoint"][0].replace("stall()", "stall(0.5)"))
    process.kill(signal.SIGTERM)
    process.kill(signal.SIGHUP)
    assert process.wait(30) == 75
    assert lab.checkpoints("cut")[-1] == "step-00000010"
    cli("runs verify cut")


@pytest.mark.slow
def test_sigterm_at_any_instant_and_again_every_100_ms(lab):
    """F60: from the moment that Python runs our first line: 75 and saved where a step was trained;
    0 where all was done."""
    recipe = lab.recipe(tokens="12_800")
    codes = set()
    for number in range(8):
        name = f"r{number}"
        process = start_efftrain(
            lab.folder, "pretrain", "--recipe", recipe, "--name", name, "--no-probe"
        )
        wait_until(lambda: _catches_sigterm(process.pid), process)  # noqa: B023  awaited here
        if number < 4:  # while it is being imported
            time.sleep(0.3 * number)
        else:  # while it trains
            step = 20 * (number - 4)
            while lab.last_step(name) < step and process.poll() is None:
                time.sleep(0.05)
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
