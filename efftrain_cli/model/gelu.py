"""GPT-2's GELU (the tanh approximation), with most of its cost taken out on CPUs.

PyTorch's kernels evaluate a slow tanh in the forward pass and the same one again in the backward
pass: 6 % of a step at 6 layers x 384. Here 0.5 x (1 + tanh(u)) is x sigmoid(2u), and the forward
pass leaves the slope behind, so that the backward pass is one multiplication. The slope takes the
place of x among what is kept for the backward pass: no more memory is held.
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
_CHUNK = 1 << 19
"""Elements worked on at once: their five arrays stay in the cache."""


def gelu(x: Tensor) -> Tensor:
    """Compute x sigmoid(2u), u = sqrt(2 / pi) (x + 0.044715 x^3), which is PyTorch's tanh form
    within rounding."""
    is_wide = x.dtype in (torch.float32, torch.float64)
    if x.device.type != "cpu" or not is_wide or torch.compiler.is_compiling():
        return F.gelu(x, approximate="tanh")
    if torch.is_grad_enabled() and x.requires_grad:
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
        return grad * slope


def _gelu(x: Tensor, slope: Tensor | None) -> Tensor:
    """Compute the function of `x`, contiguous; write its derivative to `slope` if given."""
    y = torch.empty_like(x)
    # Scratch of one chunk: z = 2u, and s = sigmoid(z).
    z, s = x.new_empty(2, min(_CHUNK, x.numel()))
    flat_x = x.view(-1)
    flat_y = y.view(-1)
    for start in range(0, x.numel(), _CHUNK):
        chunk = slice(start, start + _CHUNK)
        x_ = flat_x[chunk]
        z = z[: x_.numel()]
        s = s[: x_.numel()]
        torch.mul(x_, x_, out=z)
        torch.addcmul(x_, x_, z, value=_CUBIC, out=z).mul_(_SCALE)
        torch.sigmoid(z, out=s)
        torch.mul(x_, s, out=flat_y[chunk])
        if slope is not None:
            # d(x s)/dx = s + s (1 - s) x dz/dx, and x dz/dx = 3 z - 2 SCALE x
            slope_ = slope.view(-1)[chunk]
            torch.add(z, x_, alpha=-2 * _SCALE / 3, out=z)
            torch.ops.aten.sigmoid_backward.grad_input(z, s, grad_input=slope_)
            torch.add(s, slope_, alpha=3, out=slope_)
    return y
