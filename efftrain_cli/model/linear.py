"""A linear layer whose three matrix products add in chosen accumulators: forward, gradient of the input, gradient of the weight.

Shapes: x (tokens, in), weight (out, in), gradient of the output g (tokens, out). What is summed over, and so how long the sums are:

    forward      y   = x weight^T   over `in`
    grad_input   g_x = g weight     over `out`
    grad_weight  g_w = g^T x        over tokens of a micro-batch: the longest by far

A product whose operands are fp32 and whose accumulator is wide is the one that PyTorch's own linear layer computes, bit for bit. The bias
is added, and its gradient summed, in fp32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from efftrain_cli.model.accumulation import (
    BLOCK,
    FP8,
    draw_of,
    exact_matmul,
    narrow_matmul,
    scale_of,
    to_operand,
)

ROLES = ("forward", "grad_input", "grad_weight")
Fidelity = Literal["blocked", "intra_fp32", "exact", "hardware"]


@dataclass(frozen=True)
class RoleAccumulator:
    """What one of the three products is added in."""

    bits: int = 23
    """Explicit mantissa bits."""
    chunk: int = 0
    """Products per chunk; 0: no chunks."""
    fast: bool = False
    """With fidelity "hardware": the tensor core's own accumulator throughout, never promoted to fp32."""


@dataclass(frozen=True)
class Arithmetic:
    """How a linear layer multiplies and adds. A role that is None adds in fp32."""

    operands: str = "fp32"
    """Format of activations and weights."""
    gradient_operands: str = "fp32"
    """Format of the output's gradient."""
    fidelity: Fidelity = "blocked"
    stochastic: bool = False
    forward: RoleAccumulator | None = None
    grad_input: RoleAccumulator | None = None
    grad_weight: RoleAccumulator | None = None

    def is_wide(self, role: RoleAccumulator | None) -> bool:
        """Whether a role's sum is one fp32 sum: absent, or emulated with nothing left to round."""
        return role is None or (self.fidelity == "intra_fp32" and role.bits >= 23 and role.chunk == 0)

    def product(self, a: Tensor, b: Tensor, role: RoleAccumulator | None, draw: Tensor | None) -> Tensor:
        """`a` (m, k) times `b` (k, n), operands already in their formats, emulated in the accumulator of `role`."""
        if self.is_wide(role):
            return a @ b
        assert role is not None
        if self.fidelity == "exact":
            return exact_matmul(a, b, role.bits, role.chunk, draw)
        if self.fidelity == "blocked":
            return narrow_matmul(a, b, role.bits, role.chunk, BLOCK, draw)
        return narrow_matmul(a, b, role.bits, role.chunk, 0, draw)


class NarrowLinear(nn.Linear):
    """`nn.Linear` computing by an `Arithmetic`; its parameters are those of the layer that it replaces."""

    draw: Tensor

    def __init__(self, linear: nn.Linear, arithmetic: Arithmetic) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        self.arithmetic = arithmetic
        self.register_buffer(
            "draw", torch.zeros((), dtype=torch.int32, device=linear.weight.device), persistent=False
        )
        """0-d int32: what the random bits of this layer's next pass are made from."""

    def forward(self, x: Tensor) -> Tensor:
        return narrow_linear(x, self.weight, self.bias, self.arithmetic, self.draw)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self.arithmetic}"


class NarrowHead(nn.Module):
    """The product with the vocabulary, computing by an `Arithmetic`; the tied matrix belongs to the embedding."""

    draw: Tensor

    def __init__(self, arithmetic: Arithmetic, device: torch.device) -> None:
        super().__init__()
        self.arithmetic = arithmetic
        self.register_buffer("draw", torch.zeros((), dtype=torch.int32, device=device), persistent=False)

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        """x (..., n_embd) times weight (rows, n_embd) transposed: (..., rows)."""
        return narrow_linear(x, weight, None, self.arithmetic, self.draw)


def set_draws(module: nn.Module, seed: int, step: int, micro_step: int) -> None:
    """Gives every narrow layer below `module` the random bits of one forward and backward pass."""
    layers = (layer for layer in module.modules() if isinstance(layer, NarrowLinear | NarrowHead))
    for number, layer in enumerate(layers):
        layer.draw.fill_(draw_of(seed, step, micro_step, number))


