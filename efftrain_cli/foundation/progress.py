"""Show how far a piece of work has come: a line that is redrawn on a terminal, plain lines
elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

Report = Callable[[str, int], None]
"""Called with what is counted and how many are done."""
REDRAWN = 0.1
"""Seconds between two states of the line on a terminal."""


@contextmanager
def show_progress(console: Console, title: str, seconds_between_lines: float) -> Iterator[Report]:
    """Yield the function to report progress to.

    Args:
        title: stands before the line on a terminal, and above the plain lines.
        seconds_between_lines: between two plain lines about the same thing.
    """
    is_live = console.is_terminal and not (console.is_dumb_terminal or console.quiet)
    pause = REDRAWN if is_live else seconds_between_lines
    before = ""
    shown = 0.0
    with console.status(title) if is_live else nullcontext() as status:
        if status is None:
            console.print(title)

        def report(what: str, done: int) -> None:
            nonlocal before, shown
            now = time.monotonic()
            if what == before and now - shown < pause:
                return
            before = what
            shown = now
            line = f"{what}: {done:,}" if done else what
            if status is None:
                console.print(line)
            else:
                status.update(f"{title}: {line}")

        yield report
