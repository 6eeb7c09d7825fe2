"""Lion: Chen et al. 2023, "Symbolic discovery of optimization algorithms", arXiv 2302.06675,
algorithm 2.

    step      w <- w - lr (sign(b1 m + (1 - b1) g) + weight_decay w)
    momentum  m <- b2 m + (1 - b2) g

Every entry of the sign is 1 or -1, so updates are larger than AdamW's: the paper advises a learning
rate 3 to 10 times smaller and a weight decay as many times larger (section 5), and betas of 0.9 and
0.99.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from efftrain_cli.foundation.tensors import Tensors
from efftrain_cli.optim.optimizer import (
    Optimizer,
    ParameterSet,
    Settings,
    by_weight_decay,
)
from efftrain_cli.optim.tensors import elements_at_once, keep_if, split_by_size


class Lion(Optimizer):
    """An `Optimizer` with one moment, and without eps."""

    gradient_powers: ClassVar = {"exp_avg": 1}

    def __init__(self, parameters: ParameterSet, settings: Settings) -> None:
        """See `Optimizer`."""
        named = parameters.named
        self._betas = settings.betas
        self._momentum = {name: torch.zeros_like(parameter) for name, parameter in named.items()}
        self._groups: list[tuple[float, list[tuple[nn.Parameter, Tensor]]]] = []
        for weight_decay, names in by_weight_decay(parameters, settings.weight_decay).items():
            members = [(named[name], self._momentum[name]) for name in names]
            sizes = [momentum.numel() for _, momentum in members]
            for part in split_by_size(sizes, elements_at_once(members[0][1].device)):
                self._groups.append((weight_decay, members[part]))

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
        for weight_decay, members in self._groups:
            weights: list[Tensor] = []
            momenta = []
            gradients = []
            for parameter, momentum in members:
                if parameter.grad is not None:
                    weights.append(parameter)
                    momenta.append(momentum)
                    gradients.append(parameter.grad)
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
        return {f"exp_avg.{name}": momentum for name, momentum in self._momentum.items()}
