"""Checkpoints: named tensors and readable numbers, whole or not at all, each file known by its
sha256. No pickle is read or written.

Every rank calls these functions. Rank 0 writes, whole tensors whatever the ranks hold, so a run may
go on with another number of ranks; every rank reads, and keeps its part.
"""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from pydantic import TypeAdapter, ValidationError
from safetensors import SafetensorError, safe_open
from torch import Tensor

from efftrain_cli.foundation.console import listed, say
from efftrain_cli.foundation.errors import (
    CheckpointError,
    DiskError,
    NewerFormatError,
    RecipeError,
    UnsoundError,
)
from efftrain_cli.foundation.files import free_bytes, fsync, made_beside, make_folder, sha256_of
from efftrain_cli.foundation.records import Record, first_fault, read_record
from efftrain_cli.foundation.step import Progress
from efftrain_cli.foundation.tensors import Tensors, write_tensors
from efftrain_cli.model.config import GPTConfig
from efftrain_cli.plan.cost import checkpoint_bytes
from efftrain_cli.recipe.recipe import Recipe, dump_recipe, load_recipe
from efftrain_cli.run.directory import (
    Run,
    checkpoint_path,
    checkpoints_of,
    new_run,
    run_path,
)
from efftrain_cli.run.manifest import (
    REQUIRED,
    SCHEMA_VERSION,
    ManifestFile,
    check_hash,
    listed_files,
    write_manifest,
)
from efftrain_cli.training import dist
from efftrain_cli.training.stages import set_stage
from efftrain_cli.training.state import TrainState, check_copies


class Loaded(NamedTuple):
    """The checkpoint that a run goes on from."""

    path: Path | None
    """None: the run has none, and goes on from its beginning."""
    recipe: Recipe
    """The one that wrote it; of the run, if it has no checkpoint."""
    passed_over: list[tuple[Path, str]]
    """Newer checkpoints that are not whole, and why."""


# --- writing --------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Writing:
    """A checkpoint that rank 0 is to write, of tensors that no step changes meanwhile."""

    run: Run
    path: Path
    progress: Progress
    recipe: Recipe
    config: GPTConfig
    files: Mapping[str, Tensors]
    copied: torch.cuda.Event | None
    """When the tensors are on the host; None: they are."""

    def write(self) -> float:
        """Write it, in any thread, and return the seconds it took.

        Raises:
            DiskError: the disk refuses; the checkpoints that exist are untouched and nothing
                partial is left.
        """
        start = time.monotonic()
        if self.copied is not None:
            self.copied.synchronize()
        try:
            write(self.path, self.progress, dump_recipe(self.recipe), self.files)
        except OSError as error:
            raise _not_saved(self.path, self.recipe, self.config, error) from None
        return time.monotonic() - start

    def record(self, seconds: float) -> None:
        """Note that it is written, and remove old ones."""
        self.run.verified.add(self.path)
        section = self.recipe.checkpoint
        self.run.purge_checkpoints(section.keep, section.at or ())
        self.run.event("checkpoint", {"step": self.progress.step, "seconds": seconds})


def save(run: Run | None, state: TrainState, recipe: Recipe) -> float:
    """Write a checkpoint of `state`, remove old ones, and return the seconds it took; otherwise as
    `begin_save` and `Writing.write`."""
    writing = begin_save(run, state, recipe)
    if writing is None:
        return 0.0
    seconds = writing.write()
    writing.record(seconds)
    return seconds


