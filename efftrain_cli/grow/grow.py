"""Begin a new run with a run's whole training state, mapped to a larger model (`efftrain grow`).

The new run's recipe is the staged recipe that leads here: the source's model up to this step, then the operators. So
the new run continues with `efftrain pretrain --resume`, and its recipe alone trains the same from the start (unless an
override changes what the steps before the growth read, such as the tokens at which the decay ends). The source is only
read.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from efftrain_cli.foundation.errors import CheckpointError, RecipeError, UsageError
from efftrain_cli.foundation.files import sha256_of
from efftrain_cli.foundation.step import Progress
from efftrain_cli.foundation.tensors import read_tensors
from efftrain_cli.methods.staged_growth import (
    Stage,
    StagedGrowth,
    StageModel,
    Switch,
    parse_operator,
    shapes_of_stages,
    sizes_of,
)
from efftrain_cli.recipe.check import rule_of
from efftrain_cli.recipe.draft import Draft, apply_override
from efftrain_cli.recipe.recipe import (
    Recipe,
    check_draft,
    dump_recipe,
    load_recipe,
    recipe_values,
)
from efftrain_cli.run.directory import checkpoints_of, existing_run, run_path, taken
from efftrain_cli.run.manifest import WITHOUT_OPTIMIZER
from efftrain_cli.run.metrics import latest_rows
from efftrain_cli.run.origin import origin_data
from efftrain_cli.training.checkpoints import check_tokenizer
from efftrain_cli.training.memory import building_errors
from efftrain_cli.training.session import Session, fresh_state, origin_of, prepare_session
from efftrain_cli.training.stages import GrowthRecord, grow_stage, set_stage
from efftrain_cli.training.state import (
    TrainState,
    create_run,
    load_tensors,
    read_checkpoint,
    read_progress,
)
from efftrain_cli.training.trained_model import find_checkpoint
from efftrain_cli.training.trainer import evaluate

LOSS_TOLERANCE = 1e-5
"""Nats per token by which fp32 rounding may move the loss in a growth that keeps it."""


@dataclass(frozen=True, kw_only=True)
class GrowOptions:
    """What `efftrain grow` is asked for beside the operators; None takes the source recipe's, or the default."""

    lr: float | None = None
    rewarmup_steps: int | None = None
    schedule_ratio: float | None = None
    moments: str | None = None
    symmetry: str | None = None
    depth: str | None = None
    weights_only: bool = False
    checkpoint: str | None = None
    """Step or name of the source's checkpoint; None is the newest."""
    overrides: tuple[str, ...] = ()
    """`key=value` changes of the new run's recipe."""


@dataclass(frozen=True, kw_only=True)
class Grown:
    """What a growth did."""

    run: Path
    checkpoint: Path
    """The source's."""
    record: GrowthRecord
    """Losses are in fp32."""
    logits_before: tuple[float, ...]
    """The first logits of the first window's last position."""
    logits_after: tuple[float, ...]
    largest_logit_difference: float
    recipe: Recipe
    budget_left: int
    """Tokens."""


