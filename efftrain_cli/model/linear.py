"""Compute a linear layer whose three matrix products add in chosen accumulators.

Shapes: x (tokens, in), weight (out, in), gradient of the output g (tokens, out). What is summed
over, and so how long the sums are:

    forward      y   = x weight^T   over `in`
    grad_input   g_x = g weight     over `out`
    grad_weight  g_w = g^T x        over tokens of a micro-batch: the longest by far

A product whose operands are fp32 and whose accumulator is wide is the one that PyTorch's own linear
layer computes, bit for bit. The bias is added, and its gradient summed, in fp32.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from efftrain_cli.model.arithmetic import Accumulator, Arithmetic
from efftrain_cli.model.narrow_matmul import BLOCK, to_fp8, to_operand


class NarrowLinear(nn.Linear):
    """`nn.Linear` computing by an `Arithmetic`; its parameters are those of the layer that it
    replaces."""

    def __init__(self, linear: nn.Linear, arithmetic: Arithmetic) -> None:
        # Not nn.Linear's, which would draw weights of its own.
        nn.Module.__init__(self)
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.weight = linear.weight
        self.bias = linear.bias
        self.arithmetic = arithmetic

    def forward(self, x: Tensor) -> Tensor:
        """Compute the layer's output (..., out) of x (..., in), in the run's compute type."""
        device = x.device.type
        dtype = torch.float32
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
        linear: type[Function] = _Emulated
        if self.arithmetic.fidelity == "hardware":
            linear = _Hardware

        with torch.autocast(device, enabled=False):
            rows = x.float().flatten(0, -2)
            y = linear.apply(rows, self.weight, self.bias, self.arithmetic, dtype)
        return y.unflatten(0, x.shape[:-1])


_Gradients = tuple[Tensor | None, Tensor | None, Tensor | None, None, None]
"""Of inputs, weight and bias; the other arguments have none."""


class _Emulated(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        arithmetic: Arithmetic,
        dtype: torch.dtype,
    ) -> Tensor:
        ctx.arithmetic = arithmetic
        ctx.has_bias = bias is not None
        x, scale = to_operand(x, arithmetic.operands)
        ctx.save_for_backward(x, weight, scale)
        if arithmetic.forward is None and arithmetic.operands == "fp32":
            return F.linear(x, weight, bias).to(dtype)

        rounded, weight_scale = to_operand(weight, arithmetic.operands)
        product = _product(x, rounded.t(), arithmetic.forward)
        y = _unscaled(product, scale, weight_scale)
        if bias is not None:
            y = y + bias
        return y.to(dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> _Gradients:
        x, weight, scale = ctx.saved_tensors
        arithmetic: Arithmetic = ctx.arithmetic
        grad = grad.float()
        grad_x = grad_weight = grad_bias = None
        if ctx.has_bias:
            grad_bias = grad.sum(0)
        grad, grad_scale = to_operand(grad, arithmetic.gradient_format)

        if ctx.needs_input_grad[0]:
            rounded, weight_scale = to_operand(weight, arithmetic.operands)
            product = _product(grad, rounded, arithmetic.grad_input)
            grad_x = _unscaled(product, grad_scale, weight_scale)
        if ctx.needs_input_grad[1]:
            product = _product(grad.t(), x, arithmetic.grad_weight)
            grad_weight = _unscaled(product, grad_scale, scale)
        return grad_x, grad_weight, grad_bias, None, None


def _product(a: Tensor, b: Tensor, role: Accumulator | None) -> Tensor:
    """Multiply `a` (m, k) by `b` (k, n), operands in their formats, emulated in an accumulator."""
    if role is None:
        return a @ b
    return torch.ops.efftrain.narrow_matmul(a, b, role.bits, role.chunk, BLOCK, role.exponent_bits)


def _unscaled(product: Tensor, *scales: Tensor | None) -> Tensor:
    """Divide the product by its operands' scales, one by one: the product of two small scales might
    underflow."""
    for scale in scales:
        if scale is not None:
            product = product / scale
    return product


# --- fp8 by the device's own matrix units ---------------------------------------------------------


class _Hardware(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        arithmetic: Arithmetic,
        dtype: torch.dtype,
    ) -> Tensor:
        ctx.arithmetic = arithmetic
        ctx.dtype = dtype
        ctx.has_bias = bias is not None
        ctx.save_for_backward(x.to(dtype), weight)
        if bias is not None:
            bias = bias.to(dtype)
        role = arithmetic.forward
        if role is None:
            return F.linear(x.to(dtype), weight.to(dtype), bias)

        format_ = arithmetic.operands
        y = fp8_matmul(x, format_, weight, format_, role.fast_accumulation, dtype)
        if bias is not None:
            y = y + bias
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> _Gradients:
        x, weight = ctx.saved_tensors
        arithmetic: Arithmetic = ctx.arithmetic
        of_gradient = arithmetic.gradient_format
        format_ = arithmetic.operands
        grad_x = grad_weight = grad_bias = None
        if ctx.has_bias:
            grad_bias = grad.float().sum(0)

        if ctx.needs_input_grad[0]:
            role = arithmetic.grad_input
            if role is None:
                grad_x = grad.to(ctx.dtype) @ weight.to(ctx.dtype)
            else:
                grad_x = fp8_matmul(
                    grad, of_gradient, weight.t(), format_, role.fast_accumulation, ctx.dtype
                )
            grad_x = grad_x.float()

        if ctx.needs_input_grad[1]:
            role = arithmetic.grad_weight
            if role is None:
                grad_weight = (grad.to(ctx.dtype).t() @ x).float()
            else:
                # The sum runs over tokens, whose number may be any; the units take multiples of 16.
                missing = -x.shape[0] % 16
                left = F.pad(grad, (0, 0, 0, missing)).t()
                right = F.pad(x, (0, 0, 0, missing)).t()
                grad_weight = fp8_matmul(
                    left, of_gradient, right, format_, role.fast_accumulation, torch.float32
                )
        return grad_x, grad_weight, grad_bias, None, None


def fp8_matmul(
    a: Tensor,
    format_a: str,
    b: Tensor,
    format_b: str,
    fast: bool,
    dtype: torch.dtype,
) -> Tensor:
    """Multiply `a` (m, k) by `b` (n, k) transposed, each in its fp8 format with one scale: (m, n)
    in `dtype`.

    The units want the left operand by rows and the right one by columns, hence `b` transposed. A
    CPU has no such units: there it is the fp32 product of the fp8 operands, as `torch._scaled_mm`
    would compute it a thousand times slower, and `fast` changes nothing.
    """
    left, scale_a = to_fp8(a.float(), format_a)
    right, scale_b = to_fp8(b.float(), format_b)
    if a.device.type == "cpu":
        product = left.float() @ right.float().t()
        return _unscaled(product, scale_a, scale_b).to(dtype)
    return torch._scaled_mm(
        left.contiguous(),
        right.contiguous().t(),
        scale_a=scale_a.reciprocal(),
        scale_b=scale_b.reciprocal(),
        out_dtype=dtype,
        use_fast_accum=fast,
    )
