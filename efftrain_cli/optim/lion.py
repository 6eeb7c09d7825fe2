"""Lion: Chen et al. 2023, "Symbolic discovery of optimization algorithms", arXiv 2302.06675,
algorithm 2.

    step      w <- w - lr (sign(b1 m + (1 - b1) g) + weight_decay w)
    momentum  m <- b2 m + (1 - b2) g

Every entry of the sign is 1 or -1, so updates are larger than AdamW's: the paper advises a learning
rate 3 to 10 times smaller and a weight decay as many times larger (section 5), and betas of 0.9 and
0.99.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from efftrain_cli.foundation.tensors import Tensors
from efftrain_cli.optim.optimizer import (
    ParameterSet,
    Settings,
    decays,
    keep_if,
    split_by_size,
)

_GROUP = {"cpu": 1 << 18, "cuda": 1 << 26}
"""Elements that are updated together, by device type: what a CPU's cache holds; on CUDA a bound on
memory."""


class Lion:
    """An `Optimizer` with one moment, and without eps."""

    gradient_powers: Mapping[str, int] = {"exp_avg": 1}
    columns_by_max: frozenset[str] = frozenset()

    def __init__(self, parameters: ParameterSet, settings: Settings) -> None:
        """See `Optimizer`."""
        self._betas = settings.betas
        first = next(iter(parameters.named.values()))
        most = _GROUP.get(first.device.type, 1 << 22)
        self._momentum: Tensors = {}
        by_decay: dict[float, list[str]] = {}
        for name, parameter in parameters.named.items():
            self._momentum[name] = torch.zeros_like(parameter)
            kind = parameters.kinds[name]
            weight_decay = settings.weight_decay * decays(kind)
            by_decay.setdefault(weight_decay, []).append(name)
        self._parameters = dict(parameters.named)
        self._groups: list[tuple[float, list[str]]] = []
        for weight_decay, names in by_decay.items():
            momenta = [self._momentum[name] for name in names]
            sizes = [momentum.numel() for momentum in momenta]
            for part in split_by_size(sizes, most):
                self._groups.append((weight_decay, names[part]))

    @torch.no_grad()
    def step(
        self,
        lr: float,
        found_inf: Tensor,
        beta2: float | None = None,
    ) -> None:
        """See `Optimizer.step`; `beta2` is not read, and the recipe's rules allow none."""
        skip = found_inf.bool()
        of_direction, of_momentum = self._betas
        for weight_decay, names in self._groups:
            weights: list[Tensor] = []
            momenta = []
            gradients = []
            for name in names:
                gradient = self._parameters[name].grad
                if gradient is not None:
                    weights.append(self._parameters[name])
                    momenta.append(self._momentum[name])
                    gradients.append(gradient)
            if not weights:
                continue
            directions = torch._foreach_lerp(gradients, momenta, of_direction)
            torch._foreach_sign_(directions)
            new_weights = torch._foreach_mul(weights, 1 - lr * weight_decay)
            torch._foreach_sub_(new_weights, directions, alpha=lr)
            new_momenta = torch._foreach_lerp(gradients, momenta, of_momentum)
            keep_if(skip, weights, new_weights)
            keep_if(skip, momenta, new_momenta)

    def tensors(self) -> Tensors:
        """See `Optimizer.tensors`: `exp_avg.NAME`."""
        tensors = {}
        for name, momentum in self._momentum.items():
            tensors[f"exp_avg.{name}"] = momentum
        return tensors

    def columns(self) -> Tensors:
        """Return no columns: Lion has no second moments."""
        return {}
