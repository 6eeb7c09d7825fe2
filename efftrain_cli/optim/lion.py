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
from efftrain_cli.optim.optimizer import ParameterSet, Settings, decays


class Lion:
    """An `Optimizer` with one moment, and without eps."""

    gradient_powers: Mapping[str, int] = {"exp_avg": 1}
    columns_by_max: frozenset[str] = frozenset()

    def __init__(self, parameters: ParameterSet, settings: Settings) -> None:
        """See `Optimizer`."""
        self._parameters = dict(parameters.named)
        self._betas = settings.betas
        self._decay = {}
        self._momentum = {}
        for name, parameter in self._parameters.items():
            kind = parameters.kinds[name]
            self._decay[name] = settings.weight_decay * decays(kind)
            self._momentum[name] = torch.zeros_like(parameter)

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
        for name, parameter in self._parameters.items():
            gradient = parameter.grad
            if gradient is None:
                continue
            momentum = self._momentum[name]
            direction = torch.lerp(gradient, momentum, of_direction).sign_()
            weight = parameter * (1 - lr * self._decay[name])
            weight.sub_(direction, alpha=lr)
            torch.where(skip, parameter, weight, out=parameter)

            next_momentum = torch.lerp(gradient, momentum, of_momentum)
            torch.where(skip, momentum, next_momentum, out=momentum)

    def tensors(self) -> Tensors:
        """See `Optimizer.tensors`: `exp_avg.NAME`."""
        return {f"exp_avg.{name}": momentum for name, momentum in self._momentum.items()}

    def columns(self) -> Tensors:
        """Return no columns: Lion has no second moments."""
        return {}
