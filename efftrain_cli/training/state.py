"""The state of training: everything that a step changes, as named tensors and readable numbers.

On several ranks a tensor may be whole on each of them, or divided: `Division` says how. Weights
come in whole, one after the other, whether they are drawn, read from a checkpoint or grown, and
each rank keeps its part. So no rank ever holds more than one whole tensor that it does not own.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn

from efftrain_cli.foundation.console import listed
from efftrain_cli.foundation.errors import CheckpointError, ReplicaError
from efftrain_cli.foundation.step import Progress
from efftrain_cli.foundation.tensors import Tensors
from efftrain_cli.model.gpt import GPT
from efftrain_cli.optim.optimizer import Optimizer
from efftrain_cli.training import dist

Named = Iterable[tuple[str, Tensor]]
"""Whole tensors by name, one at a time."""


class Division(Protocol):
    """How the ranks divide the tensors of a state."""

    parameters: dict[str, nn.Parameter]
    """This rank's parameters, or rows of them, by name."""
    in_flight: Tensors
    """This rank's gradients that are due in later steps: the same dictionary as the state's."""
    shares_batches: bool
    """Whether each rank computes its share of a batch; else all of them compute each sequence."""

    def loss_sum(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """See `TrainState.loss_sum`; all ranks call it at a time."""

    def settle(self) -> None:
        """Finish what steps left undone, so that `in_flight` holds all that is due later; all ranks
        call it."""

    def part(self, name: str, whole: Tensor) -> Tensor:
        """Return this rank's part of a tensor of which it has one."""

    def gather(self, tensors: Tensors) -> Tensors:
        """Return whole tensors, on the CPU of rank 0; {} elsewhere. All ranks give their parts."""


@dataclass(slots=True, kw_only=True)
class TrainState:
    """Everything that a step changes."""

    model: GPT
    parameters: dict[str, nn.Parameter]
    """What the optimizer updates on this rank: the model's parameters, or parts of them."""
    optimizer: Optimizer
    nonfinite: Tensor
    """0-d fp32, sticky: 1 once a loss or gradient was not finite; updates stop from then on."""
    device: torch.device
    """Where this rank computes."""
    dtype: str
    """In what, as `compute_dtype` returns it."""
    progress: Progress = field(default_factory=Progress)
    in_flight: Tensors
    """Named gradients that are due in later steps: those of Ouroboros."""
    division: Division | None
    """None: every rank has the whole state."""

    @property
    def sharing(self) -> tuple[int, int]:
        """This rank's number among those that share each batch, and how many they are."""
        if self.division is None or self.division.shares_batches:
            return dist.rank(), dist.world_size()
        return 0, 1

    def loss_sum(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Sum the cross-entropy of tokens (B, T) against targets (B, T), nats, 0-d fp32."""
        if self.division is None:
            return self.model.loss_sum(tokens, targets)
        return self.division.loss_sum(tokens, targets)

    def weights(self) -> Tensors:
        """Return this rank's parameters by name; a tied head is not listed twice."""
        return {name: parameter.detach() for name, parameter in self.parameters.items()}

    def settle(self) -> None:
        """See `Division`."""
        if self.division is not None:
            self.division.settle()

    def whole(self) -> tuple[Tensors, Tensors, Tensors]:
        """Return whole tensors of model, optimizer and in flight, on rank 0. All ranks call it."""
        parts = (self.weights(), self.optimizer.tensors(), self.in_flight)
        if self.division is None:
            return parts
        model, optimizer, in_flight = map(self.division.gather, parts)
        return model, optimizer, in_flight

    def load_weights(self, named: Named) -> None:
        """Copy this rank's parts of whole weights; otherwise as `fill`."""
        fill(self.weights(), named, self.division)

    def load_in_flight(self, named: Named) -> None:
        """Take the gradients in flight of this rank's parameters."""
        for name, tensor in named:
            if name.split(".", 4)[-1] in self.parameters:
                self.in_flight[name] = tensor.to(self.device)

    def load_optimizer(self, named: Named) -> None:
        """Copy this rank's parts of the optimizer's whole tensors; otherwise as `fill`."""
        fill(self.optimizer.tensors(), named, self.division)


def fill(
    tensors: Tensors,
    named: Named,
    division: Division | None,
) -> None:
    """Copy whole tensors, or this rank's parts of them, into `tensors`.

    Raises:
        CheckpointError: one is missing or too many, or a shape differs; others may have been copied
            by then.
    """
    missing = set(tensors)
    with torch.no_grad():
        for name, whole in named:
            if name not in tensors:
                # Another rank's, unless this one has all.
                if division is None:
                    raise CheckpointError(f"tensor {name} is not part of the recipe's model")
                continue
            part = whole
            if division is not None:
                part = division.part(name, whole)
            if part.shape != tensors[name].shape:
                raise CheckpointError(
                    f"tensor {name} has shape {tuple(whole.shape)}; the recipe needs another"
                )
            tensors[name].copy_(part)
            missing.discard(name)
    if missing:
        raise CheckpointError(f"tensors are missing: {listed(sorted(missing))}")


def check_copies(state: TrainState) -> None:
    """Check that all ranks have the same weights, by a checksum that one flipped bit changes.

    Raises:
        ReplicaError: they do not.
    """
    if state.division is not None or dist.world_size() == 1:
        return
    sums = []
    for weight in state.weights().values():
        sums.append(weight.view(torch.int32).sum())
    checksum = torch.stack(sums).sum()
    extremes = torch.stack([checksum, -checksum])
    dist.all_reduce([extremes], op=torch.distributed.ReduceOp.MAX)
    if extremes.sum():
        raise ReplicaError(
            f"step {state.progress.step}: the ranks' weights differ:"
            " memory or a device may be faulty\n"
            "resume the run from its last checkpoint, on other hardware"
        )
