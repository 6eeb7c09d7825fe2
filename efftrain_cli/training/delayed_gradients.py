"""Delayed gradients, as several devices would have them, on one device: the reference of
`methods/ouroboros.py`, and the way to study it.

It is a delay line of gradients: the gradient at the weights of an earlier step is the one that step
computed, so it is kept until it is due. No FLOPs are added; memory is sum_k (K - k) |g_k|. Tensors
in flight between two steps have names with the 1-based step of their batch and their module, from
1:

    ouroboros.gradient.STEP.MODULE.PARAMETER    due in step STEP + tau

A module is updated if a gradient is due, else it waits: at the start, after the warmup, after
tensors were dropped.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from itertools import accumulate
from operator import add

import torch
import torch.nn.functional as F
from torch import Tensor

from efftrain_cli.foundation.tensors import Tensors
from efftrain_cli.methods.ouroboros import Ouroboros
from efftrain_cli.model.config import GPTConfig
from efftrain_cli.model.gpt import GPT, run_eagerly
from efftrain_cli.model.kernels import attention_kernels
from efftrain_cli.optim.gradients import combined_norm, norms_of, take_gradients
from efftrain_cli.recipe.recipe import Recipe
from efftrain_cli.training.build import autocast, compute_dtype
from efftrain_cli.training.compiling import (
    Parts,
    compile_parts,
    compiles,
    full_micro_batch,
)
from efftrain_cli.training.devices import Devices, GradientStep, Losses, Passes
from efftrain_cli.training.memory import checkpoints_activations
from efftrain_cli.training.ranks import ALONE, Ranks

PREFIX = "ouroboros."
EPSILON = 1e-6
"""Added to the norm that clipping divides by, as in torch.nn.utils.clip_grads_with_norm_."""

Due = Mapping[int, Tensors]
"""Module, from 1 -> parameter name -> due gradient; without the modules that wait."""


@dataclass(frozen=True)
class Modules:
    """A model cut into K modules."""

    leaves: Sequence[Tensors]
    """Parameter name -> tensor in whose `.grad` its gradient gathers, of each module in order. The
    first module has a lookup tensor that shares the embedding's memory; the last has the embedding
    itself if it is tied."""
    run: Callable[..., Tensor]
    """(module from 1, its input, targets=None) -> its output; the last module's is the summed loss.

    The first takes tokens; only the last reads the targets."""

    @property
    def count(self) -> int:
        """K."""
        return len(self.leaves)

    def last(
        self,
        x: Tensor,
        targets: Tensor,
        tokens: int,
    ) -> tuple[Tensor, Tensor]:
        """Run the last module forward and backward; return the loss over `tokens` and its gradient
        by the input `x`."""
        x = x.detach().requires_grad_()
        loss = self.run(self.count, x, targets) / tokens
        loss.backward()
        assert x.grad is not None
        return loss.detach(), x.grad

    def take(self, module: int) -> Tensors:
        """Take the gradients of a module's leaves, as `take_gradients`."""
        leaves = self.leaves[module - 1]
        gradients = take_gradients(list(leaves.values()))
        return dict(zip(leaves, gradients, strict=True))


def delay(modules: Modules, in_flight: Tensors, step: int) -> tuple[Due, Tensors]:
    """Exchange the fresh gradients of `step` for those due: g_k(w^s; x_s), s = step - tau_k.

    Return the due gradients and the new in-flight tensors. Set the leaves' `.grad` to None; change
    nothing else.
    """
    after = dict(in_flight)
    due: dict[int, Tensors] = {}
    for module in range(1, modules.count + 1):
        staleness = modules.count - module
        gradients = modules.take(module)
        if staleness:
            put(after, f"{PREFIX}gradient.{step}.{module}.", gradients)
            gradients = pop(after, f"{PREFIX}gradient.{step - staleness}.{module}.")
        if gradients:
            due[module] = gradients
    return due, after


def rerun_backward(
    modules: Modules,
    module: int,
    step: int,
    in_flight: Tensors,
) -> tuple[Tensors, Tensors]:
    """Compute a module's backward pass of `step`; take the tensors that it uses out of `in_flight`.

    Return its gradients by parameter, and those by its inputs by micro-batch; both are empty if no
    gradient is due yet.
    """
    batch = step - (modules.count - module)
    deltas = pop(in_flight, f"{PREFIX}delta.{batch}.{module}.")
    if not deltas:
        return {}, {}
    inputs = pop(in_flight, f"{PREFIX}input.{batch}.{module}.")
    by_input = {}
    # The order of the sum must not depend on that of a checkpoint's file.
    for number in sorted(deltas, key=int):
        x = inputs[number]
        if module > 1:
            x = x.detach().requires_grad_()
        modules.run(module, x).backward(deltas[number])
        if x.grad is not None:
            by_input[number] = x.grad
    return modules.take(module), by_input


