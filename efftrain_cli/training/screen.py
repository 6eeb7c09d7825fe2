"""What follows a run while it trains: the display, wandb, TensorBoard."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from efftrain_cli.foundation.console import make_console
from efftrain_cli.foundation.step import Progress
from efftrain_cli.plan.preview import PlanSummary
from efftrain_cli.recipe.recipe import Recipe
from efftrain_cli.run.directory import Run
from efftrain_cli.trackers import tensorboard
from efftrain_cli.trackers.wandb import followed
from efftrain_cli.training.display import TrainingDisplay


def check_extra(recipe: Recipe) -> None:
    """Check that what the recipe asks for is installed, before anything is spent."""
    if recipe.wandb.tensorboard:
        tensorboard.check_installed()


@contextmanager
def screen_of(
    run: Run | None,
    progress: Progress,
    recipe: Recipe,
    summary: PlanSummary,
) -> Iterator[TrainingDisplay | None]:
    """Show the run as it trains, and send its metrics where the recipe wants them, on rank 0."""
    if run is None:
        yield None
        return
    console = make_console()
    # Where gradients decide the batch size, the plan's number of steps is only an assumption.
    steps: int | None = summary.steps
    if "steps" in recipe.varies:
        steps = None
    wandb = recipe.wandb
    with (
        followed(run.path, wandb.mode, tensorboard=wandb.tensorboard),
        TrainingDisplay(console, summary.tokens, progress.tokens, steps) as screen,
    ):
        yield screen
