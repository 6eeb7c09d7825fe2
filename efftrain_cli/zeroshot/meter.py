"""How far a task has come and when it ends: a bar where there is a terminal, a line every 30 s where there is none."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from efftrain_cli.foundation.console import silent

SECONDS_BETWEEN_LINES = 30.0


@contextmanager
def meter(task: str, unit: str, total: int) -> Iterator[Callable[[int], None]]:
    """Shows the progress of one task on stderr. Gives `advance`, to be called with what each batch has added.

    Requests differ in cost, longest first, so the time left is an upper guess.
    """
    terminal = sys.stderr.isatty()
    interval = 0.2 if terminal else SECONDS_BETWEEN_LINES
    began = shown = time.monotonic()
    done = 0

    def advance(count: int) -> None:
        nonlocal done, shown
        done += count
        now = time.monotonic()
        if silent() or now - shown < interval:
            return
        shown, speed = now, done / (now - began)
        left = int((total - done) / speed)
        text = f"{task}: {done:,} of {total:,} {unit}, {speed:,.0f}/s, about {left // 60}:{left % 60:02d} left"
        print(f"\r\033[K{text}" if terminal else f"{text}\n", end="", file=sys.stderr, flush=True)

    try:
        yield advance
    finally:
        if terminal and not silent():
            print("\r\033[K", end="", file=sys.stderr, flush=True)