def begin_save(
    run: Run | None,
    state: TrainState,
    recipe: Recipe,
    host: Tensors | None = None,
) -> Writing | None:
    """Check `state`; return on rank 0 the checkpoint to write, unless it is written already.

    Args:
        run: on rank 0; None on the others.
        host: memory of the copies that are made, so that steps may go on beside `Writing.write`;
            kept from save to save. None: no copy is made.

    Raises:
        UnsoundError: a weight or moment is not finite; nothing is written.
        ReplicaError: the ranks' weights differ; nothing is written.
        DiskError: the run's folder is lost, or the disk refuses, on rank 0.
    """
    step = state.progress.step
    tensors = state.weights() | state.optimizer.tensors() | state.in_flight
    wrong = nonfinite_tensors(tensors)
    (is_unsound,) = dist.agree(bool(wrong))
    if is_unsound:
        raise UnsoundError(f"after step {step}: NaN or infinity in {listed(wrong)}")
    check_copies(state)
    model, optimizer, in_flight = state.whole()
    if run is None:
        return None

    run.check_place()
    path = checkpoint_path(run.path, step)
    if path in run.verified:
        return None
    try:
        # A damaged checkpoint, or a foreign file: it is not this state.
        if os.path.lexists(path):
            run.set_aside(path)
        run.sync()
    except OSError as error:
        raise _not_saved(path, recipe, state.model.config, error) from None
    copied = None
    # What ranks divide was gathered in host memory: a copy already.
    if host is not None and state.division is None:
        optimizer = copies_of(optimizer, host)
        model = copies_of(model, host)
        in_flight = copies_of(in_flight, {})  # other tensors in each step
        if state.device.type == "cuda":
            copied = torch.cuda.Event()
            copied.record(torch.cuda.current_stream(state.device))
    files = {"optimizer.safetensors": optimizer, "model.safetensors": model}
    if in_flight:
        files["method.safetensors"] = in_flight
    return Writing(
        run=run,
        path=path,
        progress=state.progress,
        recipe=recipe,
        config=state.model.config,
        files=files,
        copied=copied,
    )


def copies_of(tensors: Tensors, host: Tensors) -> Tensors:
    """Copy tensors into host memory, pinned for those of a CUDA device, which may still be copying.

    Args:
        host: memory of earlier copies, used again; what is allocated is added.
    """
    copies = {}
    for name, tensor in tensors.items():
        buffer = host.get(name)
        if buffer is None or buffer.shape != tensor.shape:
            buffer = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
            host[name] = buffer
        copies[name] = buffer.copy_(tensor, non_blocking=True)
    return copies


def _not_saved(
    path: Path,
    recipe: Recipe,
    config: GPTConfig,
    error: OSError,
) -> DiskError:
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return DiskError(f"{path}: {error.strerror}\n  raise the limit that `ulimit -n` shows")
    if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return DiskError(
            f"{path}: {error.strerror} ({errno.errorcode.get(error.errno or 0, error.errno)})."
            " Earlier checkpoints are untouched. Check that the disk is mounted, writable and sound"
        )
    needed = checkpoint_bytes(recipe, config)
    free = free_bytes(path.parent.parent)
    fix = f"make room, or lower checkpoint.keep (now {recipe.checkpoint.keep})"
    if free >= needed:
        # Another limit than that of bytes.
        fix = "`df -i` shows a lack of inodes, `quota` a quota, `ulimit -f` a limit of file sizes"
    return DiskError(
        f"{path}: {error.strerror}: {needed:,} bytes needed, {free:,} bytes free."
        f" Earlier checkpoints are untouched\n  {fix}"
    )


def write(
    directory: Path,
    progress: Progress,
    recipe_toml: str,
    files: Mapping[str, Tensors],
) -> None:
    """Write a checkpoint as `directory`, whole or not at all.

    Args:
        files: tensors by file; the largest first, as its hash takes longest.

    Raises:
        OSError: the disk is full or not writable; nothing is left behind then.
    """
    make_folder(directory.parent)
    values = {"schema_version": SCHEMA_VERSION, **progress._asdict()}
    texts = {"progress.json": json.dumps(values, indent=1), "recipe.toml": recipe_toml}
    # Hashing, writing and flushing release the interpreter lock: they go on beside each other.
    with made_beside(directory) as temporary, ThreadPoolExecutor(max_workers=4) as pool:
        temporary.mkdir()
        hashes: dict[str, Future[str]] = {}
        flushed = []
        for name in (*files, *texts):
            path = temporary / name
            if name in files:
                write_tensors(path, files[name])
            else:
                path.write_text(texts[name], encoding="utf-8")
            hashes[name] = pool.submit(sha256_of, path)
            flushed.append(pool.submit(fsync, path))
        for future in flushed:
            future.result()
        write_manifest(temporary, {name: future.result() for name, future in hashes.items()})


