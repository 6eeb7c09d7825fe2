"""Ouroboros as a ring of processes: each of K - 1 ranks computes one module, and the first rank the last module too.

A step of the ring (rank r holds module r + 1; rank 0 module K as well):

    rank 0    run module 1, send -> 1    delayed backward of 1    receive from K - 2, run K, its backward,
              send its input's gradient -> K - 2
    rank r    receive from r - 1, run, send -> r + 1 (the last: -> 0)    delayed backward,
              send its input's gradient -> r - 1
    all       receive the gradient for the next step's delayed backward, add up norms, update the own module

The delayed backward of module 1 fills the time of the forward wave. Every number is that of one device, bit for bit, in
fp32 with one thread a rank: the same functions of `training/ouroboros.py`, each sum in the same order. Several rings
share the batch: a module's delayed gradient is then added up over the rings, in its own group.

Boundary tensors travel through the hosts' memory and gloo, also between CUDA devices, as in the authors' code: sends
never wait for the receiver, so no order of ranks can block. Each process holds the whole model and its moments, and
computes and updates its modules only; `_gather` brings the parts together for an evaluation, a checkpoint, and a stop.

With "stash" a checkpoint holds gradients, as one device's does: what is in flight is then run backward to the end at
once, which is work that the next steps need not do.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from efftrain_cli.foundation.signals import Stop
from efftrain_cli.foundation.step import MicroBatch, StepPlan
from efftrain_cli.optim.gradients import norms_of
from efftrain_cli.recipe.recipe import Recipe
from efftrain_cli.training.build import compute_dtype
from efftrain_cli.training.devices import Devices, GradientStep, Passes
from efftrain_cli.training.ouroboros import (
    PREFIX,
    DelayedGradients,
    Due,
    Tensors,
    fault,
    pop,
    put,
    replayed,
)
from efftrain_cli.training.ranks import Ranks, as_described, described
from efftrain_cli.training.state import TrainState


class RingOnOneDevice(Devices):
    """This process alone, which computes what a ring of devices would."""

    def __init__(self, delayed: DelayedGradients, in_flight: Mapping[str, Tensor]) -> None:
        """`in_flight` are `TrainState.method_tensors`: read in each step, and not changed."""
        super().__init__()
        self._delayed, self._in_flight = delayed, in_flight

    def step(
        self, passes: Passes, micro_batches: Sequence[MicroBatch], plan: StepPlan
    ) -> GradientStep:
        delayed = self._delayed
        if delayed.section.delays_at(plan.step):
            return delayed.step(passes, micro_batches, plan, self._in_flight)
        columns = delayed.columns(range(1, delayed.modules.count + 1), {}, delayed=False)
        return super().step(passes, micro_batches, plan)._replace(columns=columns)


class Rings(Devices):
    """This rank's share of the rings; the gradients in flight of its modules stay here until they are gathered."""

    def __init__(self, recipe: Recipe, state: TrainState, ranks: Ranks) -> None:
        super().__init__(ranks)
        section = recipe.delayed_gradients
        assert section is not None
        size = section.devices
        self._position = ranks.rank % size
        self.sharing = Ranks(rank=ranks.rank // size, world_size=ranks.world_size // size)
        delayed = DelayedGradients(recipe, state.model, self.sharing.world_size)
        mixed = compute_dtype(recipe.train.dtype, state.model.device) == "bf16"
        self._boundary = state.model.residual_dtype if mixed else torch.float32
        self._delayed, self._state = delayed, state
        self._section, self._modules = section, delayed.modules
        self._parameters = delayed.parameters
        first = ranks.rank - self._position
        self._next = first + (self._position + 1) % size
        self._before = first + (self._position - 1) % size
        self._mine = [
            k for k in range(1, delayed.modules.count + 1) if section.device_of(k) == self._position
        ]
        self._peers = ranks.new_group(
            [range(position, ranks.world_size, size) for position in range(size)]
        )
        """The ranks with these modules in every ring; None if there is one ring."""
        self._mailbox: list[Tensor] = []  # where the ring is one rank
        self._sent: list[Any] = []
        self._in_flight = self._own(state.method_tensors)
        self._stopped = False
        """Whether a step was not finite: nothing has changed since."""

    def _own(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors of this rank's modules and, of several rings, of this ring's share of their step."""
        own = {}
        for name, tensor in tensors.items():
            kind, *rest = name.removeprefix(PREFIX).split(".")
            if kind not in ("gradient", "input", "delta") or int(rest[1]) not in self._mine:
                continue
            start = name.rpartition(".")[0] + "."
            numbers = [other.removeprefix(start) for other in tensors if other.startswith(start)]
            if kind != "gradient":
                place = sorted(map(int, numbers)).index(int(rest[2]))
                if place * self.sharing.world_size // len(numbers) != self.sharing.rank:
                    continue
            own[name] = tensor
        return own

    # --- a step ------------------------------------------------------------------------------------------------------

    def step(
        self, passes: Passes, micro_batches: Sequence[MicroBatch], plan: StepPlan
    ) -> GradientStep:
        """Leave the gradients of this rank's modules in `.grad`, clipped; loss and norms are those of the whole.

        Raises:
            Stop: a rank was asked to stop: all drop the step, and rank 0 has the whole state.
            LostProcessError: another rank has ended.
        """
        self.sync_stop_flag(plan.step)
        self.is_whole = False
        after = dict(self._in_flight)
        delayed = self._section.delays_at(plan.step)
        if delayed:
            due, losses = self._delayed_pass(passes, micro_batches, plan, after)
        else:
            due, losses = self._fresh_pass(passes, micro_batches, plan)
        gradients = self._delayed.join(due, delayed)
        wrong = fault(after, self._in_flight)
        norms, everywhere_due, loss, wrong = self._exchange_norms(gradients, due, losses, wrong)
        present = {
            name: norm
            for name, norm in norms.items()
            if any(name in self._modules.leaves[module - 1] for module in everywhere_due)
        }
        grad_norm = self._delayed.leave(gradients, present, delayed) + wrong
        self._stopped |= not bool(torch.isfinite(grad_norm) & torch.isfinite(loss))
        if not self._stopped:
            self._in_flight = after
        columns = self._delayed.columns(everywhere_due, {}, delayed)
        return GradientStep({"ce": loss}, grad_norm, present, columns=columns)

    def sync_stop_flag(self, step: int) -> None:
        try:
            super().sync_stop_flag(step)
        except Stop:
            self._gather(everything=True)
            raise

    def norms(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        norms = super().norms(tensors)
        mine = self._delayed.of_devices[self._position] if self.sharing.rank == 0 else set()
        values = [norm if name in mine else torch.zeros_like(norm) for name, norm in norms.items()]
        return dict(zip(tensors, self._sum(values), strict=True))

    def measures(self, state: TrainState) -> dict[str, Tensor]:
        return {}  # a rank has the moments of its own modules only

    def end_step(self, state: TrainState, evaluates: bool, saves: bool) -> None:
        saves |= self.asked or self._stopped
        if evaluates or saves:
            self._gather(everything=saves)

    def ready_to_save(self) -> bool:
        self.wanted = not self.is_whole
        return self.is_whole

    def _delayed_pass(
        self,
        passes: Passes,
        micro_batches: Sequence[MicroBatch],
        plan: StepPlan,
        after: dict[str, Tensor],
    ) -> tuple[Due, list[Tensor]]:
        """Return the due gradients of this rank's modules, and on rank 0 the losses of today's micro-batches."""
        modules, step, module = self._modules, plan.step, self._mine[0]
        if self._section.variant == "stash":
            leaves = modules.leaves[module - 1].items()
            put(
                after,
                f"{PREFIX}weights.{step}.{module}.",
                {name: leaf.detach().clone() for name, leaf in leaves},
            )
        for part in micro_batches:
            x = part.tokens if module == 1 else self._receive(part.tokens.shape, self._before)
            after[f"{PREFIX}input.{step}.{module}.{part.number}"] = x
            with torch.no_grad():
                self._send(modules.run(module, x), self._next)
        gradients, by_inputs = self._backward(module, step, after)
        due = {module: gradients} if gradients else {}
        losses, backward = list[Tensor](), list(by_inputs.values())
        if module == 1:
            backward = []
            for part in micro_batches:
                x = self._receive(part.tokens.shape, self._before)
                loss, by_input = modules.last(x, part.targets, plan.tokens, passes.note_of(part))
                losses.append(loss)
                backward.append(by_input)
            due[modules.count] = self._added_up(modules.take(modules.count))
        self._exchange(backward, module, step, after)
        return due, losses

    def _exchange(
        self, backward: Sequence[Tensor], module: int, step: int, after: dict[str, Tensor]
    ) -> None:
        """Send the gradients by this rank's inputs; receive those of the module after `module` for the next step.

        That module has run backward what this rank still has the inputs of.
        """
        for delta in backward:
            self._send(delta, self._before)
        batch = step - self._section.staleness(module + 1)
        prefix = f"{PREFIX}input.{batch}.{module}."
        numbers = [name.removeprefix(prefix) for name in after if name.startswith(prefix)]
        for number in sorted(numbers, key=int):
            shape = after[prefix + number].shape[:2]
            after[f"{PREFIX}delta.{batch}.{module}.{number}"] = self._receive(shape, self._next)
        self._wait()

    def _backward(
        self, module: int, step: int, after: dict[str, Tensor]
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Compute a module's delayed backward pass of `step`: its gradients, added up over the rings, and those by its
        inputs.

        Nothing is computed if a checkpoint held the gradients.
        """
        batch = step - self._section.staleness(module)
        if ready := pop(after, f"{PREFIX}gradient.{batch}.{module}."):
            return ready, {}
        weights = pop(after, f"{PREFIX}weights.{batch}.{module}.")
        with at_weights(self._modules.leaves[module - 1], weights):
            gradients, by_input = replayed(self._modules, module, step, after)
        return self._added_up(gradients), by_input

    def _fresh_pass(
        self, passes: Passes, micro_batches: Sequence[MicroBatch], plan: StepPlan
    ) -> tuple[Due, list[Tensor]]:
        """Take each micro-batch forward through the ring and back, without delay; return as `_delayed_pass`."""
        modules, last, module = self._modules, self._modules.count, self._mine[0]
        losses: list[Tensor] = []
        # One device adds up both uses of a tied matrix within a micro-batch.
        name = "wte.weight"
        uses = [
            leaves[name] for leaves in (modules.leaves[-1], modules.leaves[0]) if name in leaves
        ]
        tied: Tensor | None = None
        for part in micro_batches:
            x, shape = part.tokens, part.tokens.shape
            if module > 1:
                x = self._receive(shape, self._before).requires_grad_()
            out = modules.run(module, x)
            self._send(out.detach(), self._next)
            if module == 1:
                end = self._receive(shape, self._before)
                loss, by_input = modules.last(end, part.targets, plan.tokens, passes.note_of(part))
                losses.append(loss)
                self._send(by_input, self._before)
            out.backward(self._receive(shape, self._next))
            if x.grad is not None:
                self._send(x.grad, self._before)
            self._wait()
            if module == 1 and len(uses) == 2:
                head, lookup = (leaf.grad for leaf in uses)
                assert head is not None and lookup is not None
                tied = head + lookup if tied is None else tied + (head + lookup)
                for leaf in uses:
                    leaf.grad = None
        fresh = {k: modules.take(k) for k in self._mine}
        if tied is not None:
            fresh[last][name] = tied
            del fresh[1][name]
        return {k: self._added_up(gradients) for k, gradients in fresh.items()}, losses

    def _exchange_norms(
        self, gradients: Tensors, due: Due, losses: Sequence[Tensor], wrong: Tensor
    ) -> tuple[dict[str, Tensor], list[int], Tensor, Tensor]:
        """Return what every rank must know of the step.

        It is the norm of each parameter's gradient, the modules that have one, the loss, and `wrong`, the `fault`: one
        sum of numbers of which all but one are zero, so exact; of the loss, a share of each ring.
        """
        norms, leading = norms_of(gradients), self.sharing.rank == 0
        zero = torch.zeros((), device=self._state.model.device)
        modules = range(1, self._modules.count + 1)
        values = [norms[name] if leading and name in norms else zero for name in self._parameters]
        values += [torch.full_like(zero, float(leading and module in due)) for module in modules]
        *shared, loss, wrong = self._sum([*values, sum(losses, zero), wrong.to(zero.device)])
        flags = shared[len(self._parameters) :]
        everywhere_due = [module for module, flag in zip(modules, flags, strict=True) if flag]
        return dict(zip(self._parameters, shared, strict=False)), everywhere_due, loss, wrong

    def _sum(self, values: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the sums of 0-d numbers over all ranks."""
        everywhere = torch.stack([value.float() for value in values]).cpu()
        with self.ranks.timing_sum(everywhere.device):
            self.ranks.all_reduce([everywhere])
        return everywhere.to(self._state.model.device).unbind()

    def _added_up(self, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        """Add up a module's gradients over the rings, in place; return them."""
        if self._peers is not None and gradients:
            with self.ranks.timing_sum(self._state.model.device):
                self.ranks.all_reduce(list(gradients.values()), group=self._peers)
        return gradients

    # --- messages ----------------------------------------------------------------------------------------------------

    def _send(self, tensor: Tensor, to: int) -> None:
        if to == self.ranks.rank:
            self._mailbox.append(tensor.detach())
        else:
            self._sent.append(self.ranks.isend(tensor.detach().cpu().contiguous(), to))

    def _receive(self, shape: torch.Size, source: int) -> Tensor:
        """Receive a boundary tensor of micro-batches of `shape` (sequences, seq_len)."""
        if source == self.ranks.rank:
            return self._mailbox.pop(0)
        tensor = torch.empty((*shape, self._state.model.config.n_embd), dtype=self._boundary)
        self.ranks.recv(tensor, source)
        return tensor.to(self._state.model.device)

    def _wait(self) -> None:
        for sent in self._sent:
            sent()
        self._sent.clear()

    # --- the whole ---------------------------------------------------------------------------------------------------

    def _gather(self, everything: bool) -> None:
        """Give every rank all parameters; with `everything`, rank 0 all that a checkpoint holds.

        All ranks call it after the same step.
        """
        if self.is_whole:
            return
        optimizer = self._state.optimizer.tensors() if everything else {}
        for position, names in enumerate(self._delayed.of_devices):
            tensors = [
                parameter.detach() for name, parameter in self._parameters.items() if name in names
            ]
            tensors += [
                tensor for name, tensor in optimizer.items() if name.split(".", 1)[1] in names
            ]
            self.ranks.broadcast(tensors, src=position)
        if not everything:
            return
        if self._section.variant == "stash":
            self._run_out(self._state.progress.step)
        self._collect()
        self.is_whole, self.wanted = True, False

    def _run_out(self, step: int) -> None:
        """Run backward what is in flight after `step`, in the order of the steps to come, so that only gradients
        remain."""
        after, module = self._in_flight, self._mine[0]
        for later in range(step + 1, step + self._section.modules):
            batch = later - self._section.staleness(module)
            prefix = f"{PREFIX}gradient.{batch}.{module}."
            by_input = dict[str, Tensor]()
            if batch <= step and not any(name.startswith(prefix) for name in after):
                gradients, by_input = self._backward(module, later, after)
                put(after, prefix, gradients)
            self._exchange(list(by_input.values()) if module > 1 else [], module, later, after)

    def _collect(self) -> None:
        """Bring what is in flight to rank 0."""
        mine = self._in_flight
        if self._section.variant == "stash" and self.sharing.rank:
            mine = {}  # the rings have the same gradients
        found: dict[str, Tensor] = {}
        for rank, shapes in enumerate(self.ranks.all_gather_json(described(mine))):
            tensors = mine
            if rank != self.ranks.rank:
                tensors = as_described(shapes, self._state.model.device)
            self.ranks.broadcast(tensors.values(), src=rank)
            if self.ranks.rank == 0:
                found |= tensors
        if self.ranks.rank:
            return
        self._state.method_tensors.clear()
        self._state.method_tensors.update(found)
        if found:
            self._state.method_tensors[f"{PREFIX}layout"] = self._delayed.layout


@contextmanager
def at_weights(leaves: Tensors, weights: Tensors) -> Iterator[None]:
    """Have the leaves that `weights` names hold these for a while, forward and backward."""
    today = {name: leaves[name].data for name in weights}
    for name, weight in weights.items():
        leaves[name].data = weight
    try:
        yield
    finally:
        for name, weight in today.items():
            leaves[name].data = weight
