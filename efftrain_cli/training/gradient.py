"""The function that computes a step's gradient, and the losses that it minimizes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.profiler import record_function

from efftrain_cli.foundation.step import Batch, MicroBatch, StepPlan, StepResult
from efftrain_cli.foundation.tensors import Tensors
from efftrain_cli.methods.simigrad import accumulate_by_halves
from efftrain_cli.model.flops import flops_per_token
from efftrain_cli.model.gpt import GPT, Gates, run_eagerly
from efftrain_cli.model.kernels import (
    attention_kernels,
    choose_determinism,
    choose_matmul_precision,
)
from efftrain_cli.recipe.recipe import Recipe
from efftrain_cli.training.build import autocast, compute_dtype
from efftrain_cli.training.compiling import (
    MiddleFirst,
    Objective,
    Parts,
    compile_parts,
    compile_whole,
    compiles,
    compiles_blocks,
    full_micro_batch,
)
from efftrain_cli.training.devices import BeforeLast, Devices, GradientStep, Losses, Passes
from efftrain_cli.training.memory import checkpoints_activations
from efftrain_cli.training.ranks import ALONE, Ranks
from efftrain_cli.training.strategy import single_device

ForwardBackward = Callable[[Batch, StepPlan], StepResult]
"""Computes a step's gradient, divided by the step's tokens, into the parameters' `.grad`."""


def build_objective(
    recipe: Recipe,
    model: GPT,
    device: torch.device,
    ranks: Ranks = ALONE,
) -> Objective:
    """Build the function of a micro-batch's losses, compiled if the recipe asks for it.

    "ce", the cross-entropy, comes first: it alone is the logged loss, which divergence and
    comparisons read.
    """
    world = ranks.world_size
    dtype = compute_dtype(recipe, device)
    compiled = compiles(recipe, device) and not model.lockstep
    by_blocks = compiled and compiles_blocks(recipe, len(model.h), not ranks.is_single_process)
    recompute = checkpoints_activations(
        recipe, model.config, device, dtype=dtype, compiled=compiled
    )
    parts = Parts(run_eagerly, model.head_loss_sum)
    if by_blocks:
        parts = compile_parts(recipe, model, ranks=world)

    standardization = recipe.standardization_loss
    if standardization is not None:
        standardization.attach(model)
    model.with_squares = recipe.optim.z_loss > 0

    def objective(
        tokens: Tensor,
        targets: Tensor,
        gates: Gates,
        scales: Tensor | None,
    ) -> Tensors:
        with autocast(dtype, device):
            if model.lockstep:
                loss = model.loss_sum(tokens, targets, gates, scales, recompute)
                return {"ce": loss}

            terms: list[Tensor] = []
            x = model.embed(tokens)
            x = model.run_blocks(x, gates, scales, recompute, parts.block, terms)
            summed = parts.head_loss_sum(x, targets)
            losses = {"ce": summed}
            if model.with_squares:
                losses = {"ce": summed[0], "z_loss": summed[1]}
            if standardization is not None:
                divergences = standardization.of_sites(terms, gates, x, len(model.h))
                losses["standardization_loss"] = divergences * targets.numel()
            return losses

    if not compiled:
        return objective
    if by_blocks:
        return MiddleFirst(recipe, objective, world)
    whole = compile_whole(recipe, objective, ranks=world)
    return MiddleFirst(recipe, whole, world)


class Terms:
    """The weights of a step's losses, by name, in the minimized total, and their columns of
    metrics.jsonl."""

    def __init__(self, recipe: Recipe, model: GPT, device: torch.device) -> None:
        self._z_loss = recipe.optim.z_loss
        self._standardization = recipe.standardization_loss
        self._n_layer = len(model.h)
        self.zeros = {"ce": torch.zeros((), device=device)}
        """Losses of no micro-batch."""
        if self._z_loss:
            self.zeros["z_loss"] = torch.zeros((), device=device)
        if self._standardization is not None:
            shares = self._standardization.site_weights(model.config)
            self._site_shares = torch.tensor(shares, device=device)
            self.zeros["standardization_loss"] = torch.zeros_like(self._site_shares)

    def total(self, losses: Tensors) -> Tensor:
        """Return the minimized total, 0-d."""
        total = losses["ce"]
        if self._z_loss:
            total = total + self._z_loss * losses["z_loss"]
        section = self._standardization
        if section is not None and section.weight:
            divergence = (losses["standardization_loss"] * self._site_shares).sum()
            total = total + section.weight * divergence
        return total

    def columns(
        self,
        losses: Tensors,
        plan: StepPlan,
        gates: Sequence[Gates],
    ) -> Tensors:
        """Return the columns of a whole step's losses."""
        columns = {"loss": losses["ce"]}
        if self._z_loss:
            columns["z_loss"] = self._z_loss * losses["z_loss"]
        if self._standardization is not None:
            columns |= self._standardization.loss_columns(
                losses["standardization_loss"], self._site_shares, plan, gates, self._n_layer
            )
        return columns


