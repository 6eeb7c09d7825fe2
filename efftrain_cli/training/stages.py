"""The growth of a running state, and training through all the stages of a recipe.

The operators themselves are in `methods/growth_operators.py`, the schedule after growth in
`plan.py`; here they meet a model, its optimizer and its progress. Every rank grows its own copy, to
the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from efftrain_cli.data.windows import Windows
from efftrain_cli.foundation.tensors import Tensors
from efftrain_cli.methods.growth_operators import GrowthState, grow
from efftrain_cli.methods.staged_growth import StagedGrowth
from efftrain_cli.methods.stages import parse_operator
from efftrain_cli.plan.plan import after_growth, stage_ended
from efftrain_cli.recipe.recipe import Recipe
from efftrain_cli.training.build import set_stage
from efftrain_cli.training.evaluation import evaluate
from efftrain_cli.training.loop import is_spent, train
from efftrain_cli.training.record import StepRecord
from efftrain_cli.training.state import TrainState


@dataclass(frozen=True, slots=True, kw_only=True)
class GrowthRecord:
    """One growth, between two steps."""

    step: int
    """Finished steps when the model grew."""
    stage: int
    """The stage that begins."""
    operators: tuple[str, ...]
    parameters_before: int
    parameters_after: int
    val_loss_before: float
    """Nats per token, on the validation windows."""
    val_loss_after: float
    preserves_loss: bool
    """The operators claim to leave the loss as it is."""
    schedule_step: int
    """Position of the learning-rate schedule after the growth, in steps."""


def train_stages(
    state: TrainState,
    recipe: Recipe,
    train_data: Windows,
    val_windows: Tensor,
    until: int | None = None,
) -> Iterator[StepRecord | GrowthRecord]:
    """Train through every stage of the recipe, as `train`; grow at the end of each, and yield a
    GrowthRecord.

    At step `until` nothing grows any more: a run that goes on from there grows first.
    """
    while True:
        val_loss = None
        for record in train(state, recipe, train_data, val_windows, until):
            val_loss = record.scalars.get("val_loss")
            yield record
        over = is_spent(state.progress, recipe, until) or bool(state.nonfinite)
        if over or not stage_ended(recipe, state.progress):
            return
        yield grow_stage(state, recipe, val_windows, val_loss)


def grow_stage(
    state: TrainState,
    recipe: Recipe,
    val_windows: Tensor,
    val_loss: Tensor | None = None,
) -> GrowthRecord:
    """Grow `state` into the next stage of its recipe: model, optimizer and schedule.

    Args:
        val_loss: the loss of `val_windows` before; None: not measured yet.

    A function of the state and the recipe alone, so a run that is resumed at the end of a stage
    grows into the same.

    Raises:
        ValueError: the model has a parameter that no operator knows.
    """
    progress = state.progress
    section = recipe.staged_growth or StagedGrowth()
    number = progress.stage + 1
    stage = recipe.stages[number]
    operators = [parse_operator(text) for text in stage.operators]
    if val_loss is None:
        val_loss = evaluate(state, recipe, val_windows)
    val_loss_before = float(val_loss)
    parameters_before = state.model.parameter_count
    # Another stage, another draw.
    seed = recipe.seed + 1000 * number
    grown = grow(growth_state(state), operators, section, seed)

    set_stage(state, recipe, number)
    load_grown(state, grown)
    state.progress = after_growth(recipe, progress)
    return GrowthRecord(
        step=progress.step,
        stage=number,
        operators=stage.operators,
        parameters_before=parameters_before,
        parameters_after=state.model.parameter_count,
        val_loss_before=val_loss_before,
        val_loss_after=float(evaluate(state, recipe, val_windows)),
        preserves_loss=section.preserves_loss(operators),
        schedule_step=state.progress.schedule_step,
    )


def growth_state(state: TrainState) -> GrowthState:
    """Return the state as the operators take it: named tensors on its device, not copied."""
    optimizer: dict[str, Tensors] = {}
    for full_name, tensor in state.optimizer.tensors().items():
        key, name = full_name.split(".", 1)
        optimizer.setdefault(key, {})[name] = tensor
    return GrowthState(
        config=state.model.config,
        parameters=state.weights(),
        optimizer=optimizer,
        gradient_powers=state.optimizer.gradient_powers,
    )


def load_grown(state: TrainState, grown: GrowthState) -> None:
    """Copy grown tensors into a state of their size; without optimizer tensors the optimizer stays
    fresh."""
    optimizer = {}
    for key, tensors in grown.optimizer.items():
        for name, tensor in tensors.items():
            optimizer[f"{key}.{name}"] = tensor
    state.load_weights(grown.parameters.items())
    if optimizer:
        state.load_optimizer(optimizer.items())


def growth_message(record: GrowthRecord) -> str:
    """Describe a growth in a line or two; warn if the loss should have stayed and did not."""
    line = (
        f"grown at step {record.step} ({', '.join(record.operators)}):"
        f" {record.parameters_before:,} -> {record.parameters_after:,} parameters,"
        f" val loss {record.val_loss_before:.4f} -> {record.val_loss_after:.4f};"
        f" the schedule continues from step {record.schedule_step}"
    )
    if not record.preserves_loss:
        line += "\n  (these variants do not keep the loss)"
    elif abs(record.val_loss_after - record.val_loss_before) > 1e-3:
        # bf16 rounds the logits of the two models differently, but by less than this.
        line += "\n  warning: the loss should have stayed the same"
    return line
