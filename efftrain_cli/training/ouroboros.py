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
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
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
from efftrain_cli.model.gpt import GPT, Note, run_eagerly
from efftrain_cli.model.kernels import attention_kernels
from efftrain_cli.model.linear import FORWARD_PLACES, unnoticed
from efftrain_cli.optim.gradients import norms_of, take_gradients
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
Due = Mapping[int, Tensors]
"""Module, from 1 -> parameter name -> the gradient that is due; without the modules that wait."""


@dataclass(frozen=True)
class Modules:
    """A model cut into K modules."""

    leaves: Sequence[Mapping[str, Tensor]]
    """Of each module, first one first: parameter name -> the tensor in whose `.grad` its gradient gathers. The
    embedding's is one for the lookup, which shares its memory; tied, it has itself too, of the last module."""
    run: Callable[..., Tensor]
    """(module from 1, its input, targets=None, note=None) -> its output; the last module's is the summed loss.

    The first takes tokens; only the last reads the targets and lets `note` read its residual stream."""
    running_again: Callable[[], AbstractContextManager[None]] = nullcontext
    """Context of the passes that run a batch of an earlier step again."""

    @property
    def count(self) -> int:
        """K."""
        return len(self.leaves)

    def last(
        self, x: Tensor, targets: Tensor, tokens: int, note: Note | None
    ) -> tuple[Tensor, Tensor]:
        """Run the last module forward and backward; return the loss over `tokens` and its gradient by the input `x`."""
        x = x.detach().requires_grad_()
        loss = self.run(self.count, x, targets, note) / tokens
        loss.backward()
        assert x.grad is not None
        return loss.detach(), x.grad

    def take(self, module: int) -> dict[str, Tensor]:
        """Take the gradients of a module's leaves, as `take_gradients`."""
        leaves = self.leaves[module - 1]
        return dict(zip(leaves, take_gradients(list(leaves.values())), strict=True))


def delay(modules: Modules, in_flight: Tensors, step: int) -> tuple[Due, dict[str, Tensor]]:
    """Exchange the fresh gradients of `step` for the ones that are due: g_k(w^s; x_s), s = step - tau_k.

    Return the due gradients and the new in-flight tensors. Set the leaves' `.grad` to None; change nothing else.
    """
    after, due = dict(in_flight), dict[int, Tensors]()
    for module in range(1, modules.count + 1):
        staleness, gradients = modules.count - module, modules.take(module)
        if staleness:
            put(after, f"{PREFIX}gradient.{step}.{module}.", gradients)
            gradients = pop(after, f"{PREFIX}gradient.{step - staleness}.{module}.")
        if gradients:
            due[module] = gradients
    return due, after


def replay(
    modules: Modules,
    in_flight: Tensors,
    step: int,
    micro_batches: Sequence[MicroBatch],
    tokens: int,
    note: Note | None = None,
) -> tuple[Due, dict[str, Tensor], Tensor]:
    """Compute one step of features replay, at weights that stay as they are throughout.

    First comes the forward wave of the batch, then each module's backward pass of batch step - tau_k, from its stored
    input and with what the module after it left one step ago. Return the due gradients, the new in-flight tensors, and
    the loss of the batch: its sum over `tokens`. `note` reads the forward pass of the last micro-batch.
    """
    after, count = dict(in_flight), modules.count
    losses = []
    for part in micro_batches:
        x = part.tokens
        for module in range(1, count):
            after[f"{PREFIX}input.{step}.{module}.{part.number}"] = x
            with torch.no_grad():
                x = modules.run(module, x)
        loss, delta = modules.last(x, part.targets, tokens, note if part.is_last else None)
        after[f"{PREFIX}delta.{step}.{count - 1}.{part.number}"] = delta
        losses.append(loss)
    due: dict[int, Tensors] = {count: modules.take(count)}
    for module in range(count - 1, 0, -1):
        gradients, deltas = replayed(modules, module, step, after)
        if gradients:
            due[module] = gradients
        put(after, f"{PREFIX}delta.{step - count + module}.{module - 1}.", deltas)
    return due, after, reduce(add, losses)


