"""The display of a training run: a bar on a terminal, or plain lines elsewhere."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from efftrain_cli.foundation.console import human, human_seconds

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID


class TrainingDisplay:
    """Shows a run as its rows come in: a bar on a terminal, a line every half minute at most
    elsewhere.

    If no row comes for long (one step can take minutes), a line shows that the run is alive.
    """

    FIRST_INTERVAL = 10.0
    """Seconds between plain lines in the first two minutes."""
    INTERVAL = 28.0
    """Seconds between plain lines after that."""
    SILENCE = 29.5
    """Seconds without a finished step after which a line says that the run is alive."""

    def __init__(
        self,
        console: Console,
        total_tokens: int,
        tokens: int,
        steps: int | None,
    ) -> None:
        self._console = console
        self._total_tokens = total_tokens
        self._steps = steps
        self._first_tokens = tokens
        self._started = self._printed = time.monotonic()
        self._pace: tuple[float, int] | None = None
        """When the first step ended, and the tokens until then."""
        self._val_loss: float | None = None
        self._row: Mapping[str, object] = {}
        self._shown: Mapping[str, object] | None = None  # the row of the newest plain line
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._ended = threading.Event()
        self._lock = threading.Lock()

    def __enter__(self) -> TrainingDisplay:
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            from rich.progress import BarColumn, Progress, TextColumn

            self._bar = Progress(
                BarColumn(bar_width=None),
                TextColumn("{task.fields[text]}"),
                console=self._console,
                transient=True,
                refresh_per_second=4,
            )
            self._task = self._bar.add_task(
                "training",
                total=self._total_tokens,
                text="starting",
            )
            self._bar.start()
        else:
            threading.Thread(target=self._keep_alive, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._bar is not None:
            self._bar.stop()
        elif self._row.get("step") and self._row is not self._shown:
            self._print_line(self._text())

    def show(self, row: Mapping[str, object]) -> None:
        """Show one finished step, as a row of metrics.jsonl."""
        with self._lock:
            self._row = row
            # The first step also compiles and fills caches: it says nothing about the pace.
            if self._pace is None and int(row["tokens"]) > self._first_tokens:  # type: ignore
                self._pace = time.monotonic(), int(row["tokens"])  # type: ignore
            if row["val_loss"] is not None:
                self._val_loss = row["val_loss"]  # type: ignore
        if self._bar is not None and self._task is not None:
            self._bar.update(
                self._task,
                completed=row["tokens"],  # type: ignore
                text=self._text(),
            )
            return
        now = time.monotonic()
        interval = self.INTERVAL
        if now - self._started < 120:
            interval = self.FIRST_INTERVAL
        if now - self._printed >= interval or row["step"] == 1:
            self._shown = row
            self._print_line(self._text())

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        self._console.print(text, markup=False)

    def _text(self) -> str:
        row = self._row
        step = f"step {row['step']}"
        if self._steps is not None:
            step += f"/{self._steps}"
        parts = [step]
        if row.get("loss") is not None:
            parts.append(f"loss {row['loss']:.3f}")
        if self._val_loss is not None:
            parts.append(f"val {self._val_loss:.3f}")
        if row.get("tokens_per_second") is not None:
            parts.append(f"{human(row['tokens_per_second'])} tok/s")  # type: ignore
        if self._pace is not None:
            since, tokens_then = self._pace
            tokens = int(row["tokens"])  # type: ignore
            done = tokens - tokens_then
            if done > 0 and tokens < self._total_tokens:
                elapsed = time.monotonic() - since
                left = max(0.0, elapsed * (self._total_tokens - tokens) / done)
                parts.append(f"ETA {human_seconds(math.ceil(left))}")
        # A terminal's line keeps eight columns for the bar.
        if self._bar is not None:
            while len(parts) > 1 and len("  ".join(parts)) > self._console.width - 8:
                del parts[-2]
        return "  ".join(parts)

    def _print_line(self, text: str) -> None:
        self._printed = time.monotonic()
        if not self._console.quiet:
            print(text, flush=True)

    def _keep_alive(self) -> None:
        while not self._ended.wait(0.25):
            if time.monotonic() - self._printed < self.SILENCE:
                continue
            text = "preparing the first step"
            with self._lock:
                if self._row:
                    text = self._text()
            self._print_line(f"{text}  (still running)")
