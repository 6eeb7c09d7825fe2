"""How far a task has come and when it ends: a bar where there is a terminal, a line every 30 s where there is none."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from efftrain_cli.foundation.console import silent

SECONDS_BETWEEN_LINES = 30.0


class Meter:
    """Progress of one task on stderr. Use as a context manager and call `advance` after each batch."""

    def __init__(self, task: str, unit: str, total: int) -> None:
        self.task = task
        self.unit = unit
        self.total = total
        self.done = 0
        self._start = time.monotonic()
        self._terminal = sys.stderr.isatty()
        self._next = self._start + (0.2 if self._terminal else SECONDS_BETWEEN_LINES)

    def advance(self, count: int) -> None:
        """Counts `count` more as done, and says so when it is time."""
        self.done += count
        now = time.monotonic()
        if silent() or now < self._next:
            return
        self._next = now + (0.2 if self._terminal else SECONDS_BETWEEN_LINES)
        line = self.line(now - self._start)
        print(
            f"\r\033[K{line}" if self._terminal else line,
            end="" if self._terminal else "\n",
            file=sys.stderr,
            flush=True,
        )

    def line(self, seconds: float) -> str:
        """What is shown after `seconds`: requests differ in cost, longest first, so the time left is an upper guess."""
        left = seconds / self.done * (self.total - self.done) if self.done else float("nan")
        return (
            f"{self.task}: {self.done:,} of {self.total:,} {self.unit}, {self.done / max(seconds, 1e-9):,.0f}/s, "
            f"about {int(left) // 60}:{int(left) % 60:02d} left"
            if self.done
            else f"{self.task}: {self.total:,} {self.unit}"
        )

    def __enter__(self) -> Meter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._terminal and not silent():
            print("\r\033[K", end="", file=sys.stderr, flush=True)