def grow_run(
    source: str,
    operators: Sequence[str],
    name: str | None,
    options: GrowOptions,
    device: torch.device,
) -> Grown:
    """Create run `name` (default: SOURCE-grown), whose first checkpoint is `source`'s state grown by the operators.

    Raises:
        UsageError: an operator that cannot be, a taken name, other data than the source's.
        RecipeError: the grown recipe breaks a rule.
        CheckpointError: the source has no whole checkpoint, no optimizer state, or the growth would not keep the loss
            that it claims to keep. Nothing is written in any of these cases.
    """
    if not operators:
        raise UsageError(
            "say how the model should grow: --operator width, --operator depth, or both; --operator width:3 for x 3"
        )
    try:
        for text in operators:
            parse_operator(text)
    except ValueError as error:
        raise UsageError(f"--operator {error}") from None
    source_path = existing_run(source)
    name = name or f"{source}-grown"
    if run_path(name).exists():
        raise taken(name)
    checkpoint = _checkpoint_of(source_path, options)
    progress = read_progress(checkpoint)
    recipe = grown_recipe(
        load_recipe(str(checkpoint / "recipe.toml")),
        progress.stage,
        progress.step,
        operators,
        options,
    )
    session = prepare_session(recipe, device)
    _check_data(source_path, session, options)
    state = _state_of(checkpoint, session, progress, options.weights_only)
    # All windows, so that the losses are those of the runs' own rows.
    windows = session.val_windows.to(device)
    before = _measure(state, session, windows)
    try:
        with building_errors(recipe, session.corpus.vocab_size, device, len(recipe.stages) - 1):
            record = grow_stage(state, recipe, before[0])
    except ValueError as error:
        raise CheckpointError(f"{checkpoint}: {error}") from None
    after = _measure(state, session, windows)
    if record.preserves_loss and not abs(after[0] - before[0]) <= LOSS_TOLERANCE * max(
        1.0, before[0]
    ):
        raise CheckpointError(
            f"{checkpoint}: the loss should have stayed at {before[0]:.6f} and would be {after[0]:.6f}; nothing was written. "
            "The checkpoint's tensors do not behave like this model's"
        )
    grown = Grown(
        run=run_path(name),
        checkpoint=checkpoint,
        record=dataclasses.replace(record, val_loss_after=after[0]),
        logits_before=tuple(before[1][0, -1, :4].tolist()),
        logits_after=tuple(after[1][0, -1, :4].tolist()),
        largest_logit_difference=float((after[1] - before[1]).abs().max()),
        recipe=recipe,
        budget_left=max(0, recipe.train.tokens - state.progress.tokens),
    )
    _create_run(name, source_path, state, session, grown)
    return grown


def grown_recipe(
    source: Recipe,
    stage: int,
    step: int,
    operators: Sequence[str],
    options: GrowOptions,
) -> Recipe:
    """Return the new run's staged recipe: the source's up to `step`, in its `stage`, then a stage of the operators.

    Raises:
        UsageError: an option cannot be, or the source was grown with other variants before: a recipe has one
            [staged_growth].
        RecipeError: the grown model breaks a rule.
    """
    section = _growth_section(source, stage, options)
    earlier = list(source.stages[: stage + 1]) or [Stage()]
    switch = Switch(rule="steps", value=float(step))
    earlier[-1] = dataclasses.replace(earlier[-1], switch=switch)
    stages = (*earlier, _last_stage(operators, options))
    first = source.model_at(0)
    unchanged = dataclasses.replace(stages[0], model=StageModel())
    try:
        model = shapes_of_stages(first, [unchanged, *stages[1:]])[-1]
        # Stage 0 says what [model] would not make of it.
        sizes = {
            key: size
            for key, size in sizes_of(first).items()
            if key in ("n_layer", "n_head", "n_embd") or vars(first)[key] != vars(model)[key]
        }
        named = dataclasses.replace(stages[0], model=StageModel(**sizes))  # type: ignore[arg-type]
        stages = (named, *stages[1:])
        recipe = dataclasses.replace(source, model=model, staged_growth=section, stages=stages)
    except ValidationError as error:
        wrong = []
        for entry in error.errors():
            key = "".join(f"the grown model's {part} " for part in entry["loc"])
            wrong.append(key + rule_of(entry, []))
        raise RecipeError("; ".join(wrong)) from None
    return _with_overrides(recipe, options.overrides)


def _growth_section(source: Recipe, stage: int, options: GrowOptions) -> StagedGrowth:
    variants: dict[str, Any] = {
        "symmetry": options.symmetry,
        "depth": options.depth,
        "moments": options.moments,
    }
    if options.weights_only:
        variants["moments"] = "reset"
    asked = {key: value for key, value in variants.items() if value is not None}
    before = source.staged_growth or StagedGrowth()
    section = dataclasses.replace(before, **asked)
    if stage > 0 and section != before:
        others = ", ".join(f"{key} = {value}" for key, value in asked.items())
        raise UsageError(
            f"the source was grown before with variants other than {others}; "
            "a recipe has one [staged_growth], so its stages would not say what was done: leave these options out"
        )
    return section


