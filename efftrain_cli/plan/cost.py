"""Cost a recipe before anything is spent: FLOPs, memory and disk, by arithmetic. No torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from efftrain_cli.foundation.console import human
from efftrain_cli.foundation.errors import OutOfMemoryError
from efftrain_cli.foundation.files import CONTROL_GROUP
from efftrain_cli.foundation.step import Progress
from efftrain_cli.model.config import GPTConfig
from efftrain_cli.model.flops import parameter_count
from efftrain_cli.plan.devices import PlannedDevice
from efftrain_cli.plan.plan import model_config
from efftrain_cli.plan.preview import PlanSummary, summarize_plan
from efftrain_cli.recipe.recipe import Recipe
from efftrain_cli.recipe.sizes import likely_vocabulary

PROCESS = 450 * 10**6
"""Bytes that Python and PyTorch take before there is a model; measured with PyTorch 2.13 on a
CPU."""
ROW = 700
"""Bytes of a row of metrics.jsonl, about."""


@dataclass(frozen=True, kw_only=True)
class PlanCost:
    """What a plan is expected to cost."""

    summary: PlanSummary
    flops: float
    """Of the steps that are planned."""
    vocab_size: int
    parameters: int
    """Of [model], embeddings included."""
    micro_batch: tuple[int, int]
    """(sequences, seq_len) of a device's largest micro-batch."""
    memory_bytes: int
    """Of one device: weights, gradients, optimizer's state and the activations of the largest
    micro-batch, by `training_bytes`."""
    dtype: str
    """Number type of the matrix products."""
    checkpoint_bytes: int
    """One checkpoint of [model]."""


def plan_cost(
    recipe: Recipe,
    device: PlannedDevice,
    vocab_size: int,
    until: int | None,
    progress: Progress,
) -> PlanCost:
    """Return what training `recipe` on a device costs from `progress` to step `until` or its end;
    on several devices memory is that of one."""
    config = model_config(recipe, vocab_size)
    summary = summarize_plan(recipe, progress, vocab_size, until)
    sequences, seq_len = summary.largest_micro_batch
    sequences = min(sequences, math.ceil(recipe.train.batch_size / device.count))
    dtype = device.dtype(recipe.train.dtype)
    memory = training_bytes(recipe, config, sequences, seq_len, dtype=dtype)
    if recipe.is_sharded:
        memory -= state_bytes(recipe, config) * (device.count - 1) // device.count
    return PlanCost(
        summary=summary,
        flops=summary.flops - progress.flops,
        vocab_size=vocab_size,
        parameters=parameter_count(config),
        micro_batch=(sequences, seq_len),
        memory_bytes=memory,
        dtype=dtype,
        checkpoint_bytes=checkpoint_bytes(recipe, config),
    )


def in_flight_bytes(recipe: Recipe, config: GPTConfig) -> int:
    """Return the bytes of delayed gradients between two full steps, also in each checkpoint."""
    return sum(method.in_flight_bytes(config) for method in recipe.methods.values())


def checkpoint_bytes(recipe: Recipe, config: GPTConfig) -> int:
    """Return the bytes of a checkpoint, about: weights, the optimizer's state and delayed
    gradients, in fp32."""
    numbers = parameter_count(config) + recipe.optim.facts.state_size(config)
    return 4 * numbers + in_flight_bytes(recipe, config)


def state_bytes(recipe: Recipe, config: GPTConfig) -> int:
    """Return the bytes of weights, gradients and the optimizer's state, in fp32."""
    copies = 2 + sum(method.gradients_held for method in recipe.methods.values())
    return 4 * (copies * parameter_count(config) + recipe.optim.facts.state_size(config))


