"""Stopping on SIGTERM, SIGHUP and Ctrl-C: a signal sets a flag, which is read only where nothing is
half done.

Training asks between two micro-batches and two chunks of an evaluation, several ranks after each
gradient; a preparation asks between documents. Rows, updates and checkpoints are always finished.
So a stop waits for the micro-batch, write or call into C that is under way. A compilation is
abandoned.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

STOPPABLE = ("pretrain", "tune-warmup", "race", "sweep", "study", "verify-resume")
"""Commands that a scheduler stops and requeues."""
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_asked = ""
"""Name of the signal, or another reason, that asked to stop."""

_is_interrupted = False
"""Whether a Ctrl-C came; the next one ends the process."""
_is_abandonable = False
"""Whether a signal ends the work under way."""


class Stop(BaseException):
    """Training ends after the last finished step. Not an `Exception`, so that no handler takes it
    for an error."""


def _note(number: int, frame: FrameType | None) -> None:
    global _is_interrupted
    name = signal.Signals(number).name
    if name == "SIGINT":
        if _is_interrupted:
            _end(130)
        _is_interrupted = True
    ask_to_stop(name)
    if _is_abandonable:
        raise Stop


def _end(code: int) -> None:
    """End the process now; a terminal gets its cursor back."""
    if os.isatty(1):  # not through sys.stdout: what draws a progress bar there drops escapes
        os.write(1, b"\x1b[?25h\n")
    os._exit(code)


def stop_before_training() -> None:
    """End with 75 on SIGTERM and SIGHUP outside of training, when nothing can be lost. Ctrl-C stays
    Python's. `stop_on_signals` takes over while there is something to save."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, _stop_at_once)


def _stop_at_once(number: int, frame: FrameType | None) -> None:
    with contextlib.suppress(OSError):
        name = signal.Signals(number).name
        message = (
            f"stopped by {name} outside of training: nothing is lost\n"
            "  give the same command again\n"
        )
        os.write(2, message.encode())
    os._exit(75)


# Loaded here, as `end_with` may be called between fork and exec.
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
_PR_SET_PDEATHSIG = 1


def end_with(parent: int) -> None:
    """Have the system send SIGTERM to this process when its parent ends, in any way (Linux)."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # it has ended already
            os._exit(128 + signal.SIGTERM)


def describe_end(code: int) -> tuple[str, int]:
    """Return how a child process ended, in words, and the exit code that passes it on.

    Args:
        code: its return code as Python has it; below 0: the signal that ended it.
    """
    if code >= 0:
        return f"failed with exit code {code}", code
    try:
        name = signal.Signals(-code).name
    except ValueError:  # a real-time signal
        name = f"signal {-code}"
    return f"was ended by {name}", 128 - code


def end_undisturbed() -> None:
    """Ignore signals: the process is about to end with its exit code, and Python's own end takes a
    moment."""
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)


@contextmanager
def stop_on_signals() -> Iterator[None]:
    """Note signals inside, instead of ending the process. A second Ctrl-C ends it, with 130."""
    global _asked, _is_interrupted
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {}
    for number in _SIGNALS:
        # nohup asks that SIGHUP be ignored.
        if signal.getsignal(number) is not signal.SIG_IGN:
            handlers[number] = signal.signal(number, _note)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        _asked, _is_interrupted = "", False


def ask_to_stop(reason: str) -> None:
    """Stop as a signal would."""
    global _asked
    _asked = _asked or reason


def stop_asked() -> bool:
    """Return whether a signal, or another reason, has asked this process to stop."""
    return _asked != ""


def check_stop() -> None:
    """Stop between two pieces of work if a signal came.

    Raises:
        Stop: one came.
    """
    if _asked:
        raise Stop


@contextmanager
def abandonable() -> Iterator[None]:
    """Do long work that changes nothing before its end: a signal ends it at once.

    Raises:
        Stop: one came, now or earlier.
    """
    global _is_abandonable
    check_stop()
    _is_abandonable = True
    try:
        yield
    finally:
        _is_abandonable = False
    # The handler's exception may have been swallowed, as in a finalizer.
    check_stop()


def never() -> bool:
    """Return False: do not stop."""
    return False


def stop_reason() -> str:
    """Return the first reason to stop; of another rank, only that it had one."""
    return _asked or "a signal to another process"
