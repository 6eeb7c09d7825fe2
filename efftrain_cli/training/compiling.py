"""torch.compile, with every graph counted: a change of shape may cost one more graph, never a silent fall back to eager."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from efftrain_cli.model.gpt import GPT
from efftrain_cli.recipe.recipe import Recipe

LossSum = Callable[[Tensor, Tensor, Sequence[bool] | None, Tensor | None], Tensor]
"""(tokens, targets, gates, scales) -> summed cross-entropy of a micro-batch, nats, 0-d fp32."""

GRAPH_LIMIT = 16
"""Graphs that one function may need before compilation is called a fault. Fixed shapes need 1 and evaluation 1 more;
lengths that grow are one dynamic graph, with separate ones where a dimension is 1."""

WHOLE_MODEL_BLOCKS = 24
"""Deepest model that is compiled as one graph. Compilation takes time in proportion to the blocks, and deep models are wide
ones, where fusing across blocks matters least."""


def compiles(recipe: Recipe, device: torch.device) -> bool:
    """Whether training is compiled: "auto" means on CUDA only, as on CPUs it takes half a minute and gains nothing."""
    return recipe.train.compile == "on" or (recipe.train.compile == "auto" and device.type == "cuda")


def compiles_blocks(recipe: Recipe, n_layer: int) -> bool:
    """Whether each block is compiled rather than the whole model: with layer dropping, since a graph per pattern of blocks would be one
    for each of 2^n_layer, and in deep models. All blocks share one graph."""
    return recipe.progressive_layer_drop is not None or n_layer > WHOLE_MODEL_BLOCKS


def full_micro_batch(recipe: Recipe) -> tuple[int, int] | None:
    """(sequences, seq_len) of the micro-batches of a full step, where they are all alike; None where they are not, or
    where SimiGrad decides the batch."""
    train, seq_len = recipe.train, recipe.model.seq_len
    pieces = min(train.batch_size, -(-train.batch_size * seq_len // train.micro_batch_tokens))
    if recipe.simigrad is not None or train.batch_size % pieces:
        return None
    return train.batch_size // pieces, seq_len


def shapes_vary(recipe: Recipe) -> bool:
    """Whether micro-batches change their shape during the run."""
    return (
        recipe.seq_len_warmup is not None
        or recipe.batch_size_warmup is not None
        or full_micro_batch(recipe) is None
    )


def compile_whole(recipe: Recipe, loss_sum: LossSum, backend: str = "inductor") -> LossSum:
    """`loss_sum` compiled as a whole, loss included: the softmax then stays in registers.

    The shape of a full step has a graph of its own, the same as that of a run without any warmup; every other shape goes through one
    graph with dynamic shapes. torch.compile keeps its graphs by function, hence two functions.
    """
    _allow_no_fall_back()
    full_shape = full_micro_batch(recipe)

    def loss_at_full_shape(
        tokens: Tensor, targets: Tensor, gates: Sequence[bool] | None, scales: Tensor | None
    ) -> Tensor:
        return loss_sum(tokens, targets, gates, scales)

    def loss_at_any_shape(
        tokens: Tensor, targets: Tensor, gates: Sequence[bool] | None, scales: Tensor | None
    ) -> Tensor:
        return loss_sum(tokens, targets, gates, scales)

    at_full_shape = torch.compile(loss_at_full_shape, backend=backend)
    at_any_shape = torch.compile(loss_at_any_shape, backend=backend)

    def compiled(tokens: Tensor, targets: Tensor, gates: Sequence[bool] | None, scales: Tensor | None) -> Tensor:
        if tokens.shape == full_shape:
            return at_full_shape(tokens, targets, gates, scales)
        for tensor in (tokens, targets):
            torch._dynamo.maybe_mark_dynamic(tensor, 0)
            torch._dynamo.maybe_mark_dynamic(tensor, 1)
        return at_any_shape(tokens, targets, gates, scales)

    return compiled


def compile_blocks(recipe: Recipe, model: GPT, backend: str = "inductor") -> Callable[[Tensor, Tensor], Tensor]:
    """Compiles the model's blocks in place, and returns its compiled `head_loss_sum`. Python chooses among the blocks, whose scale
    is a 0-d tensor."""
    _allow_no_fall_back()
    dynamic = True if shapes_vary(recipe) else None
    for block in model.h:
        block.compile(backend=backend, dynamic=dynamic)
    return torch.compile(model.head_loss_sum, backend=backend, dynamic=dynamic)


def _allow_no_fall_back() -> None:
    import torch._dynamo.config as dynamo_config

    dynamo_config.recompile_limit = GRAPH_LIMIT
    dynamo_config.fail_on_recompile_limit_hit = True


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