def join_modules(modules: Modules, due: Due, names: Sequence[str], mean: bool) -> Tensors:
    """Return the due gradients by parameter.

    A parameter of two modules gets their sum, the last module's first, halved with `mean`.
    """
    order = [modules.count, *range(1, modules.count)]
    gradients = {}
    for name in names:
        users = 0
        parts = []
        for module in order:
            users += name in modules.leaves[module - 1]
            if name in due.get(module, ()):
                parts.append(due[module][name])
        if not parts:
            continue
        gradient = reduce(add, parts)
        if mean and users > 1:
            gradient = gradient * 0.5
        gradients[name] = gradient
    return gradients


def clip_groups(
    gradients: Tensors,
    norms: Tensors,
    groups: Sequence[Sequence[str]],
    largest: float,
) -> tuple[Tensor, Tensors]:
    """Return the l2 norm over all gradients, 0-d, and the gradients, the norm of each group bounded
    by `largest`.

    Args:
        norms: those of all parameters' gradients, including those that another rank has.
        largest: 0: no bound.
    """
    total_norm = combined_norm(norms.values())
    if not largest:
        return total_norm, gradients
    bounded = dict(gradients)
    for group in groups:
        names = [name for name in group if name in gradients]
        if not names:
            continue
        group_norm = combined_norm([norms[name] for name in group if name in norms])
        scale = largest / (group_norm + EPSILON)
        scaled = torch._foreach_mul([gradients[name] for name in names], scale.clamp(max=1.0))
        bounded |= dict(zip(names, scaled, strict=True))
    return total_norm, bounded


def pop(tensors: Tensors, prefix: str) -> Tensors:
    """Remove the tensors whose name begins with `prefix`; return them by the rest of their name."""
    names = [name for name in tensors if name.startswith(prefix)]
    return {name.removeprefix(prefix): tensors.pop(name) for name in names}


def put(tensors: Tensors, prefix: str, values: Tensors) -> None:
    """Add the tensors that `pop` removes."""
    tensors |= {prefix + name: value for name, value in values.items()}


def nan_unless_finite(after: Tensors, before: Tensors) -> Tensor:
    """Return 0 if all newly in-flight tensors are finite, else NaN, 0-d: they are applied only in
    later steps."""
    new = []
    for name, tensor in after.items():
        if name not in before and tensor.is_floating_point():
            new.append(tensor)
    # 0 times NaN or infinity is NaN.
    return 0.0 * torch.nn.utils.get_total_norm(new)


# --- a GPT in modules -----------------------------------------------------------------------------


def cut_gpt(
    model: GPT,
    split: Sequence[int],
    run: Callable[..., Tensor],
) -> Modules:
    """Cut a model into modules of `split` blocks.

    The first module has the embeddings, the last the final norm and the head. `run`: (tokens or
    residual stream, which blocks, targets) -> residual stream or, with targets, summed loss.
    """
    ends = list(accumulate(split))
    lookup = model.wte.weight.detach().requires_grad_()  # shares memory: always the current weights
    leaves: list[Tensors] = [{} for _ in split]
    for name, parameter in model.named_parameters():
        if name.startswith("h."):
            block = int(name.split(".")[1])
            leaves[bisect_right(ends, block)][name] = parameter
        elif name.startswith("wpe."):
            leaves[0][name] = parameter
        elif name != "wte.weight" or model.lm_head is None:
            leaves[-1][name] = parameter
    leaves[0]["wte.weight"] = lookup
    module_of = [bisect_right(ends, block) + 1 for block in range(len(model.h))]

    def run_module(
        module: int,
        x: Tensor,
        targets: Tensor | None = None,
    ) -> Tensor:
        blocks = [of_block == module for of_block in module_of]
        if module > 1:
            return run(x, blocks, targets)
        with lookup_apart(model, lookup):
            return run(x, blocks, targets)

    return Modules(leaves, run_module)


