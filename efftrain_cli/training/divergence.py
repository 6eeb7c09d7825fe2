"""The end of a run whose loss or gradient was not finite, and the way back to a stable
checkpoint."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NoReturn

from efftrain_cli.foundation.console import listed
from efftrain_cli.foundation.errors import (
    CheckpointError,
    DivergedError,
    EfftrainError,
    UnsoundError,
)
from efftrain_cli.foundation.step import Progress, StepPlan
from efftrain_cli.optim.gradients import norms_of
from efftrain_cli.recipe.recipe import Recipe
from efftrain_cli.run.directory import Run, checkpoint_step, checkpoints_of
from efftrain_cli.run.metrics import latest_rows, to_float
from efftrain_cli.run.stability import SLIGHT
from efftrain_cli.training.checkpoints import (
    drop_in_flight,
    load_checkpoint,
    read_recipe,
    save,
)
from efftrain_cli.training.devices import Devices
from efftrain_cli.training.gradient import build_forward_backward
from efftrain_cli.training.internals import norms_by_layer
from efftrain_cli.training.session import Session, fresh_state
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
            "next_window": plan.window_start + plan.windows,
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
    # The steps since the last sound checkpoint are lost to a rewind too: it goes on with the
    # windows behind this step.
    content = {"step": progress.step, "reason": reason, "next_window": progress.windows}
    run.event("diverged", content)


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


# --- the way back ---------------------------------------------------------------------------------

MOST_REWINDS = 3
"""Rewinds of one run; after them a divergence ends it."""
LASTING = 10
"""Steps that a spike must last to count as a divergence if rewinding was asked for."""


def raise_spiked(run: Run, progress: Progress, loss: float, usual: float) -> NoReturn:
    """End a session whose loss has stayed above its usual value for `LASTING` steps with a
    DivergedError."""
    what = f"the loss, {loss:.3f}, has been far above its usual {usual:.3f} for {LASTING} steps"
    _record(run, progress, what)
    raise DivergedError(f"step {progress.step}: {what}. {ADVICE}")


def raise_fluctuating(run: Run, progress: Progress, threshold: float) -> NoReturn:
    """End a probe whose validation perplexity has risen above `threshold` times its best with a
    DivergedError."""
    what = f"the validation perplexity is above {threshold:g} times its best"
    _record(run, progress, what)
    raise DivergedError(f"step {progress.step}: {what}")


def rewind(run: Run, diverged: TrainState, session: Session) -> TrainState | None:
    """Return the state to go on from after a divergence; None if `MOST_REWINDS` are used up.

    It is the newest stable checkpoint's, with the batches up to the divergence skipped. FLOPs and
    seconds of the abandoned steps stay spent; their tokens no longer count as trained on.
    """
    events = run.events()
    rewinds = [event for event in events if event.get("event") == "rewind"]
    divergences = [event for event in events if event.get("event") == "diverged"]
    # Without an event, because the disk refused it, the place to go on from is unknown.
    if len(rewinds) >= MOST_REWINDS or not divergences:
        return None
    divergence = divergences[-1]
    before = divergence["step"]
    # A run that diverges again before it has passed the step of its last divergence goes back
    # further.
    if rewinds and divergence["step"] <= rewinds[-1]["from_step"]:
        before = rewinds[-1]["to_step"]
    state = _newest_stable(run, session, before)

    start = state.progress
    spent = diverged.progress
    segment = run.next_segment(spent.segment)
    skipped = divergence["next_window"] - start.windows
    run.event(
        "rewind",
        {
            "from_step": divergence["step"],
            "to_step": start.step,
            "skipped_windows": [start.windows, divergence["next_window"]],
            "tokens_abandoned": spent.tokens - start.tokens,
            "flops_abandoned": spent.flops - start.flops,
            "seconds_abandoned": spent.train_seconds - start.train_seconds,
        },
    )
    state.progress = start._replace(
        segment=segment,
        windows=divergence["next_window"],
        tokens_discarded=start.tokens_discarded + skipped * session.recipe.model.seq_len,
        flops=spent.flops,
        train_seconds=spent.train_seconds,
    )
    # A resume must find this state: no checkpoint of the abandoned steps, nor that of this step
    # without the skip.
    for path in checkpoints_of(run.path):
        if checkpoint_step(path) >= start.step:
            run.verified.discard(path)
            run.set_aside(path)
    save(run, state, session.recipe)
    return state


def _newest_stable(run: Run, session: Session, before: int) -> TrainState:
    """Load the newest stable checkpoint from before a step, or else return the state before step 1.

    A checkpoint is stable if its step's loss ratio is at most 1.2.
    """
    ratios = {row["step"]: to_float(row.get("loss_ratio")) for row in latest_rows(run.path)}
    state = fresh_state(session)
    for path in reversed(checkpoints_of(run.path)):
        step = checkpoint_step(path)
        if step >= before or ratios.get(step, 0.0) > SLIGHT or path in run.corrupt:
            continue
        try:
            load_checkpoint(path, state, session.recipe)
        except CheckpointError as error:
            run.event("fallback", {"checkpoint": path.name, "reason": str(error)})
            continue
        drop_in_flight(run, state, read_recipe(path), session.recipe)
        break
    return state