def replayed(
    modules: Modules, module: int, step: int, in_flight: dict[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Compute the backward pass that a module does in `step`; take what it uses out of `in_flight`.

    Return its gradients by parameter, and those by its inputs by micro-batch; both are empty if nothing is due yet.
    """
    batch = step - (modules.count - module)
    deltas = pop(in_flight, f"{PREFIX}delta.{batch}.{module}.")
    if not deltas:
        return {}, {}
    inputs, by_input = pop(in_flight, f"{PREFIX}input.{batch}.{module}."), {}
    with modules.running_again():
        for number in sorted(deltas, key=int):  # the order of the sum, whatever that of a file was
            x = inputs[number]
            if module > 1:
                x = x.detach().requires_grad_()
            modules.run(module, x).backward(deltas[number])
            if x.grad is not None:
                by_input[number] = x.grad
    return modules.take(module), by_input


def joined(modules: Modules, due: Due, names: Sequence[str], mean: bool) -> dict[str, Tensor]:
    """Return the gradients that are due, by parameter.

    A parameter of two modules gets their sum, the last module's first, halved with `mean`.
    """
    order = [modules.count, *range(1, modules.count)]
    gradients = {}
    for name in names:
        users = [module for module in order if name in modules.leaves[module - 1]]
        parts = [due[module][name] for module in users if name in due.get(module, ())]
        if parts:
            gradient = reduce(add, parts)
            gradients[name] = gradient * 0.5 if mean and len(users) > 1 else gradient
    return gradients


def clipped(
    gradients: Tensors, norms: Tensors, groups: Sequence[Sequence[str]], largest: float
) -> tuple[Tensor, Tensors]:
    """Return the l2 norm over all gradients, 0-d, and the gradients, the norm of each group bounded by `largest`.

    Args:
        norms: those of all parameters' gradients, including those that another rank has.
        largest: 0: no bound.
    """
    bounded = dict(gradients)
    for group in groups if largest else ():
        names = [name for name in group if name in norms]
        here = {name: gradients[name] for name in names if name in gradients}
        if here:
            scale = largest / (_norm_of([norms[name] for name in names]) + EPSILON)
            scaled = torch._foreach_mul(list(here.values()), scale.clamp(max=1.0))
            bounded |= dict(zip(here, scaled, strict=True))
    return _norm_of(list(norms.values())), bounded


def cosine(a: Tensors, b: Tensors) -> Tensor:
    """Return the cosine between two gradients of the same parameters, 0-d fp32; products are summed in fp64."""

    def dot(x: Tensors, y: Tensors) -> Tensor:
        return torch.stack([(x[name].double() * y[name].double()).sum() for name in a]).sum()

    return (dot(a, b) / (dot(a, a) * dot(b, b)).sqrt()).float()


def _norm_of(norms: Sequence[Tensor]) -> Tensor:
    return torch.linalg.vector_norm(torch.stack(list(norms)))


def pop(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Take out the tensors whose name begins with `prefix`; return them by the rest of it."""
    names = [name for name in tensors if name.startswith(prefix)]
    return {name.removeprefix(prefix): tensors.pop(name) for name in names}


def put(tensors: dict[str, Tensor], prefix: str, values: Tensors) -> None:
    """Put in what `pop` takes out."""
    tensors |= {prefix + name: value for name, value in values.items()}


def fault(after: Tensors, before: Tensors) -> Tensor:
    """Return 0 if all that is newly in flight is finite, else NaN, 0-d: it is applied only later."""
    new = [
        tensor
        for name, tensor in after.items()
        if name not in before and tensor.is_floating_point()
    ]
    return 0.0 * torch.nn.utils.get_total_norm(new)


# --- a GPT in modules ------------------------------------------------------------------------------------------------


def cut_gpt(
    model: GPT,
    split: Sequence[int],
    run: Callable[..., Tensor],
) -> Modules:
    """Cut a model into modules of `split` blocks.

    The embeddings go with the first, the last layer norm and the head with the last. `run`: (tokens or residual stream,
    which blocks, targets, note) -> residual stream or, with targets, summed loss.
    """
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

    def run_module(
        module: int, x: Tensor, targets: Tensor | None = None, note: Note | None = None
    ) -> Tensor:
        with lookup_apart(model, lookup) if module == 1 else nullcontext():
            return run(x, masks[module - 1], targets, note)

    # Inputs and weights of an earlier step were noted in that step; its gradient is first computed now.
    return Modules(leaves, run_module, lambda: unnoticed(model, FORWARD_PLACES))


@contextmanager
def lookup_apart(model: GPT, lookup: Tensor) -> Iterator[None]:
    """Have the gradient of the embedding's lookup gather in `lookup`, which shares the matrix's memory.

    The gradient of a tied head gathers in the matrix.
    """

    def look_up(module: object, arguments: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
        return F.embedding(arguments[0], lookup) if torch.is_grad_enabled() else None

    with model.wte.register_forward_hook(look_up):
        yield


class DelayedGradients:
    """Gives the parameters the gradients that are due instead of the fresh ones. One per training; it keeps nothing in
    flight itself."""

    def __init__(self, recipe: Recipe, model: GPT, sharing: int = 1) -> None:
        """`sharing` processes share each batch of a module."""
        section = recipe.delayed_gradients
        assert section is not None
        self.section = section
        split = section.blocks(model.config)
        self.modules = modules = cut_gpt(model, split, build_run(recipe, model, sharing))
        self.parameters = dict(model.named_parameters())
        self.of_devices = [set[str]() for _ in range(section.devices)]
        """Names of the parameters whose gradient gathers on each device."""
        for module, leaves in enumerate(modules.leaves, 1):
            self.of_devices[section.device_of(module)].update(leaves)
        together = [set(self.parameters)] if section.clip == "global" else self.of_devices
        self._groups = [[name for name in self.parameters if name in names] for names in together]
        self.layout = layout_of(section, split)
        self._model, self._grad_clip = model, recipe.optim.grad_clip
        self._stopped = False

    def join(self, due: Due, delayed: bool) -> dict[str, Tensor]:
        """Return the `joined` gradients of a step with or without delay."""
        mean = delayed and self.section.embedding_gradient == "mean"
        return joined(self.modules, due, list(self.parameters), mean)

    def leave(self, gradients: Tensors, norms: Tensors, delayed: bool) -> Tensor:
        """Leave clipped gradients in `.grad`, by one norm in a step without delay; return the norm before clipping.

        `norms` as in `clipped`.
        """
        groups = self._groups if delayed else [list(self.parameters)]
        grad_norm, gradients = clipped(gradients, norms, groups, self._grad_clip)
        for name, parameter in self.parameters.items():
            parameter.grad = gradients.get(name)
        return grad_norm

    def columns(
        self, due: Collection[int], cosines: Mapping[int, Tensor], delayed: bool = True
    ) -> dict[str, Tensor]:
        """Return the columns of a step.

        They are each module's staleness in steps (NaN if it is not `due`, and waits) and the cosine between its due
        gradient and that of the same batch at today's weights (NaN if not measured), 0-d.
        """
        nan = torch.full((), math.nan, device=self._model.device)
        columns = {}
        for module in range(1, self.modules.count + 1):
            staleness = float(delayed and self.section.staleness(module))
            columns[f"ouroboros_staleness_{module}"] = (
                torch.full_like(nan, staleness) if module in due else nan
            )
        if self.section.cosine_every:
            columns |= {
                f"ouroboros_cosine_{k}": cosines.get(k, nan) for k in range(1, self.modules.count)
            }
        return columns

    def step(
        self,
        passes: Passes,
        micro_batches: Sequence[MicroBatch],
        plan: StepPlan,
        in_flight: Tensors,
    ) -> GradientStep:
        """Leave the delayed gradients, clipped, in `.grad`; None if nothing is due.

        The norm is not finite also if a gradient that is only due later is not: what is in flight then stays as it was,
        in this step and all later ones.
        """
        modules = self.modules
        losses: Mapping[str, Tensor]
        if self.section.variant == "stash":
            with lookup_apart(self._model, modules.leaves[0]["wte.weight"]):
                losses = passes(micro_batches)
            due, after = delay(modules, in_flight, plan.step)
        else:
            due, after, loss = replay(
                modules, in_flight, plan.step, micro_batches, plan.tokens, passes.note
            )
            losses = {"ce": loss}
        cosines = {}
        if self.section.cosine_every:
            cosines = self._cosines(due, after, micro_batches, plan.step, passes)
        # A longer warmup than the run began with leaves gradients that are never due.
        oldest = plan.step - modules.count + 1
        after = {
            name: t
            for name, t in after.items()
            if name.endswith("layout") or int(name.split(".")[2]) >= oldest
        }
        after[f"{PREFIX}layout"] = self.layout
        gradients = self.join(due, delayed=True)
        norms = norms_of(gradients)
        grad_norm = self.leave(gradients, norms, delayed=True) + fault(after, in_flight)
        self._stopped |= not bool(torch.isfinite(grad_norm) & torch.isfinite(losses["ce"]))
        in_flight_after = None if self._stopped else after
        columns = self.columns(due, cosines)
        return GradientStep(losses, grad_norm, norms, in_flight_after, columns)

    def _cosines(
        self,
        due: Due,
        after: dict[str, Tensor],
        micro_batches: Sequence[MicroBatch],
        step: int,
        passes: Passes,
    ) -> dict[int, Tensor]:
        """Return, if `step` measures them, the cosines of all modules but the last, as in `columns`.

        Keep today's batch in `after`, and drop the oldest.
        """
        for part in micro_batches:
            after[f"{PREFIX}tokens.{step}.{part.number}"] = part.tokens
            after[f"{PREFIX}targets.{step}.{part.number}"] = part.targets
        cosines = {}
        lookup = self.modules.leaves[0]["wte.weight"]
        for module in range(1, self.modules.count):
            batch = step - self.section.staleness(module)
            kept = [name for name in after if name.startswith(f"{PREFIX}tokens.{batch}.")]
            if module not in due or not self.section.measures_cosine_at(step) or not kept:
                continue
            # Their number is not that of the step: 0 is as good as any, as nothing is drawn by it.
            parts = [
                MicroBatch(0, after[name], after[name.replace("tokens", "targets")])
                for name in kept
            ]
            with lookup_apart(self._model, lookup), unnoticed(self._model):
                passes(parts)
            fresh = [self.modules.take(k) for k in range(1, self.modules.count + 1)]
            cosines[module] = cosine(due[module], fresh[module - 1])
        oldest = step - self.section.staleness(1)
        for kind in ("tokens", "targets"):
            pop(after, f"{PREFIX}{kind}.{oldest}.")
        return cosines


def build_run(recipe: Recipe, model: GPT, sharing: int) -> Callable[..., Tensor]:
    """Build the `run` of `cut_gpt`, compiled if the recipe asks for it, for batches that `sharing` processes share."""
    device = model.device
    dtype, compiled = compute_dtype(recipe.train.dtype, device), compiles(recipe, device)
    recompute = checkpoints_activations(
        recipe, model.config, device, dtype=dtype, compiled=compiled
    )
    parts = Parts(run_eagerly, model.head_loss_sum)
    if compiled:
        parts = compile_parts(recipe, model, ranks=sharing)
    full_shape = full_micro_batch(recipe, sharing)

    def run(x: Tensor, blocks: Sequence[bool], targets: Tensor | None, note: Note | None) -> Tensor:
        same_shape = x.shape[:2] == full_shape
        with autocast(dtype, device), attention_kernels(device, same_shape=same_shape):
            x = x if x.is_floating_point() else model.embed(x)
            x = model.run_blocks(x, blocks, None, recompute, parts.block)
            if targets is None:
                return x
            loss = parts.head_loss_sum(x, targets)
            if note is not None:
                note(x)
            return loss

    return run


# --- between two runs ------------------------------------------------------------------------------------------------


def layout_of(section: Ouroboros, split: Sequence[int]) -> Tensor:
    """Return what tensors in flight belong to: variant, K and blocks of each module, int64 on the CPU."""
    return torch.tensor([("stash", "replay").index(section.variant), section.modules, *split])


def dropped(in_flight: Tensors, section: Ouroboros | None, shape: GPTConfig) -> str | None:
    """Return why tensors in flight are of no use to a run with `section`; None if they are, or if there are none."""
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