@contextmanager
def lookup_apart(model: GPT, lookup: Tensor) -> Iterator[None]:
    """Gather the gradient of the embedding's lookup in `lookup`, which shares the matrix's memory.

    The gradient of a tied head gathers in the matrix.
    """

    def look_up(module: object, arguments: tuple[Tensor, ...], output: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return output
        return F.embedding(arguments[0], lookup)

    with model.wte.register_forward_hook(look_up):
        yield


class DelayedGradients(Devices):
    """This process alone, giving the parameters the due gradients instead of the fresh ones.

    One per training.
    """

    def __init__(
        self,
        recipe: Recipe,
        model: GPT,
        in_flight: Tensors,
        ranks: Ranks = ALONE,
        sharing: Ranks = ALONE,
    ) -> None:
        """Cut `model` into modules.

        Args:
            in_flight: `TrainState.method_tensors`: read in each step, and not changed.
            sharing: the processes that share each batch of a module.
        """
        super().__init__(ranks)
        self.sharing = sharing
        section = recipe.delayed_gradients
        assert section is not None
        self.section = section
        split = section.blocks(model.config)
        self.modules = cut_gpt(model, split, build_run(recipe, model, sharing.world_size))
        self.module_numbers = range(1, section.modules + 1)
        self.parameters = dict(model.named_parameters())
        self._model = model
        self._grad_clip = recipe.optim.grad_clip
        self._in_flight = in_flight
        self._stopped = False
        """A step was not finite: nothing has changed since."""

        self.of_devices = [set[str]() for _ in range(section.devices)]
        """Names of the parameters whose gradient gathers on each device."""
        for module, leaves in enumerate(self.modules.leaves, 1):
            self.of_devices[section.device_of(module)].update(leaves)

        self._groups = [list(self.parameters)]
        """Names of the parameters that are clipped by one norm."""
        if section.clip == "module":
            self._groups = []
            for names in self.of_devices:
                self._groups.append([name for name in self.parameters if name in names])

    def step(self, passes: Passes) -> GradientStep:
        if self.section.delays_at(passes.plan.step):
            return self.delayed_step(passes)
        return super().step(passes)

    def delayed_step(self, passes: Passes) -> GradientStep:
        """Leave the delayed gradients, clipped, in `.grad`; None if no gradient is due.

        The norm is not finite also if a gradient that is due only later is not: the in-flight
        tensors then stay as they were, in this step and all later ones.
        """
        due, after, losses = self.due_gradients(passes)
        # A longer warmup than the run began with leaves gradients that are never due.
        oldest = passes.plan.step - self.section.staleness(1)
        for name in list(after):
            if int(name.split(".")[2]) < oldest:
                del after[name]

        mean = self.section.embedding_gradient == "mean"
        gradients = join_modules(self.modules, due, list(self.parameters), mean)
        nan_or_zero = nan_unless_finite(after, self._in_flight)
        norms, losses, nan_or_zero = self.exchange(gradients, due, losses, nan_or_zero)
        grad_norm, gradients = clip_groups(gradients, norms, self._groups, self._grad_clip)
        for name, parameter in self.parameters.items():
            parameter.grad = gradients.get(name)

        grad_norm = grad_norm + nan_or_zero
        is_finite = torch.isfinite(grad_norm) & torch.isfinite(losses["ce"])
        if not is_finite:
            self._stopped = True
        step = GradientStep(losses, grad_norm, norms)
        if self._stopped:
            return step
        return step._replace(method_tensors=after)

    def due_gradients(self, passes: Passes) -> tuple[Due, Tensors, Losses]:
        """Return the due gradients, the new in-flight tensors, and the losses of the step."""
        with lookup_apart(self._model, self.modules.leaves[0]["wte.weight"]):
            losses = passes()
        due, after = delay(self.modules, self._in_flight, passes.plan.step)
        return due, after, losses

    def exchange(
        self,
        gradients: Tensors,
        due: Due,
        losses: Losses,
        nan_or_zero: Tensor,
    ) -> tuple[Tensors, Losses, Tensor]:
        """Return what the step needs of all devices: norms by parameter before clipping, losses,
        and `nan_or_zero`."""
        return norms_of(gradients), losses, nan_or_zero


def build_run(recipe: Recipe, model: GPT, sharing: int) -> Callable[..., Tensor]:
    """Build the `run` of `cut_gpt`, compiled if the recipe asks for it, for batches that `sharing`
    processes share."""
    device = model.device
    dtype = compute_dtype(recipe, device)
    compiled = compiles(recipe, device)
    recompute = checkpoints_activations(
        recipe, model.config, device, dtype=dtype, compiled=compiled
    )
    parts = Parts(run_eagerly, model.head_loss_sum)
    if compiled:
        parts = compile_parts(recipe, model, ranks=sharing)
    full_shape = full_micro_batch(recipe, sharing)

    def run(x: Tensor, blocks: Sequence[bool], targets: Tensor | None) -> Tensor:
        same_shape = x.shape[:2] == full_shape
        with autocast(dtype, device), attention_kernels(device, same_shape=same_shape):
            if not x.is_floating_point():
                x = model.embed(x)
            x = model.run_blocks(x, blocks, None, recompute, parts.block)
            if targets is None:
                return x
            return parts.head_loss_sum(x, targets)

    return run


# --- between two runs -----------------------------------------------------------------------------


def dropped(before: Ouroboros, now: Ouroboros | None, shape: GPTConfig) -> str | None:
    """Return why a run with section `now` cannot use tensors in flight of one with `before`; None
    if it can.

    Both sections delay gradients; `now` is None if the run delays none.
    """
    old_blocks = before.blocks(shape)
    blocks = ", ".join(map(str, old_blocks))
    was = f"{before.modules} modules of {blocks} blocks"
    if now is None:
        return (
            f"the checkpoint is of a run with {was}: its gradients in flight, of up"
            f" to {before.modules - 1} steps ago, are dropped, and training goes on without delay"
        )

    new_blocks = now.blocks(shape)
    if old_blocks == new_blocks:
        return None
    blocks = ", ".join(map(str, new_blocks))
    return (
        f"the checkpoint is of a run with {was},"
        f" and this one has {now.modules} of {blocks}: the gradients"
        f" in flight are dropped, and in {now.modules - 1} steps every module has one again"
    )
