"""The report of a run whose loss, gradient, weights or validation loss were not finite."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from efftrain_cli.foundation.console import listed
from efftrain_cli.foundation.step import StepPlan
from efftrain_cli.recipe.recipe import Recipe
from efftrain_cli.run.directory import Run, checkpoints_of
from efftrain_cli.training import internals
from efftrain_cli.training.gradient import Gradient
from efftrain_cli.training.session import Session
from efftrain_cli.training.state import TrainState

ADVICE = "Lower optim.lr, lengthen optim.warmup_steps, or add a sequence length warmup"


def gradient_norms_by_layer(
    state: TrainState,
    session: Session,
    plan: StepPlan,
) -> tuple[float, dict[str, float]]:
    """Return the loss of one planned step, and the l2 norm of the gradient of each block and of
    each table outside. All ranks call it; nothing changes."""
    batch = session.train_data.batch(plan, *state.sharing)
    result = Gradient(session.recipe, state)(batch.to(state.device), plan)
    norms = internals.by_layer(internals.gradient_norms(state))
    for parameter in state.parameters.values():
        parameter.grad = None
    values = torch.stack(list(norms.values())).tolist()
    return float(result.scalars["loss"]), dict(zip(norms, values, strict=True))


def describe_cause(loss: float, bad_layers: Sequence[str]) -> str:
    """Describe the first value that was not finite, by the step's second computation."""
    if bad_layers:
        return f"gradients of {listed(bad_layers)}"
    if not math.isfinite(loss):
        return "the loss"
    return "computed once more, the same step is finite: memory or hardware may be faulty"


def way_on(run: Run, state: TrainState, recipe: Recipe) -> str:
    """Return advice, with a command that continues from the newest sound checkpoint at half the
    learning rate."""
    if recipe.stages and recipe.stages[state.progress.stage].lr is not None:
        return (
            f"{ADVICE}: change the lr of stage {state.progress.stage}"
            f" in {run.path / 'recipe.toml'},"
            f" then `efftrain pretrain --resume {run.name} --override-resume` goes on"
        )
    lr = recipe.optim.lr / 2
    changes = f"--set optim.lr={lr:.6g}"
    if recipe.optim.min_lr > lr:
        changes += f" --set optim.min_lr={lr:.6g}"
    return (
        f"{ADVICE}\nto continue at half the learning rate:"
        f" `efftrain pretrain --resume {run.name} {changes} --override-resume`"
    )


def last_sound(run: Run) -> str:
    """Name the newest checkpoint of a run that was not found damaged."""
    sound = [path.name for path in checkpoints_of(run.path) if path not in run.corrupt]
    if not sound:
        return "there is no checkpoint from before that"
    return f"the last sound checkpoint is {sound[-1]}"
