"""Which kernels PyTorch may choose from: attention's order of preference, and deterministic ones only."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext

import torch


def attention_kernels(device: torch.device, same_shape: bool) -> AbstractContextManager[None]:
    """The order in which attention's kernels are tried on a Hopper GPU; PyTorch's own order elsewhere. Around the backward pass
    too, as activation checkpointing chooses again there.

    PyTorch prefers FlashAttention 2; on Hopper cuDNN's kernels have been reported faster at training shapes
    (huggingface/transformers#48163). cuDNN makes a plan for every shape, so where the shape keeps changing it is left out.

    Args:
        same_shape: one shape is asked for again and again.
    """
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        return nullcontext()
    from torch.nn.attention import SDPBackend, sdpa_kernel

    order = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    if same_shape:
        order.insert(0, SDPBackend.CUDNN_ATTENTION)
    return sdpa_kernel(order, set_priority=True)


def choose_determinism(deterministic: bool) -> None:
    """Lets PyTorch use only kernels that repeat bit for bit, or any kernels; for the whole process.

    Call it before the first matrix product: cuBLAS reads its setting once. cuDNN's attention is not deterministic, so
    FlashAttention takes its place.
    """
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if torch.are_deterministic_algorithms_enabled() == deterministic:  # saying so again would import the compiler
        return
    torch.use_deterministic_algorithms(deterministic)
    # Our code reads no memory that it has not written; filling it first would cost a pass over every new tensor.
    torch.utils.deterministic.fill_uninitialized_memory = not deterministic