def sequences_at_once(recipe: Recipe) -> int:
    """Return how many sequences of full length a micro-batch holds, at most."""
    train = recipe.train
    return min(train.batch_size, max(1, train.micro_batch_tokens // recipe.model.seq_len))


def training_bytes(
    recipe: Recipe,
    config: GPTConfig,
    sequences: int,
    seq_len: int,
    *,
    dtype: str,
    compiled: bool = False,
) -> int:
    """Estimate the bytes of device memory that training on micro-batches of (sequences, seq_len)
    tokens holds at most.

    The state in fp32, with autocast's copy of the weights. Per token and block, in elements of the
    compute type: the residual stream twice, both norms' outputs, q, k, v, attention's output, the
    MLP's hidden units, and what norms, rotation and shared heads keep beside them: 16 n_embd in
    GPT-2; and one fp32 log-sum-exp a head. The logits and their gradient once each.

    Args:
        config: shape of a model of the recipe.
        dtype: "bf16", "tf32" or "fp32".
    """
    element = 4
    if dtype == "bf16":
        element = 2
    state = state_bytes(recipe, config) + in_flight_bytes(recipe, config)
    if dtype == "bf16":
        state += element * parameter_count(config)

    width = config.n_embd
    q, k, v = config.qkv_rows
    kept = 4 * width + q + k + v + config.attention_size
    kept += config.mlp_facts.kept_arrays * config.ff_size
    kept += (q + k) * (config.position_facts.rotates + config.qk_norm)
    kept += 2 * (q - k)  # keys and values, repeated for every query head
    block = kept * element + 4 * config.n_head
    if config.norm_facts.keeps_fp32 and not compiled:
        block += 2 * 4 * width  # before the gain, in fp32
    elif dtype == "bf16" and not compiled:
        block += 4 * width  # uncompiled layer norms keep their inputs in fp32

    blocks = config.n_layer * block
    if recipe.train.activation_checkpointing is True:  # "auto" turns it on if this does not fit
        # Of each block only its input is kept; one block's activations exist at a time.
        blocks = config.n_layer * width * element + block
    logits = 2 * config.padded_vocab_size * element
    return state + sequences * seq_len * (blocks + logits)


def disk_bytes(recipe: Recipe, weights_only: bool = False) -> int:
    """Return the bytes that a finished run keeps on disk: its checkpoints, or the last weights, and
    its rows."""
    steps = recipe.train.tokens // (recipe.train.batch_size * recipe.model.seq_len) + 1
    config = model_config(recipe, likely_vocabulary(recipe.data.tokenizer))
    if weights_only:
        return 4 * parameter_count(config) + steps * ROW
    return recipe.checkpoint.most * checkpoint_bytes(recipe, config) + steps * ROW


def memory_bytes(recipe: Recipe) -> int:
    """Return the bytes of memory that training takes on a CPU, about: the process, and what
    `training_bytes` says."""
    config = model_config(recipe, likely_vocabulary(recipe.data.tokenizer))
    sequences = sequences_at_once(recipe)
    seq_len = recipe.model.seq_len
    return PROCESS + training_bytes(recipe, config, sequences, seq_len, dtype="fp32")


def check_memory(recipes: Sequence[Recipe], jobs: int) -> None:
    """Refuse more runs at once than memory holds.

    Raises:
        OutOfMemoryError: the largest of the recipes does not fit `jobs` times; the message says how
            often it does.
    """
    free = free_memory()
    if free is None or jobs == 1 or not recipes:
        return
    largest = max(map(memory_bytes, recipes))
    if largest * jobs <= free:
        return
    note = ", which changes no result"
    for recipe in recipes:
        if any(method.cut_matters() for method in recipe.methods.values()):
            note = ", another result by a method"
    raise OutOfMemoryError(
        f"--jobs {jobs}: {jobs} runs at once need about {human(largest * jobs, 'B')} of memory,"
        f" {human(free, 'B')} are free\n"
        f"  use --jobs {max(1, free // largest)}, or lower train.micro_batch_tokens{note}"
    )


def free_memory() -> int | None:
    """Return the bytes of memory that this process could still take; None if no system says so.

    They are the machine's, or what its control group leaves, whose cache of files gives way.
    """
    limits = []
    with suppress(OSError, KeyError, ValueError):
        machine = _numbers_in(Path("/proc/meminfo"))
        limits.append(1024 * machine["MemAvailable:"])
    with suppress(OSError, KeyError, ValueError):  # a limit may be "max"
        limit = int((CONTROL_GROUP / "memory.max").read_text())
        used = int((CONTROL_GROUP / "memory.current").read_text())
        by_use = _numbers_in(CONTROL_GROUP / "memory.stat")
        cached = by_use["active_file"] + by_use["inactive_file"]
        limits.append(max(0, limit - used + cached))
    return min(limits, default=None)


def _numbers_in(path: Path) -> dict[str, int]:
    """Read a file of the system that has a name and a number on each line."""
    numbers = {}
    for line in path.read_text().splitlines():
        name, number, *_ = line.split()
        numbers[name] = int(number)
    return numbers
