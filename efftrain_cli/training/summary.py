"""What `pretrain` prints before and after training, on rank 0."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from efftrain_cli.data.windows import data_warnings, frequency_loss
from efftrain_cli.foundation.console import counted, human_seconds, print_labelled
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
from efftrain_cli.run.directory import Run
from efftrain_cli.training import dist
from efftrain_cli.training.precision import compute_dtype
from efftrain_cli.training.session import Session

if TYPE_CHECKING:
    from rich.console import Console


WORTH_NAMING = 1.1
"""Least gain by another compute type, as a ratio of speeds, that is printed."""


def show_header(
    console: Console,
    run: Run,
    session: Session,
    before: Progress,
    plan: PlanSummary,
) -> None:
    """Print what is about to be trained, before anything is spent."""
    recipe = session.recipe
    corpus = session.corpus
    epochs = session.train_data.epochs(plan.windows)
    first = f"run     {run.name} on {describe_place(session)}"
    if before.step:
        first = f"resumed {run.name} after step {before.step:,} of {plan.steps:,}"
    text = text_line(recipe, corpus.train.tokens, epochs)
    print_labelled(console, [first, text, model_line(recipe, corpus.vocab_size)], indent=LABEL)

    warnings = data_warnings(session.train_data, plan.windows, session.val_windows.shape[0])
    for warning in (*corpus.notes, *warnings, *staged_warnings(recipe, plan.end)):
        console.print(f"warning: {warning}", markup=False)


def show_steps(
    console: Console,
    recipe: Recipe,
    plan: PlanSummary,
    seconds: float | None,
    speedup: float | None = None,
) -> None:
    """Print the steps, their seconds if they were probed, and what bf16 would gain, if much."""
    line = steps_line(recipe, plan)
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
    run: Run,
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
