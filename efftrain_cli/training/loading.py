"""Read checkpoints: to train on, or as a trained model for `sample`, `export` and `eval-zeroshot`.

Every rank reads all of a checkpoint and keeps its part. No pickle is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
from pydantic import TypeAdapter, ValidationError
from safetensors import SafetensorError, safe_open
from torch import Tensor

from efftrain_cli.data.tokenizer import Tokenizer, load_tokenizer
from efftrain_cli.foundation.console import say
from efftrain_cli.foundation.errors import (
    CheckpointError,
    DataError,
    NewerFormatError,
    RecipeError,
    UsageError,
)
from efftrain_cli.foundation.records import Record, first_fault, read_record
from efftrain_cli.foundation.step import Progress
from efftrain_cli.foundation.tensors import read_tensors
from efftrain_cli.model.generate import Sampling, generate
from efftrain_cli.model.gpt import GPT
from efftrain_cli.recipe.recipe import Recipe, load_recipe
from efftrain_cli.run.directory import checkpoint_step, checkpoints_of, existing_run
from efftrain_cli.run.manifest import (
    REQUIRED,
    WITHOUT_OPTIMIZER,
    ManifestFile,
    check_hash,
    listed_files,
    read_manifest,
    verify_checkpoint,
)
from efftrain_cli.run.origin import read_origin
from efftrain_cli.training import dist
from efftrain_cli.training.build import build_model, set_stage
from efftrain_cli.training.state import TrainState

Read = TypeVar("Read")
Faults = dict[Path, str]
"""Checkpoints that are not whole, and why."""
PROGRESS = TypeAdapter(Progress)


class Loaded(NamedTuple):
    """The checkpoint that a run goes on from."""

    path: Path | None
    """None: the run has none, and goes on from its beginning."""
    recipe: Recipe
    """The one that wrote it; of the run, if it has no checkpoint."""
    passed_over: Faults
    """Newer checkpoints."""


# --- to train on ----------------------------------------------------------------------------------


def load_newest(run: Path, state: TrainState, recipe: Recipe) -> Loaded:
    """Load a run's newest checkpoint that is whole into `state`. All ranks load the same.

    Raises:
        CheckpointError: there are checkpoints but none is whole.
        NewerFormatError: the newest was written by a newer efftrain.
    """
    checkpoints = checkpoints_of(run)
    if not checkpoints:
        return Loaded(None, read_recipe(run), {})
    return Loaded(*newest_whole(checkpoints, lambda path: load(path, state, recipe)))


def newest_whole(
    checkpoints: Sequence[Path], read: Callable[[Path], Read]
) -> tuple[Path, Read, Faults]:
    """Return the newest of a run's checkpoints that `read` can read on all ranks, what it returned,
    and the newer ones.

    Raises:
        CheckpointError: none is whole.
        NewerFormatError: the newest was written by a newer efftrain.
    """
    faults: Faults = {}
    for path in reversed(checkpoints):
        fault = ""
        try:
            found = read(path)
        except NewerFormatError:
            raise
        except CheckpointError as error:
            fault = str(error)
        # Of several ranks' faults any will do.
        fault = max(dist.gather_objects(fault))
        if not fault:
            return path, found, faults
        faults[path] = fault
        if dist.is_main() and path != checkpoints[0]:
            say(f"warning: {fault}; trying the one before")
    run = checkpoints[0].parent.parent
    reasons = "\n  ".join(faults.values())
    raise CheckpointError(
        f"run {run.name!r} has no valid checkpoint:\n  {reasons}\n"
        f"  begin again: efftrain pretrain {run / 'recipe.toml'} --name NAME"
    )


def newest_recipe(run: Path) -> Recipe:
    """Read the recipe of a run's newest checkpoint that has a sound one; without any, the run's."""
    for path in reversed(checkpoints_of(run)):
        try:
            read_progress(path)
            return written_recipe(path)
        except NewerFormatError:
            raise
        except CheckpointError:
            pass
    return read_recipe(run)


def load(path: Path, state: TrainState, recipe: Recipe) -> Recipe:
    """Load a checkpoint into `state`, which takes the size of the checkpoint's stage; return the
    recipe that it was written with.

    Raises:
        CheckpointError: it is damaged, or its tensors do not fit; `state` is useless then.
    """
    files = listed_files(path, required=REQUIRED)
    check_hash(path / "progress.json", files["progress.json"])
    check_hash(path / "recipe.toml", files["recipe.toml"])
    progress = read_progress(path)
    written = read_recipe(path)
    # A checkpoint that was passed over may have been of a later stage.
    if recipe.stages:
        set_stage(state, recipe, progress.stage)
    take(path / "model.safetensors", files, state.load_weights)
    take(path / "optimizer.safetensors", files, state.load_optimizer)
    state.in_flight.clear()
    if "method.safetensors" in files:
        take(path / "method.safetensors", files, state.load_in_flight)
    state.progress = progress
    return written


def take(
    path: Path,
    files: Mapping[str, ManifestFile],
    load_tensors: Callable[[Iterator[tuple[str, Tensor]]], None],
) -> None:
    """Give the tensors of a file to `load_tensors`, while another thread computes the file's
    sha256: so the disk is read once.

    Raises:
        CheckpointError: it is not the file that was written, or its tensors do not fit.
    """
    with ThreadPoolExecutor() as pool:
        checking = pool.submit(check_hash, path, files[path.name])
        try:
            load_tensors(stream(path))
        except (CheckpointError, SafetensorError, OSError) as error:
            checking.result()
            raise CheckpointError(f"{path}: {error}") from None
        checking.result()


def stream(path: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a file, one at a time, on the CPU."""
    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118  it is no dict
            yield name, file.get_tensor(name)


