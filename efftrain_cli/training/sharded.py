"""strategy = "shard": each rank keeps a share of weights, gradients and moments, and gathers the weights of a block
to use it.

PyTorch's FSDP2 (`fully_shard`; Zhao et al. 2023, arXiv 2304.11277) carries it, block by block. The optimizer works on
this rank's rows of every tensor as on tensors of their own. Between steps rank 0 says what the others do next, since a
checkpoint, which holds whole tensors under their names as that of one device does, is gathered by all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from efftrain_cli.foundation.signals import Stop
from efftrain_cli.foundation.step import Batch, MicroBatch, StepPlan
from efftrain_cli.recipe.recipe import Recipe
from efftrain_cli.training.build import build_optimizer
from efftrain_cli.training.devices import Devices, Losses, Passes, Rewinding, split_micro_batches
from efftrain_cli.training.ranks import Ranks
from efftrain_cli.training.state import TrainState

GO, GATHER, END, REWIND = range(4)
"""What rank 0 has the others do: the next step; a gathering of all tensors; the end; a state from before."""


class Sharded(Devices):
    """This rank's rows of the parameters, and how they become whole."""

    computes_alone = False

    def __init__(
        self, recipe: Recipe, state: TrainState, ranks: Ranks, device: torch.device
    ) -> None:
        """Leave to each rank its share of a whole state, on `device`.

        FSDP2 deals rows as `torch.chunk` does: all ranks but the last ones get equally many.
        """
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method

        super().__init__(ranks)
        before = state.optimizer.tensors()
        self._shapes = {name: parameter.shape for name, parameter in state.model.named_parameters()}
        mesh = init_device_mesh(device.type, (ranks.world_size,))
        for block in state.model.h:
            fully_shard(block, mesh=mesh)
        fully_shard(state.model, mesh=mesh)
        register_fsdp_forward_method(state.model, "loss_sum")
        for module in state.model.modules():
            if isinstance(module, FSDPModule):
                # The loss is divided by the step's tokens already; and gloo knows no other sum than a plain one.
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
        state.model.lockstep = True
        if device.type == "cuda":  # as `build_model` chooses
            state.model.residual_dtype = torch.bfloat16
        self._sharded = dict(state.model.named_parameters())
        self._local = {
            name: nn.Parameter(_local(parameter)) for name, parameter in self._sharded.items()
        }
        """This rank's rows, in the memory of the model's parameters."""
        state.optimizer = build_optimizer(recipe, state.model, self._local)
        with torch.no_grad():
            for key, tensor in state.optimizer.tensors().items():
                tensor.copy_(self._rows(before[key], key.split(".", 1)[1]))
        state.nonfinite = state.nonfinite.to(device)

    def _rows(self, tensor: Tensor, name: str) -> Tensor:
        """Return this rank's rows of a whole tensor of parameter `name`."""
        if not tensor.dim():
            return tensor
        each = -(-tensor.shape[0] // self.ranks.world_size)
        return tensor[each * self.ranks.rank : each * (self.ranks.rank + 1)]

    def begin_step(self, state: TrainState) -> None:
        self._serve(state, GO)  # which waits as long as rank 0 saves

    def together(self) -> AbstractContextManager[None]:
        return self.ranks.peer_errors()

    def cut(self, batch: Batch, plan: StepPlan) -> list[MicroBatch]:
        """Cut as `Devices`, with one of weight 0 for each that is empty: the others need this rank in their passes."""
        padding = batch.tokens.new_zeros(1, plan.seq_len)
        return [
            part if len(part.tokens) else part._replace(tokens=padding, targets=padding, weight=0.0)
            for part in split_micro_batches(batch, plan, self.sharing)
        ]

    def gradient(
        self, passes: Passes, micro_batches: Sequence[MicroBatch], plan: StepPlan
    ) -> Losses:
        losses = passes(micro_batches)  # which add up the gradients
        self.sync_stop_flag(plan.step)
        self.ranks.all_reduce(list(losses.values()))
        return losses

    def take_gradients(self, state: TrainState) -> list[nn.Parameter]:
        for name, parameter in self._sharded.items():
            assert parameter.grad is not None
            self._local[name].grad, parameter.grad = _local(parameter.grad), None
        return list(self._local.values())

    def gradient_norms(self, groups: Sequence[Sequence[nn.Parameter]]) -> list[Tensor]:
        squares = [norm**2 for norm in super().gradient_norms(groups)]
        self.ranks.all_reduce(squares)
        return [square.sqrt() for square in squares]

    def norms(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        squares = [norm.square() for norm in super().norms(tensors).values()]
        self.ranks.all_reduce(squares)
        return {name: square.sqrt() for name, square in zip(tensors, squares, strict=True)}

    def measures(self, state: TrainState) -> dict[str, Tensor]:
        whole = {name: local.clone() for name, local in state.optimizer.columns().items()}
        for name, value in whole.items():
            if name in state.optimizer.columns_by_max:
                self.ranks.all_reduce_max(value)
            else:
                self.ranks.all_reduce([value])
        return whole

    # --- between steps ---

    def end(self, state: TrainState) -> None:
        self._serve(state, END)
        super().end(state)

    def survivable(self, state: TrainState) -> tuple[type[BaseException], ...]:
        return (Stop,)  # a rank's share is lost with it

    def after_stop(self, state: TrainState) -> None:
        self._serve(state, END)

    def rewind(self) -> None:
        self._order(REWIND)

    def _order(self, order: int) -> None:
        """Order on rank 0 what comes next; do nothing on the other ranks."""
        if self.ranks.rank == 0:
            self._exchange(order)

    def _exchange(self, order: int = -1) -> int:
        """Return the order of rank 0, the only one that gives any."""
        given = torch.tensor(order)
        self.ranks.all_reduce_max(given, patient=True)
        return int(given)

    def _serve(self, state: TrainState, until: int) -> None:
        """Order `until` on rank 0; on the others do as they are asked until it does.

        Raises:
            Rewinding: rank 0 has gone back to an earlier state.
        """
        self._order(until)
        while self.ranks.rank and (order := self._exchange()) != until:
            if order == REWIND:
                raise Rewinding
            if order == GATHER:
                self.full_state_dict(state)

    def local_tensors(self, state: TrainState) -> dict[str, Tensor]:
        local = {name: parameter.detach() for name, parameter in self._local.items()}
        return {**local, **state.optimizer.tensors()}

    def full_state_dict(self, state: TrainState) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Gather the state on the CPU; the other ranks take part, and get empty dictionaries."""
        self._order(GATHER)
        return self._gather(self._local), self._gather(state.optimizer.tensors())

    def _gather(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        found = {}
        for key, tensor in tensors.items():
            name = key if key in self._shapes else key.split(".", 1)[1]
            shape = self._shapes[name]
            if not tensor.dim():
                found[key] = tensor.detach().cpu()
                continue
            each = -(-shape[0] // self.ranks.world_size)
            padded = tensor.new_zeros((each, *shape[1:]))
            padded[: tensor.shape[0]] = tensor.detach()
            parts = self.ranks.gather(padded)
            if parts:
                found[key] = torch.cat([part.cpu() for part in parts])[: shape[0]]
        return found if self.ranks.rank == 0 else {}


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local().detach()  # type: ignore[attr-defined]
