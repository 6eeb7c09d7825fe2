"""Flat buckets of gradients: what is added up over the ranks at once, and a sum that begins during the backward pass.

The layout of the buckets is a function of the tensors' sizes, so it is the same in every step and in every process, and
a resumed run repeats each sum bit for bit. When a bucket is sent decides nothing about it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from efftrain_cli.training.ranks import Ranks

BUCKET = 1 << 24
"""Elements that are added up at once: 64 MiB of fp32 beside the gradients."""
IN_FLIGHT = 4
"""Buckets of an early sum that are under way at once."""


def buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """The tensors in order, together as long as they stay below `BUCKET` elements."""
    bucket: list[Tensor] = []
    size = 0
    for tensor in tensors:
        if bucket and size + tensor.numel() > BUCKET:
            yield bucket
            bucket, size = [], 0
        bucket.append(tensor)
        size += tensor.numel()
    if bucket:
        yield bucket


def flattened(bucket: Sequence[Tensor]) -> Tensor:
    """The tensors of a bucket as one."""
    return torch.cat([tensor.reshape(-1) for tensor in bucket])


def scatter(flat: Tensor, bucket: Sequence[Tensor]) -> None:
    """The inverse of `flattened`, in place."""
    for tensor, part in zip(bucket, flat.split([tensor.numel() for tensor in bucket]), strict=True):
        tensor.copy_(part.view_as(tensor))


class EarlySum:
    """As `Ranks.add_up` of all gradients and the `losses`, begun while the backward pass of a step's last micro-batch
    computes the rest.

    Made just before that pass. A bucket is sent once the gradients in it are complete, by hooks on the parameters, but
    only after the one behind it in the model: so all ranks send the same buckets in the same order, whichever blocks
    each of them runs.
    """

    def __init__(
        self, ranks: Ranks, parameters: Sequence[nn.Parameter], losses: Sequence[Tensor]
    ) -> None:
        self._ranks, self._parameters = ranks, parameters
        self._buckets = list(buckets([*parameters, *losses]))
        self._bucket_of = {
            id(tensor): number for number, bucket in enumerate(self._buckets) for tensor in bucket
        }
        self._missing = [
            sum(isinstance(tensor, nn.Parameter) for tensor in bucket) for bucket in self._buckets
        ]
        self._left = len(self._buckets)
        self._under_way: deque[tuple[list[Tensor], Tensor, Callable[[], None]]] = deque()
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._arrived) for parameter in parameters
        ]

    def finish(self) -> None:
        """After the backward pass, when every parameter has a `.grad`: sends what is left and waits for all; `.grad`
        and the losses are sums then."""
        for hook in self._hooks:
            hook.remove()
        with self._ranks.adding(self._parameters[0]):
            while self._left:
                self._send()
            while self._under_way:
                self._receive()

    def _arrived(self, parameter: Tensor) -> None:
        self._missing[self._bucket_of[id(parameter)]] -= 1
        while self._left and not self._missing[self._left - 1]:
            self._send()

    def _send(self) -> None:
        if (
            len(self._under_way) == IN_FLIGHT
        ):  # memory for a few buckets, not for a second copy of the gradient
            self._receive()
        self._left -= 1
        gradients = [
            t.grad if isinstance(t, nn.Parameter) else t for t in self._buckets[self._left]
        ]
        bucket = [gradient for gradient in gradients if gradient is not None]
        flat = flattened(bucket)
        self._under_way.append((bucket, flat, self._ranks.begin_sum(flat)))

    def _receive(self) -> None:
        bucket, flat, wait = self._under_way.popleft()
        wait()
        scatter(flat, bucket)
