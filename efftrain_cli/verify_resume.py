"""Prove on this machine that a stopped and continued run equals an uninterrupted one (`efftrain
verify-resume`).

Two real runs in a temporary folder: one trains 2 k steps; the other stops after k and is continued
to 2 k by another process, which knows nothing but the checkpoint. Then every weight, every tensor
of the optimizer and every row (times aside) is compared bit for bit.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch.testing import assert_close

from efftrain_cli.foundation.console import listed
from efftrain_cli.foundation.errors import CheckpointError, EfftrainError
from efftrain_cli.foundation.files import make_folder, write_whole
from efftrain_cli.foundation.signals import describe_end
from efftrain_cli.plan.plan import micro_batch_multiple, shorten_schedules
from efftrain_cli.recipe.recipe import Recipe, dump_recipe
from efftrain_cli.recipe.sections import Checkpoint
from efftrain_cli.run.directory import checkpoint_path, runs_in, runs_root
from efftrain_cli.run.metrics import latest_rows

_FREE = ("seconds", "segment", "tokens_per_second", "mfu")
"""Endings of the columns that may differ between two equal runs."""


def verify_resume(
    recipe: Recipe,
    *,
    device: str,
    half: int,
    devices: int,
) -> list[str]:
    """Compare a run of 2 x `half` steps with one that was stopped after `half` and continued;
    return what to print.

    Raises:
        CheckpointError: they differ; the message names the first step and the first tensor that do.
        EfftrainError: one of the runs failed, which has printed why.
    """
    cut = cut_recipe(recipe, half, devices)
    make_folder(runs_root())
    with tempfile.TemporaryDirectory(prefix=".verify-resume.", dir=runs_root()) as name:
        folder = Path(name)
        path = folder / "cut.toml"
        write_whole(path, dump_recipe(cut))
        with runs_in(folder):
            for run, steps in (("whole", 2 * half), ("cut", half)):
                _pretrain(device, steps, devices, "--recipe", str(path), "--name", run)
            _pretrain(device, 2 * half, devices, "--resume", "cut")
        rows, tensors = compare_runs(folder / "whole", folder / "cut", 2 * half)
    seq_len = cut.model.seq_len
    sequences = cut.train.micro_batch_tokens // seq_len
    batch_size = cut.train.batch_size
    step = f"{batch_size // sequences} micro-batches a step of {sequences} x {seq_len} tokens"
    moved = listed(list(shorten_schedules(cut, half, batch_size))) or "no schedule"
    return [
        f"recipe cut to {step}, {2 * half} steps; {moved} moved into them",
        f"stopped after step {half}, continued in a new process to step {2 * half}",
        f"identical: {tensors} tensors and {rows} rows, bit for bit",
    ]


def cut_recipe(recipe: Recipe, half: int, devices: int) -> Recipe:
    """Make the recipe small enough for a minute or two.

    A step has two micro-batches of at most two sequences, or one per device if there are more
    devices. Every schedule is moved into the first 2 x `half` steps, so that it changes before and
    after the stop.
    """
    seq_len = recipe.model.seq_len
    fitting = recipe.train.micro_batch_tokens // seq_len
    sequences = max(1, min(2, fitting, recipe.train.batch_size // 2))
    each = micro_batch_multiple(recipe, devices)
    # Half of the batch, where a schedule begins, is enough for all.
    batch_size = max(max(2, each) * sequences, 2 * each)
    return replace(
        recipe,
        train=replace(
            recipe.train,
            batch_size=batch_size,
            micro_batch_tokens=sequences * seq_len,
        ),
        data=replace(recipe.data, repeat=True),
        eval=replace(
            recipe.eval,
            every=half,
            windows=min(recipe.eval.windows, 4),
        ),
        checkpoint=Checkpoint(),
        wandb=replace(recipe.wandb, mode="off"),
        **shorten_schedules(recipe, half, batch_size),
    )


def compare_runs(whole: Path, cut: Path, step: int) -> tuple[int, int]:
    """Compare rows, and the tensors after `step`, of two runs; return how many rows and tensors
    there are.

    Raises:
        CheckpointError: they differ.
    """
    have = _values(cut)
    want = _values(whole)
    first = []
    for place in sorted(have.keys() | want.keys()):
        undisturbed = want.get(place)
        continued = have.get(place)
        if undisturbed != continued:
            row, column = place
            values = f"{undisturbed!r} undisturbed and {continued!r} continued"
            first.append(f"step {row}: {column} is {values}")
            break

    tensors = _tensors(checkpoint_path(cut, step))
    try:
        assert_close(tensors, _tensors(checkpoint_path(whole, step)), rtol=0, atol=0)
    except AssertionError as error:
        first.append(f"tensors after step {step}: {' '.join(str(error).split())}")
    if not first:
        return len(latest_rows(cut)), len(tensors)
    raise CheckpointError(
        "the continued run differs from the uninterrupted one."
        f" First differences: {'; '.join(first)}. On CUDA, `--set train.deterministic=true` asks"
        " for kernels whose results repeat; on a CPU this is a defect of efftrain: please report it"
    )


def _pretrain(device: str, steps: int, devices: int, *which: str) -> None:
    """Start or continue a run in new processes."""
    command = [sys.executable, "-m", "efftrain_cli", "pretrain", *which, "--no-probe"]
    command += ["--device", device, "--devices", str(devices), "--steps", str(steps)]
    result = subprocess.run(command, stdout=subprocess.DEVNULL, check=False)
    if result.returncode:
        how, exit_code = describe_end(result.returncode)
        error = EfftrainError(f"pretrain {' '.join(which)}: the process {how}")
        error.exit_code = exit_code
        raise error


def _values(run: Path) -> dict[tuple[int, str], object]:
    """Return the values of the rows that count, by step and column, without what may differ."""
    values = {}
    for row in latest_rows(run):
        for column, value in row.items():
            if not column.endswith(_FREE):
                values[row["step"], column] = value
    return values


def _tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for name in ("model", "optimizer", "method"):
        file = checkpoint / f"{name}.safetensors"
        if file.exists():
            tensors |= load_file(file)
    return tensors
