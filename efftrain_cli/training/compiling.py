"""torch.compile, with every graph counted: a change of shape may cost one more graph, never a
silent fallback to eager code. If the compiler itself fails, `train.compile = "auto"` trains
uncompiled and prints a warning."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from functools import cache
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor

from efftrain_cli.foundation.console import say
from efftrain_cli.foundation.errors import UsageError
from efftrain_cli.foundation.signals import abandonable
from efftrain_cli.foundation.step import StepPlan
from efftrain_cli.plan.plan import accumulation_steps, micro_batch_multiple
from efftrain_cli.recipe.recipe import Recipe
from efftrain_cli.training import dist

GRAPH_LIMIT = 16
"""Graphs that one function may need before compilation is called a fault. Fixed shapes need 1;
lengths that grow are one dynamic graph, with separate ones where a dimension is 1."""
WHOLE_MODEL_BLOCKS = 24
"""Deepest model that is compiled as one graph. Compilation takes time in proportion to the blocks,
and deep models are wide ones, where fusing across blocks matters least."""
BACKEND = "inductor"
_FAULTS: list[str] = []
"""Errors of the compiler in this process under "auto", which then compiles nothing more."""

Shape = tuple[int, int]
"""(sequences, seq_len) of a micro-batch."""


def compiles(recipe: Recipe, device: torch.device) -> bool:
    """Return whether training is compiled, unless the compiler fails.

    "auto" compiles on CUDA only: on CPUs it takes half a minute and gains nothing.
    """
    if recipe.train.compile == "auto":
        return device.type == "cuda" and not _FAULTS
    return recipe.train.compile == "on"


def compiles_blocks(recipe: Recipe, n_layer: int) -> bool:
    """Return whether each block is compiled, not the whole model. All blocks share one graph.

    It is so with layer dropping, since a graph per pattern of blocks would be one for each of
    2^n_layer; in deep models; and on several ranks: autograd sees a compiled graph as one node,
    whose gradients all arrive at its end, too late to be sent during the pass. Ouroboros
    differentiates embedding and head apart.
    """
    apart = dist.world_size() > 1 or recipe.delayed_gradients is not None
    return apart or "blocks" in recipe.varies or n_layer > WHOLE_MODEL_BLOCKS


def full_micro_batch(recipe: Recipe, ranks: int) -> Shape | None:
    """Return the shape of a full step's micro-batches; None if they are not all alike.

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


def micro_batch_shapes(plan: StepPlan) -> frozenset[Shape]:
    """Return the shapes of the step's micro-batches: one, or two that differ by a sequence."""
    fewest, more = divmod(plan.batch_size, plan.accumulation_steps)
    return frozenset({(fewest, plan.seq_len), (fewest + bool(more), plan.seq_len)})


def by_shape(
    recipe: Recipe,
    function: Callable[..., Any],
    full_shape: Shape | None,
) -> Callable[..., Any]:
    """Return `function` compiled, or as it is once the compiler has failed under "auto".

    The shape of a full step has a graph of its own, the same as that of a run without any warmup;
    every other shape goes through one graph with dynamic shapes. So what `attention_kernels` allows
    for one kind of shape is not forced on the other. A micro-batch's shape is that of the first
    argument with two dimensions or more. Calls with keywords, which look inside, are not compiled.
    """
    import torch._dynamo.config as dynamo_config
    import torch._functorch.config as functorch_config
    from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

    # More graphs than that are an error, not a silent fallback.
    dynamo_config.recompile_limit = GRAPH_LIMIT
    dynamo_config.fail_on_recompile_limit_hit = True
    # Backward graphs are compiled with their forward ones: if either fails, nothing has been
    # computed yet.
    functorch_config.force_non_lazy_backward_lowering = True
    at_full_shape = torch.compile(_twin(function, "full"), backend=BACKEND, dynamic=False)
    at_any_shape = torch.compile(_twin(function, "any"), backend=BACKEND)

    def compute(*arguments: Any, **options: Any) -> Any:
        if _FAULTS or options:
            return function(*arguments, **options)
        batched = [x for x in arguments if isinstance(x, Tensor) and x.dim() > 1]
        compiled = at_full_shape
        if batched[0].shape[:2] != full_shape:
            compiled = at_any_shape
            for tensor in batched:
                torch._dynamo.maybe_mark_dynamic(tensor, 0)
                torch._dynamo.maybe_mark_dynamic(tensor, 1)
        try:
            if dist.world_size() > 1:  # the others would wait for this rank
                return compiled(*arguments)
            # A compilation may take minutes, and changes nothing of the state.
            with abandonable():
                return compiled(*arguments)
        except (TorchDynamoException, FailOnRecompileLimitHit) as error:
            _note_fault(recipe, error)
            return function(*arguments)

    return compute


@cache
def _code_of_its_own(code: CodeType, name: str) -> CodeType:
    return code.replace(co_name=name)


def _twin(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return a copy of a function with graphs of its own: torch.compile keeps them by code object,
    and those of an earlier training of this process are found again."""
    assert isinstance(function, FunctionType)
    return FunctionType(
        _code_of_its_own(function.__code__, name),
        function.__globals__,
        name,
        function.__defaults__,
        function.__closure__,
    )


def _note_fault(recipe: Recipe, error: Exception) -> None:
    """Warn under "auto" that training goes on uncompiled.

    Raises:
        UsageError: under "on".
    """
    cause = getattr(error, "inner_exception", error)
    if isinstance(cause, torch.OutOfMemoryError):
        raise cause
    first_line = str(cause).strip().partition("\n")[0]
    message = f"torch.compile failed: {type(cause).__name__}: {first_line}"
    if recipe.train.compile == "on":
        raise UsageError(
            f"{message}\n  install a C compiler and Python's headers if they are missing"
            " (Debian, Ubuntu: gcc g++ python3-dev),\n"
            '  or train uncompiled, with another --name: --set train.compile="off"'
        ) from error
    _FAULTS.append(message)
    say(
        f"warning: {message}\n"
        '  train.compile = "auto" goes on uncompiled: the loss is the same within rounding,'
        " but a step takes\n  1.3 to 1.9 times as long (published figures) and more memory"
    )


def middle_micro_batch(recipe: Recipe) -> list[Shape]:
    """Return the shape that has as many tokens as a full micro-batch, at half the full length; none
    if lengths stay or are too short.

    The compiler fits the kernels for all lengths but the full one to the first that it sees, which
    should be of this shape.
    """
    warmup = recipe.seq_len_warmup
    full = recipe.model.seq_len
    seq_len = full // 2
    if warmup is None or seq_len < 2:
        return []
    batch_size = warmup.batch_size_at(seq_len, full, recipe.train.batch_size)
    sequences = min(batch_size, recipe.train.micro_batch_tokens // seq_len)
    if sequences < 2:
        return []
    return [(sequences, seq_len)]


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
