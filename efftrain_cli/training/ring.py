"""Ouroboros as a ring of processes: K - 1 ranks, of which each computes its module alone, the first rank the first and
the last.

A step of the ring (rank r holds module r + 1; rank 0 module K as well):

    rank 0    run module 1, send -> 1    late backward of 1    receive from K - 2, run K, its backward,
              send its input's gradient -> K - 2
    rank r    receive from r - 1, run, send -> r + 1 (the last: -> 0)    late backward,
              send its input's gradient -> r - 1
    all       receive the gradient for the next step's late backward, add up norms, update the own module

The late backward of module 1 passes the time of the forward wave. Every number is that of one device, bit for bit, in
fp32 with one thread a rank: the same functions of `training/ouroboros.py`, each sum in the same order. Several rings
share the batch: a module's late gradient is then added up over the rings, in its own group.

Boundary tensors travel through the hosts' memory and gloo, also between CUDA devices, as in the authors' code: sends
never wait for the receiver, so no order of ranks can block. Each process holds the whole model and its moments, and
computes and updates its modules only; `gather` brings the others' parts together where all is needed: for an
evaluation, a checkpoint, and at a stop.

With "stash" a checkpoint holds gradients, as one device's does: what is in flight is then run backward to the end at
once, which is work that the next steps need not do.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from itertools import count
from typing import Any

import torch
from torch import Tensor

from efftrain_cli.foundation.signals import Stop
from efftrain_cli.plan.step import MicroBatch, StepPlan
from efftrain_cli.training.ouroboros import (
    PREFIX,
    LateGradients,
    LateStep,
    fault,
    norms_of,
    pop,
    replayed,
)
from efftrain_cli.training.ranks import Ranks, as_described, described
from efftrain_cli.training.state import TrainState

_GATHERINGS = count()
"""Numbers the gatherings of this process, which are those of every process: what is announced needs a name of its
own."""


class Ring:
    """This rank's share of the rings. One per training; the gradients in flight of its modules are kept here until they
    are gathered."""

    def __init__(
        self, late: LateGradients, state: TrainState, ranks: Ranks, boundary: torch.dtype
    ) -> None:
        self._late, self._state, self._ranks, self._boundary = late, state, ranks, boundary
        self._section, self._modules, self._parameters = late.section, late.modules, late.parameters
        size = late.section.devices
        self._position = ranks.rank % size
        self.rings = Ranks(rank=ranks.rank // size, world_size=ranks.world_size // size)
        """Which ring this is, of how many: they share the batch."""
        first = ranks.rank - self._position
        self._next, self._before = (
            first + (self._position + 1) % size,
            first + (self._position - 1) % size,
        )
        self._mine = [
            k
            for k in range(1, late.modules.count + 1)
            if late.section.device_of(k) == self._position
        ]
        self._peers = ranks.group(
            [range(position, ranks.world_size, size) for position in range(size)]
        )
        """The ranks with these modules in every ring; None where there is one ring."""
        self._mailbox: list[Tensor] = []  # where the ring is one rank
        self._sent: list[Any] = []
        self._in_flight = self._own(state.method_tensors)
        self.stopped = False
        """Whether a step was not finite: nothing has changed since."""
        self.asked = False
        """Whether rank 0 wants to save after this step."""
        state.whole, state.wanted = True, False

    def _own(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Those of `tensors` that belong to this rank's modules and, of several rings, to this ring's share of their
        step."""
        found = {}
        for name, tensor in tensors.items():
            kind, *rest = name.removeprefix(PREFIX).split(".")
            if kind not in ("gradient", "input", "delta") or int(rest[1]) not in self._mine:
                continue
            if kind != "gradient":
                prefix = name.rpartition(".")[0] + "."
                numbers = sorted(
                    int(other.removeprefix(prefix)) for other in tensors if other.startswith(prefix)
                )
                if (
                    numbers.index(int(rest[2])) * self.rings.world_size // len(numbers)
                    != self.rings.rank
                ):
                    continue
            found[name] = tensor
        return found

    # --- a step ------------------------------------------------------------------------------------------------------

    def step(self, micro_batches: Sequence[MicroBatch], plan: StepPlan) -> LateStep:
        """Leaves the gradients of this rank's modules in `.grad`, clipped; loss and norm are those of the whole.

        Raises:
            Stop: a rank was asked to stop: all drop the step, and rank 0 has the whole state.
            LostProcessError: another rank has ended.
        """
        try:
            self._ranks.go_on(plan.step)
        except Stop:
            self.gather(everything=True)
            raise
        self._state.whole = False
        self._ranks.enter("forward and backward")
        after = dict(self._in_flight)
        delayed = self._section.delays_at(plan.step)
        late, losses = (
            self._delayed(micro_batches, plan, after)
            if delayed
            else self._fresh(micro_batches, plan)
        )
        gradients = self._late.joined(late, delayed)
        norms, due, loss, wrong = self._together(
            gradients, late, losses, fault(after, self._in_flight)
        )
        present = {
            name: norm
            for name, norm in norms.items()
            if any(due[k] and name in self._modules.leaves[k] for k in range(len(due)))
        }
        grad_norm = self._late.leave(gradients, present, delayed) + wrong
        self.stopped |= not bool(torch.isfinite(grad_norm) & torch.isfinite(loss))
        if not self.stopped:
            self._in_flight = after
        ages = [
            float(self._section.staleness(k)) if delayed else 0.0 for k in range(1, len(due) + 1)
        ]
        staleness = [age if here else float("nan") for age, here in zip(ages, due, strict=True)]
        return LateStep({"ce": loss}, grad_norm, None, staleness, {})

    def _delayed(
        self, micro_batches: Sequence[MicroBatch], plan: StepPlan, after: dict[str, Tensor]
    ) -> tuple[list[dict[str, Tensor] | None], list[Tensor]]:
        """The gradients that are due of this rank's modules, and the losses of today's micro-batches where the head
        is."""
        modules, step, last = self._modules, plan.step, self._modules.count
        module = self._mine[0]
        late: list[dict[str, Tensor] | None] = [None] * last
        if self._section.variant == "stash":
            stashed = {
                name: leaf.detach().clone() for name, leaf in modules.leaves[module - 1].items()
            }
            after |= {
                f"{PREFIX}weights.{step}.{module}.{name}": tensor
                for name, tensor in stashed.items()
            }
        for number, tokens, _ in micro_batches:
            x = tokens if module == 1 else self._receive(tokens.shape, self._before)
            after[f"{PREFIX}input.{step}.{module}.{number}"] = x
            with torch.no_grad():
                self._send(modules.run(module, x, None), self._next)
        losses, backward = list[Tensor](), list[Tensor]()
        if module == 1:
            late[0], _ = self._backward(module, step, after)
            for _, tokens, targets in micro_batches:
                loss, by_input = modules.last(
                    self._receive(tokens.shape, self._before), targets, plan.tokens
                )
                losses.append(loss)
                backward.append(by_input)
            late[-1] = self._added_up(modules.take(last))
        else:
            late[module - 1], by_inputs = self._backward(module, step, after)
            backward = list(by_inputs.values())
        self._exchange(backward, module, step, after)
        return late, losses

    def _exchange(
        self, backward: Sequence[Tensor], module: int, step: int, after: dict[str, Tensor]
    ) -> None:
        """Sends the gradients by this rank's inputs, and takes those of the module after `module` for the next step: it
        has run backward what this rank still has the inputs of."""
        for delta in backward:
            self._send(delta, self._before)
        batch = step - self._section.staleness(module + 1)
        prefix = f"{PREFIX}input.{batch}.{module}."
        for number in sorted(
            (name.removeprefix(prefix) for name in after if name.startswith(prefix)), key=int
        ):
            shape = after[prefix + number].shape[:2]
            after[f"{PREFIX}delta.{batch}.{module}.{number}"] = self._receive(shape, self._next)
        self._wait()

    def _backward(
        self, module: int, step: int, after: dict[str, Tensor]
    ) -> tuple[dict[str, Tensor] | None, dict[str, Tensor]]:
        """A module's late backward pass of `step`: its gradients, added up over the rings, and those by its inputs.
        Where the gradients are there already, of a checkpoint, nothing is computed."""
        batch = step - self._section.staleness(module)
        if ready := pop(after, f"{PREFIX}gradient.{batch}.{module}."):
            return ready, {}
        weights = pop(after, f"{PREFIX}weights.{batch}.{module}.")
        with at_weights(self._modules.leaves[module - 1], weights) if weights else nullcontext():
            gradients, by_input = replayed(self._modules, module, step, after)
        return None if gradients is None else self._added_up(gradients), by_input

    def _fresh(
        self, micro_batches: Sequence[MicroBatch], plan: StepPlan
    ) -> tuple[list[dict[str, Tensor] | None], list[Tensor]]:
        """A step without delay: each micro-batch forward through the ring and back."""
        modules, last, module = self._modules, self._modules.count, self._mine[0]
        losses: list[Tensor] = []
        tied: Tensor | None = None
        for _, tokens, targets in micro_batches:
            x = (
                tokens
                if module == 1
                else self._receive(tokens.shape, self._before).requires_grad_()
            )
            out = modules.run(module, x, None)
            self._send(out.detach(), self._next)
            if module == 1:
                loss, by_input = modules.last(
                    self._receive(tokens.shape, self._before), targets, plan.tokens
                )
                losses.append(loss)
                self._send(by_input, self._before)
            out.backward(self._receive(tokens.shape, self._next))
            if x.grad is not None:
                self._send(x.grad, self._before)
            self._wait()
            if (
                module == 1 and "wte.weight" in modules.leaves[-1]
            ):  # one device adds up both uses of the matrix within a micro-batch
                uses = [leaves["wte.weight"] for leaves in (modules.leaves[-1], modules.leaves[0])]
                head, lookup = (leaf.grad for leaf in uses)
                assert head is not None and lookup is not None
                tied = head + lookup if tied is None else tied + (head + lookup)
                for leaf in uses:
                    leaf.grad = None
        fresh: list[dict[str, Tensor] | None] = [
            modules.take(k) if k in self._mine else None for k in range(1, last + 1)
        ]
        if tied is not None and fresh[0] is not None and fresh[-1] is not None:
            fresh[-1]["wte.weight"] = tied
            del fresh[0]["wte.weight"]
        return [
            None if gradients is None else self._added_up(gradients) for gradients in fresh
        ], losses

    def _together(
        self,
        gradients: Mapping[str, Tensor | None],
        late: Sequence[object],
        losses: Sequence[Tensor],
        wrong: Tensor,
    ) -> tuple[dict[str, Tensor], list[bool], Tensor, Tensor]:
        """What every rank must know of the step: the norm of each parameter's gradient, which modules have one, the
        loss, and `wrong`, the `fault`; and whether rank 0 wants to save. One sum of numbers of which all but one are
        zero, so exact; of the loss, a share of each ring."""
        device, leading = self._state.model.device, self.rings.rank == 0
        norms = norms_of(gradients)
        zero = torch.zeros((), device=device)
        values = [norms[name] if leading and name in norms else zero for name in self._parameters]
        values += [
            torch.full_like(zero, float(leading and gradient is not None)) for gradient in late
        ]
        values += [
            sum(losses, zero),
            wrong.to(device),
            torch.full_like(zero, float(self._state.wanted)),
        ]
        everywhere = torch.stack([value.float() for value in values]).cpu()
        self._ranks.sum_of(everywhere)
        self.asked = bool(everywhere[-1])
        *shared, loss, wrong, _ = everywhere.to(device).unbind()
        due = [bool(value) for value in everywhere[len(self._parameters) : -3]]
        return dict(zip(self._parameters, shared, strict=False)), due, loss, wrong

    def _added_up(self, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        """A module's gradients, added up over the rings in place."""
        if self._peers is not None:
            self._ranks.add_up_in(self._peers, list(gradients.values()))
        return gradients

    # --- messages ----------------------------------------------------------------------------------------------------

    def _send(self, tensor: Tensor, to: int) -> None:
        if to == self._ranks.rank:
            self._mailbox.append(tensor.detach())
        else:
            self._sent.append(self._ranks.isend(tensor.detach().cpu().contiguous(), to))

    def _receive(self, shape: torch.Size, source: int) -> Tensor:
        """A boundary tensor of micro-batches of `shape` (sequences, seq_len)."""
        if source == self._ranks.rank:
            return self._mailbox.pop(0)
        tensor = torch.empty((*shape, self._state.model.config.n_embd), dtype=self._boundary)
        self._ranks.receive(tensor, source)
        return tensor.to(self._state.model.device)

    def _wait(self) -> None:
        for sent in self._sent:
            sent()
        self._sent.clear()

    # --- the whole ---------------------------------------------------------------------------------------------------

    def gather(self, everything: bool) -> None:
        """Gives every rank all parameters; with `everything`, rank 0 all that a checkpoint holds. All ranks call it
        after the same step."""
        state, ranks = self._state, self._ranks
        if state.whole:
            return
        ranks.enter("exchange")
        optimizer = state.optimizer.tensors() if everything else {}
        for position, names in enumerate(self._late.of_devices):
            tensors = [
                parameter.detach() for name, parameter in self._parameters.items() if name in names
            ]
            tensors += [
                tensor for name, tensor in optimizer.items() if name.split(".", 1)[1] in names
            ]
            ranks.share_from(position, tensors)
        if not everything:
            return
        if self._section.variant == "stash":
            self._run_out(state.progress.step)
        self._collect(next(_GATHERINGS))
        state.whole, state.wanted, self.asked = True, False, False

    def _run_out(self, step: int) -> None:
        """Runs backward what is in flight after `step`, in the order of the steps to come, so that only gradients
        remain."""
        after, module = self._in_flight, self._mine[0]
        for later in range(step + 1, step + self._section.modules):
            batch = later - self._section.staleness(module)
            gradients, by_input = None, dict[str, Tensor]()
            if batch <= step and not any(
                name.startswith(f"{PREFIX}gradient.{batch}.{module}.") for name in after
            ):
                gradients, by_input = self._backward(module, later, after)
            if gradients is not None:
                after |= {
                    f"{PREFIX}gradient.{batch}.{module}.{name}": gradient
                    for name, gradient in gradients.items()
                }
            self._exchange(list(by_input.values()) if module > 1 else [], module, later, after)

    def _collect(self, number: int) -> None:
        """Brings what is in flight to rank 0."""
        state, ranks, mine = self._state, self._ranks, self._in_flight
        if self._section.variant == "stash" and self.rings.rank:
            mine = {}  # the rings have the same gradients
        if ranks.rank:
            ranks.announce(f"ring/{number}/{ranks.rank}", described(mine))
            for tensor in mine.values():
                ranks.isend(tensor.detach().cpu().contiguous(), 0)()
            return
        found = dict(mine)
        for rank in range(1, ranks.world_size):
            for name, tensor in as_described(
                ranks.hear(f"ring/{number}/{rank}"), torch.device("cpu")
            ).items():
                ranks.receive(tensor, rank)
                found[name] = tensor.to(state.model.device)
        state.method_tensors.clear()
        state.method_tensors.update(found)
        if found:
            state.method_tensors[f"{PREFIX}layout"] = self._late.layout


@contextmanager
def at_weights(leaves: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> Iterator[None]:
    """Has the leaves hold other weights for a while, forward and backward."""
    today = {name: leaf.data for name, leaf in leaves.items()}
    for name, leaf in leaves.items():
        leaf.data = weights[name]
    try:
        yield
    finally:
        for name, leaf in leaves.items():
            leaf.data = today[name]
