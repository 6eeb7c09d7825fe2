"""Lists of tensors: the gradients of parameters, and updates in pieces that a cache holds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

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


def elements_at_once(device: torch.device) -> int:
    """Return how many elements are worked on together: 1 MiB of fp32, which a CPU's cache holds; on
    CUDA a bound on memory."""
    if device.type == "cpu":
        return 1 << 18
    return 1 << 26


def split_by_size(sizes: Sequence[int], most: int) -> Iterator[slice]:
    """Divide a list into runs whose sizes add up to at most `most`, or of one item."""
    start = 0
    total = 0
    for i, size in enumerate(sizes):
        if i > start and total + size > most:
            yield slice(start, i)
            start = i
            total = 0
        total += size
    yield slice(start, len(sizes))


def keep_if(
    skip: Tensor,
    old: Sequence[Tensor],
    new: Sequence[Tensor],
) -> None:
    """Copy each new tensor over the old one, unless `skip` (0-d bool, on the device) is true."""
    for target, tensor in zip(old, new, strict=True):
        torch.where(skip, target, tensor, out=target)
