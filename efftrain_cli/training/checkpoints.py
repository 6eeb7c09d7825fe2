"""A run's checkpoints: written when due, found again after a stop, and checked against the recipe
that continues them."""

from __future__ import annotations

import errno
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from efftrain_cli.data.corpus import Corpus
from efftrain_cli.foundation.console import listed, printable, say
from efftrain_cli.foundation.errors import (
    CheckpointError,
    DiskError,
    NewerFormatError,
    RecipeError,
    UnsoundError,
    UsageError,
)
from efftrain_cli.foundation.files import free_bytes
from efftrain_cli.foundation.tensors import read_tensors
from efftrain_cli.plan.cost import checkpoint_bytes
from efftrain_cli.plan.plan import model_config
from efftrain_cli.recipe.recipe import Recipe, dump_recipe, load_recipe, recipe_differences
from efftrain_cli.run.directory import Run, checkpoint_path, checkpoints_of
from efftrain_cli.run.manifest import verify_checkpoint
from efftrain_cli.run.origin import (
    check_not_orphaned,
    imported_without_text,
    origin_data,
    read_origin,
    write_origin,
)
from efftrain_cli.run.small_files import NOT_COMPUTED
from efftrain_cli.training.delayed_gradients import dropped
from efftrain_cli.training.devices import Devices
from efftrain_cli.training.stages import set_stage
from efftrain_cli.training.state import (
    TrainState,
    load_tensors,
    nonfinite_tensors,
    read_checkpoint,
    write_checkpoint,
)

Differences = list[list[Any]]
"""[key, before, now] of what a resumed run differs in."""

_SHAPE_KEYS = ("model.", "data.tokenizer", "optim.name")
"""Recipe keys that decide which tensors there are, and their shapes."""


def save(run: Run, state: TrainState, recipe: Recipe, devices: Devices | None = None) -> float:
    """Write a checkpoint of `state`, remove old ones, and return the seconds it took.

    Nothing is written if this step has a verified one, or if other ranks have parts of the state.
    `devices` hold the state; None: this process alone.

    Raises:
        UnsoundError: a weight or moment is not finite. Nothing is written and nothing removed: the
            checkpoints that exist are the way back.
        DiskError: there is too little room, or the disk refuses; the checkpoints that exist are
            untouched and nothing partial is left.
    """
    start = time.monotonic()
    run.check_place()
    path = checkpoint_path(run.path, state.progress.step)
    devices = devices or Devices()
    if path in run.verified or not devices.is_whole:
        return 0.0
    model, optimizer = devices.full_state_dict(state)
    if wrong := nonfinite_tensors({**model, **optimizer, **state.method_tensors}):
        where = f"after step {state.progress.step}"
        raise UnsoundError(f"{where}: NaN or infinity in {listed(wrong)}")
    try:
        # A damaged checkpoint or a foreign file: it is not this state.
        if os.path.lexists(path):
            run.set_aside(path)
        run.sync()
        write_checkpoint(path, state, dump_recipe(recipe), (model, optimizer))
    except OSError as error:
        raise _not_saved(path, run, state, recipe, error) from None
    run.verified.add(path)
    run.purge_checkpoints(recipe.checkpoint.keep)
    seconds = time.monotonic() - start
    run.event("checkpoint", {"step": state.progress.step, "seconds": seconds})
    return seconds


def _not_saved(
    path: Path,
    run: Run,
    state: TrainState,
    recipe: Recipe,
    error: OSError,
) -> DiskError:
    if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return DiskError(
            f"{path}: {error.strerror} ({errno.errorcode.get(error.errno or 0, error.errno)})."
            " Earlier checkpoints are untouched. Check that the disk is mounted, writable and sound"
        )
    free = free_bytes(run.path)
    needed = checkpoint_bytes(recipe, state.model.config)
    return DiskError(
        f"{path}: the disk is full ({error.strerror}):"
        f" {needed:,} bytes needed, {free:,} bytes free. Earlier checkpoints are untouched."
        f" Make room, or lower checkpoint.keep (now {recipe.checkpoint.keep})"
    )


def newest_checkpoint(run: Run) -> Path | None:
    """Return the newest checkpoint that passes verification; None if the run has no checkpoint.

    Each one passed over becomes an event and a warning.

    Raises:
        CheckpointError: there are checkpoints but none is valid.
    """
    paths = checkpoints_of(run.path)
    for path in sorted(run.path.glob("checkpoints/*")):
        if path not in paths and not _is_set_aside(path):
            run.event("ignored", {"path": path.name, "reason": "not named like a checkpoint"})
            say(
                f"warning: {printable(str(path))} is not named like a checkpoint"
                " (step-00000000); ignored"
            )
    newest, passed_over = newest_sound(paths)
    for path, error in passed_over:
        run.corrupt.add(path)
        run.event("fallback", {"checkpoint": path.name, "reason": str(error)})
    if newest is not None:
        run.verified.add(newest)
    elif passed_over:
        reasons = "\n  ".join(str(error) for _, error in passed_over)
        raise CheckpointError(f"no checkpoint of this run is valid:\n  {reasons}")
    else:
        check_not_orphaned(run.path)
    return newest


