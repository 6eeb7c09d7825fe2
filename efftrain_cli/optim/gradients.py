"""The gradients of a list of parameters, taken together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor


def fill_gradients(parameters: Sequence[Tensor]) -> None:
    """Give each parameter of a block that no micro-batch ran the gradient that it has: zero.

    An optimizer skips a parameter without `.grad`: neither decay nor momentum would act on it, and
    its step count would fall behind.
    """
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)


def gradients_of(parameters: Iterable[Tensor]) -> list[Tensor]:
    """List the gradients of the parameters that have one."""
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def take_gradients(parameters: Sequence[Tensor]) -> list[Tensor]:
    """Take the parameters' gradients, zeros for a missing one; `.grad` is None then, so that a new
    sum can begin."""
    fill_gradients(parameters)
    gradients = gradients_of(parameters)
    for parameter in parameters:
        parameter.grad = None
    return gradients
