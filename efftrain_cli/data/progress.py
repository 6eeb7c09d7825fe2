"""Preparing data where somebody watches: a bar on a terminal, plain lines elsewhere, nothing if the data is ready."""

from __future__ import annotations

import time
from types import TracebackType
from typing import TYPE_CHECKING, Literal

from efftrain_cli.data.corpus import Corpus
from efftrain_cli.data.limits import Limits
from efftrain_cli.data.prepare import prepare
from efftrain_cli.foundation.console import human_seconds, make_console

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID

    from efftrain_cli.recipe.sections import Data


def prepare_shown(
    data: Data,
    *,
    limits: Limits | None = None,
    verify: Literal["lazy", "full"] = "lazy",
    console: Console | None = None,
) -> Corpus:
    """`data.prepare`, with a bar on a terminal or plain lines elsewhere. A corpus that is ready shows nothing.

    Raises:
        DataError: text, tokenizer or a cached corpus is missing, damaged or does not fit.
        DiskError: the cache's disk is full.
    """
    with PreparationScreen(console or make_console()) as screen:
        corpus = prepare(data, limits=limits, report=screen.show, verify=verify)
    return corpus


class PreparationScreen:
    """Shows a preparation from its first report on."""

    INTERVAL = 10.0
    """Seconds between two plain lines of the same work."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._started = self._shown = time.monotonic()
        self._what = ""
        self._bar: Progress | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> PreparationScreen:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
        if self._what and error is None:
            self._console.print(f"data prepared in {human_seconds(time.monotonic() - self._started)}")

    def show(self, what: str, done: int, total: int | None) -> None:
        """One report of `data.prepare`: what is being done, how much of it, and of how much where known."""
        now = time.monotonic()
        begins = what != self._what
        if not begins and now - self._shown < (0.1 if self._bar is not None else self.INTERVAL):
            return
        if not self._what and (not self._console.is_terminal or self._console.is_dumb_terminal):
            self._console.print("preparing the data (once; the next run finds it in the cache)")
        self._shown, self._what = now, what
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            self._move_bar(what, done, total)
        elif done == 0 or not begins:
            share = f" of {total:,} ({done / total:.0%})" if total else ""
            self._console.print(f"{what}: {done:,}{share}" if done else what)

    def _move_bar(self, what: str, done: int, total: int | None) -> None:
        if self._bar is None or self._task is None:
            from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

            self._bar = Progress(
                TextColumn("preparing the data"),
                BarColumn(bar_width=None),
                TextColumn("{task.fields[text]}"),
                TimeElapsedColumn(),
                console=self._console,
                transient=True,
            )
            self._task = self._bar.add_task("preparing", total=None, text=what)
            self._bar.start()
        text = f"{what} {done:,}" if done else what
        self._bar.update(self._task, completed=done, total=total, text=text)
