"""What the rest of the program knows of an optimizer."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor


class Optimizer(Protocol):
    """Updates named parameters by their gradients. Nothing outside this folder knows which optimizer a run has."""

    gradient_powers: Mapping[str, int]
    """For each kind of state: with which power of the gradient it scales, 0 for a counter of steps. Growth reads it:
    where a wider model's gradients are 1/k of the small one's, first moments become 1/k and second moments 1/k^2."""

    def step(self, lr: float, found_inf: Tensor) -> None:
        """One update of every parameter that has a gradient, at the step's learning rate.

        Where `found_inf` (0-d fp32 on the device) is 1, weights, moments and counters keep every bit. The host does not
        wait to find out.
        """

    def tensors(self) -> dict[str, Tensor]:
        """The whole state as `STATE.PARAMETER`, such as `exp_avg.wte.weight`: the tensors themselves, to be saved or
        written into. They exist from the start, so that step 0 can be saved and grown."""

    def measures(self) -> dict[str, Tensor]:
        """What the state says about stability, by column of metrics.jsonl: 0-d fp32 tensors on the device."""


class WithoutCompiler:
    """PyTorch's own `add_param_group` imports its compiler, which costs eager training two seconds of start."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch.optim.Optimizer."""
        inspect.unwrap(torch.optim.Optimizer.add_param_group)(self, param_group)
