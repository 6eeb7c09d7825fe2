"""What PyTorch may choose from: kernels of attention, TF32, deterministic kernels, freed memory."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def attention_kernels(device: torch.device, same_shape: bool) -> Iterator[None]:
    """Limit the kernels that attention may choose from, where shapes keep changing.

    Enter it around the backward pass too, as activation checkpointing chooses again there. Compiled
    code keeps the choice of its compilation, so each kind of shape needs a graph of its own.

    PyTorch itself prefers cuDNN where that is fast and safe (sm90 and sm100 from 2.11 on), and its
    choice stands where one shape is asked for again and again (`same_shape`). cuDNN makes a plan
    for every shape, so where shapes keep changing it is left out.
    """
    if device.type != "cuda" or same_shape:
        yield
        return
    enabled = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(enabled)


def choose_matmul_precision(dtype: str, device: torch.device) -> None:
    """Let fp32 matrix products on CUDA round their factors to TF32 (10 bits of mantissa) only if
    `dtype` is "tf32".

    It holds for the whole process.
    """
    if device.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = dtype == "tf32"


def choose_determinism(deterministic: bool) -> None:
    """Let PyTorch use only kernels that repeat bit for bit, or any kernels; for the whole process.

    Call it before the first matrix product: cuBLAS reads its setting once. cuDNN's attention is not
    deterministic, so FlashAttention takes its place.
    """
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # Saying so again would import the compiler.
    if torch.are_deterministic_algorithms_enabled() == deterministic:
        return
    torch.use_deterministic_algorithms(deterministic)
    # Our code reads no memory that it has not written; filling it first would cost a pass over
    # every new tensor.
    torch.utils.deterministic.fill_uninitialized_memory = not deterministic  # type: ignore[attr-defined]


def keep_freed_memory(device: torch.device) -> None:
    """Let a CPU's allocator keep what a step frees for the next step; for the whole process.

    glibc would give large tensors and the top of its heap back to the system, which maps and clears
    them again in the next step, page by page: 6 to 15 % of a step.
    """
    if device.type != "cpu":
        return
    trim_threshold, mmap_max = -1, -4
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:  # another C library
        return
    mallopt(trim_threshold, 2**31 - 1)
    mallopt(mmap_max, 0)
