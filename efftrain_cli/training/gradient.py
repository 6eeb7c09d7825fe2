"""A step's gradient: forward and backward passes over its micro-batches, summed over the ranks.

This page is the plain accumulation, with the two methods that change it: blocks that are skipped
(layer dropping) and sums of two halves apart (SimiGrad). Ouroboros has pages of its own, `delay.py`
and `ring.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, cast

import torch
from torch import Tensor
from torch.profiler import record_function

from efftrain_cli.foundation.signals import Stop, never
from efftrain_cli.foundation.step import Batch, StepPlan, StepResult
from efftrain_cli.foundation.tensors import Tensors
from efftrain_cli.methods.simigrad import Dots, half_dots
from efftrain_cli.model.flops import flops_per_token
from efftrain_cli.model.gpt import Gates, GPTConfig
from efftrain_cli.model.kernels import (
    attention_kernels,
    choose_determinism,
    choose_matmul_precision,
    keep_freed_memory,
)
from efftrain_cli.optim.tensors import take_gradients
from efftrain_cli.recipe.recipe import Recipe
from efftrain_cli.training import dist
from efftrain_cli.training.compiling import full_micro_batch
from efftrain_cli.training.device import Stopwatch
from efftrain_cli.training.objective import Objective
from efftrain_cli.training.state import TrainState

if TYPE_CHECKING:
    from efftrain_cli.training.sharding import Rows


class MicroBatch(NamedTuple):
    """What one forward and backward pass takes."""

    number: int
    """From 0, in the whole step."""
    tokens: Tensor
    targets: Tensor
    gates: Gates
    weight: float
    """Factor of its losses: 0 if it stands in for one without a sequence."""


class Gradient:
    """Computes a step's gradient, divided by the step's tokens, into the parameters' `.grad`.

    Loss and gradient do not depend on how the step is cut, nor on how many ranks share it.
    """

    def __init__(
        self,
        recipe: Recipe,
        state: TrainState,
        stops: Callable[[], bool] = never,
    ) -> None:
        """`stops` is asked between two micro-batches whether to abandon the step."""
        choose_determinism(recipe.train.deterministic)
        choose_matmul_precision(state.dtype, state.device)
        keep_freed_memory(state.device)
        self._recipe = recipe
        self._state = state
        self._stops = stops
        self._sharing = state.sharing
        self._parameters = list(state.parameters.values())
        self._objective = Objective(recipe, state)
        self._full_shape = full_micro_batch(recipe, self._sharing[1])
        rows = cast("Rows | None", state.division)
        self._sum = rows or dist.GradientSum(self._parameters)
        self.watch: Stopwatch | None = None
        """Time of the newest sum that the passes did not hide; None in one process."""

    def __call__(self, batch: Batch, plan: StepPlan) -> StepResult:
        """Leave the gradient of the whole step in `.grad`; return what the step was.

        Raises:
            Stop: `stops` said so.
        """
        gates = draw_gates(self._recipe, plan, self._state)
        parts = cut(batch, plan, gates, self._sharing)
        dots = None
        if plan.measure_similarity:
            losses, dots = self._by_halves(parts, plan)
        else:
            losses = self._accumulate(parts, plan)
        columns = self._objective.columns(losses, plan, gates)
        result = step_result(
            self._recipe,
            self._state.model.config,
            plan,
            gates,
        )
        return result._replace(scalars=columns, simigrad_dots=dots)

    def _accumulate(self, parts: Sequence[MicroBatch], plan: StepPlan) -> Tensors:
        """Add the gradient of all ranks' `parts` to `.grad`; return their losses over the step's
        tokens."""
        device = self._state.device
        scales = branch_scales(plan, device)
        losses = {name: zero.clone() for name, zero in self._objective.zeros.items()}
        if not parts:
            self._sum.begin(list(losses.values()))
        for part in parts:
            if self._stops():
                raise Stop
            same_shape = part.tokens.shape == self._full_shape
            with attention_kernels(device, same_shape=same_shape):
                with record_function("forward"):
                    summed = self._objective.compute(
                        part.tokens,
                        part.targets,
                        part.gates,
                        scales,
                    )
                shares = {}
                for name, loss in summed.items():
                    shares[name] = part.weight * loss / plan.tokens
                    losses[name] += shares[name].detach()
                if part is parts[-1]:
                    self._sum.begin(list(losses.values()))
                self._objective.total(shares).backward()
        self._sum.finish()
        self.watch = self._sum.watch
        return losses

    def _by_halves(
        self,
        parts: Sequence[MicroBatch],
        plan: StepPlan,
    ) -> tuple[Tensors, Dots]:
        """Accumulate the step's even micro-batches apart from its odd ones; return the losses and
        the products of the two halves' gradients.

        Three numbers are read from the device: the only read inside training.
        """
        even = self._accumulate([part for part in parts if part.number % 2 == 0], plan)
        first_half = take_gradients(self._parameters)
        odd = self._accumulate([part for part in parts if part.number % 2 == 1], plan)
        second_half = take_gradients(self._parameters)
        sequences = [plan.sequences_of(number) for number in range(plan.accumulation_steps)]
        in_first = sum(sequences[::2])
        in_second = sum(sequences[1::2])
        dots = half_dots(first_half, second_half, in_first, in_second)
        if self._state.division is not None:
            dist.all_reduce([dots])
        # What decides the next batch must be the same on ranks with other kinds of devices.
        dist.broadcast([dots])

        torch._foreach_add_(second_half, first_half)
        for parameter, gradient in zip(self._parameters, second_half, strict=True):
            parameter.grad = gradient
        a_dot_b, a_square, b_square = dots.tolist()
        losses = {name: even[name] + odd[name] for name in even}
        return losses, (a_dot_b, a_square, b_square)


def cut(
    batch: Batch,
    plan: StepPlan,
    gates: Sequence[Gates],
    sharing: tuple[int, int],
) -> list[MicroBatch]:
    """Return this rank's micro-batches of a step, whose sequences are `batch`.

    Args:
        sharing: as `TrainState.sharing`.
    """
    rank, ranks = sharing
    count = plan.accumulation_steps
    numbers = range(count * rank // ranks, count * (rank + 1) // ranks)
    sizes = [plan.sequences_of(number) for number in numbers]
    inputs = batch.tokens.split(sizes)
    outputs = batch.targets.split(sizes)
    padding = batch.tokens.new_zeros(1, plan.seq_len)
    parts = []
    for number, tokens, targets in zip(numbers, inputs, outputs, strict=True):
        weight = 1.0
        if not len(tokens):
            tokens = targets = padding
            weight = 0.0
        parts.append(MicroBatch(number, tokens, targets, gates[number], weight))
    return parts


def step_result(
    recipe: Recipe,
    config: GPTConfig,
    plan: StepPlan,
    gates: Sequence[Gates],
) -> StepResult:
    """Return the result of a step, with its FLOPs and without columns."""
    computed = 0
    for number, gate in enumerate(gates):
        of_each = len(plan.keep)
        if gate is not None:
            of_each = sum(gate)
        computed += of_each * plan.sequences_of(number)
    blocks = computed / plan.batch_size
    per_token = flops_per_token(config, plan.seq_len, blocks)
    of_optimizer = recipe.optim.facts.step_flops(config)
    tokens = plan.tokens
    return StepResult(
        tokens=tokens,
        flops=per_token.with_logits * tokens + of_optimizer,
        flops_without_logits=per_token.without_logits * tokens + of_optimizer,
        optimizer_flops=of_optimizer,
        blocks_executed=blocks,
    )


def branch_scales(plan: StepPlan, device: torch.device) -> Tensor | None:
    """Return the factors of the blocks' branches, (n_layer,) on `device`; None if all are 1."""
    if plan.branch_scales is None:
        return None
    on_host = torch.tensor(plan.branch_scales, pin_memory=device.type == "cuda")
    return on_host.to(device, non_blocking=True)


def draw_gates(
    recipe: Recipe,
    plan: StepPlan,
    state: TrainState,
) -> list[Gates]:
    """Draw the blocks that each micro-batch of the step runs.

    Ranks that divide the model must run the same blocks at a time: their n-th micro-batches have
    the same gates.
    """
    count = plan.accumulation_steps
    layer_drop = recipe.progressive_layer_drop
    if layer_drop is None:
        return [None] * count
    draws = count
    if state.division is not None:
        draws //= state.sharing[1]
    gates: list[Gates] = []
    for number in range(count):
        drawn = layer_drop.gates(
            plan.keep,
            seed=recipe.seed,
            step=plan.step,
            micro_step=number % draws,
            paired=recipe.simigrad is not None,
        )
        gates.append(drawn)
    return gates
