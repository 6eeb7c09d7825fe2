"""The state of training, and its form on disk: named tensors and readable numbers, nothing else.

A checkpoint is a directory that exists whole or not at all: it is written beside its final name,
flushed, and renamed. Every file's sha256 is in manifest.json and verified before any tensor is
used. No pickle is read or written.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from efftrain_cli.foundation.errors import CheckpointError
from efftrain_cli.foundation.files import fsync, made_beside, sha256_of
from efftrain_cli.foundation.records import Record, first_fault, read_record
from efftrain_cli.foundation.step import Progress
from efftrain_cli.foundation.tensors import Tensors, read_tensors, write_tensors
from efftrain_cli.model.gpt import GPT
from efftrain_cli.optim.optimizer import Optimizer
from efftrain_cli.run.directory import checkpoint_path, new_run, run_path
from efftrain_cli.run.manifest import SCHEMA_VERSION, verify_checkpoint, write_manifest


@dataclass(slots=True)
class TrainState:
    """Everything that a step changes."""

    model: GPT
    optimizer: Optimizer
    progress: Progress = field(default_factory=Progress)
    nonfinite: Tensor = field(default_factory=lambda: torch.zeros(()))
    """0-d fp32 on the device, sticky: 1 once a loss or gradient was not finite; updates stop from
    then on."""
    method_tensors: Tensors = field(default_factory=dict)
    """Named tensors of a method that needs any beyond model and optimizer."""


def model_tensors(state: TrainState) -> Tensors:
    """Return the parameters by name; a tied head is not listed twice."""
    return {name: parameter.detach() for name, parameter in state.model.named_parameters()}


def load_tensors(state: TrainState, model: Tensors, optimizer: Tensors) -> None:
    """Copy named tensors into `state`.

    Raises:
        CheckpointError: a name is missing or too much, or a shape differs; nothing has been copied
            then.
    """
    pairs = [
        ("model", model_tensors(state), model),
        ("optimizer", state.optimizer.tensors(), optimizer),
    ]
    problems = []
    for kind, have, given in pairs:
        for name in have.keys() | given.keys():
            if name not in given:
                problems.append(f"{kind} tensor {name} is missing")
            elif name not in have:
                problems.append(f"{kind} tensor {name} is not part of this model")
            elif have[name].shape != given[name].shape:
                wrong = tuple(given[name].shape)
                right = tuple(have[name].shape)
                problems.append(
                    f"{kind} tensor {name} has shape {wrong}, the recipe's model needs {right}"
                )
    if problems:
        raise CheckpointError(
            "the checkpoint does not fit the recipe:\n  " + "\n  ".join(sorted(problems)[:20])
        )
    with torch.no_grad():
        for _, have, given in pairs:
            for name, tensor in have.items():
                tensor.copy_(given[name])


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
    finite = torch.isfinite(torch.stack([value.float() for value in maxima])).tolist()
    return [name for name, is_finite in zip(floating, finite, strict=True) if not is_finite]


def progress_to_json(progress: Progress) -> dict[str, object]:
    """Return the progress as JSON values, with the schema's version."""
    return {"schema_version": SCHEMA_VERSION, **progress._asdict()}


def progress_from_json(values: dict[str, object]) -> Progress:
    """Invert `progress_to_json`; fields that an older checkpoint lacks keep their defaults.

    Raises:
        CheckpointError: a field is unknown, or has a wrong type.
    """
    fields = {name: value for name, value in values.items() if name != "schema_version"}
    unknown = fields.keys() - set(Progress._fields)
    if unknown:
        raise CheckpointError(f"progress.json has unknown fields: {', '.join(sorted(unknown))}")
    try:
        return TypeAdapter(Progress).validate_python(fields)
    except ValidationError as error:
        raise CheckpointError(f"progress.json is damaged: {first_fault(error)}") from None


def write_checkpoint(
    directory: Path,
    state: TrainState,
    recipe_toml: str,
    tensors: tuple[Tensors, Tensors] | None = None,
) -> None:
    """Write the state as `directory`, whole or not at all.

    Args:
        tensors: those of model and optimizer, if they were gathered before.

    Raises:
        OSError: the disk is full or not writable; nothing is left behind then.
        FileExistsError: `directory` exists.
    """
    if directory.exists():
        raise FileExistsError(directory)
    directory.parent.mkdir(parents=True, exist_ok=True)
    # The largest first: its hash, the longest of all work here, then goes on beside everything
    # else.
    model, optimizer = tensors or (model_tensors(state), state.optimizer.tensors())
    files = {"optimizer.safetensors": optimizer, "model.safetensors": model}
    if state.method_tensors:
        files["method.safetensors"] = state.method_tensors
    texts = {
        "progress.json": json.dumps(progress_to_json(state.progress), indent=1),
        "recipe.toml": recipe_toml,
    }
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
    with new_run(name, recipe_toml, origin, tokenizer) as run:
        run.log(rows)
        for event, content in events.items():
            run.event(event, content)
        write_checkpoint(checkpoint_path(run.path, state.progress.step), state, recipe_toml)
    return run_path(name)


def read_checkpoint(
    directory: Path,
) -> tuple[Progress, Tensors, Tensors, Tensors]:
    """Verify a checkpoint and read it: (progress, model tensors, optimizer tensors, method
    tensors), on the CPU.

    Files that the manifest does not list are ignored.

    Raises:
        CheckpointError: a file is missing, damaged or unexpected; the message names it.
    """
    files = verify_checkpoint(directory)
    progress = read_progress(directory)
    model = read_tensors(directory / "model.safetensors")
    optimizer = read_tensors(directory / "optimizer.safetensors")
    method = {}
    if "method.safetensors" in files:
        method = read_tensors(directory / "method.safetensors")
    return progress, model, optimizer, method


def read_progress(directory: Path) -> Progress:
    """Read the progress of a verified checkpoint.

    Raises:
        CheckpointError: it is no progress that this version reads.
    """
    return progress_from_json(read_record(directory / "progress.json", Record).to_json())
