"""The memory that training needs: an estimate before it, and the setting to change if it runs
out."""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from efftrain_cli.foundation.console import human
from efftrain_cli.foundation.environment import environment_number
from efftrain_cli.foundation.errors import OutOfMemoryError
from efftrain_cli.foundation.files import machine_memory
from efftrain_cli.model.config import GPTConfig
from efftrain_cli.model.flops import parameter_count
from efftrain_cli.plan.cost import full_micro_batch, state_bytes, training_bytes
from efftrain_cli.plan.plan import model_config
from efftrain_cli.plan.preview import PlanSummary
from efftrain_cli.recipe.recipe import Recipe
from efftrain_cli.training import dist

USABLE = 0.9
"""Share of a device's memory that the estimate may reach: the rest is for the CUDA context,
workspaces and fragments."""
_OUT_OF_MEMORY = (
    "can't allocate memory",
    "not enough memory",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)
"""Words of errors that are no OutOfMemoryError: of PyTorch's CPU allocator, and of what allocates
beside its CUDA allocator."""


def peak_memory(device: torch.device) -> dict[str, int]:
    """Return the most bytes that this process has had in use: of the host, and of a CUDA device."""
    peak = {"host_bytes": peak_resident_bytes()}
    if device.type == "cuda":
        peak["device_bytes"] = torch.cuda.max_memory_allocated(device)
    return peak


def peak_resident_bytes() -> int:
    """Return the largest resident size of this process so far, bytes."""
    status = Path("/proc/self/status")
    if status.exists():
        # Not getrusage if this file exists: its peak begins with that of the parent process.
        lines = status.read_text().splitlines()
        line = next(line for line in lines if line.startswith("VmHWM"))
        return 1024 * int(line.split()[1])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if sys.platform == "darwin":
        return peak
    return 1024 * peak


def checkpoints_activations(
    recipe: Recipe,
    config: GPTConfig,
    device: torch.device,
    *,
    dtype: str,
    compiled: bool,
) -> bool:
    """Return whether blocks are computed again in the backward pass.

    "auto": if a full micro-batch would not fit the CUDA device otherwise.
    """
    train = recipe.train
    if train.activation_checkpointing != "auto":
        return train.activation_checkpointing
    if device.type != "cuda":
        return False
    needed = training_bytes(
        recipe,
        config,
        full_micro_batch(recipe),
        config.seq_len,
        dtype=dtype,
        compiled=compiled,
        recompute=False,
    )
    if recipe.is_sharded:
        state = state_bytes(recipe, config)
        needed -= state - state // dist.world_size()
    return needed > USABLE * torch.cuda.get_device_properties(device).total_memory


@contextmanager
def memory_errors(recipe: Recipe, summary: PlanSummary) -> Iterator[None]:
    """Turn running out of memory, of the device or the host, into an OutOfMemoryError that names
    what to change."""
    sequences, seq_len = summary.largest_micro_batch
    ways = []
    if sequences > 1:
        note = ""
        if any(method.cut_matters() for method in recipe.methods.values()):
            note = ", another result by its method"
        tokens = recipe.train.micro_batch_tokens
        ways.append(f"train.micro_batch_tokens = {sequences // 2 * seq_len} (now {tokens}{note})")
    if recipe.train.activation_checkpointing is not True:
        ways.append("train.activation_checkpointing = true (slower, much less memory)")
    if sequences == 1:
        ways.append("a lower model.seq_len or a smaller model (another result)")

    def message(error: BaseException) -> str:
        cause = "MemoryError"
        if str(error):
            cause = str(error).splitlines()[0]
        return (
            "out of memory in the largest micro-batch planned,"
            f" {sequences} sequences of {seq_len} tokens: {cause}\n"
            f"  set {', or '.join(ways)}"
        )

    with _out_of_memory_as(message):
        yield


@contextmanager
def building_errors(
    recipe: Recipe,
    vocab_size: int,
    device: torch.device,
    stage: int = 0,
    trains: bool = True,
) -> Iterator[None]:
    """Refuse, by an OutOfMemoryError, a model that cannot fit before it is built, and one if memory
    runs out meanwhile.

    Linux hands out more memory than there is and kills the process that uses it. So a model on the
    CPU is measured first, against the whole memory of the machine or its container, for all
    processes of the run on this machine: weights, gradients and the optimizer's state in fp32,
    then, if it is trained, with the activations of a full micro-batch.

    Args:
        trains: the model is trained, and not only grown.
    """
    model = recipe.model_at(stage)
    config = model_config(recipe, vocab_size, stage=stage)
    size = human(parameter_count(config))
    needed = human(state_bytes(recipe, config), "B")

    def refusal(available: str) -> str:
        return (
            f"out of memory: a model of {size} parameters needs {needed} for weights, gradients and"
            f" moments, {available}. Lower model.n_layer (now {model.n_layer}) or model.n_embd"
            f" (now {model.n_embd}), or train on a device with more memory"
        )

    memory = machine_memory()
    if device.type == "cpu" and memory is not None:
        if bytes_held(recipe, config) > memory:
            raise OutOfMemoryError(refusal(f"and this machine has {human(memory, 'B')} in all"))
        if trains:
            _check_processes(recipe, config, memory)
    with _out_of_memory_as(lambda _: refusal(f"more than {device} has free")):
        yield


def bytes_held(recipe: Recipe, config: GPTConfig) -> int:
    """Return the bytes of weights, gradients and the optimizer's state of one process."""
    needed = state_bytes(recipe, config)
    if recipe.is_sharded or recipe.delayed_gradients is not None:
        return needed // dist.world_size()
    return needed


def _check_processes(recipe: Recipe, config: GPTConfig, memory: int) -> None:
    """Check that all processes of the run on this machine fit into its memory.

    Raises:
        OutOfMemoryError: they do not.
    """
    train = recipe.train
    seq_len = config.seq_len
    sequences = full_micro_batch(recipe)
    dtype = "fp32"
    if train.dtype == "bf16":
        dtype = "bf16"
    needed = training_bytes(recipe, config, sequences, seq_len, dtype=dtype)
    needed += bytes_held(recipe, config) - state_bytes(recipe, config)
    processes = 1
    if dist.world_size() > 1:
        processes = environment_number("LOCAL_WORLD_SIZE", 1)
    if needed * processes <= memory:
        return
    ways = []
    if 1 <= memory // needed < processes:
        ways.append(f"--devices {memory // needed}")
    if sequences > 1:
        ways.append(f"train.micro_batch_tokens = {seq_len} (now {train.micro_batch_tokens})")
    if train.activation_checkpointing is not True:
        ways.append("train.activation_checkpointing = true")
    each = ""
    if processes > 1:
        each = f" in each of {processes} processes"
    raise OutOfMemoryError(
        f"out of memory: training on micro-batches of {sequences} x {seq_len} tokens"
        f" needs about {human(needed, 'B')}{each}, and this machine has {human(memory, 'B')} in"
        f" all\n  set {' or '.join(ways) or 'a lower model.seq_len'},"
        " or train on a device with more memory"
    )


@contextmanager
def _out_of_memory_as(message: Callable[[BaseException], str]) -> Iterator[None]:
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        by_name = isinstance(error, MemoryError | torch.OutOfMemoryError)
        if not by_name and not any(words in str(error) for words in _OUT_OF_MEMORY):
            raise
        raise OutOfMemoryError(message(error)) from None
