"""GPT-2 117M with one lever moved at a time, against the first part of this piece."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from unittest import mock

import torch

from benchmarks.gpu.measuring import (
    Bench,
    Figure,
    Part,
    figure,
    rate_figure,
    rate_part,
    rates,
    recipe_for,
    training,
)
from efftrain_cli.recipe.recipe import Recipe


def _shipped(bench: Bench) -> Recipe:
    return recipe_for(bench)


def _with(setting: str, micro_batches: int = 2, name: str = "gpt2-117m"):
    return lambda bench: recipe_for(bench, name, micro_batches=micro_batches, sets=[setting])


def _sequences(sequences: int):
    return lambda bench: recipe_for(
        bench, sequences=sequences, micro_batches=max(1, 64 // sequences)
    )


def _eager(bench: Bench) -> Recipe:
    recipe = _shipped(bench)
    return replace(recipe, train=replace(recipe.train, compile="off"))


def _patched(name: str, recipe, patch: AbstractContextManager[object], seconds: float = 60) -> Part:
    part = rate_part(name, recipe, seconds)

    def work(bench: Bench) -> Iterator[Figure]:
        with patch:
            yield from part.work(bench)

    return Part(name, work, seconds)


def _only(*backends: str) -> AbstractContextManager[object]:
    """Attention by these of PyTorch's kernels, at every shape."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    allowed = [getattr(SDPBackend, name) for name in backends]
    return mock.patch(
        "efftrain_cli.training.gradient.attention_kernels",
        lambda device, same_shape: sdpa_kernel(allowed),
    )


def _cuda_graphs(name: str) -> Part:
    """One micro-batch a step: a second replay would write into the first one's gradients."""

    def work(bench: Bench) -> Iterator[Figure]:
        import torch._inductor.config as inductor

        for graphs in (False, True) if bench.device.type == "cuda" else (False,):
            with inductor.patch({"triton.cudagraphs": True}) if graphs else nullcontext():
                recipe = recipe_for(bench, name, micro_batches=1)
                label = f"{name}, one micro-batch, {'with' if graphs else 'without'} CUDA graphs"
                yield rate_figure(label, rates(bench, training(bench, recipe)))
        if bench.device.type != "cuda":
            yield figure("CUDA graphs", None, "", "on CUDA only")

    return Part(f"CUDA graphs, {name}", work, 80)


_BLOCKS = mock.patch("efftrain_cli.training.gradient.compiles_blocks", lambda recipe, n_layer: True)

PARTS = (
    rate_part("117M, 2 x 32 x 1024", _shipped),
    _patched("117M, attention by FlashAttention only", _shipped, _only("FLASH_ATTENTION", "MATH")),
    _patched("117M, attention by cuDNN only", _shipped, _only("CUDNN_ATTENTION", "MATH")),
    rate_part("117M, micro-batches of 40", _sequences(40)),
    rate_part("117M, micro-batches of 64 (more than 2^31 logits)", _sequences(64)),
    rate_part("117M, micro-batches of 16", _sequences(16)),
    rate_part("117M, fp32 residual stream", _shipped, residual=torch.float32),
    # In a process of its own: cuBLAS reads its part of the setting once.
    rate_part(
        "117M, deterministic", _with("train.deterministic=true"), CUBLAS_WORKSPACE_CONFIG=":4096:8"
    ),
    _patched("117M, blocks compiled one by one", _shipped, _BLOCKS, 40),
    rate_part("117M, eager", _eager, 20),
    _cuda_graphs("gpt2-117m"),
    _cuda_graphs("small"),
    rate_part("117M, fp32", _with("train.dtype=fp32"), 90),
    rate_part("117M, tf32", _with("train.dtype=tf32"), 60),
)
