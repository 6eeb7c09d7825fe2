"""GPT-2's GELU (the tanh approximation), with most of its cost taken out on CPUs.

PyTorch's kernels evaluate a slow tanh in the forward pass and the same one again in the backward
pass. Here 0.5 x (1 + tanh(u)) is x sigmoid(2u), and the forward pass leaves the slope behind, so
that the backward pass is one multiplication. The slope takes the place of x among what is kept for
the backward pass: no more memory is held.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

_SCALE = 2 * math.sqrt(2 / math.pi)
_CUBIC = 0.044715
_PIECE = 1 << 16
"""Elements worked on at once: their arrays stay in a core's cache."""


def gelu(x: Tensor) -> Tensor:
    """Compute x sigmoid(2u), u = sqrt(2 / pi) (x + 0.044715 x^3), which is PyTorch's tanh form
    within rounding. Of bf16 it is computed in fp32; value and slope are rounded once each."""
    if x.device.type != "cpu" or torch.compiler.is_compiling():
        return F.gelu(x, approximate="tanh")
    if x.requires_grad:
        return _Gelu.apply(x)
    return _gelu(x.contiguous(), None)


class _Gelu(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.contiguous()
        slope = torch.empty_like(x)
        ctx.save_for_backward(slope)
        return _gelu(x, slope)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (slope,) = ctx.saved_tensors
        # In place: new memory takes longer than the product. Autograd would notice a second pass.
        return slope.mul_(grad)


def _gelu(
    x: Tensor,
    slope: Tensor | None,
) -> Tensor:
    """Compute the function of `x`, contiguous; write its derivative to `slope` if given."""
    y = torch.empty_like(x)
    dtype = torch.promote_types(x.dtype, torch.float32)
    is_narrow = x.dtype != dtype
    # One piece of z = 2u and of s = sigmoid(z); of bf16 also of x, and a result before rounding.
    length = min(_PIECE, x.numel())
    scratch = torch.empty(4, length, dtype=dtype)
    scale = torch.tensor(_SCALE, dtype=dtype)
    inputs = x.view(-1).split(_PIECE)
    values = y.view(-1).split(_PIECE)
    slopes = values
    if slope is not None:
        slopes = slope.view(-1).split(_PIECE)
    for piece, value, derivative in zip(inputs, values, slopes, strict=True):
        z, s, wide_piece, wide_result = scratch[:, : piece.numel()]
        value_out = value
        slope_out = derivative
        if is_narrow:
            piece = wide_piece.copy_(piece)
            value_out = wide_result
            slope_out = wide_result
        torch.addcmul(
            scale,
            piece,
            piece,
            value=_SCALE * _CUBIC,
            out=z,
        )
        z.mul_(piece)
        torch.sigmoid(z, out=s)
        torch.mul(piece, s, out=value_out)
        value.copy_(value_out)  # does nothing to itself
        if slope is None:
            continue

        # d(x s)/dx = s + s (1 - s) x dz/dx, and x dz/dx = 3 z - 2 SCALE x
        z.add_(piece, alpha=-2 * _SCALE / 3)
        torch.ops.aten.sigmoid_backward.grad_input(z, s, grad_input=z)
        torch.add(s, z, alpha=3, out=slope_out)
        derivative.copy_(slope_out)
    return y
