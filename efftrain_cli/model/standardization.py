"""Measure the divergence of activations from N(0, 1).

The divergence of N(mu, v) from N(0, 1) is (mu^2 + v - log v - 1) / 2 nats.

Source: Collins, Balle, Shlens 2019, arXiv 1903.00925, section 2.
"""

from __future__ import annotations

import torch
from torch import Tensor

from efftrain_cli.model.cross_entropy import at_least_fp32


class _Divergence(torch.autograd.Function):
    """Mean divergence of the channels of x (samples, channels), 0-d fp32 or fp64.

    For the backward pass it saves the moments and x itself, which other layers save anyway;
    autograd would save a copy of x in fp32. Each of m channels has n samples. So d/dx = (mu + (x -
    mu) (1 - 1 / (v + eps))) / (n m), and n m is the number of elements of x.
    """

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        x: Tensor,
        eps: float,
    ) -> Tensor:
        wide = at_least_fp32(x)
        mean = wide.mean(0, keepdim=True)
        # In place: a second large tensor costs more than the sums.
        variance = (wide - mean).square_().mean(0, keepdim=True)

        ctx.save_for_backward(x, mean, variance)
        ctx.eps = eps  # type: ignore[attr-defined]
        divergences = mean.square() + variance - (variance + eps).log() - 1
        return 0.5 * divergences.mean()

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple[Tensor, None]:
        x, mean, variance = ctx.saved_tensors  # type: ignore[attr-defined]
        share = grad / x.numel()
        slope = 1 - 1 / (variance + ctx.eps)  # type: ignore[attr-defined]
        # mu + (x - mu) slope = mu (1 - slope) + x slope: one pass over x
        grad_x = torch.addcmul(
            share * mean * (1 - slope),
            x.to(mean.dtype),
            share * slope,
        )
        return grad_x.to(x.dtype), None


def standardization_loss(x: Tensor, eps: float = 0.0) -> Tensor:
    """Return the mean divergence of the channels of activations x (..., channels) from N(0, 1), in
    nats.

    0-d, in fp64 if x is, else in fp32. Moments are over all sequences and positions. `eps` is added
    to the variance in the logarithm.
    """
    return _Divergence.apply(x.flatten(0, -2), eps)