def newest_sound(
    paths: Sequence[Path],
    needed: frozenset[str] | None = None,
) -> tuple[Path | None, list[tuple[Path, CheckpointError]]]:
    """Return the newest of checkpoints (oldest first) that is whole and finite, as far as its files
    are needed.

    Return too the newer ones that were passed over, with a warning, each with its reason.

    Raises:
        NewerFormatError: the newest that is whole was written by a newer efftrain.
    """
    passed_over: list[tuple[Path, CheckpointError]] = []
    for path in reversed(paths):
        try:
            _check_finite(path, verify_checkpoint(path, needed))
            return path, passed_over
        except NewerFormatError:
            raise
        except CheckpointError as error:
            passed_over.append((path, error))
            say(f"warning: {error}; trying the one before")
    return None, passed_over


def _check_finite(path: Path, files: frozenset[str]) -> None:
    """Check that weights and moments are finite: an older version saved states that are not."""
    for name in sorted({"model.safetensors", "optimizer.safetensors"} & files):
        if wrong := nonfinite_tensors(read_tensors(path / name)):
            raise CheckpointError(f"{path / name}: NaN or infinity in {listed(wrong)}")


def load_checkpoint(path: Path, state: TrainState, recipe: Recipe) -> None:
    """Load a checkpoint into `state`, which takes the size of the checkpoint's stage.

    Raises:
        CheckpointError: it is damaged, or its tensors do not fit; `state` is untouched then.
    """
    progress, model, optimizer, method = read_checkpoint(path)
    sized = replace(state)
    if progress.stage:
        set_stage(sized, recipe, progress.stage)
    load_tensors(sized, model, optimizer)

    state.model = sized.model
    state.optimizer = sized.optimizer
    method.pop("ouroboros.layout", None)  # of older versions
    state.method_tensors = {name: tensor.to(state.model.device) for name, tensor in method.items()}
    state.progress = progress


def drop_in_flight(run: Run, state: TrainState, written: Recipe, recipe: Recipe) -> str | None:
    """Drop the method tensors of a state, which `written` has made, if `recipe` cannot use them,
    and record that.

    Return the reason; None if they are kept.
    """
    before = written.delayed_gradients
    if before is None or not state.method_tensors:
        return None
    reason = dropped(before, recipe.delayed_gradients, state.model.config)
    if reason is not None:
        state.method_tensors.clear()
        run.event("in_flight_dropped", {"step": state.progress.step, "reason": reason})
    return reason


def computed_differences(a: Recipe, b: Recipe) -> Differences:
    """Return [dotted key, value in a, value in b] of the keys that differ and change what a run
    computes."""
    differences = []
    for key, *values in recipe_differences(a, b):
        if not key.startswith(NOT_COMPUTED):
            differences.append([key, *values])
    return differences


def check_recipe(
    run: Run,
    checkpoint: Path | None,
    recipe: Recipe,
    accepted: Differences,
    override: bool,
) -> Differences:
    """Compare the recipe that is to continue a run with the one that wrote `checkpoint`, or, if the
    run has none, with the one it was started with.

    Return the differences that are allowed and not `accepted` yet.

    Raises:
        CheckpointError: the model or its vocabulary would have another shape.
        UsageError: anything else that a step depends on differs, and `override` is not given.
    """
    written = read_recipe(checkpoint or run.path)
    differences = computed_differences(written, recipe)
    shapes = [entry for entry in differences if entry[0].startswith(_SHAPE_KEYS)]
    if shapes and checkpoint is not None:
        raise CheckpointError(
            f"{checkpoint} was written with another model or optimizer: {_described(shapes)}:"
            " a checkpoint only continues with the tensors it has\n"
            "  restore the values, or start a new run"
        )
    named: Differences = []
    # An imported run: its first text is named now, which changes nothing.
    if origin_data(run.path)["train_hash"] is None:
        of_text = [entry for entry in differences if entry[0].startswith("data.")]
        named = new_differences(run, of_text, accepted, True, "the text is named")
        differences = [entry for entry in differences if entry not in of_text]
    changed = new_differences(run, differences, accepted, override, "the recipe has changed")
    return [*named, *changed]