def _last_stage(operators: Sequence[str], options: GrowOptions) -> Stage:
    asked: dict[str, Any] = {"lr": options.lr, "schedule_ratio": options.schedule_ratio}
    if options.rewarmup_steps is not None:
        asked["rewarmup_steps"] = options.rewarmup_steps
    try:
        return Stage(operators=tuple(operators), **asked)
    except ValidationError as error:
        wrong = []
        for entry in error.errors():
            option = str(entry["loc"][0]).replace("_", "-")
            rule = rule_of(entry, [str(part) for part in entry["loc"]])
            wrong.append(f"--{option} {entry['input']} {rule}")
        raise UsageError("; ".join(wrong)) from None


def _with_overrides(recipe: Recipe, overrides: Sequence[str]) -> Recipe:
    for override in overrides:
        if override.startswith(("model.", "stages", "staged_growth", "data.tokenizer")):
            raise UsageError(
                f"--set {override}: the model, its stages and its tokenizer follow from the source and the operators"
            )
    draft = Draft("grown", Path("grown.toml"), values=recipe_values(recipe))
    for override in overrides:
        apply_override(draft, override)
    return check_draft(draft)


def _checkpoint_of(source: Path, options: GrowOptions) -> Path:
    """Return the checkpoint to grow: with weights only, one whose weights are valid."""
    if options.weights_only:
        return find_checkpoint(source, options.checkpoint, WITHOUT_OPTIMIZER)
    checkpoints = checkpoints_of(source)
    if (
        options.checkpoint is None
        and checkpoints
        and not (checkpoints[-1] / "optimizer.safetensors").exists()
    ):
        raise CheckpointError(
            f"{checkpoints[-1]} has no optimizer.safetensors. Growth maps the optimizer's moments and step counters with the weights. With "
            "--weights-only only the weights are grown: the moments of all parameters are lost, the loss rises for about "
            "a hundred steps after the growth, and a longer --rewarmup-steps helps"
        )
    return find_checkpoint(source, options.checkpoint)


def _state_of(
    checkpoint: Path,
    session: Session,
    progress: Progress,
    weights_only: bool,
) -> TrainState:
    """Read the source's state, in its own size, under the new recipe."""
    state = fresh_state(session, trains=False)
    if progress.stage:
        set_stage(state, session.recipe, progress.stage)
    if weights_only:
        load_tensors(
            state, read_tensors(checkpoint / "model.safetensors"), state.optimizer.tensors()
        )
    else:
        _, model, optimizer, method = read_checkpoint(checkpoint)
        if method:
            raise CheckpointError(
                f"{checkpoint} holds tensors of a method ({', '.join(sorted(method)[:3])}) that no growth operator knows"
            )
        load_tensors(state, model, optimizer)
    state.progress = progress
    return state


def _check_data(source: Path, session: Session, options: GrowOptions) -> None:
    """Refuse to continue a run with another tokenizer, or on another text that nobody named."""
    origin = origin_data(source)
    check_tokenizer(source.name, origin, session.corpus)
    changed = origin["train_hash"] not in (None, session.corpus.train.sha256)
    if changed and not any(override.startswith("data.") for override in options.overrides):
        raise UsageError(
            f"run {source.name!r} was trained on another text than data.train names now. Restore the text, or say that it "
            "is meant by naming it: --set data.train=..."
        )


def _measure(
    state: TrainState,
    session: Session,
    windows: torch.Tensor,
) -> tuple[float, torch.Tensor]:
    """Return (loss, logits of the first window on the CPU), in fp32."""
    loss = evaluate(state.model, windows, session.recipe.train.micro_batch_tokens, "fp32")
    with torch.no_grad():
        return float(loss), state.model(windows[:1, :-1]).cpu()


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
