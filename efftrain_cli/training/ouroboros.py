"""Delayed gradients, as several devices would have them, on one device: the reference of `methods/ouroboros.py`, and
the way to study it.

`stash` is a delay line of gradients: the gradient at the weights of an earlier step is what that step computed, so it
is kept until it is due. No FLOPs are added; memory is sum_k (K - k) |g_k|. `replay` goes module by module, as its
gradients depend on later weights.

What is in flight between two steps are named tensors, each with the 1-based step of its batch and its module from 1:

    ouroboros.gradient.STEP.MODULE.PARAMETER          stash: due in step STEP + tau
    ouroboros.input.STEP.MODULE.MICROBATCH            replay: what the module was given
    ouroboros.delta.STEP.MODULE.MICROBATCH            replay: gradient of the loss by the module's output
    ouroboros.tokens.STEP.MICROBATCH, .targets.       where cosines are measured: the batch, to be run again
    ouroboros.layout                                  variant, K, blocks of each module

So a module is updated where something is due, and waits where nothing is: at the start, after the warmup, after tensors
were dropped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import reduce
from itertools import accumulate
from operator import add

import torch
import torch.nn.functional as F
from torch import Tensor

from efftrain_cli.foundation.step import MicroBatch, StepPlan
from efftrain_cli.methods.ouroboros import Ouroboros
from efftrain_cli.model.config import GPTConfig
from efftrain_cli.model.gpt import GPT, run_eagerly
from efftrain_cli.model.kernels import attention_kernels
from efftrain_cli.model.linear import FORWARD_PLACES, unnoticed
from efftrain_cli.recipe.recipe import Recipe
from efftrain_cli.training.build import autocast, compute_dtype
from efftrain_cli.training.compiling import (
    Parts,
    compile_parts,
    compiles,
    full_micro_batch,
)
from efftrain_cli.training.devices import GradientStep, Passes
from efftrain_cli.training.memory import checkpoints_activations

PREFIX = "ouroboros."
EPSILON = 1e-6
"""Beside the norm that clipping divides by, as in torch.nn.utils.clip_grads_with_norm_."""

Tensors = Mapping[str, Tensor]
Late = Sequence[Mapping[str, Tensor] | None]
"""Of each module, first one first: parameter name -> the gradient that is due, or None while none is."""


@dataclass(frozen=True)
class Modules:
    """A model cut into K modules."""

    leaves: Sequence[Mapping[str, Tensor]]
    """Of each module, first one first: parameter name -> the tensor in whose `.grad` its gradient gathers. The
    embedding's is one for the lookup, which shares its memory; tied, it has itself too, of the last module."""
    run: Callable[[int, Tensor, Tensor | None], Tensor]
    """(module from 1, its input, targets) -> its output; the last module's is the summed loss. The first takes tokens,
    and the last alone looks at the targets."""
    running_again: Callable[[], AbstractContextManager[None]] = nullcontext
    """Context of the passes that run a batch of an earlier step again."""

    @property
    def count(self) -> int:
        """K."""
        return len(self.leaves)

    def last(self, x: Tensor, targets: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
        """The last module, forward and backward: the loss, its sum over `tokens`, and its gradient by the input `x`."""
        x = x.detach().requires_grad_()
        loss = self.run(self.count, x, targets) / tokens
        loss.backward()
        assert x.grad is not None
        return loss.detach(), x.grad

    def take(self, module: int) -> dict[str, Tensor]:
        """The gradients of a module's leaves, zeros where there is none; `.grad` is None afterwards."""
        gradients = {}
        for name, leaf in self.leaves[module - 1].items():
            gradients[name] = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
            leaf.grad = None
        return gradients


def delay(modules: Modules, in_flight: Tensors, step: int) -> tuple[Late, dict[str, Tensor]]:
    """Exchanges the fresh gradients in the modules' leaves, those of `step`, for the ones that are due: g_k(w^s; x_s),
    s = step - tau_k. Returns them and what is in flight afterwards; changes neither argument but for `.grad`, which is
    None then."""
    after, late = dict(in_flight), list[Mapping[str, Tensor] | None]()
    for module in range(1, modules.count + 1):
        staleness, fresh = modules.count - module, modules.take(module)
        if staleness:
            after |= {
                f"{PREFIX}gradient.{step}.{module}.{name}": gradient
                for name, gradient in fresh.items()
            }
            late.append(pop(after, f"{PREFIX}gradient.{step - staleness}.{module}.") or None)
        else:
            late.append(fresh)
    return late, after


def replay(
    modules: Modules,
    in_flight: Tensors,
    step: int,
    micro_batches: Sequence[MicroBatch],
    tokens: int,
) -> tuple[Late, dict[str, Tensor], Tensor]:
    """One step of features replay, at weights that stay as they are throughout: the forward wave of the batch, then
    each module's backward pass of batch step - tau_k, from its stored input and with what the module after it left one
    step ago.

    Returns the gradients that are due, what is in flight afterwards, and the loss of the batch: its sum over `tokens`.
    """
    after, count = dict(in_flight), modules.count
    losses = []
    for number, x, targets, _ in micro_batches:
        for module in range(1, count):
            after[f"{PREFIX}input.{step}.{module}.{number}"] = x
            with torch.no_grad():
                x = modules.run(module, x, None)
        loss, after[f"{PREFIX}delta.{step}.{count - 1}.{number}"] = modules.last(x, targets, tokens)
        losses.append(loss)
    late: list[Mapping[str, Tensor] | None] = [None] * (count - 1) + [modules.take(count)]
    for module in range(count - 1, 0, -1):
        late[module - 1], deltas = replayed(modules, module, step, after)
        batch = step - count + module
        after |= {
            f"{PREFIX}delta.{batch}.{module - 1}.{number}": delta
            for number, delta in deltas.items()
        }
    return late, after, reduce(add, losses)


def replayed(
    modules: Modules, module: int, step: int, in_flight: dict[str, Tensor]
) -> tuple[dict[str, Tensor] | None, dict[str, Tensor]]:
    """The backward pass that a module does in `step`: its gradients, None where nothing is due yet, and the gradient by
    its inputs, by micro-batch. What it used is taken out of `in_flight`."""
    batch = step - (modules.count - module)
    deltas = pop(in_flight, f"{PREFIX}delta.{batch}.{module}.")
    if not deltas:
        return None, {}
    inputs, by_input = pop(in_flight, f"{PREFIX}input.{batch}.{module}."), {}
    with modules.running_again():
        for number in sorted(deltas, key=int):  # the order of the sum, whatever that of a file was
            x = inputs[number]
            if module > 1:
                x = x.detach().requires_grad_()
            modules.run(module, x, None).backward(deltas[number])
            if x.grad is not None:
                by_input[number] = x.grad
    return modules.take(module), by_input


def joined(
    modules: Modules, late: Late, names: Sequence[str], mean: bool
) -> dict[str, Tensor | None]:
    """The gradient of each parameter: None where nothing is due. One of two modules gets the sum of what is,
    the last module's first, halved with `mean`."""
    order = [modules.count - 1, *range(modules.count - 1)]
    found: dict[str, Tensor | None] = {}
    for name in names:
        users = [number for number in order if name in modules.leaves[number]]
        due = [
            gradients[name]
            for number in users
            if (gradients := late[number]) is not None and name in gradients
        ]
        gradient = reduce(add, due) if due else None
        found[name] = (
            gradient * 0.5 if mean and gradient is not None and len(users) > 1 else gradient
        )
    return found


def norms_of(gradients: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    """The l2 norm of each gradient that there is, 0-d."""
    present = {name: gradient for name, gradient in gradients.items() if gradient is not None}
    return (
        dict(zip(present, torch._foreach_norm(list(present.values())), strict=True))
        if present
        else {}
    )


def clipped(
    gradients: Mapping[str, Tensor | None],
    norms: Tensors,
    groups: Sequence[Sequence[str]],
    largest: float,
) -> tuple[Tensor, dict[str, Tensor | None]]:
    """The l2 norm over all gradients, 0-d, and the gradients with the norm of each group bounded by `largest` (0: not
    at all). `norms` are of all parameters' gradients, including those that another rank has."""
    found = dict(gradients)
    for group in groups if largest else ():
        names = [name for name in group if name in norms]
        here = {name: gradient for name in names if (gradient := gradients[name]) is not None}
        if here:
            scale = largest / (_norm_of([norms[name] for name in names]) + EPSILON)
            scaled = torch._foreach_mul(list(here.values()), scale.clamp(max=1.0))
            found |= dict(zip(here, scaled, strict=True))
    return _norm_of(list(norms.values())), found


def cosine(a: Tensors, b: Tensors) -> Tensor:
    """The cosine between two gradients of the same parameters, 0-d fp32; products are summed in fp64."""

    def dot(x: Tensors, y: Tensors) -> Tensor:
        return torch.stack([(x[name].double() * y[name].double()).sum() for name in a]).sum()

    return (dot(a, b) / (dot(a, a) * dot(b, b)).sqrt()).float()


def _norm_of(norms: Sequence[Tensor]) -> Tensor:
    return torch.linalg.vector_norm(torch.stack(list(norms)))


def pop(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Takes the tensors whose name begins with `prefix`, by the rest of it."""
    names = [name for name in tensors if name.startswith(prefix)]
    return {name.removeprefix(prefix): tensors.pop(name) for name in names}


def fault(after: Tensors, before: Tensors) -> Tensor:
    """0-d: 0 where all that is newly in flight is finite, else not a number, though it is applied only later."""
    new = [
        tensor
        for name, tensor in after.items()
        if name not in before and tensor.is_floating_point()
    ]
    return 0.0 * torch.nn.utils.get_total_norm(new)


# --- a GPT in modules ------------------------------------------------------------------------------------------------


def cut_gpt(
    model: GPT, split: Sequence[int], run: Callable[[Tensor, Sequence[bool], Tensor | None], Tensor]
) -> Modules:
    """The model in modules of `split` blocks: the embeddings with the first, the last layer norm and the head with the
    last. `run`: (tokens or residual stream, which blocks, targets) -> residual stream or, with targets, summed loss."""
    ends = list(accumulate(split))
    lookup = model.wte.weight.detach().requires_grad_()  # the same memory: always today's weights
    leaves: list[dict[str, Tensor]] = [{} for _ in split]
    for name, parameter in model.named_parameters():
        if name.startswith("h."):
            block = int(name.split(".")[1])
            leaves[next(number for number, end in enumerate(ends) if block < end)][name] = parameter
        elif name.startswith("wpe."):
            leaves[0][name] = parameter
        elif name != "wte.weight" or model.lm_head is None:
            leaves[-1][name] = parameter
    leaves[0]["wte.weight"] = lookup
    every = range(len(model.h))
    masks = [
        [end - blocks <= block < end for block in every]
        for blocks, end in zip(split, ends, strict=True)
    ]

    def run_module(module: int, x: Tensor, targets: Tensor | None) -> Tensor:
        with lookup_apart(model, lookup) if module == 1 else nullcontext():
            return run(x, masks[module - 1], targets)

    # Inputs and weights of an earlier step were noted in that step; its gradient is first computed now.
    return Modules(leaves, run_module, lambda: unnoticed(model, FORWARD_PLACES))


@contextmanager
def lookup_apart(model: GPT, lookup: Tensor) -> Iterator[None]:
    """Has the gradient of the embedding's lookup gather in `lookup`, which shares the matrix's memory; the head's stays
    in the matrix."""

    def look_up(module: object, arguments: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
        return F.embedding(arguments[0], lookup) if torch.is_grad_enabled() else None

    with model.wte.register_forward_hook(look_up):
        yield


class DelayedGradients:
    """Gives the parameters the gradients that are due instead of the fresh ones. One per training; it keeps nothing in
    flight itself."""

    def __init__(
        self,
        section: Ouroboros,
        model: GPT,
        modules: Modules,
        split: Sequence[int],
        grad_clip: float,
    ) -> None:
        self.section, self.modules = section, modules
        self.parameters = dict(model.named_parameters())
        self.of_devices = [set[str]() for _ in range(section.devices)]
        """Names of the parameters whose gradient gathers on each device."""
        for module, leaves in enumerate(modules.leaves, 1):
            self.of_devices[section.device_of(module)].update(leaves)
        together = [set(self.parameters)] if section.clip == "global" else self.of_devices
        self._groups = [[name for name in self.parameters if name in names] for names in together]
        self.layout = layout_of(section, split)
        self._model, self._grad_clip = model, grad_clip
        self._stopped = False

    def delays_at(self, step: int) -> bool:
        """Whether 1-based `step` uses late gradients."""
        return self.section.delays_at(step)

    def joined(self, late: Late, delayed: bool) -> dict[str, Tensor | None]:
        """`joined` gradients of all parameters, of a step with or without delay."""
        mean = delayed and self.section.embedding_gradient == "mean"
        return joined(self.modules, late, list(self.parameters), mean)

    def leave(
        self, gradients: Mapping[str, Tensor | None], norms: Tensors, delayed: bool
    ) -> Tensor:
        """Leave clipped gradients in `.grad`, by one norm in a step without delay; return the norm before clipping.

        `norms` as in `clipped`.
        """
        groups = self._groups if delayed else [list(self.parameters)]
        grad_norm, gradients = clipped(gradients, norms, groups, self._grad_clip)
        for name, parameter in self.parameters.items():
            parameter.grad = gradients[name]
        return grad_norm

    def columns(
        self, staleness: Sequence[float], cosines: Mapping[int, Tensor]
    ) -> dict[str, Tensor]:
        """Return the columns of a step: each module's staleness in steps (NaN if it waited) and, by module from 1, the
        cosine between its late gradient and that of the same batch at today's weights (NaN if not measured)."""
        values = torch.tensor(staleness, device=self._model.device).unbind()
        found = {f"ouroboros_staleness_{number}": value for number, value in enumerate(values, 1)}
        if self.section.cosine_every:
            none = torch.full((), math.nan, device=self._model.device)
            found |= {
                f"ouroboros_cosine_{k}": cosines.get(k, none) for k in range(1, self.modules.count)
            }
        return found

    def step(
        self,
        passes: Passes,
        micro_batches: Sequence[MicroBatch],
        plan: StepPlan,
        in_flight: Tensors,
    ) -> GradientStep:
        """Leave the late gradients, clipped, in `.grad`; None if nothing is due.

        The norm is not finite also if a gradient that is only due later is not: what is in flight then stays as it was,
        in this step and all later ones.
        """
        section, modules = self.section, self.modules
        losses: Mapping[str, Tensor]
        if section.variant == "stash":
            with lookup_apart(self._model, modules.leaves[0]["wte.weight"]):
                losses = passes(micro_batches)
            late, after = delay(modules, in_flight, plan.step)
        else:
            late, after, loss = replay(modules, in_flight, plan.step, micro_batches, plan.tokens)
            losses = {"ce": loss}
        cosines = {}
        if section.cosine_every:
            cosines = self._cosines(late, after, micro_batches, plan.step, passes)
        # A longer warmup than the run began with leaves gradients that are never due.
        oldest = plan.step - modules.count + 1
        after = {
            name: t
            for name, t in after.items()
            if name.endswith("layout") or int(name.split(".")[2]) >= oldest
        }
        gradients = self.joined(late, delayed=True)
        norms = norms_of(gradients)
        grad_norm = self.leave(gradients, norms, delayed=True)
        after[f"{PREFIX}layout"] = self.layout
        grad_norm = grad_norm + fault(after, in_flight)
        self._stopped |= not bool(torch.isfinite(grad_norm) & torch.isfinite(losses["ce"]))
        staleness = [
            math.nan if due is None else float(section.staleness(k))
            for k, due in enumerate(late, 1)
        ]
        in_flight_after = None if self._stopped else after
        columns = self.columns(staleness, cosines)
        return GradientStep(losses, grad_norm, norms, in_flight_after, columns)

    def _cosines(
        self,
        late: Late,
        after: dict[str, Tensor],
        micro_batches: Sequence[MicroBatch],
        step: int,
        backward: Callable[[Sequence[MicroBatch]], object],
    ) -> dict[int, Tensor]:
        """Where `step` measures: of each module but the last, the cosine between its late gradient and that of the same
        batch at today's weights. Keeps today's batch, and drops the oldest."""
        for number, tokens, targets, _ in micro_batches:
            after[f"{PREFIX}tokens.{step}.{number}"], after[f"{PREFIX}targets.{step}.{number}"] = (
                tokens,
                targets,
            )
        cosines = {}
        for module, gradients in enumerate(late[:-1], 1):
            batch = step - self.section.staleness(module)
            kept = {
                name: after[name] for name in after if name.startswith(f"{PREFIX}tokens.{batch}.")
            }
            if gradients is None or not self.section.measures_cosine_at(step) or not kept:
                continue
            with (
                lookup_apart(self._model, self.modules.leaves[0]["wte.weight"]),
                unnoticed(self._model),
            ):
                # Their number is not that of the step: 0 is as good as any, where nothing is drawn by it.
                backward(
                    [
                        MicroBatch(0, part, after[name.replace("tokens", "targets")])
                        for name, part in kept.items()
                    ]
                )
            fresh = [self.modules.take(k) for k in range(1, self.modules.count + 1)]
            cosines[module] = cosine(gradients, fresh[module - 1])
        oldest = step - self.section.staleness(1)
        for kind in ("tokens", "targets"):
            pop(after, f"{PREFIX}{kind}.{oldest}.")
        return cosines


def build_delayed_gradients(recipe: Recipe, model: GPT, world_size: int = 1) -> DelayedGradients:
    """Build Ouroboros's gradients for a run of `world_size` processes."""
    section, device = recipe.delayed_gradients, model.device
    assert section is not None
    dtype, compiled = compute_dtype(recipe.train.dtype, device), compiles(recipe, device)
    recompute = checkpoints_activations(
        recipe, model.config, device, dtype=dtype, compiled=compiled
    )
    parts = compile_parts(recipe, model) if compiled else Parts(run_eagerly, model.head_loss_sum)
    full_shape = full_micro_batch(recipe, max(1, world_size // section.devices))

    def run(x: Tensor, blocks: Sequence[bool], targets: Tensor | None) -> Tensor:
        with (
            autocast(dtype, device),
            attention_kernels(device, same_shape=x.shape[:2] == full_shape),
        ):
            x = x if x.is_floating_point() else model.embed(x)
            x = model.run_blocks(x, blocks, None, recompute, parts.block)
            return x if targets is None else parts.head_loss_sum(x, targets)

    split = section.blocks(model.config)
    modules = cut_gpt(model, split, run)
    return DelayedGradients(section, model, modules, split, recipe.optim.grad_clip)


# --- between two runs ------------------------------------------------------------------------------------------------


def layout_of(section: Ouroboros, split: Sequence[int]) -> Tensor:
    """What tensors in flight belong to: variant, K and blocks of each module, int64 on the CPU."""
    return torch.tensor([("stash", "replay").index(section.variant), section.modules, *split])


def dropped(in_flight: Tensors, section: Ouroboros | None, shape: GPTConfig) -> str | None:
    """Why tensors in flight are of no use to a run with `section`, for its user; None where they are, or where there
    are none."""
    if f"{PREFIX}layout" not in in_flight:
        return None
    variant, modules, *split = in_flight[f"{PREFIX}layout"].tolist()
    was = f"{modules} modules of {', '.join(map(str, split))} blocks on gradients by {('stash', 'replay')[variant]}"
    if section is None or section.modules == 1:
        return f"the checkpoint is of a run with {was}: those in flight, of up to {modules - 1} steps ago, are dropped, and training goes on without delay"
    if torch.equal(in_flight[f"{PREFIX}layout"].cpu(), layout_of(section, section.blocks(shape))):
        return None
    return (
        f"the checkpoint is of a run with {was}, and this one has {section.modules} of {', '.join(map(str, section.blocks(shape)))} by "
        f"{section.variant}: the gradients in flight are dropped, and in {section.modules - 1} steps every module has one again"
    )
