"""Measure the divergence of activations from N(0, 1), and fold scales and shifts into matrices.

The divergence of N(mu, v) from N(0, 1) is (mu^2 + v - log v - 1) / 2 nats.

Source: Collins, Balle, Shlens 2019, arXiv 1903.00925, section 2.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from efftrain_cli.model.cross_entropy import at_least_fp32
from efftrain_cli.model.gpt import GPT

Moments = Literal["channel", "token"]


class _Divergence(torch.autograd.Function):
    """Mean divergence of the moments of x (samples, channels) along `dim`, 0-d fp32 or fp64.

    For the backward pass it saves the moments and x itself, which other layers save anyway;
    autograd would save a copy of x in fp32. Each of m moments is over n values. So d/dx = (mu + (x
    - mu) (1 - 1 / (v + eps))) / (n m), and n m is the number of elements of x.
    """

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        x: Tensor,
        dim: int,
        eps: float,
    ) -> Tensor:
        wide = at_least_fp32(x)
        mean = wide.mean(dim, keepdim=True)
        # In place: a second large tensor costs more than the sums.
        variance = (wide - mean).square_().mean(dim, keepdim=True)

        ctx.save_for_backward(x, mean, variance)
        ctx.eps = eps  # type: ignore[attr-defined]
        divergences = mean.square() + variance - (variance + eps).log() - 1
        return 0.5 * divergences.mean()

    @staticmethod
    def backward(
        ctx: torch.autograd.function.FunctionCtx, grad: Tensor
    ) -> tuple[Tensor, None, None]:
        x, mean, variance = ctx.saved_tensors  # type: ignore[attr-defined]
        share = grad / x.numel()
        slope = 1 - 1 / (variance + ctx.eps)  # type: ignore[attr-defined]
        # mu + (x - mu) slope = mu (1 - slope) + x slope: one pass over x
        at_zero = share * mean * (1 - slope)
        grad_x = torch.addcmul(at_zero, x.to(mean.dtype), share * slope)
        return grad_x.to(x.dtype), None, None


def standardization_loss(
    x: Tensor,
    moments: Moments = "channel",
    eps: float = 0.0,
    skip_first: bool = False,
) -> Tensor:
    """Return the mean divergence of activations x (..., T, channels) from N(0, 1), in nats.

    0-d, in fp64 if x is, else in fp32.

    Args:
        moments: "channel" for moments of each channel over all sequences and positions, as in the
            paper; "token" for those of each token over its channels, as in a layer norm.
        eps: added to the variance in the logarithm.
        skip_first: whether to leave out the first position of each sequence.
    """
    if skip_first:
        x = x[..., 1:, :]
    dim = {"channel": 0, "token": -1}[moments]
    return _Divergence.apply(x.flatten(0, -2), dim, eps)


def folded(model: GPT) -> GPT:
    """Return a model that computes the same to rounding, without scales and shifts in its blocks.

    They are folded into the neighbouring matrices: y = (W x + b) g + s has the matrix diag(g) W,
    y = W (x g + s) + b the matrix W diag(g). The final norm keeps its own, as the matrix after it
    may be the embedding too. `model` is not changed; it is returned itself if nothing is to fold.
    """
    kept = tuple(name for name in model.config.affine if name == "ln_f")
    if kept == model.config.affine:
        return model
    dtype = model.wte.weight.dtype
    plain = GPT(replace(model.config, affine=kept)).to(model.device, dtype)
    plain.residual_dtype = model.residual_dtype
    plain.train(model.training)

    weights = model.state_dict()
    # Linear layer -> the norm, or the scale and shift in its place, that it reads.
    norms = {"attn.c_attn": "ln_1", "attn.c_proj": None, "mlp.c_fc": "ln_2", "mlp.c_proj": None}
    for number in range(len(model.h)):
        for layer, norm in norms.items():
            prefix = f"h.{number}."
            matrix = weights[f"{prefix}{layer}.weight"].double()
            bias = weights[f"{prefix}{layer}.bias"].double()
            if norm in model.config.affine:
                bias = bias + matrix @ weights[f"{prefix}{norm}.bias"].double()
                matrix = matrix * weights[f"{prefix}{norm}.weight"].double()
            if layer in model.config.affine:
                scale = weights[f"{prefix}{layer}_affine.weight"].double()
                shift = weights[f"{prefix}{layer}_affine.bias"].double()
                matrix = scale[:, None] * matrix
                bias = scale * bias + shift
            weights[f"{prefix}{layer}.weight"] = matrix.to(dtype)
            weights[f"{prefix}{layer}.bias"] = bias.to(dtype)
    plain.load_state_dict({name: weights[name] for name in plain.state_dict()})
    return plain
