"""Begin a new run with a run's whole training state, mapped to a larger model (`efftrain grow`).

The new run's recipe is the staged recipe that leads here: the source's model up to this step, then
the operators. So the new run continues with `efftrain pretrain --resume`, and its recipe alone
trains the same from the start (unless an override changes what the steps before the growth read,
such as the tokens at which the decay ends). The source is only read.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from pydantic import ValidationError

from efftrain_cli.foundation.errors import CheckpointError, UsageError
from efftrain_cli.foundation.files import sha256_of
from efftrain_cli.foundation.step import Progress
from efftrain_cli.methods.staged_growth import StagedGrowth
from efftrain_cli.methods.stages import Stage, StageModel, Switch, shapes_of_stages, sizes_of
from efftrain_cli.recipe.draft import Draft, apply_override
from efftrain_cli.recipe.recipe import (
    Recipe,
    check_draft,
    dump_recipe,
    load_recipe,
    recipe_values,
)
from efftrain_cli.run.directory import checkpoints_of, existing_run, run_path, taken
from efftrain_cli.run.manifest import REQUIRED
from efftrain_cli.run.metrics import latest_rows
from efftrain_cli.run.origin import origin_data
from efftrain_cli.training.build import set_stage
from efftrain_cli.training.checkpoint import create_run
from efftrain_cli.training.loading import find_checkpoint, load, read_progress, stream
from efftrain_cli.training.memory import building_errors
from efftrain_cli.training.origin import origin_of
from efftrain_cli.training.resuming import check_tokenizer, text_of
from efftrain_cli.training.session import Session, fresh_state, prepare_session
from efftrain_cli.training.stages import GrowthRecord, grow_stage
from efftrain_cli.training.state import TrainState

LOSS_TOLERANCE = 1e-5
"""Nats per token by which fp32 rounding may move the loss in a growth that keeps it."""


@dataclass(frozen=True, kw_only=True)
class Grown:
    """What a growth did."""

    run: Path
    checkpoint: Path
    """The source's."""
    record: GrowthRecord
    """Losses are in fp32."""
    largest_logit_difference: float
    """Over the first validation window."""
    recipe: Recipe
    budget_left: int
    """Tokens."""


def grow_run(
    source: str,
    operators: Sequence[str],
    name: str | None,
    device: torch.device,
    *,
    weights_only: bool = False,
    checkpoint: str | None = None,
    overrides: Sequence[str] = (),
) -> Grown:
    """Create run `name` (default: SOURCE-grown), whose first checkpoint is `source`'s state grown
    by the operators.

    Args:
        operators: one or more, as `parse_operator` reads them.
        weights_only: grow only the weights, and begin with an optimizer that has never stepped.
        checkpoint: step or name of the source's checkpoint; None: the newest.
        overrides: `key=value` changes of the new run's recipe.

    Raises:
        UsageError: a taken name, an override of what the growth decides, or other data than the
            source's.
        RecipeError: the grown recipe breaks a rule.
        CheckpointError: the source has no whole checkpoint, no optimizer state, or the growth would
            not keep the loss that it claims to keep. Nothing is written in any of these cases.
    """
    source_path = existing_run(source)
    name = name or f"{source}-grown"
    if run_path(name).exists():
        raise taken(name)
    if weights_only:
        overrides = (*overrides, "staged_growth.moments=reset")
    folder = _checkpoint_of(source_path, checkpoint, weights_only)
    progress = read_progress(folder)
    source_recipe = load_recipe(str(folder / "recipe.toml"))
    recipe = grown_recipe(source_recipe, progress, operators, overrides)
    session = prepare_session(recipe, device, text_of(source_path, recipe))
    _check_data(source_path, session, overrides)
    state = _state_of(folder, session, progress, weights_only)

    # All windows, so that the losses are those of the runs' own rows.
    windows = session.val_windows.to(device)
    before = _first_logits(state, windows)
    try:
        with building_errors(
            recipe, session.corpus.vocab_size, device, len(recipe.stages) - 1, trains=False
        ):
            record = grow_stage(state, recipe, windows)
    except ValueError as error:
        raise CheckpointError(f"{folder}: {error}") from None
    difference = (_first_logits(state, windows) - before).abs().max()
    loss_before = record.val_loss_before
    loss_after = record.val_loss_after
    tolerance = LOSS_TOLERANCE * max(1.0, loss_before)
    if record.preserves_loss and not abs(loss_after - loss_before) <= tolerance:
        raise CheckpointError(
            f"{folder}: the loss should have stayed at {loss_before:.6f}"
            f" and would be {loss_after:.6f}; nothing was written."
            " The checkpoint's tensors do not behave like this model's"
        )
    grown = Grown(
        run=run_path(name),
        checkpoint=folder,
        record=record,
        largest_logit_difference=float(difference),
        recipe=recipe,
        budget_left=max(0, recipe.train.tokens - state.progress.tokens),
    )
    _create_run(name, source_path, state, session, grown)
    return grown


