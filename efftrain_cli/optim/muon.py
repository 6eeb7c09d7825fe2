"""Muon for the matrices of the blocks, AdamW for everything else.

Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks"
(https://kellerjordan.github.io/posts/muon/). Five Newton-Schulz iterations in bf16 bring the
momentum of a matrix close to the nearest orthogonal matrix, which is the update. As the paper
recommends, q, k and v are orthogonalized one by one, not as the fused matrix that stores them.
Matrices of equal shapes are computed together, to the bits of torch.optim.Muon.
"""

from __future__ import annotations

import math
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from efftrain_cli.foundation.tensors import Tensors
from efftrain_cli.model.flops import NEWTON_SCHULZ_ITERATIONS
from efftrain_cli.optim.adamw import AdamW
from efftrain_cli.optim.optimizer import (
    Optimizer,
    ParameterSet,
    Settings,
)
from efftrain_cli.optim.tensors import keep_if, split_by_size

MOMENTUM = 0.95
"""Decay rate of the momentum, Nesterov's; torch's default and the paper's."""

_COEFFICIENTS = (3.4445, -4.775, 2.0315)
"""The paper's: of x, (x x^T) x and (x x^T)^2 x in one iteration."""

_GROUP = 1 << 26
"""Most elements that are updated together: a bound on memory."""


class _Part(NamedTuple):
    """Rows of a block's matrix that are orthogonalized by themselves: q, k or v of a fused matrix,
    or all."""

    whole: nn.Parameter
    rows: slice
    momentum: Tensor

    @property
    def weight(self) -> Tensor:
        return self.whole.detach()[self.rows]


class Muon(Optimizer):
    """An `Optimizer`: Muon for matrices, AdamW for the other parameters.

    The update of a matrix, not its weight decay, is multiplied by sqrt(max(1, rows / columns)), or
    by 0.2 sqrt(max(rows, columns)) with `muon_scale` "match_rms_adamw" (Liu et al. 2025, "Muon is
    scalable for LLM training", arXiv 2502.16982, section 2.2): an orthogonal matrix then has a root
    mean square of 0.2, which is typical of AdamW's update.
    """

    gradient_powers: ClassVar = {"momentum_buffer": 1, **AdamW.gradient_powers}

    def __init__(self, parameters: ParameterSet, settings: Settings) -> None:
        """See `Optimizer`."""
        self._settings = settings
        kinds = parameters.kinds
        others = {}
        self._momentum: Tensors = {}
        by_shape: dict[torch.Size, list[_Part]] = {}
        for name, parameter in parameters.named.items():
            if not kinds[name].endswith("matrix"):
                others[name] = parameter
                continue
            counts = [len(parameter)]
            if kinds[name] == "fused_matrix":
                counts = list(parameters.qkv_rows)
            self._momentum[name] = torch.zeros_like(parameter)
            start = 0
            for buffer in self._momentum[name].split(counts):
                rows = slice(start, start + len(buffer))
                start = rows.stop
                part = _Part(parameter, rows, buffer)
                by_shape.setdefault(buffer.shape, []).append(part)
        self._groups: list[list[_Part]] = []
        for shape, parts in by_shape.items():
            sizes = [shape.numel()] * len(parts)
            for group in split_by_size(sizes, _GROUP):
                self._groups.append(parts[group])
        # It has few parameters: its columns would say nothing of the whole model.
        self._adamw = AdamW(ParameterSet(named=others, kinds=kinds), settings)

    @torch.no_grad()
    def step(
        self,
        lr: float,
        found_inf: Tensor,
        beta2: float | None = None,
    ) -> None:
        """See `Optimizer.step`."""
        self._adamw.step(lr, found_inf, beta2)
        # Without muon_lr, which the recipe's rules allow with "match_rms_adamw" only, it is lr.
        ratio = (self._settings.muon_lr or self._settings.lr) / self._settings.lr
        skip = found_inf.bool()
        for group in self._groups:
            self._update(group, lr * ratio, skip)

    def _update(
        self,
        group: list[_Part],
        lr: float,
        skip: Tensor,
    ) -> None:
        """Update matrices of one shape, those that have a gradient."""
        weights = []
        momenta = []
        gradients = []
        for part in group:
            if part.whole.grad is not None:
                weights.append(part.weight)
                momenta.append(part.momentum)
                gradients.append(part.whole.grad[part.rows])
        if not weights:
            return
        new_momenta = torch._foreach_lerp(momenta, gradients, 1 - MOMENTUM)
        updates = torch._foreach_lerp(gradients, new_momenta, MOMENTUM)
        directions = orthogonalize(torch.stack(updates)).unbind()

        rows, columns = weights[0].shape
        scale = math.sqrt(max(1, rows / columns))
        if self._settings.muon_scale == "match_rms_adamw":
            scale = 0.2 * math.sqrt(max(rows, columns))
        new_weights = torch._foreach_mul(weights, 1 - lr * self._settings.weight_decay)
        torch._foreach_add_(new_weights, directions, alpha=-lr * scale)
        keep_if(skip, weights, new_weights)
        keep_if(skip, momenta, new_momenta)

    def tensors(self) -> Tensors:
        """See `Optimizer.tensors`: `momentum_buffer.NAME` of matrices, AdamW's of the others."""
        tensors = {f"momentum_buffer.{name}": buffer for name, buffer in self._momentum.items()}
        return tensors | self._adamw.tensors()


def orthogonalize(matrices: Tensor) -> Tensor:
    """Return bf16 matrices close to the nearest orthogonal ones of `matrices` (n, rows, columns):
    singular values come to lie between about 0.7 and 1.2."""
    x = matrices.bfloat16()
    is_tall = x.shape[1] > x.shape[2]
    if is_tall:
        x = x.mT
    # The spectral norm is then at most 1.
    norms = x.norm(dim=(1, 2), keepdim=True)
    x = x / norms.clamp(min=1e-7)
    first, third, fifth = _COEFFICIENTS
    for _ in range(NEWTON_SCHULZ_ITERATIONS):
        gram = x @ x.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=third, alpha=fifth)
        x = torch.baddbmm(x, polynomial, x, beta=first)
    if is_tall:
        x = x.mT
    return x
