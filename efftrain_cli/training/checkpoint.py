"""Write checkpoints: named tensors and readable numbers, whole or not at all, each file known by
its sha256. No pickle is written or read.

Every rank calls `begin_save`; rank 0 writes whole tensors whatever the ranks hold, so a run may go
on with another number of ranks.
"""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from efftrain_cli.foundation.console import listed
from efftrain_cli.foundation.errors import DiskError, UnsoundError
from efftrain_cli.foundation.files import (
    disk_error,
    free_bytes,
    fsync,
    made_beside,
    make_folder,
    sha256_of,
)
from efftrain_cli.foundation.step import Progress
from efftrain_cli.foundation.tensors import Tensors, write_tensors
from efftrain_cli.recipe.recipe import Recipe, dump_recipe
from efftrain_cli.run.directory import RunDirectory, checkpoint_path, new_run, run_path
from efftrain_cli.run.manifest import SCHEMA_VERSION, write_manifest
from efftrain_cli.training import dist
from efftrain_cli.training.state import TrainState, check_copies


@dataclass(frozen=True, kw_only=True)
class Writing:
    """A checkpoint that rank 0 is to write, of tensors that no step changes meanwhile."""

    run: RunDirectory
    path: Path
    progress: Progress
    recipe: Recipe
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
        with self.disk_errors():
            write(self.path, self.progress, dump_recipe(self.recipe), self.files)
        return time.monotonic() - start

    def record(self, seconds: float) -> None:
        """Note that it is written, and remove old ones."""
        self.run.verified.add(self.path)
        section = self.recipe.checkpoint
        self.run.purge_checkpoints(section.keep, section.at or ())
        self.run.event("checkpoint", {"step": self.progress.step, "seconds": seconds})

    @contextmanager
    def disk_errors(self) -> Iterator[None]:
        """Turn an OSError into a DiskError that says what to do."""
        try:
            yield
        except OSError as error:
            raise self._refusal(error) from None

    def _refusal(self, error: OSError) -> DiskError:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            error.filename = self.path
            return disk_error(error)
        needed = 0
        for tensors in self.files.values():
            needed += sum(tensor.nbytes for tensor in tensors.values())
        free = free_bytes(self.run.path)
        fix = f"make room, or lower checkpoint.keep (now {self.recipe.checkpoint.keep})"
        if free >= needed:
            # Another limit than that of bytes.
            fix = (
                "`df -i` shows a lack of inodes, `quota` a quota, `ulimit -f` a limit of file sizes"
            )
        return DiskError(
            f"{self.path}: {error.strerror}: {needed:,} bytes needed, {free:,} bytes free."
            f" Earlier checkpoints are untouched\n  {fix}"
        )


def save(run: RunDirectory | None, state: TrainState, recipe: Recipe) -> float:
    """Write a checkpoint of `state`, remove old ones, and return the seconds it took; otherwise as
    `begin_save` and `Writing.write`."""
    writing = begin_save(run, state, recipe)
    if writing is None:
        return 0.0
    seconds = writing.write()
    writing.record(seconds)
    return seconds


def begin_save(
    run: RunDirectory | None,
    state: TrainState,
    recipe: Recipe,
    host: dict[str, Tensors] | None = None,
) -> Writing | None:
    """Check `state`; return on rank 0 the checkpoint to write, unless it is written already.

    Args:
        run: on rank 0; None on the others.
        host: copies by file, so that steps may go on beside `Writing.write`; their memory is used
            again in the next save. None: no copy is made.

    Raises:
        UnsoundError: a weight or moment is not finite; nothing is written.
        ReplicaError: the ranks' weights differ; nothing is written.
        DiskError: the run's folder is lost, or the disk refuses, on rank 0.
    """
    step = state.progress.step
    state.settle()
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
    files = {"optimizer.safetensors": optimizer, "model.safetensors": model}
    if in_flight:
        files["method.safetensors"] = in_flight
    copied = None
    # What ranks divide was gathered in host memory: a copy already.
    if host is not None and state.division is None:
        for name, tensors in files.items():
            host[name] = files[name] = copies_of(tensors, host.get(name, {}))
        if state.device.type == "cuda":
            copied = torch.cuda.Event()
            copied.record(torch.cuda.current_stream(state.device))
    writing = Writing(
        run=run, path=path, progress=state.progress, recipe=recipe, files=files, copied=copied
    )
    with writing.disk_errors():
        # A damaged checkpoint, or a foreign file: it is not this state.
        if os.path.lexists(path):
            run.set_aside(path)
        run.sync()
    return writing


def copies_of(tensors: Tensors, buffers: Tensors) -> Tensors:
    """Copy tensors into host memory, pinned for those of a CUDA device, which may still be copying.

    Args:
        buffers: earlier copies, whose memory is used again where it fits.
    """
    copies = {}
    for name, tensor in tensors.items():
        buffer = buffers.get(name)
        if buffer is None or buffer.shape != tensor.shape:
            buffer = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
        copies[name] = buffer.copy_(tensor, non_blocking=True)
    return copies


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
