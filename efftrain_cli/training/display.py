"""What `pretrain` prints on rank 0: a header, a bar on a terminal or plain lines elsewhere, and the
result."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from efftrain_cli.data.windows import data_warnings, frequency_loss
from efftrain_cli.foundation.console import (
    counted,
    human,
    human_seconds,
    make_console,
    print_labelled,
)
from efftrain_cli.foundation.step import Progress
from efftrain_cli.plan.describe import (
    LABEL,
    is_stuck,
    model_line,
    result_line,
    steps_line,
    text_line,
)
from efftrain_cli.plan.preview import PlanSummary, staged_warnings
from efftrain_cli.recipe.recipe import Recipe
from efftrain_cli.run.directory import RunDirectory
from efftrain_cli.trackers.wandb import followed
from efftrain_cli.training import dist
from efftrain_cli.training.device import compute_dtype
from efftrain_cli.training.session import Session

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as Bar

WORTH_NAMING = 1.1
"""Least gain by another compute type, as a ratio of speeds, that is printed."""


# --- before and after training --------------------------------------------------------------------


def show_header(
    console: Console,
    run: RunDirectory,
    session: Session,
    plan: PlanSummary,
) -> None:
    """Print what a new run trains, before anything is spent."""
    recipe = session.recipe
    corpus = session.corpus
    epochs = session.train_data.epochs(plan.windows)
    first = f"run     {run.name} on {describe_place(session)}"
    text = text_line(recipe, corpus.train.tokens, epochs)
    print_labelled(console, [first, text, model_line(recipe, corpus.vocab_size)], indent=LABEL)

    warnings = data_warnings(session.train_data, plan.windows, session.val_windows.shape[0])
    for warning in (*corpus.manifest.notes, *warnings, *staged_warnings(recipe, plan.end)):
        console.print(f"warning: {warning}", markup=False)


def show_steps(
    console: Console,
    recipe: Recipe,
    plan: PlanSummary,
    seconds: float | None,
    speedup: float | None = None,
    resumed: str = "",
) -> None:
    """Print the steps, their seconds if they were probed, and what bf16 would gain, if much.

    Args:
        resumed: run and step of a resumed run, whose steps were printed when it began.
    """
    line = steps_line(recipe, plan)
    if resumed:
        line = f"resumed {resumed} of {plan.steps:,}"
    if seconds is not None:
        shared = ""
        if dist.world_size() > 1:
            shared = f", if {dist.world_size()} devices share them at no cost"
        line += f"; about {human_seconds(seconds)} (probed{shared})"
    lines = [line]
    if speedup is not None and speedup >= WORTH_NAMING:
        times = f"about {speedup:.1f} times faster here"
        lines.append(f"dtype   bf16 would be {times}: --set train.dtype=bf16")
    print_labelled(console, lines, indent=LABEL)


def describe_place(session: Session) -> str:
    """Describe the devices that train, and how they compute."""
    recipe = session.recipe
    place = str(session.device)
    if dist.world_size() > 1:
        place = f"{dist.world_size()} x {session.device.type}"
        if recipe.is_sharded:
            place += " (sharded)"
    if session.device.type == "cpu":
        place += f", {counted(torch.get_num_threads(), 'thread')}"
    place += f", {compute_dtype(recipe, session.device)}"
    if recipe.train.deterministic:
        place += ", deterministic kernels"
    return place


def show_result(
    console: Console,
    run: RunDirectory,
    session: Session,
    progress: Progress,
    loss: float,
) -> None:
    """Print what came of the run, and the one command that goes on.

    Args:
        loss: last validation loss, nats per token.
    """
    corpus = session.corpus
    frequencies = frequency_loss(corpus.train, session.val_windows, corpus.vocab_size)
    lines = [result_line(progress, loss, frequencies)]
    if not progress.step:
        lines = [f"result  not trained: val loss {loss:.4f} nats/token"]
    print_labelled(console, lines, indent=LABEL)
    command = f'sample {run.name} --prompt "The"'
    if progress.tokens < session.recipe.train.tokens:
        command = f"pretrain --resume {run.name}"
    elif is_stuck(loss, frequencies):
        return
    # A command is not folded: a terminal's own line break is not copied with it.
    console.print(f"next    efftrain {command}", markup=False, soft_wrap=True)


# --- meanwhile ------------------------------------------------------------------------------------


@contextmanager
def screen_of(
    run: RunDirectory | None,
    progress: Progress,
    recipe: Recipe,
    summary: PlanSummary,
) -> Iterator[TrainingDisplay | None]:
    """Show the run as it trains, and send its metrics where the recipe wants them, on rank 0."""
    if run is None:
        yield None
        return
    # Where gradients decide the batch size, the plan's number of steps is only an assumption.
    steps = None if "steps" in recipe.varies else summary.steps
    wandb = recipe.wandb
    with (
        followed(run.path, wandb.mode, tensorboard=wandb.tensorboard),
        TrainingDisplay(make_console(), summary.tokens, progress.tokens, steps) as screen,
    ):
        yield screen


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
        self._row: Mapping[str, Any] = {}
        self._shown: Mapping[str, Any] | None = None  # the row of the newest plain line
        self._bar: Bar | None = None
        self._ended = threading.Event()
        self._lock = threading.Lock()

    def __enter__(self) -> TrainingDisplay:
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            from rich.progress import BarColumn, TextColumn
            from rich.progress import Progress as Bar

            self._bar = Bar(
                BarColumn(bar_width=None),
                TextColumn("{task.fields[text]}"),
                console=self._console,
                transient=True,
                refresh_per_second=4,
            )
            self._bar.add_task("training", total=self._total_tokens, text="starting")
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

    def show(self, row: Mapping[str, Any]) -> None:
        """Show one finished step, as a row of metrics.jsonl."""
        with self._lock:
            self._row = row
            # The first step also compiles and fills caches: it says nothing about the pace.
            if self._pace is None and row["tokens"] > self._first_tokens:
                self._pace = time.monotonic(), row["tokens"]
            if row["val_loss"] is not None:
                self._val_loss = row["val_loss"]
        if self._bar is not None:
            (task,) = self._bar.task_ids
            self._bar.update(task, completed=row["tokens"], text=self._text())
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
            parts.append(f"{human(row['tokens_per_second'])} tok/s")
        if self._pace is not None:
            since, tokens_then = self._pace
            tokens = row["tokens"]
            done = tokens - tokens_then
            if done > 0 and tokens < self._total_tokens:
                left = (time.monotonic() - since) * (self._total_tokens - tokens) / done
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