def grown_recipe(
    source: Recipe,
    progress: Progress,
    operators: Sequence[str],
    overrides: Sequence[str],
) -> Recipe:
    """Return the new run's staged recipe: the source's up to `progress`, then the operators' stage.

    Raises:
        UsageError: an override of what the growth decides, or the source was grown in other
            variants before: a recipe has one [staged_growth].
        RecipeError: the grown recipe breaks a rule.
    """
    earlier = list(source.stages[: progress.stage + 1]) or [Stage()]
    switch = Switch(rule="steps", value=float(progress.step))
    earlier[-1] = dataclasses.replace(earlier[-1], switch=switch)
    last = Stage(operators=tuple(operators))
    first = source.model_at(0)
    unchanged = dataclasses.replace(earlier[0], model=StageModel())
    model = first
    # The check of the recipe names a size beyond its limit.
    with suppress(ValidationError):
        model = shapes_of_stages(first, [unchanged, *earlier[1:], last])[-1]

    # Stage 0 says what [model] would not make of it.
    sizes = {}
    for key, size in sizes_of(first).items():
        if key in ("n_layer", "n_head", "n_embd") or vars(first)[key] != vars(model)[key]:
            sizes[key] = size
    earlier[0] = dataclasses.replace(earlier[0], model=StageModel(**sizes))  # type: ignore[arg-type]

    section = source.staged_growth or StagedGrowth()
    values = recipe_values(source)
    values["model"] = recipe_values(model)
    values["staged_growth"] = recipe_values(section)
    values["stages"] = [recipe_values(stage) for stage in (*earlier, last)]
    draft = Draft("grown", Path("recipe.toml"), values=values)
    for override in overrides:
        _check_override(override, len(earlier))
        apply_override(draft, override)
    recipe = check_draft(draft)
    if progress.stage and recipe.staged_growth != section:
        raise UsageError(
            "the source was grown before in other variants,"
            " and a recipe has one [staged_growth], which would not say what was done\n"
            "  leave out --weights-only and --set staged_growth.*"
        )
    return recipe


def _check_override(override: str, last: int) -> None:
    """Refuse an override of what follows from the source and the operators; `last` is the number of
    the new stage."""
    key = override.partition("=")[0].strip()
    own = f"stages.{last}."
    if key.startswith(own) and key != f"{own}operators":
        return
    if key.startswith(("model.", "stages", "data.tokenizer")):
        raise UsageError(
            f"--set {override}: the model, its earlier stages"
            " and its tokenizer follow from the source and the operators\n"
            f"  of the new stage, --set {own}lr, {own}rewarmup_steps and {own}schedule_ratio"
        )


def _checkpoint_of(source: Path, checkpoint: str | None, weights_only: bool) -> Path:
    """Return the checkpoint to grow: with weights only, one whose weights are valid."""
    if weights_only:
        return find_checkpoint(source, checkpoint)
    newest = checkpoints_of(source)[-1:]
    if checkpoint is None and newest and not (newest[0] / "optimizer.safetensors").exists():
        raise CheckpointError(
            f"{newest[0]} has no optimizer.safetensors, whose moments and step counters grow"
            " with the weights\n"
            "  add --weights-only to grow the weights alone: the moments of all parameters are lost"
            " and the loss rises for about a hundred steps, less with a longer rewarmup_steps"
        )
    return find_checkpoint(source, checkpoint, REQUIRED)


def _state_of(
    checkpoint: Path,
    session: Session,
    progress: Progress,
    weights_only: bool,
) -> TrainState:
    """Read the source's state, in its own size, under the new recipe."""
    state = fresh_state(session, trains=False)
    state.dtype = "fp32"  # of the losses before and after
    if progress.stage:
        set_stage(state, session.recipe, progress.stage)
    if weights_only:
        state.load_weights(stream(checkpoint / "model.safetensors"))
    elif (checkpoint / "method.safetensors").exists():
        raise CheckpointError(
            f"{checkpoint} holds gradients in flight that no growth operator knows"
        )
    else:
        load(checkpoint, state, session.recipe)
    state.progress = progress
    return state


def _check_data(source: Path, session: Session, overrides: Sequence[str]) -> None:
    """Refuse to continue a run with another tokenizer, or on another text that nobody named."""
    origin = origin_data(source)
    check_tokenizer(source.name, origin, session.corpus)
    changed = origin["train_hash"] not in (None, session.corpus.train.sha256)
    if changed and not any(override.startswith("data.") for override in overrides):
        raise UsageError(
            f"run {source.name!r} was trained on another text than data.train names now\n"
            "  restore the text, or say that it is meant by naming it: --set data.train=..."
        )


def _first_logits(state: TrainState, windows: torch.Tensor) -> torch.Tensor:
    """Return the logits of the first window in fp32, on the CPU."""
    with torch.no_grad():
        return state.model(windows[:1, :-1]).cpu()


def _create_run(name: str, source: Path, state: TrainState, session: Session, grown: Grown) -> None:
    """Create the new run, with the source's rows and the grown state."""
    parent = {
        "run": source.name,
        "checkpoint": grown.checkpoint.name,
        "model_sha256": sha256_of(grown.checkpoint / "model.safetensors"),
    }
    step = grown.record.step
    # One segment, however often the source was resumed: the new run was not.
    state.progress = state.progress._replace(segment=0)
    create_run(
        name,
        state,
        dump_recipe(session.recipe),
        origin_of(session, source.name) | {"grown_from": parent},
        session.corpus.tokenizer_path,
        events={
            "growth": dataclasses.asdict(grown.record) | {"grown_from": source.name},
            "end": {"status": "paused", "step": step},
        },
        rows=[{**row, "segment": 0} for row in latest_rows(source, step)],
    )
