"""torch.compile, with every graph counted: a change of shape may cost one more graph, never a
silent fallback to eager code. If the compiler itself fails, `train.compile = "auto"` trains
uncompiled and prints a warning."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from efftrain_cli.foundation.errors import UsageError
from efftrain_cli.foundation.step import StepPlan
from efftrain_cli.foundation.tensors import Tensors
from efftrain_cli.model.gpt import GPT, Gates, RunBlock, run_eagerly
from efftrain_cli.plan.plan import accumulation_steps, micro_batch_multiple
from efftrain_cli.recipe.recipe import Recipe

Objective = Callable[[Tensor, Tensor, Gates, Tensor | None], Tensors]
"""(tokens, targets, gates, scales) -> losses by name, fp32, summed over the micro-batch's targets:
"ce", the cross-entropy in nats, 0-d, first, then a method's terms, whose shape and weights the
method defines (a mean counts as many times as there are targets)."""


Backend = Callable[[torch.fx.GraphModule, list[Tensor]], Callable[..., Any]]
"""Function that compiles a graph for torch.compile."""

GRAPH_LIMIT = 16
"""Graphs that one function may need before compilation is called a fault. Fixed shapes need 1 and
evaluation 1 more; lengths that grow are one dynamic graph, with separate ones where a dimension is
1."""

WHOLE_MODEL_BLOCKS = 24
"""Deepest model that is compiled as one graph. Compilation takes time in proportion to the blocks,
and deep models are wide ones, where fusing across blocks matters least."""


_FAULTS: list[str] = []
"""Errors of the compiler in this process under "auto", which then compiles nothing more."""


def may_compile(recipe: Recipe, device: torch.device) -> bool:
    """Return whether training is compiled unless the compiler fails: the same on all ranks.

    "auto" compiles on CUDA only: on CPUs it takes half a minute and gains nothing.
    """
    if recipe.train.compile == "auto":
        return device.type == "cuda"
    return recipe.train.compile == "on"


def compiles(recipe: Recipe, device: torch.device) -> bool:
    """Return whether training is compiled: with "auto" it is not once the compiler has failed in
    this process."""
    gave_up = recipe.train.compile == "auto" and bool(_FAULTS)
    return may_compile(recipe, device) and not gave_up


@contextmanager
def compiler_errors() -> Iterator[None]:
    """Turn a failure of the compiler into a UsageError that names the fix.

    Running out of memory while compiling stays what it is.
    """
    try:
        yield
    except RuntimeError as error:
        if "torch._dynamo" not in sys.modules:
            raise
        from torch._dynamo.exc import BackendCompilerFailed, TorchDynamoException

        if not isinstance(error, TorchDynamoException):
            raise
        cause: BaseException = error
        if isinstance(error, BackendCompilerFailed):
            cause = error.inner_exception
        if isinstance(cause, torch.OutOfMemoryError):
            raise cause from None
        first_line = str(cause).strip().partition("\n")[0]
        raise UsageError(
            f"torch.compile failed: {type(cause).__name__}: {first_line}\n"
            "  install a C compiler and Python's headers if they are missing"
            " (Debian, Ubuntu: gcc g++ python3-dev),\n"
            '  or train uncompiled: --set train.compile="off"'
        ) from None


def compiles_blocks(recipe: Recipe, n_layer: int, overlaps: bool = False) -> bool:
    """Return whether each block is compiled, not the whole model. All blocks share one graph.

    It is so with layer dropping, since a graph per pattern of blocks would be one for each of
    2^n_layer; in deep models; and if the sum of gradients `overlaps` the backward pass: autograd
    sees a compiled graph as one node, whose gradients all arrive at its end.
    """
    # Delayed gradients differentiate embedding and head apart.
    apart = overlaps or recipe.delayed_gradients is not None
    return apart or "blocks" in recipe.varies or n_layer > WHOLE_MODEL_BLOCKS


def full_micro_batch(recipe: Recipe, ranks: int = 1) -> tuple[int, int] | None:
    """Return (sequences, seq_len) of a full step's micro-batches on so many ranks; None if they are
    not all alike.

    SimiGrad's batches are multiples of its quantum. Their micro-batches are full ones if that is
    always a multiple of the micro-batches that make up a step.
    """
    train = recipe.train
    seq_len = recipe.model.seq_len
    if recipe.simigrad is not None:
        fits = train.micro_batch_tokens // seq_len
        quantum = recipe.simigrad.quantum
        if fits and quantum % (micro_batch_multiple(recipe, ranks) * fits) == 0:
            return fits, seq_len
        return None
    micro_batches = accumulation_steps(recipe, train.batch_size, seq_len, ranks)
    if train.batch_size % micro_batches:
        return None
    return train.batch_size // micro_batches, seq_len


def micro_batch_shapes(plan: StepPlan) -> frozenset[tuple[int, int]]:
    """Return (sequences, seq_len) of the step's micro-batches: one shape, or two that differ by a
    sequence."""
    fewest, more = divmod(plan.batch_size, plan.accumulation_steps)
    return frozenset({(fewest, plan.seq_len), (fewest + bool(more), plan.seq_len)})


def middle_micro_batch(recipe: Recipe) -> tuple[int, int] | None:
    """Return (sequences, seq_len) with as many tokens as a full micro-batch, at half the full
    length; None if lengths stay or are too short."""
    warmup = recipe.seq_len_warmup
    full = recipe.model.seq_len
    seq_len = full // 2
    if warmup is None or seq_len < 2:
        return None
    batch_size = warmup.batch_size_at(seq_len, full, recipe.train.batch_size)
    sequences = min(batch_size, recipe.train.micro_batch_tokens // seq_len)
    if sequences < 2:
        return None
    return sequences, seq_len


def compile_whole(
    recipe: Recipe,
    objective: Objective,
    backend: str | Backend = "inductor",
    ranks: int = 1,
) -> Objective:
    """Compile `objective` as a whole, loss included: the softmax then stays in registers."""
    return _by_shape(
        recipe,
        ranks,
        backend,
        eager=objective,
        full=lambda *arguments: objective(*arguments),
        other=lambda *arguments: objective(*arguments),
    )


@dataclass(frozen=True)
class Parts:
    """The functions that compute a model's blocks and head."""

    block: RunBlock
    """(block, x, scale) -> the block's output; `scale` is a 0-d tensor or None."""
    head_loss_sum: Callable[[Tensor, Tensor], Tensor]
    """(residual stream, targets) -> summed cross-entropy."""


