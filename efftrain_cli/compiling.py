"""torch.compile, with every graph counted: a change of shape may cost one more graph, never a silent fall back to eager."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from efftrain_cli.model import GPT
from efftrain_cli.recipe import Recipe

GRAPH_LIMIT = 16
"""Graphs that one function may need before compilation is called a fault. Fixed shapes need 1 and evaluation 1 more;
lengths that grow are one dynamic graph, with separate ones where a dimension is 1."""


def compiles(recipe: Recipe, device: torch.device) -> bool:
    """Whether training is compiled: "auto" means on CUDA only, as on CPUs it takes half a minute and gains nothing."""
    return recipe.train.compile == "on" or (recipe.train.compile == "auto" and device.type == "cuda")


def shapes_vary(recipe: Recipe) -> bool:
    """Whether micro-batches change their shape during the run, so that graphs must be dynamic from the start."""
    return (
        recipe.seq_len_warmup is not None
        or recipe.batch_size_warmup is not None
        or recipe.simigrad is not None
        or (recipe.train.batch_size * recipe.model.seq_len) % recipe.train.micro_batch_tokens != 0
    )


def compile_loss_sum(
    recipe: Recipe,
    model: GPT,
    loss_sum: Callable[[Tensor, Tensor, Sequence[bool] | None, Tensor | None], Tensor],
    backend: str = "inductor",
) -> Callable[[Tensor, Tensor, Sequence[bool] | None, Tensor | None], Tensor]:
    """`loss_sum` compiled.

    Whole, loss included, where every block runs: the softmax then stays in registers. With layer dropping each block is
    compiled and the choice of blocks is left to Python, since a graph per pattern of blocks would be one for each of 2^L;
    the blocks share one graph, and their scale is a 0-d tensor.
    """
    import torch._dynamo.config as dynamo_config

    dynamo_config.recompile_limit = GRAPH_LIMIT
    dynamo_config.fail_on_recompile_limit_hit = True
    vary = shapes_vary(recipe)

    if recipe.progressive_layer_drop is not None:
        for block in model.h:
            block.compile(backend=backend, dynamic=True if vary else None)
        return loss_sum

    compiled = torch.compile(loss_sum, backend=backend)

    def compiled_loss_sum(
        tokens: Tensor, targets: Tensor, gates: Sequence[bool] | None, scales: Tensor | None
    ) -> Tensor:
        if vary:
            for tensor in (tokens, targets):
                torch._dynamo.maybe_mark_dynamic(tensor, 0)
                torch._dynamo.maybe_mark_dynamic(tensor, 1)
        return compiled(tokens, targets, gates, scales)

    return compiled_loss_sum


def compiled_graphs() -> int:
    """Graphs compiled by this process so far."""
    if "torch._dynamo" not in sys.modules:
        return 0
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"]


def compile_seconds() -> float:
    """Seconds that this process has spent compiling so far."""
    if "torch._dynamo" not in sys.modules:
        return 0.0
    from torch._dynamo.utils import calculate_time_spent

    return calculate_time_spent().get("total_wall_time", 0.0)
