"""Show how far a piece of work has come: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from efftrain_cli.foundation.console import human_seconds

if TYPE_CHECKING:
    from rich.console import Console

Report = Callable[[str, int, int | None], None]
"""Called with what is counted, how many are done, and how many there are; None if that is
unknown."""


@contextmanager
def show_progress(
    console: Console, title: str, seconds_between_lines: float, heading: str = ""
) -> Iterator[Report]:
    """Yield what to report progress to. Nothing is shown before the first report.

    Args:
        title: stands before the bar.
        seconds_between_lines: between two plain lines about the same thing.
        heading: a line before the first plain line.
    """
    if console.is_terminal and not console.is_dumb_terminal:
        with _bar(console, title) as report:
            yield report
        return
    before = ""
    began = shown = time.monotonic()

    def print_line(what: str, done: int, total: int | None) -> None:
        nonlocal before, began, shown
        now = time.monotonic()
        begins = what != before
        if not begins and now - shown < seconds_between_lines:
            return
        if heading and not before:
            console.print(heading)
        if begins:
            began = now
        before = what
        shown = now
        if not done:
            console.print(what)
        elif not begins:
            share = f" of {total:,} ({done / total:.0%})" if total else ""
            left = ""
            if total and done < total:
                left = f", about {human_seconds((now - began) * (total - done) / done)} left"
            console.print(f"{what}: {done:,}{share}{left}")

    yield print_line


@contextmanager
def _bar(console: Console, title: str) -> Iterator[Report]:
    from rich.progress import (
        BarColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn(title),
        BarColumn(bar_width=None),
        TextColumn("{task.description} {task.completed:,.0f}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    bar = Progress(*columns, console=console, transient=True)
    task = bar.add_task("", total=None)

    def report(what: str, done: int, total: int | None) -> None:
        bar.update(task, description=what, completed=done, total=total)
        bar.start()

    try:
        yield report
    finally:
        bar.stop()
