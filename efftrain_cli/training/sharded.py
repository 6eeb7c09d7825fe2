"""strategy = "shard": each rank keeps a shard of weights, gradients and moments.

PyTorch's FSDP2 (`fully_shard`; Zhao et al. 2023, arXiv 2304.11277) shards block by block, and
gathers a block's weights when they are used. The optimizer updates this rank's rows of every
tensor. Between steps all ranks gather a checkpoint if rank 0 asks for one. It holds whole tensors,
like the checkpoint of a single device.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from efftrain_cli.foundation.signals import Stop
from efftrain_cli.foundation.step import Batch, MicroBatch, StepPlan
from efftrain_cli.foundation.tensors import Tensors
from efftrain_cli.recipe.recipe import Recipe
from efftrain_cli.training.build import build_optimizer
from efftrain_cli.training.devices import Devices, Losses, Passes, split_micro_batches
from efftrain_cli.training.ranks import Ranks
from efftrain_cli.training.state import TrainState


class Sharded(Devices):
    """This rank's shard of the training state, and its collectives."""

    computes_alone = False

    def __init__(
        self,
        recipe: Recipe,
        state: TrainState,
        ranks: Ranks,
        device: torch.device,
    ) -> None:
        """Replace a whole state by this rank's shard of it, on `device`.

        FSDP2 divides rows like `torch.chunk`: only the last ranks may get fewer than the others.
        """
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method

        super().__init__(ranks)
        model = state.model
        whole = state.optimizer.tensors()
        self._shapes = {name: parameter.shape for name, parameter in model.named_parameters()}

        mesh = init_device_mesh(device.type, (ranks.world_size,))
        for block in model.h:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        register_fsdp_forward_method(model, "loss_sum")
        for module in model.modules():
            if isinstance(module, FSDPModule):
                # The loss is divided by the step's tokens already, and gloo has only plain sums.
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
        model.lockstep = True
        # As in `build_model`.
        if device.type == "cuda":
            model.residual_dtype = torch.bfloat16

        self._sharded = dict(model.named_parameters())
        self._local = {}
        """This rank's rows, in the memory of the model's parameters."""
        for name, parameter in self._sharded.items():
            self._local[name] = nn.Parameter(_local(parameter))

        self._optimizer = state.optimizer = build_optimizer(recipe, model, self._local)
        with torch.no_grad():
            for key, tensor in state.optimizer.tensors().items():
                tensor.copy_(self._rows(whole[key]))
        state.nonfinite = state.nonfinite.to(device)

    def _rows(self, tensor: Tensor) -> Tensor:
        """Return this rank's rows of a whole tensor; a 0-d tensor itself."""
        if not tensor.dim():
            return tensor
        rows = self._rows_per_rank(tensor.shape)
        first = rows * self.ranks.rank
        return tensor[first : first + rows]

    def _rows_per_rank(self, shape: torch.Size) -> int:
        return math.ceil(shape[0] / self.ranks.world_size)

    def cut(self, batch: Batch, plan: StepPlan) -> list[MicroBatch]:
        """Return this rank's micro-batches, with padding of weight 0 for empty ones.

        Each rank must make every pass, as the other ranks need its shards.
        """
        parts = split_micro_batches(batch, plan, self.sharing)
        padding = batch.tokens.new_zeros(1, plan.seq_len)
        for index, part in enumerate(parts):
            if not len(part.tokens):
                parts[index] = part._replace(tokens=padding, targets=padding, weight=0.0)
        return parts

    def gradient(self, passes: Passes) -> Losses:
        # FSDP2 reduces the gradients during the passes.
        losses = passes()
        self.sync_stop_flag(passes.plan.step)
        self.ranks.all_reduce(list(losses.values()))
        return losses

    def take_gradients(self, state: TrainState) -> list[nn.Parameter]:
        for name, parameter in self._sharded.items():
            assert parameter.grad is not None
            self._local[name].grad = _local(parameter.grad)
            parameter.grad = None
        return list(self._local.values())

    def gradient_norm(self, parameters: Sequence[nn.Parameter]) -> Tensor:
        square = super().gradient_norm(parameters) ** 2
        self.ranks.all_reduce([square])
        return square.sqrt()

    def norms(self, tensors: Tensors) -> Tensors:
        norms = super().norms(tensors)
        squares = [norm.square() for norm in norms.values()]
        self.ranks.all_reduce(squares)
        return {name: square.sqrt() for name, square in zip(norms, squares, strict=True)}

    def optimizer_columns(self, state: TrainState) -> Tensors:
        columns = {name: value.clone() for name, value in state.optimizer.columns().items()}
        for name, value in columns.items():
            if name in state.optimizer.columns_by_max:
                self.ranks.all_reduce_max(value)
            else:
                self.ranks.all_reduce([value])
        return columns

    # --- between steps ---

    def survivable(self, state: TrainState) -> tuple[type[BaseException], ...]:
        # The shard of a lost rank is lost too.
        return (Stop,)

    def after_stop(self, state: TrainState) -> None:
        self.end(state)

    def exchange_flags(self, step: int) -> bool:
        """Exchange flags as in `Devices`; gather the state as often as rank 0 asks for it.

        Rank 0 gathers in `full_state_dict`.
        """
        stops = super().exchange_flags(step)
        while self.asked and self.ranks.rank:
            self._gather_state()
            stops = super().exchange_flags(step)
        return stops

    def full_state_dict(self, state: TrainState) -> tuple[Tensors, Tensors]:
        """Gather the state on the CPU of rank 0, between two steps.

        The other ranks gather in `exchange_flags`.
        """
        self.patient = True
        self.wanted = True
        self.exchange_flags(state.progress.step)
        self.wanted = False
        return self._gather_state()

    def _gather_state(self) -> tuple[Tensors, Tensors]:
        return self._gather(self._local), self._gather(self._optimizer.tensors())

    def _gather(self, tensors: Mapping[str, Tensor]) -> Tensors:
        """Gather whole tensors on the CPU of rank 0; return {} on the other ranks."""
        whole = {}
        for key, tensor in tensors.items():
            # Every rank has the 0-d tensors.
            if not tensor.dim():
                whole[key] = tensor.detach().cpu()
                continue
            # The key of a moment is STATE.PARAMETER.
            name = key
            if key not in self._shapes:
                name = key.split(".", 1)[1]
            shape = self._shapes[name]
            padded = tensor.new_zeros(self._rows_per_rank(shape), *shape[1:])
            padded[: len(tensor)] = tensor.detach()
            parts = self.ranks.gather(padded)
            if parts:
                rows = torch.cat([part.cpu() for part in parts])
                whole[key] = rows[: shape[0]]
        if self.ranks.rank:
            return {}
        return whole


def _local(tensor: Tensor) -> Tensor:
    """Return this rank's rows of a DTensor, as a view."""
    return tensor.to_local().detach()  # type: ignore[attr-defined]