def read_recipe(folder: Path) -> Recipe:
    """Read the recipe in a run's or a checkpoint's folder.

    Raises:
        CheckpointError: it is not a recipe that this version reads.
    """
    try:
        return load_recipe(str(folder / "recipe.toml"))
    except (RecipeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{folder / 'recipe.toml'} cannot be read: {error}") from None


def check_data(run: Run, corpus: Corpus, accepted: Differences, override: bool) -> Differences:
    """Compare the data that is to continue a run with those it was started on, token for token.

    Return the differences that are allowed and not `accepted` yet.

    Raises:
        CheckpointError: the vocabulary is another.
        UsageError: other tokens, and `override` is not given.
    """
    origin = origin_data(run.path)
    check_tokenizer(run.name, origin, corpus)
    now = {"train_hash": corpus.train.sha256, "valid_hash": corpus.valid.sha256}
    differences = [
        [f"data: {key}", origin[key], now[key]]
        for key in now
        if origin[key] not in (None, now[key])
    ]
    return new_differences(run, differences, accepted, override, "the text has changed")


def check_tokenizer(name: str, origin: Mapping[str, Any], corpus: Corpus) -> None:
    """Check that a corpus has the tokenizer of a run, by the data of its origin.

    Raises:
        CheckpointError: it has another one.
    """
    if (origin["tokenizer_hash"], origin["vocab_size"]) != (
        corpus.tokenizer_sha256,
        corpus.vocab_size,
    ):
        raise CheckpointError(
            f"run {name!r} was trained with another tokenizer ({origin['vocab_size']} tokens,"
            f" {origin['tokenizer_hash'][:12]}...) than data.train and data.tokenizer make now"
            f" ({corpus.vocab_size} tokens, {corpus.tokenizer_sha256[:12]}...):"
            " its weights belong to other tokens\n  restore the text, or start a new run"
        )


def check_text_is_named(run: Run, overrides: Sequence[str]) -> None:
    """Check that the text that an imported run is first trained on was named: nobody may have read
    its recipe.

    Raises:
        UsageError: it was not named, neither at the import nor now.
    """
    text_keys = ("data.train", "data.sources")
    if any(override.strip().startswith(text_keys) for override in overrides):
        return
    if imported_without_text(run.path):
        raise UsageError(
            f"run {run.path.name!r} was imported without text to train on\n"
            f"  name it, as `efftrain pretrain --resume {run.path.name} --set data.train=my.txt"
            " --set data.repeat=true` (data.train=stdlib for the source of Python's library)"
        )


def record_first_data(run: Run, data: object) -> None:
    """Write the data that an imported run is first trained on, the entry of `session.origin_of`,
    into its origin.json.

    Other runs' origins stay as they are.
    """
    if origin_data(run.path)["train_hash"] is None:
        write_origin(run.path, {**read_origin(run.path), "data": data})


def accepted_differences(run: Run) -> Differences:
    """Return the differences that an earlier `--override-resume` accepted."""
    accepted: Differences = []
    for event in run.events():
        differences = event.get("differences")
        if event.get("event") == "override" and isinstance(differences, list):
            accepted += differences
    return accepted


def new_differences(
    run: Run,
    differences: Differences,
    accepted: Differences,
    override: bool,
    what: str,
) -> Differences:
    """Return the differences that are not `accepted` yet, after a warning.

    Raises:
        UsageError: there are any, and `override` is False.
    """
    fresh = [entry for entry in differences if entry not in accepted]
    if fresh and not override:
        raise UsageError(
            f"run {run.name!r}: {what} since its checkpoint: {_described(fresh)}\n"
            "  give --override-resume to continue anyway"
            " (the difference is recorded), or start a new run"
        )
    if fresh:
        say(f"warning: continuing although {what}: {_described(fresh)}")
    return fresh


def check_disk(folder: Path, recipe: Recipe, vocab_size: int, existing: int = 0) -> None:
    """Check that the kept checkpoints, and the one being written, fit on the disk of `folder`.

    The folder need not exist; the run has `existing` checkpoints already. All are as large as those
    of the last stage.

    Raises:
        DiskError: with bytes needed and free.
    """
    keep = recipe.checkpoint.keep
    size = checkpoint_bytes(recipe, model_config(recipe, vocab_size))
    missing = keep + 1 - min(existing, keep)
    needed = missing * size * 11 // 10
    free = free_bytes(folder)
    if free < needed:
        raise DiskError(
            f"{folder}: too little disk space: {missing} more checkpoints of {size:,} bytes,"
            f" and 10 % for rows and logs: {needed:,} bytes needed, {free:,} bytes free\n"
            f"  make room, lower checkpoint.keep (now {keep}),"
            " or set EFFTRAIN_RUNS to a folder on another disk"
        )


def _described(differences: list[Any]) -> str:
    text = ", ".join(f"{key}: {old!r} -> {new!r}" for key, old, new in differences)
    return re.sub(r"\b([0-9a-f]{12})[0-9a-f]{52}\b", r"\1...", text)  # hashes, cut short


def _is_set_aside(path: Path) -> bool:
    """Return whether `path` is a checkpoint under another name, or one that was never finished."""
    return ".corrupt" in path.name or ".left" in path.name or path.name.endswith(".tmp")