def build_forward_backward(
    recipe: Recipe,
    model: GPT,
    device: torch.device,
    devices: Devices | None = None,
    ranks: Ranks | None = None,
) -> ForwardBackward:
    """Build the function that computes a step's gradient by accumulation over micro-batches.

    Each micro-batch's summed losses are divided by the tokens of the whole step, so loss and
    gradient do not depend on how the step is cut, nor on how many devices share it.

    Args:
        devices: this process alone, with no gradients in flight, if None.
        ranks: those that share a step of the run; None: those that share it on `devices`. A probe
            runs alone, compiled as for them.
    """
    choose_determinism(recipe.train.deterministic)
    choose_matmul_precision(compute_dtype(recipe, device), device)
    devices = devices or single_device(recipe, model)
    ranks = ranks or devices.sharing
    objective = build_objective(recipe, model, device, ranks)
    terms = Terms(recipe, model, device)
    full_shape = full_micro_batch(recipe, ranks.world_size)
    parameters = list(model.parameters())

    def forward_backward(batch: Batch, plan: StepPlan) -> StepResult:
        scales = branch_scales(plan, device)
        gates = draw_gates(recipe, plan)

        def run(micro_batches: Sequence[MicroBatch], before_last: BeforeLast) -> Losses:
            losses = {name: zero.clone() for name, zero in terms.zeros.items()}
            for micro_batch in micro_batches:
                number = micro_batch.number
                tokens = micro_batch.tokens
                targets = micro_batch.targets
                with attention_kernels(device, same_shape=tokens.shape == full_shape):
                    with record_function("forward"):
                        summed = objective(tokens, targets, gates[number], scales)
                    shares = {}
                    for name, loss in summed.items():
                        shares[name] = micro_batch.weight * loss / plan.tokens
                        losses[name] = losses[name] + shares[name].detach()
                    if number == micro_batches[-1].number:
                        before_last(losses)
                    terms.total(shares).backward()
            return losses

        micro_batches = devices.cut(batch, plan)
        passes = Passes(run, parameters, micro_batches, plan)
        if plan.measure_similarity:
            step = step_by_halves(devices, passes)
        else:
            step = devices.step(passes)
        columns = terms.columns(step.losses, plan, gates)
        return step_result(recipe, model, plan, gates, step)._replace(scalars=columns)

    return forward_backward


def step_result(
    recipe: Recipe,
    model: GPT,
    plan: StepPlan,
    gates: Sequence[Gates],
    step: GradientStep,
) -> StepResult:
    """Return the result of a step, with its FLOPs and without columns."""
    blocks = blocks_per_sequence(plan, gates)
    per_token = flops_per_token(model.config, plan.seq_len, blocks)
    of_optimizer = recipe.optim.facts.step_flops(model.config)
    return StepResult(
        tokens=plan.tokens,
        flops=per_token.with_logits * plan.tokens + of_optimizer,
        flops_without_logits=per_token.without_logits * plan.tokens + of_optimizer,
        optimizer_flops=of_optimizer,
        blocks_executed=blocks,
        simigrad_dots=step.dots,
        grad_norm=step.grad_norm,
        norms=step.norms,
        method_tensors=step.method_tensors,
    )


def branch_scales(plan: StepPlan, device: torch.device) -> Tensor | None:
    """Return the factors of the blocks' branches, (n_layer,) on `device`; None if all are 1."""
    if plan.branch_scales is None:
        return None
    on_host = torch.tensor(plan.branch_scales, pin_memory=device.type == "cuda")
    return on_host.to(device, non_blocking=True)


def draw_gates(recipe: Recipe, plan: StepPlan) -> list[Gates]:
    """Draw the blocks that each micro-batch of the step runs."""
    layer_drop = recipe.progressive_layer_drop
    gates: list[Gates] = []
    for number in range(plan.accumulation_steps):
        drawn = None
        if layer_drop is not None:
            drawn = layer_drop.gates(
                plan.keep,
                seed=recipe.seed,
                step=plan.step,
                micro_step=number,
                paired=recipe.simigrad is not None,
            )
        gates.append(drawn)
    return gates


def blocks_per_sequence(plan: StepPlan, gates: Sequence[Gates]) -> float:
    """Return the blocks computed per sequence, averaged over the step."""
    total = 0
    for number, gate in enumerate(gates):
        blocks = len(plan.keep)
        if gate is not None:
            blocks = sum(gate)
        total += blocks * plan.sequences_of(number)
    return total / plan.batch_size


def step_by_halves(devices: Devices, passes: Passes) -> GradientStep:
    """Leave the gradient to apply in `.grad`; return its losses and the products of the two halves'
    gradients."""
    halves: list[Losses] = []

    def accumulate(half: Sequence[MicroBatch]) -> None:
        halves.append(devices.gradient(passes.of(half)))

    dots = accumulate_by_halves(accumulate, passes.micro_batches, passes.parameters, passes.plan)
    even, odd = halves
    losses = {name: even[name] + odd[name] for name in even}
    return GradientStep(losses, dots=dots)
