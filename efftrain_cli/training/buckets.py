"""Flat buckets: tensors that the ranks add up at once.

Their layout is a function of the tensors' sizes, so it is the same in every step and in every process.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

BUCKET = 1 << 24
"""Elements that are added up at once: 64 MiB of fp32 beside the gradients."""


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
