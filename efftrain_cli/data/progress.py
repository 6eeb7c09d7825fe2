"""Preparing data where somebody watches: a bar on a terminal, plain lines elsewhere, nothing if the data is ready."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

from efftrain_cli.data.corpus import Corpus
from efftrain_cli.data.limits import Limits
from efftrain_cli.data.prepare import prepare
from efftrain_cli.foundation.console import human_seconds, make_console
from efftrain_cli.foundation.progress import Report, show_progress

if TYPE_CHECKING:
    from rich.console import Console

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
    """Yield what `data.prepare` reports to; show a preparation from its first report on."""
    started = time.monotonic()
    reported = False
    heading = "preparing the data (once; the next run finds it in the cache)"
    with show_progress(console, "preparing the data", INTERVAL, heading) as show:

        def report(what: str, done: int, total: int | None) -> None:
            nonlocal reported
            reported = True
            show(what, done, total)

        yield report
    if reported:
        console.print(f"data prepared in {human_seconds(time.monotonic() - started)}")