def compile_parts(
    recipe: Recipe,
    model: GPT,
    backend: str | Backend = "inductor",
    ranks: int = 1,
) -> Parts:
    """Compile the model's block and head, for `GPT.run_blocks` to call; Python chooses among the
    blocks."""
    block = _by_shape(
        recipe,
        ranks,
        backend,
        eager=run_eagerly,
        full=lambda *arguments: run_eagerly(*arguments),
        other=lambda *arguments: run_eagerly(*arguments),
    )
    head_loss_sum = _by_shape(
        recipe,
        ranks,
        backend,
        eager=model.head_loss_sum,
        full=lambda *arguments: model.head_loss_sum(*arguments),
        other=lambda *arguments: model.head_loss_sum(*arguments),
    )
    return Parts(block, head_loss_sum)


def _by_shape(
    recipe: Recipe,
    ranks: int,
    backend: str | Backend,
    *,
    eager: Callable[..., Any],
    full: Callable[..., Any],
    other: Callable[..., Any],
) -> Callable[..., Any]:
    """Return a function that computes `eager` compiled, or as it is once the compiler has failed
    under "auto".

    The shape of a full step has a graph of its own, the same as that of a run without any warmup;
    every other shape goes through one graph with dynamic shapes. torch.compile keeps its graphs by
    the code of a function, hence `full` and `other`, which both call `eager`. It does not look at
    the kernels that attention may choose from, so what `attention_kernels` allows for one kind of
    shape is not forced on the other.
    """
    import torch._dynamo.config as dynamo_config
    import torch._functorch.config as functorch_config

    # More graphs than that are an error, not a silent fallback.
    dynamo_config.recompile_limit = GRAPH_LIMIT
    dynamo_config.fail_on_recompile_limit_hit = True
    # Backward graphs are compiled with their forward ones: if either fails, nothing has been
    # computed yet.
    functorch_config.force_non_lazy_backward_lowering = True
    at_full_shape = torch.compile(full, backend=backend, dynamic=False)
    at_any_shape = torch.compile(other, backend=backend)
    full_shape = full_micro_batch(recipe, ranks)
    falls_back = recipe.train.compile == "auto"

    def compute(*arguments: object) -> Any:
        if _FAULTS and falls_back:
            return eager(*arguments)
        # (sequences, seq_len, ...); scales have one dimension or none.
        tensors = [x for x in arguments if isinstance(x, Tensor) and x.dim() > 1]
        compiled = at_full_shape
        if tensors[0].shape[:2] != full_shape:
            compiled = at_any_shape
            for tensor in tensors:
                torch._dynamo.maybe_mark_dynamic(tensor, 0)
                torch._dynamo.maybe_mark_dynamic(tensor, 1)
        try:
            with compiler_errors():
                return compiled(*arguments)
        except UsageError as error:
            if not falls_back:
                raise
            _FAULTS.append(str(error))
            print(
                f"warning: {error}\n"
                '  train.compile = "auto" goes on uncompiled:'
                " the loss is the same within rounding, but a step takes\n"
                "  1.3 to 1.9 times as long (published figures) and more memory",
                file=sys.stderr,
            )
            return eager(*arguments)

    return compute


class MiddleFirst:
    """A compiled objective that computes a micro-batch of the middle length before its first one of
    another length.

    The compiler fits the kernels for all lengths but the full one to the first that it sees.
    """

    def __init__(
        self,
        recipe: Recipe,
        objective: Objective,
        ranks: int = 1,
    ) -> None:
        self._objective = objective
        self._full_shape = full_micro_batch(recipe, ranks)
        self._middle = middle_micro_batch(recipe)

    def __call__(
        self,
        tokens: Tensor,
        targets: Tensor,
        gates: Gates,
        scales: Tensor | None,
    ) -> Tensors:
        if self._middle is not None and tokens.shape != self._full_shape:
            middle = tokens.new_zeros(self._middle)
            self._middle = None
            self._objective(middle, middle.clone(), gates, scales)
        return self._objective(tokens, targets, gates, scales)


def freeze_objects() -> None:
    """Exclude all current objects from garbage collection.

    A compiler's graphs are millions of objects that stay; scanning them takes half a second each
    time.
    """
    gc.collect()
    gc.freeze()


def compiled_graphs() -> int:
    """Count the graphs that this process has compiled so far."""
    if "torch._dynamo" not in sys.modules:
        return 0
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"]


def compile_seconds() -> float:
    """Return the seconds that this process has spent compiling so far."""
    if "torch._dynamo" not in sys.modules:
        return 0.0
    from torch._dynamo.utils import calculate_time_spent

    return calculate_time_spent().get("total_wall_time", 0.0)
