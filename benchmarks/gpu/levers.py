"""GPT-2 117M with one lever moved at a time, against the first part of this piece."""

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

Patch = AbstractContextManager[object]


def _shipped(bench: Bench) -> Recipe:
    return recipe_for(bench)


def _deterministic(bench: Bench) -> Recipe:
    return recipe_for(bench, sets=["train.deterministic=true"])


def _eager(bench: Bench) -> Recipe:
    recipe = _shipped(bench)
    return replace(recipe, train=replace(recipe.train, compile="off"))


def _patched(name: str, recipe: Callable[[Bench], Recipe], patch: Patch) -> Part:
    part = rate_part(name, recipe, 50)

    def work(bench: Bench) -> Iterator[Figure]:
        with patch:
            yield from part.work(bench)

    return replace(part, work=work)


def _only(*backends: str) -> Patch:
    """Attention by these of PyTorch's kernels, at every shape."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    allowed = [getattr(SDPBackend, name) for name in backends]
    return mock.patch(
        "efftrain_cli.training.gradient.attention_kernels",
        lambda device, same_shape: sdpa_kernel(allowed),
    )


def cuda_graphs(bench: Bench) -> Iterator[Figure]:
    """One micro-batch a step: a second replay would write into the first one's gradients."""
    import torch._inductor.config as inductor

    for graphs in (False, True) if bench.device.type == "cuda" else (False,):
        with inductor.patch({"triton.cudagraphs": True}) if graphs else nullcontext():
            recipe = recipe_for(bench, "small", micro_batches=1)
            label = f"small, one micro-batch, {'with' if graphs else 'without'} CUDA graphs"
            yield rate_figure(label, rates(bench, training(bench, recipe)))
    if bench.device.type != "cuda":
        yield figure("CUDA graphs", None, "", "on CUDA only")


_BLOCKS = mock.patch("efftrain_cli.training.objective.compiles_blocks", lambda *_: True)

PARTS = (
    rate_part("117M, 2 x 32 x 1024", _shipped, 50),
    _patched("117M, attention by FlashAttention only", _shipped, _only("FLASH_ATTENTION", "MATH")),
    rate_part("117M, fp32 residual stream", _shipped, 50, residual=torch.float32),
    # In a process of its own: cuBLAS reads its part of the setting once.
    rate_part("117M, deterministic", _deterministic, 55, CUBLAS_WORKSPACE_CONFIG=":4096:8"),
    _patched("117M, blocks compiled one by one", _shipped, _BLOCKS),
    rate_part("117M, eager", _eager, 15),
    Part("CUDA graphs, small", cuda_graphs, 40),
)
