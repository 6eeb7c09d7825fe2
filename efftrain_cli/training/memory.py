"""The memory that training needs: an estimate before it, and the setting to change if it runs
out."""

from __future__ import annotations

import resource
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
from efftrain_cli.plan.cost import sequences_at_once, state_bytes, training_bytes
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
    if not status.exists():  # macOS
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # On Linux, getrusage begins with the peak of the parent process.
    lines = status.read_text().splitlines()
    line = next(line for line in lines if line.startswith("VmHWM"))
    return 1024 * int(line.split()[1])


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
        sequences_at_once(recipe),
        config.seq_len,
        dtype=dtype,
        compiled=compiled,
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

    def message(error: BaseException) -> str:
        cause = "MemoryError"
        if str(error):
            cause = str(error).splitlines()[0]
        return (
            "out of memory in the largest micro-batch planned,"
            f" {sequences} sequences of {seq_len} tokens: {cause}\n"
            f"  {_smaller_batch(recipe, sequences, sequences // 2, seq_len)}"
        )

    with _out_of_memory_as(message):
        yield


def _smaller_batch(recipe: Recipe, sequences: int, fewer: int, seq_len: int) -> str:
    """Say how a micro-batch takes less memory; of more than one of `sequences`, by `fewer`."""
    train = recipe.train
    ways = []
    if sequences > 1:
        note = ""
        if any(method.cut_matters() for method in recipe.methods.values()):
            note = ", another result by its method"
        tokens = f"{fewer * seq_len} (now {train.micro_batch_tokens}{note})"
        ways.append(f"train.micro_batch_tokens = {tokens}")
    if train.activation_checkpointing is not True:
        ways.append("train.activation_checkpointing = true (slower, much less memory)")
    if sequences == 1:
        ways.append("a lower model.seq_len or a smaller model (another result)")
    return f"set {', or '.join(ways)}"


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
    CPU is measured first, for all processes of the run on this machine, against the whole memory of
    the machine or its container: weights, gradients and the optimizer's state in fp32, and if it is
    trained the activations of a full micro-batch.

    Args:
        trains: the model is trained, and not only grown.
    """
    config = model_config(recipe, vocab_size, stage=stage)
    model = f"a model of {human(parameter_count(config))} parameters"
    memory = machine_memory()
    if device.type == "cpu" and memory is not None:
        _check_machine(recipe, config, model, memory, trains)

    def message(_: BaseException) -> str:
        needed = human(state_bytes(recipe, config), "B")
        return (
            f"out of memory: {model} needs {needed} for weights, gradients and moments, more than"
            f" {device} has free\n  {_smaller(config)}, or train on a device with more memory"
        )

    with _out_of_memory_as(message):
        yield


def _smaller(config: GPTConfig) -> str:
    return f"lower model.n_layer (now {config.n_layer}) or model.n_embd (now {config.n_embd})"


def _check_machine(
    recipe: Recipe, config: GPTConfig, model: str, memory: int, trains: bool
) -> None:
    """Check that all processes of the run on this machine fit into its memory, bytes.

    Raises:
        OutOfMemoryError: they do not.
    """
    seq_len = config.seq_len
    sequences = sequences_at_once(recipe)
    state = state_bytes(recipe, config)
    held = state
    if recipe.is_sharded or recipe.delayed_gradients is not None:
        held //= dist.world_size()
    needed = held
    with_batches = ""
    if trains:
        dtype = "bf16" if recipe.train.dtype == "bf16" else "fp32"
        needed += training_bytes(recipe, config, sequences, seq_len, dtype=dtype) - state
        with_batches = f" on micro-batches of {sequences} x {seq_len} tokens"
    processes = 1
    each = ""
    if dist.world_size() > 1:
        processes = environment_number("LOCAL_WORLD_SIZE", 1)
        each = f" in each of {processes} processes"
    if needed * processes <= memory:
        return

    fix = _smaller_batch(recipe, sequences, 1, seq_len)
    if held > memory:
        fix = _smaller(config)
    if 1 <= memory // needed < processes:
        fix = f"set --devices {memory // needed}, or {fix}"
    raise OutOfMemoryError(
        f"out of memory: {model}{with_batches} needs about {human(needed, 'B')}{each},"
        f" and this machine has {human(memory, 'B')} in all\n"
        f"  {fix}, or train on a device with more memory"
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
