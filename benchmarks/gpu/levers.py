"""GPT-2 117M with one lever moved at a time, against the first part of this piece: 320 sequences a step in all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
    return recipe_for(bench, micro_batches=10)


def _with(setting: str) -> Callable[[Bench], Recipe]:
    return lambda bench: recipe_for(bench, micro_batches=10, sets=[setting])


def _sequences(sequences: int) -> Callable[[Bench], Recipe]:
    return lambda bench: recipe_for(bench, sequences=sequences, micro_batches=320 // sequences)


def _eager(bench: Bench) -> Recipe:
    recipe = _shipped(bench)
    return replace(recipe, train=replace(recipe.train, compile="off"))


def _patched(name: str, recipe: Callable[[Bench], Recipe], patch: AbstractContextManager[object], *, extra: bool = False) -> Part:
    part = rate_part(name, recipe, steps=2, extra=extra)

    def work(bench: Bench) -> Iterator[Figure]:
        with patch:
            yield from part.work(bench)

    return replace(part, work=work)


def _only(*backends: str) -> AbstractContextManager[object]:
    """Attention by these of PyTorch's kernels, at every shape."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    allowed = [getattr(SDPBackend, name) for name in backends]
    return mock.patch("efftrain_cli.training.gradient.attention_kernels", lambda device, same_shape: sdpa_kernel(allowed))


def _cuda_graphs(name: str, seconds: float, extra: bool = False) -> Part:
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

    return Part(f"CUDA graphs, {name}", work, seconds, extra=extra)


_BLOCKS = mock.patch("efftrain_cli.training.gradient.compiles_blocks", lambda recipe, n_layer: True)

PARTS = (
    rate_part("117M, 10 x 32 x 1024", _shipped, steps=2),
    _patched("117M, attention by FlashAttention only", _shipped, _only("FLASH_ATTENTION", "MATH")),
    _patched("117M, attention by cuDNN only", _shipped, _only("CUDNN_ATTENTION", "MATH")),
    rate_part("117M, micro-batches of 40", _sequences(40), steps=2),
    # In a process of its own: cuBLAS reads its part of the setting once.
    rate_part(
        "117M, deterministic", _with("train.deterministic=true"), 50, steps=2, environment={"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    ),
    _cuda_graphs("small", 30),
    rate_part("117M, micro-batches of 64 (more than 2^31 logits)", _sequences(64), steps=2, extra=True),
    rate_part("117M, micro-batches of 16", _sequences(16), steps=2, extra=True),
    rate_part("117M, fp32 residual stream", _shipped, steps=2, residual=torch.float32, extra=True),
    _patched("117M, blocks compiled one by one", _shipped, _BLOCKS, extra=True),
    rate_part("117M, eager", _eager, 30, steps=2, extra=True),
    _cuda_graphs("gpt2-117m", 60, extra=True),
    rate_part("117M, tf32", _with("train.dtype=tf32"), 60, steps=1, extra=True),
    rate_part("117M, fp32", _with("train.dtype=fp32"), 90, steps=1, extra=True),
)