def create_run(
    name: str,
    state: TrainState,
    recipe_toml: str,
    origin: Mapping[str, object],
    tokenizer: Path,
    events: Mapping[str, Mapping[str, object]],
    rows: Sequence[Mapping[str, object]] = (),
) -> Path:
    """Create run `name` with `state` as its first checkpoint; it appears with that or not at all.

    Args:
        tokenizer: a file to copy.
        events: name -> content, for events.jsonl.
        rows: of metrics.jsonl, up to the state's step.

    Raises:
        UsageError, DiskError: as `new_run`.
    """
    model, optimizer, _ = state.whole()
    with new_run(name, recipe_toml, origin, tokenizer) as run:
        run.log(rows)
        for event, content in events.items():
            run.event(event, content)
        path = checkpoint_path(run.path, state.progress.step)
        files = {"optimizer.safetensors": optimizer, "model.safetensors": model}
        write(path, state.progress, recipe_toml, files)
    return run_path(name)


def nonfinite_tensors(tensors: Tensors) -> list[str]:
    """Return the names of the tensors that hold a NaN or an infinity, in one pass, with one wait
    for the device."""
    floating = {}
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and tensor.numel():
            floating[name] = tensor
    if not floating:
        return []
    maxima = torch._foreach_norm(list(floating.values()), ord=torch.inf)
    largest = torch.stack([value.float() for value in maxima])
    finite = torch.isfinite(largest).tolist()
    return [name for name, is_finite in zip(floating, finite, strict=True) if not is_finite]


# --- reading --------------------------------------------------------------------------------------


def load_newest(run: Path, state: TrainState, recipe: Recipe) -> Loaded:
    """Load a run's newest checkpoint that is whole into `state`. All ranks load the same.

    Raises:
        CheckpointError: there are checkpoints but none is whole.
        NewerFormatError: the newest was written by a newer efftrain.
    """
    passed_over: list[tuple[Path, str]] = []
    for path in reversed(checkpoints_of(run)):
        fault = ""
        try:
            written = written_recipe(path)
            load(path, state, recipe)
        except NewerFormatError:
            raise
        except CheckpointError as error:
            fault = str(error)
        # Of several ranks' faults any will do.
        fault = max(dist.gather_objects(fault))
        if not fault:
            return Loaded(path, written, passed_over)
        passed_over.append((path, fault))
        if dist.is_main():
            say(f"warning: {fault}; trying the one before")
    if passed_over:
        reasons = "\n  ".join(fault for _, fault in passed_over)
        raise CheckpointError(f"no checkpoint of this run is valid:\n  {reasons}")
    return Loaded(None, read_recipe(run), [])


def newest_recipe(run: Path) -> Recipe:
    """Read the recipe of a run's newest checkpoint that has a sound one; without any, the run's."""
    for path in reversed(checkpoints_of(run)):
        try:
            read_progress(path)
            return written_recipe(path)
        except NewerFormatError:
            raise
        except CheckpointError:
            continue
    return read_recipe(run)


def load(path: Path, state: TrainState, recipe: Recipe) -> None:
    """Load a checkpoint into `state`, which takes the size of the checkpoint's stage.

    Raises:
        CheckpointError: it is damaged, or its tensors do not fit; `state` is useless then.
    """
    files = listed_files(path, required=REQUIRED)
    check_hash(path / "progress.json", files)
    check_hash(path / "recipe.toml", files)
    progress = read_progress(path)
    # A checkpoint that was passed over may have been of a later stage.
    if recipe.stages:
        set_stage(state, recipe, progress.stage)
    take(path / "model.safetensors", files, state.load_weights)
    take(path / "optimizer.safetensors", files, state.load_optimizer)
    state.in_flight.clear()
    if "method.safetensors" in files:
        take(path / "method.safetensors", files, state.load_in_flight)
    tensors = state.weights() | state.optimizer.tensors() | state.in_flight
    if wrong := nonfinite_tensors(tensors):
        raise CheckpointError(f"{path}: NaN or infinity in {listed(wrong)}")
    state.progress = progress


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
        checking = pool.submit(check_hash, path, files)
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
        return TypeAdapter(Progress).validate_python(values)
    except ValidationError as error:
        raise CheckpointError(f"{path} is damaged: {first_fault(error)}") from None


def written_recipe(checkpoint: Path) -> Recipe:
    """Read the recipe that a checkpoint was written with.

    Raises:
        CheckpointError: it is damaged, or no recipe that this version reads.
    """
    check_hash(checkpoint / "recipe.toml", listed_files(checkpoint, required=REQUIRED))
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
