"""Preparing data where somebody watches: a bar on a terminal, plain lines elsewhere, nothing if the data is ready."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

from efftrain_cli.data.corpus import Corpus
from efftrain_cli.data.limits import Limits
from efftrain_cli.data.prepare import prepare
from efftrain_cli.data.split import Report
from efftrain_cli.foundation.console import human_seconds, make_console

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

    from efftrain_cli.recipe.sections import Data

INTERVAL = 10.0
"""Seconds between two plain lines of the same work."""


def prepare_shown(
    data: Data,
    *,
    limits: Limits | None = None,
    verify: Literal["lazy", "full"] = "lazy",
    console: Console | None = None,
) -> Corpus:
    """`data.prepare`, shown as it goes on. A corpus that is ready shows nothing."""
    with preparation_screen(console or make_console()) as report:
        return prepare(data, limits=limits, report=report, verify=verify)


@contextmanager
def preparation_screen(console: Console) -> Iterator[Report]:
    """Gives what `data.prepare` reports to, and shows a preparation from its first report on."""
    started = shown = time.monotonic()
    before = ""
    bar: Progress | None = None
    if console.is_terminal and not console.is_dumb_terminal:
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (
            TextColumn("preparing the data"),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[text]}"),
        )
        bar = Progress(*columns, TimeElapsedColumn(), console=console, transient=True)
        bar.add_task("preparing", total=None, text="")

    def report(what: str, done: int, total: int | None) -> None:
        nonlocal shown, before
        now = time.monotonic()
        begins = what != before
        if not begins and now - shown < (INTERVAL if bar is None else 0.1):
            return
        if not before and bar is None:
            console.print("preparing the data (once; the next run finds it in the cache)")
        shown, before = now, what
        if bar is not None:
            bar.update(
                bar.task_ids[0],
                completed=done,
                total=total,
                text=f"{what} {done:,}" if done else what,
            )
            bar.start()
        elif done == 0 or not begins:
            share = f" of {total:,} ({done / total:.0%})" if total else ""
            console.print(f"{what}: {done:,}{share}" if done else what)

    try:
        yield report
    finally:
        if bar is not None:
            bar.stop()
    if before:
        console.print(f"data prepared in {human_seconds(time.monotonic() - started)}")
