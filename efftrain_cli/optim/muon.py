"""Muon for the matrices of the blocks, AdamW for everything else.

Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks"
(https://kellerjordan.github.io/posts/muon/): the momentum of a matrix is brought close to the nearest orthogonal matrix
by five Newton-Schulz iterations in bf16, and that is the update. The iterations are torch.optim.Muon's. As the paper
recommends, q, k and v are orthogonalized one by one, not as the one matrix that they are stored in.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from efftrain_cli.optim.adamw import AdamW
from efftrain_cli.optim.optimizer import ParameterSet, Settings, WithoutCompiler

MOMENTUM = 0.95
"""Decay rate of the momentum, Nesterov's; torch's default and the paper's."""


class _TorchMuon(WithoutCompiler, torch.optim.Muon):
    pass


class Muon:
    """An `Optimizer`: torch's Muon with its default adjustment of the learning rate, sqrt(max(1, rows / columns))."""

    gradient_powers: Mapping[str, int] = {"momentum_buffer": 1, **AdamW.gradient_powers}
    columns_by_max: frozenset[str] = frozenset()

    def __init__(self, parameters: ParameterSet, settings: Settings) -> None:
        """See `Optimizer`."""
        assert settings.muon_lr is not None  # a rule of the recipe
        kinds = parameters.kinds
        matrices = {}
        others = {}
        for name, parameter in parameters.named.items():
            if kinds[name].endswith("matrix"):
                matrices[name] = parameter
            else:
                others[name] = parameter
        self._lr_ratio = settings.muon_lr / settings.lr
        self._adamw = AdamW(ParameterSet(named=others, kinds=kinds), settings)
        self._momentum = {name: torch.zeros_like(parameter) for name, parameter in matrices.items()}
        self._parts: list[tuple[nn.Parameter, list[int], list[nn.Parameter]]] = []
        """(matrix, rows of its parts, the parts as parameters that share its memory): three of a fused matrix, else
        one."""
        for name, matrix in matrices.items():
            rows = [len(matrix)]
            if kinds[name] == "fused_matrix":
                rows = list(parameters.qkv_rows)
            parts = [nn.Parameter(part) for part in matrix.detach().split(rows)]
            self._parts.append((matrix, rows, parts))
        all_parts = []
        for _, _, parts in self._parts:
            all_parts += parts
        self._muon = _TorchMuon(
            all_parts, lr=0.0, weight_decay=settings.weight_decay, momentum=MOMENTUM
        )
        for (_, rows, parts), momentum in zip(self._parts, self._momentum.values(), strict=True):
            for part, buffer in zip(parts, momentum.split(rows), strict=True):
                self._muon.state[part]["momentum_buffer"] = buffer

    def step(self, lr: float, found_inf: Tensor) -> None:
        """See `Optimizer.step`."""
        self._adamw.step(lr, found_inf)
        for group in self._muon.param_groups:
            group["lr"] = lr * self._lr_ratio
        for matrix, rows, parts in self._parts:
            gradients: Sequence[Tensor | None] = [None] * len(rows)
            if matrix.grad is not None:
                gradients = matrix.grad.split(rows)
            for part, gradient in zip(parts, gradients, strict=True):
                part.grad = gradient
        # torch's Muon does not take `found_inf`: what it changes is kept, and put back on the device if the step must
        # not count.
        changed = [*(matrix.detach() for matrix, _, _ in self._parts), *self._momentum.values()]
        before = [tensor.clone() for tensor in changed]
        self._muon.step()
        skip = found_inf.bool()
        for tensor, old in zip(changed, before, strict=True):
            torch.where(skip, old, tensor, out=tensor)
        for _, _, parts in self._parts:
            for part in parts:
                part.grad = None

    def tensors(self) -> dict[str, Tensor]:
        """See `Optimizer.tensors`: `momentum_buffer.NAME` of each matrix, AdamW's three of each other parameter."""
        momentum = {f"momentum_buffer.{name}": tensor for name, tensor in self._momentum.items()}
        return momentum | self._adamw.tensors()

    def columns(self) -> dict[str, Tensor]:
        """Return no columns: sqrt(v) of the few parameters of AdamW would be taken for that of a whole model."""
        return {}
