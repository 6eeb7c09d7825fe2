"""Stopping on SIGTERM, SIGHUP and Ctrl-C without losing or tearing anything.

A signal never breaks into what must be whole: an optimizer update, a row, a checkpoint. It is
remembered, and raised as `Stop` at once or at the next chance inside `interruptible()`: while data
is prepared or read, and during forward, backward, compilation and evaluation, where the weights are
still those of the last finished step. So stopping takes as long as a save, however long a step is.

Signals belong to the process, so the state here does too. Without `stop_on_signals` nothing in this
file does anything.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

SECOND_CTRL_C = 5.0
"""A second Ctrl-C within so many seconds ends the process at once, with exit code 130."""
PATIENCE = 5.0
"""Python sees a signal only between two calls into C, and one backward pass of a large model on a
CPU is a single such call. After so many seconds another thread saves in its place."""
STOPPABLE = ("pretrain", "tune-warmup", "race", "sweep", "study", "verify-resume")
"""Commands that a scheduler stops and requeues."""
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Stop(BaseException):
    """A signal asked to stop. Not an `Exception`, so that no handler on the way takes it for an
    error."""


class _Listener:
    """The state of one `stop_on_signals`; there is one at a time."""

    asked: str | None = None
    """Name of the signal that asked to stop."""
    open = False
    """Work that can be abandoned is under way."""
    rescue: Callable[[], None] | None = None
    """Does from another thread what the main thread would do on `Stop`."""
    rescuable = False
    """The work under way leaves the state as it was, so that another thread may save it."""
    seen = False
    rescuing = False
    last_ctrl_c = -SECOND_CTRL_C - 1.0

    def __init__(self) -> None:
        self.lock = threading.RLock()  # signal handlers may nest
        self.unraisable = sys.unraisablehook

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal in the main thread, as Python calls it."""
        with self.lock:
            self.asked = self.asked or signal.Signals(number).name
            self.seen = True
            rescuing = self.rescuing
            raising = self.open
            self.open = False
        if rescuing:
            _wait_for_the_end()
        if raising:
            raise Stop(self.asked)

    def swallowed(self, unraisable: sys.UnraisableHookArgs) -> None:
        """Keep a `Stop` that fell into a finalizer or a weak reference's callback, which Python
        prints and drops. It is raised at the end of the work; until then a second signal is raised
        at once, and the rescue may come first."""
        if unraisable.exc_type is not Stop:
            self.unraisable(unraisable)
            return
        self.open = True
        self.seen = False

    def watch(self, pipe: int) -> None:
        """Read the numbers of arriving signals in a thread of its own, whatever the main thread is
        doing."""
        while numbers := os.read(pipe, 64):
            for number in numbers:
                if number not in _SIGNALS:
                    continue
                now = time.monotonic()
                if number == signal.SIGINT:
                    if now - self.last_ctrl_c <= SECOND_CTRL_C:
                        _end(130)
                    self.last_ctrl_c = now
                if self.asked is None:
                    self.asked = signal.Signals(number).name
                    threading.Thread(target=self._rescue_if_stuck, daemon=True).start()

    def _rescue_if_stuck(self) -> None:
        time.sleep(PATIENCE)
        with self.lock:
            if self.seen or not self.open or not self.rescuable or self.rescue is None:
                return
            self.rescuing = True
        try:
            self.rescue()
        except BaseException as error:
            print(f"error: stopping failed: {error}", file=sys.stderr)
            _end(1)
        _end(75)


_listener: _Listener | None = None


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
    """Raise `Stop` for SIGTERM, SIGHUP and Ctrl-C inside `interruptible()`; elsewhere they wait."""
    global _listener
    if _listener is not None or threading.current_thread() is not threading.main_thread():
        yield
        return
    listener = _listener = _Listener()
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    # nohup asks that SIGHUP be ignored.
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    handled = (signal.SIGTERM, signal.SIGINT) if ignored else _SIGNALS
    before = {number: signal.signal(number, listener.handle) for number in handled}
    wakeup = signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    sys.unraisablehook = listener.swallowed
    threading.Thread(target=listener.watch, args=(read_end,), daemon=True).start()
    try:
        yield
    finally:
        sys.unraisablehook = listener.unraisable
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(wakeup)
        _listener = None
        os.close(write_end)


@contextmanager
def rescued_by(rescue: Callable[[], None]) -> Iterator[None]:
    """Name what another thread does if the main thread hangs in a long call into C; the process
    then ends with exit code 75. `rescue` may assume that the main thread does nothing more."""
    if _listener is None:
        yield
        return
    before = _listener.rescue
    _listener.rescue = rescue
    try:
        yield
    finally:
        if _listener is not None:
            _listener.rescue = before


@contextmanager
def interruptible(rescuable: bool = False) -> Iterator[None]:
    """Do work that may be abandoned anywhere without leaving a trace.

    Args:
        rescuable: the work can hang in a long call into C, and the state that `rescued_by` saves is
            not part of it.

    Raises:
        Stop: a signal came, now or earlier.
    """
    listener = _listener
    if listener is None:
        yield
        return
    listener.rescuable = rescuable
    listener.open = True
    try:
        if listener.asked is not None:
            raise Stop(listener.asked)
        yield
    except Exception as error:
        # Libraries may turn an exception that passes through them into one of their own.
        if listener.asked is not None:
            raise Stop(listener.asked) from error
        raise
    finally:
        with listener.lock:
            listener.open = False
            rescuing = listener.rescuing
        if rescuing:
            _wait_for_the_end()
    if listener.asked is not None:  # raised where exceptions are swallowed, such as a finalizer
        raise Stop(listener.asked)


def stop_asked() -> bool:
    """Return whether a signal, or another reason, has asked to stop."""
    return _listener is not None and _listener.asked is not None


def stop_reason() -> str:
    """Return the signal, or other reason, that asked to stop."""
    return (_listener and _listener.asked) or "a signal"


def ask_to_stop(reason: str) -> None:
    """Stop as a signal would, at the next chance."""
    if _listener is not None and _listener.asked is None:
        _listener.asked = reason


def _wait_for_the_end() -> None:
    """Wait: the rescuing thread will end the process."""
    while True:
        time.sleep(60)


def _end(code: int) -> None:
    """End the process now; a terminal gets its cursor back."""
    try:
        sys.stdout.flush()
        sys.stderr.flush()
        if os.isatty(1):  # not through sys.stdout: what draws a progress bar there drops escapes
            os.write(1, b"\x1b[?25h\n")
    finally:
        os._exit(code)
