"""Ouroboros as a ring of processes: each of K - 1 ranks computes one module, and the first rank the
last module too.

A step of the ring (rank r holds module r + 1; rank 0 module K as well):

    rank 0    run module 1, send -> 1    delayed backward of 1    receive from K - 2, run K,
              its backward, send its input's gradient -> K - 2
    rank r    receive from r - 1, run, send -> r + 1 (the last: -> 0)    delayed backward,
              send its input's gradient -> r - 1
    all       receive the gradient for the next step's delayed backward, add up norms,
              update this rank's modules

The delayed backward of module 1 fills the time of the forward wave. In the warmup nothing is
delayed, so nothing could overlap: the first rank of each ring computes the whole model and sends
its gradient to the others.

Every number is that of one device, bit for bit, in fp32 with one thread per rank: both call the
functions of `training/delayed_gradients.py`, and take each sum in the same order. Several rings
share the batch: a module's delayed gradient is then added up over the rings, in its own group.

Boundary tensors travel through the hosts' memory and gloo, also between CUDA devices, as in the
authors' code: sends never wait for the receiver, so no order of ranks can block. Each process holds
the whole model and its moments, but computes and updates its modules only; `_gather` brings the
parts together for an evaluation, a checkpoint, and a stop.

A module's delayed gradient is that of the weights of its batch's step, which the ring keeps beside
the batch: its backward pass runs the module forward a second time. In flight on a rank between two
steps are

    ouroboros.weights.STEP.MODULE.PARAMETER     the module's weights in that step
    ouroboros.input.STEP.MODULE.MICROBATCH      its input
    ouroboros.delta.STEP.MODULE.MICROBATCH      gradient of the loss by its output

A checkpoint holds gradients, as one device's does. A save therefore runs all that is in flight
backward at once; the next steps need not do that work again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from efftrain_cli.foundation.signals import Stop
from efftrain_cli.foundation.tensors import Tensors
from efftrain_cli.optim.gradients import gradients_of, norms_of
from efftrain_cli.recipe.recipe import Recipe
from efftrain_cli.training.build import compute_dtype
from efftrain_cli.training.delayed_gradients import (
    PREFIX,
    DelayedGradients,
    Due,
    pop,
    put,
    rerun_backward,
)
from efftrain_cli.training.devices import GradientStep, Losses, Passes
from efftrain_cli.training.ranks import Ranks, describe_tensors, empty_tensors
from efftrain_cli.training.state import TrainState


class Rings(DelayedGradients):
    """This rank's modules of its ring. Their in-flight tensors stay on this rank until they are
    gathered."""

    def __init__(self, recipe: Recipe, state: TrainState, ranks: Ranks) -> None:
        section = recipe.delayed_gradients
        assert section is not None
        size = section.devices
        self._position = ranks.rank % size
        sharing = Ranks(rank=ranks.rank // size, world_size=ranks.world_size // size)
        super().__init__(recipe, state.model, {}, ranks, sharing)
        self._state = state
        self._mine = [k for k in self.module_numbers if section.device_of(k) == self._position]
        self._in_flight = self._select(state.method_tensors)
        self._boundary_dtype = torch.float32
        if compute_dtype(recipe, state.model.device) == "bf16":
            self._boundary_dtype = state.model.residual_dtype

        first = ranks.rank - self._position
        self._next = first + (self._position + 1) % size
        self._before = first + (self._position - 1) % size
        members = [range(position, ranks.world_size, size) for position in range(size)]
        self._peers = ranks.new_group(members)
        """The ranks with these modules in every ring; None if there is one ring."""
        self._mailbox: list[Tensor] = []  # messages to itself, if the ring is one rank
        self._sent: list[Any] = []

    def _select(self, tensors: Tensors) -> Tensors:
        """Return the gradients of this rank's modules."""
        selected = {}
        for name, tensor in tensors.items():
            if int(name.split(".")[3]) in self._mine:
                selected[name] = tensor
        return selected

    # --- a step -----------------------------------------------------------------------------------

    def step(self, passes: Passes) -> GradientStep:
        """Leave the gradients of this rank's modules in `.grad`; loss and norms are the whole's.

        Raises:
            Stop: a rank was asked to stop: all drop the step, and rank 0 has the whole state.
            LostProcessError: another rank has ended.
        """
        self.sync_stop_flag(passes.plan.step)
        self.is_whole = False
        return super().step(passes)

    def gradient(self, passes: Passes) -> Losses:
        """Leave the gradient of a step without delay in `.grad`, on every rank.

        The first rank of each ring computes the whole model, as one device does, and sends the
        gradient to the others.
        """
        if self._position:
            passes = passes.of([])
        losses = super().gradient(passes)
        gradients = gradients_of(passes.parameters)
        if not self._position:
            unsummed = dict(zip(self.parameters, gradients, strict=True))
            # The last module first: a tied matrix counts with it.
            for leaves in reversed(self.modules.leaves):
                own = {name: unsummed.pop(name) for name in leaves if name in unsummed}
                self._sum_over_rings(own)
            self._sum_over_rings(losses)
        with self.ranks.timing_sum(self._state.model.device):
            self.ranks.broadcast([*gradients, *losses.values()])
        return losses

    def delayed_step(self, passes: Passes) -> GradientStep:
        step = super().delayed_step(passes)
        if step.method_tensors is not None:
            self._in_flight = step.method_tensors
        return step._replace(method_tensors=None)

    def sync_stop_flag(self, step: int) -> None:
        try:
            super().sync_stop_flag(step)
        except Stop:
            self._gather(everything=True)
            raise

    def norms(self, tensors: Tensors) -> Tensors:
        # One rank of the first ring has each tensor: the others add zeros.
        updated = self.of_devices[self._position]
        norms = super().norms(tensors)
        for name, norm in norms.items():
            if self.sharing.rank or name not in updated:
                norms[name] = torch.zeros_like(norm)
        sums = self._sum(list(norms.values()))
        return dict(zip(norms, sums, strict=True))

    def optimizer_columns(self, state: TrainState) -> Tensors:
        return {}  # a rank has the moments of its modules only

    def end_step(self, state: TrainState, evaluates: bool, saves: bool) -> None:
        self._stopped |= bool(state.nonfinite)
        saves |= self.asked or self._stopped
        if evaluates or saves:
            self._gather(everything=saves)

    def ready_to_save(self) -> bool:
        self.wanted = not self.is_whole
        return self.is_whole

    def due_gradients(self, passes: Passes) -> tuple[Due, Tensors, Losses]:
        """Return those of this rank's modules, and on rank 0 the loss of its micro-batches."""
        after = dict(self._in_flight)
        modules = self.modules
        module = self._mine[0]
        micro_batches = passes.micro_batches
        plan = passes.plan
        step = plan.step
        leaves = modules.leaves[module - 1].items()
        weights = {name: leaf.detach().clone() for name, leaf in leaves}
        put(after, f"{PREFIX}weights.{step}.{module}.", weights)

        # The forward wave.
        for part in micro_batches:
            x = part.tokens
            if module > 1:
                x = self._receive(x.shape, self._before)
            after[f"{PREFIX}input.{step}.{module}.{part.number}"] = x
            with torch.no_grad():
                self._send(modules.run(module, x), self._next)

        gradients, by_inputs = self._backward(module, step, after)
        due = {}
        if gradients:
            due[module] = gradients
        loss = torch.zeros((), device=self._state.model.device)
        to_send = list(by_inputs.values())
        if module == 1:
            for part in micro_batches:
                x = self._receive(part.tokens.shape, self._before)
                part_loss, by_input = modules.last(x, part.targets, plan.tokens)
                loss = loss + part_loss
                to_send.append(by_input)
            due[modules.count] = self._sum_over_rings(modules.take(modules.count))
        self._exchange(to_send, module, step, after)
        return due, after, {"ce": loss}

    def _exchange(
        self,
        backward: Sequence[Tensor],
        module: int,
        step: int,
        after: Tensors,
    ) -> None:
        """Send the gradients by this rank's inputs; receive those by `module`'s outputs for the
        next step.

        The module after `module` has run that batch backward; this rank still has its inputs.
        """
        for delta in backward:
            self._send(delta, self._before)

        batch = step - self.section.staleness(module + 1)
        prefix = f"{PREFIX}input.{batch}.{module}."
        for number in numbers_after(prefix, after):
            shape = after[prefix + number].shape[:2]
            after[f"{PREFIX}delta.{batch}.{module}.{number}"] = self._receive(shape, self._next)
        self._wait()

    def _backward(
        self,
        module: int,
        step: int,
        after: Tensors,
    ) -> tuple[Tensors, Tensors]:
        """Compute a module's delayed backward pass of `step`.

        Return its gradients by parameter, added up over the rings, and those by its inputs.
        Gradients that a checkpoint held are returned without a pass.
        """
        batch = step - self.section.staleness(module)
        if restored := pop(after, f"{PREFIX}gradient.{batch}.{module}."):
            return restored, {}
        weights = pop(after, f"{PREFIX}weights.{batch}.{module}.")
        with at_weights(self.modules.leaves[module - 1], weights):
            gradients, by_input = rerun_backward(self.modules, module, step, after)
        return self._sum_over_rings(gradients), by_input

    def exchange(
        self,
        gradients: Tensors,
        due: Due,
        losses: Losses,
        nan_or_zero: Tensor,
    ) -> tuple[Tensors, Losses, Tensor]:
        """Give every rank what the step needs of all, by one sum.

        All terms but one of each number are zero, so it is exact; the loss has a term of each ring.
        """
        zero = torch.zeros((), device=self._state.model.device)
        if self.sharing.rank:
            # Every ring has the same gradients: the first reports them.
            gradients = {}
            due = {}
        norms = norms_of(gradients)
        values = [norms.get(name, zero) for name in self.parameters]
        values += [torch.full_like(zero, k in due) for k in self.module_numbers]
        values += [losses["ce"], nan_or_zero.to(zero.device)]

        *numbers, loss, nan_or_zero = self._sum(values)
        flags = numbers[len(self.parameters) :]
        names = set[str]()
        for leaves, flag in zip(self.modules.leaves, flags, strict=True):
            if flag:
                names.update(leaves)
        all_norms = zip(self.parameters, numbers, strict=False)
        norms = {name: norm for name, norm in all_norms if name in names}
        return norms, {"ce": loss}, nan_or_zero

    def _sum(self, values: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the sums of 0-d numbers over all ranks."""
        numbers = torch.stack([value.float() for value in values]).cpu()
        with self.ranks.timing_sum(numbers.device):
            self.ranks.all_reduce([numbers])
        return numbers.to(self._state.model.device).unbind()

    def _sum_over_rings(self, gradients: Tensors) -> Tensors:
        """Add up a module's gradients over the rings, in place; return them."""
        if self._peers is not None and gradients:
            with self.ranks.timing_sum(self._state.model.device):
                self.ranks.all_reduce(list(gradients.values()), group=self._peers)
        return gradients

    # --- messages ---------------------------------------------------------------------------------

    def _send(self, tensor: Tensor, to: int) -> None:
        tensor = tensor.detach()
        if to == self.ranks.rank:
            self._mailbox.append(tensor)
        else:
            on_host = tensor.cpu().contiguous()
            self._sent.append(self.ranks.isend(on_host, to))

    def _receive(self, shape: torch.Size, source: int) -> Tensor:
        """Receive a boundary tensor of micro-batches of `shape` (sequences, seq_len)."""
        if source == self.ranks.rank:
            return self._mailbox.pop(0)
        model = self._state.model
        tensor = torch.empty(*shape, model.config.n_embd, dtype=self._boundary_dtype)
        self.ranks.recv(tensor, source)
        return tensor.to(model.device)

    def _wait(self) -> None:
        for sent in self._sent:
            sent()
        self._sent.clear()

    # --- the whole --------------------------------------------------------------------------------

    def _gather(self, everything: bool) -> None:
        """Give each rank all parameters and, with `everything`, rank 0 all that a checkpoint holds.

        All ranks call it after the same step.
        """
        if self.is_whole:
            return
        optimizer = {}
        if everything:
            optimizer = self._state.optimizer.tensors()
        for position, names in enumerate(self.of_devices):
            tensors = []
            for name, parameter in self.parameters.items():
                if name in names:
                    tensors.append(parameter.detach())
            for key, tensor in optimizer.items():
                if key.split(".", 1)[1] in names:
                    tensors.append(tensor)
            self.ranks.broadcast(tensors, src=position)
        if not everything:
            return

        self._run_out(self._state.progress.step)
        self._collect()
        self.is_whole = True
        self.wanted = False

    def _run_out(self, step: int) -> None:
        """Run backward all inputs in flight after `step`, in the order of the steps to come:
        gradients remain."""
        after = self._in_flight
        module = self._mine[0]
        for later in range(step + 1, step + self.section.modules):
            batch = later - self.section.staleness(module)
            prefix = f"{PREFIX}gradient.{batch}.{module}."
            to_send = list[Tensor]()
            if batch <= step and not any(name.startswith(prefix) for name in after):
                gradients, by_input = self._backward(module, later, after)
                put(after, prefix, gradients)
                to_send = list(by_input.values())
            self._exchange(to_send, module, later, after)

    def _collect(self) -> None:
        """Bring all in-flight tensors to rank 0."""
        sent = self._in_flight
        if self.sharing.rank:
            sent = {}  # the rings have the same gradients
        gathered: Tensors = {}
        for rank, shapes in enumerate(self.ranks.all_gather_json(describe_tensors(sent))):
            tensors = sent
            if rank != self.ranks.rank:
                tensors = empty_tensors(shapes, self._state.model.device)
            self.ranks.broadcast(tensors.values(), src=rank)
            gathered |= tensors
        if self.ranks.rank:
            return
        self._state.method_tensors.clear()
        self._state.method_tensors.update(gathered)


def numbers_after(prefix: str, tensors: Tensors) -> list[str]:
    """Return the numbers that follow `prefix` in the tensors' names, in ascending order."""
    numbers = [name.removeprefix(prefix) for name in tensors if name.startswith(prefix)]
    return sorted(numbers, key=int)


@contextmanager
def at_weights(leaves: Tensors, weights: Tensors) -> Iterator[None]:
    """Replace the values of the leaves that `weights` names while the block runs, forward and
    backward."""
    current = {name: leaves[name].data for name in weights}
    for name, weight in weights.items():
        leaves[name].data = weight
    try:
        yield
    finally:
        for name, weight in current.items():
            leaves[name].data = weight
