"""Muon for the matrices of the blocks, AdamW for everything else.

Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks"
(https://kellerjordan.github.io/posts/muon/). Five Newton-Schulz iterations in bf16 bring the
momentum of a matrix close to the nearest orthogonal matrix, which is the update. torch.optim.Muon
computes them. As the paper recommends, q, k and v are orthogonalized one by one, not as the fused
matrix that stores them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from efftrain_cli.foundation.tensors import Tensors
from efftrain_cli.optim.adamw import AdamW
from efftrain_cli.optim.optimizer import ParameterSet, Settings, WithoutCompiler

MOMENTUM = 0.95
"""Decay rate of the momentum, Nesterov's; torch's default and the paper's."""


class _TorchMuon(WithoutCompiler, torch.optim.Muon):
    pass


class _Matrix(NamedTuple):
    """A matrix of a block, with the parts that are orthogonalized one by one.

    The parts of a fused matrix are q, k and v; any other matrix is one part.
    """

    whole: nn.Parameter
    momentum: Tensor
    rows: list[int]
    """Number of rows of each part."""
    parts: list[nn.Parameter]
    """Views of `whole`."""


class Muon:
    """An `Optimizer`: torch's Muon for matrices, AdamW for the other parameters.

    torch multiplies the update of a matrix, not its weight decay, by sqrt(max(1, rows / columns)),
    or by 0.2 sqrt(max(rows, columns)) with `muon_scale` "match_rms_adamw" (Liu et al. 2025, "Muon
    is scalable for LLM training", arXiv 2502.16982, section 2.2): an orthogonal matrix then has a
    root mean square of 0.2, which is typical of AdamW's update.
    """

    gradient_powers: Mapping[str, int] = {"momentum_buffer": 1, **AdamW.gradient_powers}
    columns_by_max: frozenset[str] = frozenset()

    def __init__(self, parameters: ParameterSet, settings: Settings) -> None:
        """See `Optimizer`."""
        # Without muon_lr, which the recipe's rules allow with "match_rms_adamw" only, it is lr.
        self._lr_ratio = (settings.muon_lr or settings.lr) / settings.lr
        kinds = parameters.kinds
        others = {}
        self._matrices: dict[str, _Matrix] = {}
        for name, parameter in parameters.named.items():
            if not kinds[name].endswith("matrix"):
                others[name] = parameter
                continue
            rows = [len(parameter)]
            if kinds[name] == "fused_matrix":
                rows = list(parameters.qkv_rows)
            parts = [nn.Parameter(part) for part in parameter.detach().split(rows)]
            momentum = torch.zeros_like(parameter)
            self._matrices[name] = _Matrix(
                parameter,
                momentum,
                rows,
                parts,
            )
        self._adamw = AdamW(ParameterSet(named=others, kinds=kinds), settings)

        all_parts = []
        for matrix in self._matrices.values():
            all_parts += matrix.parts
        self._muon = _TorchMuon(
            all_parts,
            lr=0.0,
            weight_decay=settings.weight_decay,
            momentum=MOMENTUM,
            adjust_lr_fn=settings.muon_scale,
        )
        for matrix in self._matrices.values():
            buffers = matrix.momentum.split(matrix.rows)
            for part, buffer in zip(matrix.parts, buffers, strict=True):
                self._muon.state[part]["momentum_buffer"] = buffer

    def step(
        self,
        lr: float,
        found_inf: Tensor,
        beta2: float | None = None,
    ) -> None:
        """See `Optimizer.step`."""
        self._adamw.step(lr, found_inf, beta2)
        for group in self._muon.param_groups:
            group["lr"] = lr * self._lr_ratio

        changed = []
        for matrix in self._matrices.values():
            changed += [matrix.whole.detach(), matrix.momentum]
            if matrix.whole.grad is not None:
                gradients = matrix.whole.grad.split(matrix.rows)
                for part, gradient in zip(matrix.parts, gradients, strict=True):
                    part.grad = gradient

        # torch's Muon does not take `found_inf`: keep a copy of what it changes, and restore that
        # on the device if the step must not count.
        before = [tensor.clone() for tensor in changed]
        self._muon.step()
        skip = found_inf.bool()
        for tensor, old in zip(changed, before, strict=True):
            torch.where(skip, old, tensor, out=tensor)
        # Not `zero_grad`, which imports PyTorch's compiler.
        for matrix in self._matrices.values():
            for part in matrix.parts:
                part.grad = None

    def tensors(self) -> Tensors:
        """See `Optimizer.tensors`: `momentum_buffer.NAME` of matrices, AdamW's of the others."""
        tensors = {}
        for name, matrix in self._matrices.items():
            tensors[f"momentum_buffer.{name}"] = matrix.momentum
        return tensors | self._adamw.tensors()

    def columns(self) -> Tensors:
        """Return no columns: sqrt(v) of AdamW's few parameters says nothing of the whole model."""
        return {}
