"""strategy = "shard": each rank keeps a share of the weights, gradients and moments, and gathers a block's weights when
it is computed.

PyTorch's FSDP2 (`fully_shard`; Zhao et al. 2023, arXiv 2304.11277) carries it, block by block. The optimizer works on
this rank's rows of every tensor as on tensors of their own. Between steps rank 0 says what the others do next, since a
checkpoint, which holds whole tensors under their names as that of one device does, is gathered by all.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from efftrain_cli.recipe.recipe import Recipe
from efftrain_cli.training.gradient import build_optimizer
from efftrain_cli.training.ranks import Ranks, Rewinding

if TYPE_CHECKING:
    from efftrain_cli.training.state import TrainState

GO, GATHER, END, REWIND = range(4)
"""What rank 0 has the others do: the next step; a gathering of all tensors; the end; a state from before."""


class Shards:
    """This rank's rows of the parameters, and how they become whole."""

    def __init__(self, state: TrainState, ranks: Ranks, device: torch.device) -> None:
        """Shards the model of `state` in place, on `device`.

        FSDP2 deals rows as `torch.chunk` does: all ranks but the last ones get equally many.
        """
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method

        self.ranks = ranks
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
        self.local = {
            name: nn.Parameter(_local(parameter)) for name, parameter in self._sharded.items()
        }
        """This rank's rows, in the memory of the model's parameters."""

    def rows(self, tensor: Tensor, name: str) -> Tensor:
        """This rank's rows of a whole tensor of parameter `name`."""
        if not tensor.dim():
            return tensor
        each = -(-tensor.shape[0] // self.ranks.world_size)
        return tensor[each * self.ranks.rank : each * (self.ranks.rank + 1)]

    def take_gradients(self) -> list[Tensor]:
        """Brings the gradients of the model to the local parameters; returns them."""
        gradients = []
        for name, parameter in self._sharded.items():
            assert parameter.grad is not None
            gradients.append(_local(parameter.grad))
            self.local[name].grad, parameter.grad = gradients[-1], None
        return gradients

    def norm(self, tensors: list[Tensor]) -> Tensor:
        """The l2 norm of the whole of what each rank has a share of, 0-d fp32."""
        square = torch.nn.utils.get_total_norm(tensors) ** 2
        self.ranks.add_up([square])
        return square.sqrt()

    def measures(self, local: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The optimizer's measures of the whole, from those of each rank's share."""
        total, largest = local["adam_sqrt_v_l1"].clone(), local["adam_sqrt_v_max"].clone()
        self.ranks.add_up([total])
        self.ranks.largest(largest)
        return {"adam_sqrt_v_l1": total, "adam_sqrt_v_max": largest}

    # --- between steps ---

    def lead(self, order: int) -> None:
        """Rank 0 says what comes next; on the other ranks nothing."""
        if self.ranks.rank == 0:
            self.ranks.order(order)

    def serve(self, state: TrainState, until: int) -> None:
        """Rank 0 orders `until`; the others do as they are asked until it does.

        Raises:
            Rewinding: rank 0 has gone back to an earlier state.
        """
        self.lead(until)
        while self.ranks.rank and (order := self.ranks.order()) != until:
            if order == REWIND:
                raise Rewinding
            if order == GATHER:
                self.whole(state)

    def whole(self, state: TrainState) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """(model tensors, optimizer tensors), whole and on the CPU, on rank 0; the other ranks take part, and get
        nothing."""
        self.lead(GATHER)
        return self._gather(self.local), self._gather(state.optimizer.tensors())

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


def shards(recipe: Recipe, ranks: Ranks) -> bool:
    """Whether each of these ranks is to keep a share of the state."""
    return not ranks.alone and recipe.parallel is not None and recipe.parallel.strategy == "shard"


def shard_state(state: TrainState, recipe: Recipe, ranks: Ranks, device: torch.device) -> None:
    """Leaves to each rank its share of a whole state, on `device`; nothing where the recipe does not shard."""
    if not shards(recipe, ranks):
        return
    before = state.optimizer.tensors()
    state.shards = Shards(state, ranks, device)
    state.optimizer = build_optimizer(recipe, state.model, state.shards.local)
    with torch.no_grad():
        for key, tensor in state.optimizer.tensors().items():
            tensor.copy_(state.shards.rows(before[key], key.split(".", 1)[1]))
    state.nonfinite = state.nonfinite.to(device)
