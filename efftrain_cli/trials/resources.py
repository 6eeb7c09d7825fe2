"""What a run needs before it has run: disk, memory, and time by the speed of earlier runs of the same model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median

from efftrain_cli.foundation.console import human_bytes
from efftrain_cli.foundation.errors import EfftrainError, OutOfMemoryError
from efftrain_cli.plan.cost import (
    gradient_copies,
    in_flight_bytes,
    likely_vocabulary,
    training_bytes,
)
from efftrain_cli.plan.plan import model_config, model_parameters, padded_vocab_size
from efftrain_cli.recipe.recipe import Recipe, recipe_values
from efftrain_cli.run.directory import run_names, runs_root
from efftrain_cli.run.metrics import last_row
from efftrain_cli.run.rates import estimated_speed
from efftrain_cli.run.small_files import read_recipe_values

PROCESS = 450 * 10**6
"""Bytes that Python and PyTorch take before there is a model; measured with PyTorch 2.13 on a CPU."""
ROW = 700
"""Bytes of a row of metrics.jsonl, about."""
START_SECONDS = 5.0
"""What starting a process, importing PyTorch and opening the data takes, about: no row of metrics.jsonl counts it."""


def _sizes(recipe: Recipe) -> tuple[int, int]:
    """Parameters of the recipe's (last) model, and bytes of its late gradients."""
    vocab_size = padded_vocab_size(recipe, likely_vocabulary(recipe.data.tokenizer))
    return model_parameters(recipe, vocab_size), in_flight_bytes(recipe, vocab_size)


def disk_bytes(recipe: Recipe) -> int:
    """Bytes that a finished run keeps on disk: its checkpoints of weights and two moments in fp32 and of late
    gradients, and its rows."""
    steps = recipe.train.tokens // (recipe.train.batch_size * recipe.model.seq_len) + 1
    parameters, late = _sizes(recipe)
    return recipe.checkpoint.keep * (12 * parameters + late) + steps * ROW


def memory_bytes(recipe: Recipe) -> int:
    """Return the bytes of memory that training takes on a CPU, about: the process, and what `training_bytes` says."""
    seq_len = recipe.model.seq_len
    sequences = min(recipe.train.batch_size, max(1, recipe.train.micro_batch_tokens // seq_len))
    return (
        PROCESS
        + training_bytes(
            model_config(recipe, likely_vocabulary(recipe.data.tokenizer)),
            sequences,
            seq_len,
            dtype="fp32",
            compiled=False,
            recompute=recipe.train.activation_checkpointing is True,
            gradients=gradient_copies(recipe),
        )
        + _sizes(recipe)[1]
    )


def check_memory(recipes: Sequence[Recipe], jobs: int) -> None:
    """Refuses more runs at once than memory holds.

    Raises:
        OutOfMemoryError: the largest of the recipes does not fit `jobs` times; the message says how often it does.
    """
    free = free_memory()
    if free is None or jobs == 1 or not recipes:
        return
    largest = max(map(memory_bytes, recipes))
    if largest * jobs > free:
        fits = max(1, free // largest)
        cut_matters = any(
            method.cut_matters() for recipe in recipes for method in recipe.methods.values()
        )
        note = ", another result by a method" if cut_matters else ", which changes no result"
        raise OutOfMemoryError(
            f"--jobs {jobs}: {jobs} runs at once need about {human_bytes(largest * jobs)} of memory, {human_bytes(free)} are free\n"
            f"  use --jobs {fits}, or lower train.micro_batch_tokens{note}"
        )


def free_memory() -> int | None:
    """Bytes of memory that this process could still take: the machine's, or what its control group leaves; None where
    no system says so."""
    found = []
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        found.append(
            next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
        )
    except (OSError, StopIteration, ValueError):
        pass
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii").strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text(encoding="ascii"))
        if limit != "max":
            found.append(max(0, int(limit) - used))
    except (OSError, ValueError):
        pass
    return min(found, default=None)


def seconds_left(
    recipe: Recipe, tokens: int, speeds: dict[tuple[object, int], float | None]
) -> float | None:
    """Return the wall time of `tokens` more of a recipe, None if nothing was measured here. It goes by `speed_of`, or
    without a finished run by the nearest measurement, as `pretrain --plan`. `speeds` keeps what was looked up."""
    key = (recipe.model, recipe.train.batch_size)
    if key not in speeds:
        speeds[key] = speed_of(recipe) or estimated_speed(recipe)
    speed = speeds[key]
    return None if speed is None else tokens / speed + START_SECONDS * (tokens > 0)


def speed_of(recipe: Recipe) -> float | None:
    """Tokens per second of wall time of the finished runs of the same model and batch in the folder of runs, their
    median; None where there is none. Evaluation, checkpoints and preparing are part of the time."""
    wanted = {"model": recipe_values(recipe.model), "batch_size": recipe.train.batch_size}
    speeds = []
    for name in run_names():
        path = runs_root() / name
        try:
            found = read_recipe_values(path)
            if {"model": found["model"], "batch_size": found["train"]["batch_size"]} != wanted:
                continue
            row = last_row(path)
            seconds = float(row["wall_seconds"])
            if seconds > 0 and row["segment"] == 0:
                speeds.append(float(row["tokens"]) / seconds)
        except (EfftrainError, OSError, ValueError, KeyError, TypeError):
            continue  # a run that cannot be read is not a measurement
    return median(speeds) if speeds else None