def read_progress(checkpoint: Path) -> Progress:
    """Read the progress of a checkpoint; fields that an older one lacks keep their defaults.

    Raises:
        CheckpointError: it is damaged, or no progress that this version reads.
    """
    path = checkpoint / "progress.json"
    values = read_record(path, Record).to_json()
    values.pop("schema_version")
    unknown = values.keys() - set(Progress._fields)
    if unknown:
        raise CheckpointError(f"{path} has unknown fields: {', '.join(sorted(unknown))}")
    try:
        return PROGRESS.validate_python(values)
    except ValidationError as error:
        raise CheckpointError(f"{path} is damaged: {first_fault(error)}") from None


def written_recipe(checkpoint: Path) -> Recipe:
    """Read the recipe that a checkpoint was written with.

    Raises:
        CheckpointError: it is damaged, or no recipe that this version reads.
    """
    files = listed_files(checkpoint, required=REQUIRED)
    check_hash(checkpoint / "recipe.toml", files["recipe.toml"])
    return read_recipe(checkpoint)


def read_recipe(folder: Path) -> Recipe:
    """Read the recipe in a run's or a checkpoint's folder.

    Raises:
        CheckpointError: it is not a recipe that this version reads.
    """
    try:
        return load_recipe(str(folder / "recipe.toml"))
    except (RecipeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{folder / 'recipe.toml'} cannot be read: {error}") from None


def check_not_orphaned(run: Path) -> None:
    """Refuse a run whose first weights came from a parent and are gone: it would continue with
    random ones.

    Raises:
        CheckpointError: the run has a parent. The caller found no checkpoint.
    """
    origin = read_origin(run)
    for key in ("branch", "grown_from", "imported"):
        parent = origin.get(key) or {}
        source = parent.get("parent") or parent.get("run") or parent.get("directory")
        if source:
            raise CheckpointError(
                f"run {run.name!r} began with the weights of {source}, and has no checkpoint:"
                " its weights are lost\n"
                "  begin it again under another name; its rows can still be compared"
            )


# --- to use ---------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class TrainedModel:
    """A checkpoint's model, and what is needed to use it."""

    run: Path
    checkpoint: Path
    model_sha256: str
    """Of the checkpoint's model.safetensors."""
    recipe: Recipe
    progress: Progress
    model: GPT
    tokenizer: Tokenizer


def load_trained_model(name: str, checkpoint: str | None, device: torch.device) -> TrainedModel:
    """Load the model of run `name`: of the newest valid checkpoint, or of the one asked for by its
    step or name.

    Raises:
        UsageError: there is no such run or checkpoint.
        CheckpointError: the run has no checkpoint yet, or none that is whole, or the weights do not
            fit the recipe.
        DataError: the run's tokenizer is missing or not the one it was trained with.
    """
    run = existing_run(name)
    path = find_checkpoint(run, checkpoint)
    tokenizer = load_run_tokenizer(run)
    recipe = read_recipe(path)
    progress = read_progress(path)
    # Weights are fp32 however they were trained: they are used as an ordinary GPT-2, whose products
    # add in fp32.
    model = build_model(recipe, tokenizer.vocab_size, device, progress.stage)
    weights = path / "model.safetensors"
    try:
        model.load_state_dict(read_tensors(weights))
    except RuntimeError as error:
        raise CheckpointError(
            f"{weights} does not fit the recipe beside it and the run's tokenizer: {error}"
        ) from None
    return TrainedModel(
        run=run,
        checkpoint=path,
        model_sha256=read_manifest(path).files["model.safetensors"].sha256,
        recipe=recipe,
        progress=progress,
        model=model.eval(),
        tokenizer=tokenizer,
    )


def find_checkpoint(
    run: Path, wanted: str | None, needed: frozenset[str] = WITHOUT_OPTIMIZER
) -> Path:
    """Find the run's newest checkpoint whose files `needed` are whole, or the one `wanted` names: a
    step, or step-00000100.

    Raises:
        UsageError: no checkpoint is called that; the message lists those there are.
        CheckpointError: there is none yet, or the one asked for (or every one) is damaged.
        NewerFormatError: the newest that is whole was written by a newer efftrain.
    """
    checkpoints = checkpoints_of(run)
    if not checkpoints:
        check_not_orphaned(run)
        raise CheckpointError(
            f"run {run.name!r} has no checkpoint yet: one is written every checkpoint.every"
            " of its recipe and at the end\n"
            f"  wait for it, or if the run has stopped: `efftrain pretrain --resume {run.name}`"
        )
    if wanted is None:
        newest, _, _ = newest_whole(checkpoints, lambda path: verify_checkpoint(path, needed))
        return newest
    for path in checkpoints:
        if wanted in (path.name, str(checkpoint_step(path))):
            verify_checkpoint(path, needed)
            return path
    steps = [str(checkpoint_step(path)) for path in checkpoints]
    raise UsageError(
        f"--checkpoint {wanted}: run {run.name!r} has checkpoints of steps {', '.join(steps)}"
    )


def load_run_tokenizer(run: Path) -> Tokenizer:
    """Load the tokenizer in the run directory.

    Raises:
        DataError: it is missing, or not the one that origin.json says the run was trained with.
    """
    path = run / "tokenizer.json"
    if not path.is_file():
        raise DataError(f"{path} is missing: without it the model's tokens have no meaning")
    tokenizer = load_tokenizer(path)
    expected = (read_origin(run).get("data") or {}).get("tokenizer_hash")
    if expected is not None and expected != tokenizer.sha256:
        raise DataError(
            f"{path} is not the tokenizer this run was trained with"
            f" (fingerprint {tokenizer.sha256[:12]}, origin.json has {str(expected)[:12]}):"
            " its tokens would mean different text"
        )
    return tokenizer


def generate_text(
    model: GPT,
    tokenizer: Tokenizer,
    prompt: str,
    sampling: Sampling,
    max_tokens: int,
) -> Iterator[str]:
    """Yield pieces of the text that follows `prompt`, as they become whole characters, to
    end-of-text or max_tokens.

    An empty prompt stands for the beginning of a document. "<|endoftext|>" in a prompt is plain
    text, as in training data.
    """
    from tokenizers.decoders import DecodeStream

    ids = tokenizer.encode([prompt])[0].tolist() or [tokenizer.eot_id]
    # The stream reads the prompt too: a piece's leading space depends on what stands before it.
    stream = DecodeStream(ids=ids, skip_special_tokens=True)
    tokens = generate(model, torch.tensor([ids], device=model.device), sampling)
    for _ in range(max_tokens):
        token = int(next(tokens))
        if token == tokenizer.eot_id:
            return
        piece = stream.step(tokenizer.backend, token)
        if piece is not None:
            yield piece
