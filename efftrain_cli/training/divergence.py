"""The end of a run whose loss or gradient was not finite."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NoReturn

from efftrain_cli.foundation.console import listed
from efftrain_cli.foundation.errors import DivergedError, EfftrainError, UnsoundError
from efftrain_cli.foundation.step import Progress, StepPlan
from efftrain_cli.optim.gradients import norms_of
from efftrain_cli.recipe.recipe import Recipe
from efftrain_cli.run.directory import Run, checkpoints_of
from efftrain_cli.training.checkpoints import save
from efftrain_cli.training.devices import Devices
from efftrain_cli.training.gradient import build_forward_backward
from efftrain_cli.training.internals import norms_by_layer
from efftrain_cli.training.session import Session
from efftrain_cli.training.state import TrainState
from efftrain_cli.training.trainer import StepRecord, finite_or_none

ADVICE = "Lower optim.lr, lengthen optim.warmup_steps, or add a sequence length warmup"


def raise_diverged(
    run: Run,
    state: TrainState,
    session: Session,
    devices: Devices,
    record: StepRecord,
    before: Progress,
) -> NoReturn:
    """Save the state before the first step that was not finite, record that step, and end the run
    with a DivergedError.

    The update of that step and of all later ones was not applied, so weights and moments are still
    those of `before`. The step's gradient is computed again for the report: nothing was measured
    for it during training. If the weights were not finite before the step, its gradient shows no
    cause, and nothing is saved.
    """
    assert record.plan is not None
    plan = record.plan
    state.progress = before
    state.nonfinite.zero_()
    saved = "and are saved"
    try:
        save(run, state, session.recipe, devices)
    except UnsoundError as error:
        raise_unsound(run, state, session, str(error))
    except EfftrainError as error:
        run.event("save_failed", {"step": before.step, "reason": str(error)})
        saved = f"but could not be saved: {error}"
    loss = math.nan
    norms: dict[str, float] = {}
    bad: list[str] = []
    cause = "each device has a part of the model: no layer is named"
    if devices.computes_alone:
        loss, norms = gradient_norms_by_layer(state, session, plan)
        bad = [layer for layer, norm in norms.items() if not math.isfinite(norm)]
        cause = _describe_cause(loss, bad)

    run.event(
        "diverged",
        {
            "step": plan.step,
            "loss": finite_or_none(loss),
            "lr": plan.lr,
            "seq_len": plan.seq_len,
            "batch_size": plan.batch_size,
            "window_start": plan.window_start,
            "window_tokens": session.train_data.starts(plan.window_start, plan.windows).tolist(),
            "grad_norm_by_layer": {layer: finite_or_none(norm) for layer, norm in norms.items()},
            "nonfinite_layers": bad,
        },
    )
    raise DivergedError(
        f"step {plan.step}: the loss or a gradient is not finite"
        f" ({cause}; lr {plan.lr:.3g}, seq_len {plan.seq_len})."
        f" The update was not applied; the weights are those after step {before.step}, {saved}."
        " events.jsonl has the step's windows and the gradient norm of every layer.\n"
        f"{_way_on(run, state, session.recipe)}"
    )


def _describe_cause(loss: float, bad: list[str]) -> str:
    """Describe the first value that was not finite, by the step's second computation.

    `bad`: layers whose gradient is not finite.
    """
    if bad:
        return f"gradients of {listed(bad)}"
    if not math.isfinite(loss):
        return "the loss"
    return "computed once more, the same step is finite: memory or hardware may be faulty"


def raise_unsound(run: Run, state: TrainState, session: Session, what: str) -> NoReturn:
    """End a run whose weights, moments or validation loss are not finite with a DivergedError. Save
    nothing.

    The message names the checkpoint to go on from: the newest, which is from before that.
    """
    _record(run, state.progress, what)
    last = "there is no checkpoint from before that"
    for path in checkpoints_of(run.path):
        if path not in run.corrupt:
            last = f"the last sound checkpoint is {path.name}"
    raise DivergedError(
        f"{what}. This state was not saved; {last}.\n{_way_on(run, state, session.recipe)}"
    )


def _record(run: Run, progress: Progress, reason: str) -> None:
    run.event("diverged", {"step": progress.step, "reason": reason})


def _way_on(run: Run, state: TrainState, recipe: Recipe) -> str:
    """Return advice, with a command that continues from the newest sound checkpoint at half the
    learning rate."""
    if recipe.stages and recipe.stages[state.progress.stage].lr is not None:
        return (
            f"{ADVICE}: change the lr of stage {state.progress.stage}"
            f" in {run.path / 'recipe.toml'}, delete its last line,"
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


def gradient_norms_by_layer(
    state: TrainState,
    session: Session,
    plan: StepPlan,
) -> tuple[float, dict[str, float]]:
    """Return the loss of one planned step, and the l2 norm of the gradient of each block and of
    each table outside.

    Delayed gradients of earlier steps are left out. Nothing changes.
    """
    recipe = replace(session.recipe, ouroboros=None)
    forward_backward = build_forward_backward(recipe, state.model, session.device)
    state.model.zero_grad(set_to_none=True)
    result = forward_backward(session.train_data.batch(plan).to(session.device), plan)
    parameters = state.model.named_parameters()
    norms = norms_of({name: p.grad for name, p in parameters if p.grad is not None})
    state.model.zero_grad(set_to_none=True)
    layers = {layer: float(norm) for layer, norm in norms_by_layer(norms).items()}
    return float(result.scalars["loss"]), layers


def raise_fluctuating(run: Run, progress: Progress, threshold: float) -> NoReturn:
    """End a probe whose validation perplexity has risen above `threshold` times its best with a
    DivergedError."""
    what = f"the validation perplexity is above {threshold:g} times its best"
    _record(run, progress, what)
    raise DivergedError(f"step {progress.step}: {what}")
