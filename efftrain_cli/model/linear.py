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
        with torch.autocast(device, enabled=False):
            rows = x.float().flatten(0, -2)
            y = _Linear.apply(rows, self.weight, self.bias, self.arithmetic, dtype)
        return y.unflatten(0, x.shape[:-1])


_Gradients = tuple[Tensor | None, Tensor | None, Tensor | None, None, None]
"""Of inputs, weight and bias; the other arguments have none."""


class _Linear(Function):
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
        ctx.wide = torch.float32
        is_hardware = arithmetic.fidelity == "hardware"
        if is_hardware:
            ctx.wide = dtype
        ctx.save_for_backward(x.to(ctx.wide), weight)
        if bias is not None:
            bias = bias.to(ctx.wide)
        role = arithmetic.forward
        format_ = arithmetic.operands
        if role is None and (is_hardware or format_ == "fp32"):
            return F.linear(x.to(ctx.wide), weight.to(ctx.wide), bias).to(dtype)

        y = _multiply(x, format_, weight.t(), format_, arithmetic.fidelity, role, ctx.wide)
        if bias is not None:
            y = y + bias
        return y.to(dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> _Gradients:
        x, weight = ctx.saved_tensors
        arithmetic: Arithmetic = ctx.arithmetic
        of_gradient = arithmetic.gradient_format
        format_ = arithmetic.operands
        fidelity = arithmetic.fidelity
        grad_x = grad_weight = grad_bias = None
        if ctx.has_bias:
            grad_bias = grad.float().sum(0)
        if ctx.needs_input_grad[0]:
            role = arithmetic.grad_input
            product = _multiply(grad, of_gradient, weight, format_, fidelity, role, ctx.wide)
            grad_x = product.float()
        if ctx.needs_input_grad[1]:
            role = arithmetic.grad_weight
            dtype = ctx.wide
            if role is not None:
                dtype = torch.float32  # its sums over all tokens are not rounded to bf16
            product = _multiply(grad.t(), of_gradient, x, format_, fidelity, role, dtype)
            grad_weight = product.float()
        return grad_x, grad_weight, grad_bias, None, None


def _multiply(
    a: Tensor,
    format_a: str,
    b: Tensor,
    format_b: str,
    fidelity: str,
    role: Accumulator | None,
    dtype: torch.dtype,
) -> Tensor:
    """Multiply `a` (m, k) by `b` (k, n), each in its format, in the role's accumulator.

    An emulated product is in fp32, a device's own in `dtype`. Without a role the device multiplies
    operands in `dtype` too, whatever their format.
    """
    if fidelity == "hardware":
        if role is None:
            return a.to(dtype) @ b.to(dtype)
        if missing := -a.shape[1] % 16:
            # The number of tokens may be any; the units take multiples of 16.
            a = F.pad(a.t(), (0, 0, 0, missing)).t()
            b = F.pad(b, (0, 0, 0, missing))
        return fp8_matmul(a, format_a, b.t(), format_b, role.fast_accumulation, dtype)

    a, scale_a = to_operand(a.float(), format_a)
    b, scale_b = to_operand(b, format_b)
    if role is None:
        product = a @ b
    else:
        product = torch.ops.efftrain.narrow_matmul(
            a,
            b,
            role.bits,
            role.chunk,
            BLOCK,
            role.exponent_bits,
        )
    return _unscaled(product, scale_a, scale_b)


def _unscaled(product: Tensor, *scales: Tensor | None) -> Tensor:
    """Divide the product by its operands' scales, one by one: the product of two small scales might
    underflow."""
    for scale in scales:
        if scale is not None:
            product = product / scale
    return product


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