def first_overflow(model: nn.Module, compute: Callable[[], object]) -> tuple[str, str] | None:
    """(layer, role) of the first product in a narrow layer of `model` that is not finite though its operands are, while `compute`
    runs forward and backward passes; None where there is none. Not for compiled code: it looks at every layer's tensors."""
    found: list[tuple[str, str]] = []
    hooks = []

    def finite(*tensors: Tensor | None) -> bool:
        return all(tensor is None or bool(tensor.isfinite().all()) for tensor in tensors)

    def watch(name: str, layer: nn.Module, weight: Tensor) -> None:
        def after_forward(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            if finite(inputs[0], weight) and not finite(output):
                found.append((name, "forward"))

        def after_backward(_: nn.Module, grad_x: tuple[Tensor | None, ...], grad_y: tuple[Tensor | None, ...]) -> None:
            if finite(*grad_y) and not finite(grad_x[0]):
                found.append((name, "grad_input"))
            coming[0] = finite(*grad_y)

        def with_gradient(grad: Tensor) -> None:
            if coming[0] and not finite(grad):
                found.append((name, "grad_weight"))

        coming = [True]
        hooks.append(layer.register_forward_hook(after_forward))
        hooks.append(layer.register_full_backward_hook(after_backward))
        hooks.append(weight.register_hook(with_gradient))

    for name, layer in model.named_modules():
        if isinstance(layer, NarrowLinear):
            watch(name, layer, layer.weight)
    try:
        compute()
    finally:
        for hook in hooks:
            hook.remove()
    return found[0] if found else None


def narrow_linear(x: Tensor, weight: Tensor, bias: Tensor | None, arithmetic: Arithmetic, draw: Tensor) -> Tensor:
    """x (..., in) times weight (out, in) transposed, plus bias: (..., out), in the compute type of the run.

    Where no gradient is wanted, stochastic rounding gives way to rounding to nearest: a validation loss has no noise of its own.
    """
    device = x.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else torch.float32
    noise = draw if arithmetic.stochastic and torch.is_grad_enabled() else None
    with torch.autocast(device, enabled=False):
        linear = _Hardware if arithmetic.fidelity == "hardware" else _Emulated
        y = linear.apply(x.float().flatten(0, -2), weight, bias, arithmetic, noise, dtype)
    return y.unflatten(0, x.shape[:-1])


class _Emulated(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        arithmetic: Arithmetic,
        draw: Tensor | None,
        dtype: torch.dtype,
    ) -> Tensor:
        ctx.arithmetic = arithmetic
        ctx.has_bias = bias is not None
        x, scale = to_operand(x, arithmetic.operands)
        ctx.save_for_backward(x, weight, scale, draw)
        if arithmetic.is_wide(arithmetic.forward) and arithmetic.operands == "fp32":
            return F.linear(x, weight, bias).to(dtype)
        rounded, weight_scale = to_operand(weight, arithmetic.operands)
        y = _unscaled(arithmetic.product(x, rounded.t(), arithmetic.forward, draw), scale, weight_scale)
        return (y if bias is None else y + bias).to(dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None, None]:
        x, weight, scale, draw = ctx.saved_tensors
        arithmetic: Arithmetic = ctx.arithmetic
        grad = grad.float()
        wide_grad = grad
        grad, grad_scale = to_operand(grad, arithmetic.gradient_operands)
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            rounded, weight_scale = to_operand(weight, arithmetic.operands)
            product = arithmetic.product(grad, rounded, arithmetic.grad_input, None if draw is None else draw + 1)
            grad_x = _unscaled(product, grad_scale, weight_scale)
        if ctx.needs_input_grad[1]:
            product = arithmetic.product(grad.t(), x, arithmetic.grad_weight, None if draw is None else draw + 2)
            grad_weight = _unscaled(product, grad_scale, scale)
        return grad_x, grad_weight, wide_grad.sum(0) if ctx.has_bias else None, None, None, None


def _unscaled(product: Tensor, *scales: Tensor | None) -> Tensor:
    """The product divided by its operands' scales. One by one: the product of two small scales might underflow."""
    for scale in scales:
        if scale is not None:
            product = product / scale
    return product


# --- fp8 by the device's own matrix units ----------------------------------------------------------------------------


class _Hardware(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        arithmetic: Arithmetic,
        draw: Tensor | None,
        dtype: torch.dtype,
    ) -> Tensor:
        ctx.arithmetic, ctx.dtype = arithmetic, dtype
        ctx.has_bias = bias is not None
        ctx.save_for_backward(x.to(dtype), weight)
        role, format_ = arithmetic.forward, arithmetic.operands
        if role is None:
            return F.linear(x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))
        y = fp8_matmul(x, format_, weight, format_, role.fast, dtype)
        return y if bias is None else y + bias.to(dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None, None]:
        x, weight = ctx.saved_tensors
        arithmetic: Arithmetic = ctx.arithmetic
        of_gradient, format_ = arithmetic.gradient_operands, arithmetic.operands
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            role = arithmetic.grad_input
            if role is None:
                grad_x = grad.to(ctx.dtype) @ weight.to(ctx.dtype)
            else:
                grad_x = fp8_matmul(grad, of_gradient, weight.t(), format_, role.fast, ctx.dtype)
            grad_x = grad_x.float()
        if ctx.needs_input_grad[1]:
            role = arithmetic.grad_weight
            if role is None:
                grad_weight = (grad.to(ctx.dtype).t() @ x).float()
            else:
                # The sum runs over tokens, whose number may be any; the units take multiples of 16.
                short = -x.shape[0] % 16
                left, right = F.pad(grad, (0, 0, 0, short)).t(), F.pad(x, (0, 0, 0, short)).t()
                grad_weight = fp8_matmul(left, of_gradient, right, format_, role.fast, torch.float32)
        return grad_x, grad_weight, grad.float().sum(0) if ctx.has_bias else None, None, None, None


def fp8_matmul(a: Tensor, format_a: str, b: Tensor, format_b: str, fast: bool, dtype: torch.dtype) -> Tensor:
    """`a` (m, k) times `b` (n, k) transposed, each brought to its fp8 format with one scale: (m, n) in `dtype`.

    The units want the left operand by rows and the right one by columns, hence `b` transposed. A CPU has no such units: there it is
    the fp32 product of the fp8 operands, as `torch._scaled_mm` would compute it a thousand times slower, and `fast` changes nothing.
    """
    if a.device.type == "cpu":
        (left, scale_a), (right, scale_b) = to_operand(a.float(), format_a), to_operand(b.float(), format_b)
        return _unscaled(left @ right.t(), scale_a, scale_b).to(dtype)
    scale_a, scale_b = scale_of(a, format_a), scale_of(b, format_b)
    a8 = (a.float() * scale_a).to(FP8[format_a]).contiguous()
    b8 = (b.float() * scale_b).to(FP8[format_b]).contiguous()
    return torch._scaled_mm(
        a8,
        b8.t(),
        scale_a=scale_a.reciprocal(),
        scale_b=scale_b.reciprocal(),
        out_dtype=dtype,
        use_fast_accum=fast,
    )
