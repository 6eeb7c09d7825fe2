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

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from efftrain_cli.model.accumulator import Accumulator
from efftrain_cli.model.narrow_matmul import BLOCK, FP8, draw_of, scale_of, to_operand

ROLES = ("forward", "grad_input", "grad_weight")
Fidelity = Literal["blocked", "intra_fp32", "hardware"]


@dataclass(frozen=True)
class Arithmetic:
    """How a linear layer multiplies and adds. A role that is None adds in fp32."""

    operands: str = "fp32"
    """Format of activations and weights."""
    gradient_operands: str = "fp32"
    """Format of the output's gradient."""
    fidelity: Fidelity = "blocked"
    stochastic: bool = False
    forward: Accumulator | None = None
    grad_input: Accumulator | None = None
    grad_weight: Accumulator | None = None

    def is_wide(self, role: Accumulator | None) -> bool:
        """Return whether a role's sum is one fp32 sum: absent, or emulated without rounding."""
        if role is None:
            return True
        return self.fidelity == "intra_fp32" and role == Accumulator()

    def product(
        self,
        a: Tensor,
        b: Tensor,
        role: Accumulator | None,
        draw: Tensor | None,
        saturated: Tensor,
    ) -> Tensor:
        """Multiply `a` (m, k) by `b` (k, n), operands in their formats, emulated in the accumulator
        of `role`.

        Add to `saturated`, 0-d, how many roundings saturated.
        """
        if self.is_wide(role):
            return a @ b
        assert role is not None
        count = None
        if role.exponent_bits < 8:
            count = saturated
        block = 0
        if self.fidelity == "blocked":
            block = BLOCK
        return torch.ops.efftrain.narrow_matmul(
            a, b, role.bits, role.chunk, block, draw, role.exponent_bits, count
        )


class SaturationStats:
    """Places in a narrow layer's buffer `seen`, fp64 (9,): what its passes had since it was last
    cleared."""

    SATURATED = 0
    """This place and the two after it: roundings that saturated in each role."""
    LARGEST = 3
    """This place and the two after it: log2 of the largest scale of inputs, weights and gradients;
    -inf: no scale."""
    SMALLEST = 6
    """This place and the two after it: -log2 of the smallest scale."""


INPUTS, WEIGHTS, GRADIENTS = range(3)
OPERANDS = ("inputs", "weights", "gradients")
FORWARD_PLACES = (
    SaturationStats.SATURATED,
    SaturationStats.LARGEST + INPUTS,
    SaturationStats.LARGEST + WEIGHTS,
    SaturationStats.SMALLEST + INPUTS,
    SaturationStats.SMALLEST + WEIGHTS,
)
"""Places of `SaturationStats` that only a forward pass writes."""


def nothing_seen(device: torch.device) -> Tensor:
    """Return the buffer of a layer without passes: fp64 (9,)."""
    counts = [0.0] * 3
    scales = [-math.inf] * 6
    return torch.tensor(counts + scales, dtype=torch.float64, device=device)


def clear_seen(model: nn.Module) -> None:
    """Clear what every narrow layer below `model` has seen."""
    for layer in _narrow_layers(model):
        layer.seen.copy_(nothing_seen(layer.seen.device))


@contextmanager
def unnoticed(model: nn.Module, places: Sequence[int] = range(9)) -> Iterator[None]:
    """Restore `places` of what the narrow layers below `model` have seen: passes inside are none of
    the step's."""
    before = [(layer, layer.seen.clone()) for layer in _narrow_layers(model)]
    yield
    for layer, seen in before:
        for place in places:
            layer.seen[place] = seen[place]


def seen_by_layers(model: nn.Module) -> Tensor:
    """Combine the buffers of the narrow layers below `model`: fp64 (9,), as `SaturationStats`."""
    return combine_stats(torch.stack([layer.seen for layer in _narrow_layers(model)]))


def combine_stats(seen: Tensor) -> Tensor:
    """Combine the buffers of layers or of ranks, fp64 (n, 9), into one of (9,): counts add up,
    scales are extremes."""
    counts = seen[:, : SaturationStats.LARGEST]
    scales = seen[:, SaturationStats.LARGEST :]
    return torch.cat([counts.sum(0), scales.amax(0)])


def _narrow_layers(model: nn.Module) -> Iterator[NarrowLinear | NarrowHead]:
    return (layer for layer in model.modules() if isinstance(layer, NarrowLinear | NarrowHead))


def _register_buffers(layer: nn.Module, device: torch.device) -> None:
    """Give a narrow layer `draw`, 0-d int32, of which its next pass makes random bits, and what it
    has `seen`."""
    draw = torch.zeros((), dtype=torch.int32, device=device)
    layer.register_buffer("draw", draw, persistent=False)
    layer.register_buffer("seen", nothing_seen(device), persistent=False)


class NarrowLinear(nn.Linear):
    """`nn.Linear` computing by an `Arithmetic`; its parameters are those of the layer that it
    replaces."""

    draw: Tensor
    seen: Tensor

    def __init__(self, linear: nn.Linear, arithmetic: Arithmetic) -> None:
        # Not nn.Linear's, which would draw weights of its own.
        nn.Module.__init__(self)
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.weight = linear.weight
        self.bias = linear.bias
        self.arithmetic = arithmetic
        _register_buffers(self, linear.weight.device)

    def forward(self, x: Tensor) -> Tensor:
        return narrow_linear(x, self.weight, self.bias, self.arithmetic, self.draw, self.seen)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self.arithmetic}"


class NarrowHead(nn.Module):
    """The product with the vocabulary, computing by an `Arithmetic`; the tied matrix belongs to the
    embedding."""

    draw: Tensor
    seen: Tensor

    def __init__(self, arithmetic: Arithmetic, device: torch.device) -> None:
        super().__init__()
        self.arithmetic = arithmetic
        _register_buffers(self, device)

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        """Multiply x (..., n_embd) by weight (rows, n_embd) transposed: (..., rows)."""
        return narrow_linear(x, weight, None, self.arithmetic, self.draw, self.seen)


def set_draws(module: nn.Module, seed: int, step: int, micro_step: int) -> None:
    """Give every narrow layer below `module` the random bits of one forward and backward pass."""
    for number, layer in enumerate(_narrow_layers(module)):
        layer.draw.fill_(draw_of(seed, step, micro_step, number))


def narrow_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    arithmetic: Arithmetic,
    draw: Tensor,
    seen: Tensor,
) -> Tensor:
    """Multiply x (..., in) by weight (out, in) transposed, add the bias: (..., out), in the run's
    compute type.

    Without gradients, stochastic rounding gives way to rounding to nearest: a validation loss has
    no noise of its own.
    """
    device = x.device.type
    dtype = torch.float32
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
    noise = None
    if arithmetic.stochastic and torch.is_grad_enabled():
        noise = draw
    linear: type[Function] = _Emulated
    if arithmetic.fidelity == "hardware":
        linear = _Hardware

    with torch.autocast(device, enabled=False):
        rows = x.float().flatten(0, -2)
        y = linear.apply(rows, weight, bias, arithmetic, noise, seen, dtype)
    return y.unflatten(0, x.shape[:-1])


def note_scale(seen: Tensor, scale: Tensor | None, kind: int) -> None:
    """Record the scale of an operand of `kind`, INPUTS, WEIGHTS or GRADIENTS, in `seen`; None: it
    has no scale."""
    if scale is not None:
        torch.ops.efftrain.note_scale(seen, scale, kind)


def _note_scale(seen: Tensor, scale: Tensor, kind: int) -> None:
    log2 = scale.double().log2()
    largest = SaturationStats.LARGEST + kind
    smallest = SaturationStats.SMALLEST + kind
    seen[largest] = torch.maximum(seen[largest], log2)
    seen[smallest] = torch.maximum(seen[smallest], -log2)


# An operator that changes its argument: torch.compile keeps it, in its place.
_LIBRARY = torch.library.Library("efftrain", "FRAGMENT")
_LIBRARY.define("note_scale(Tensor(a!) seen, Tensor scale, SymInt kind) -> ()")
_LIBRARY.impl("note_scale", _note_scale, "CompositeExplicitAutograd")


@torch.library.register_fake("efftrain::note_scale", lib=_LIBRARY)  # type: ignore[untyped-decorator]
def _shape_of_nothing(seen: Tensor, scale: Tensor, kind: int) -> None:
    return None


_Gradients = tuple[Tensor | None, Tensor | None, Tensor | None, None, None, None, None]
"""Of inputs, weight and bias; the other arguments have none."""


class _Emulated(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        arithmetic: Arithmetic,
        draw: Tensor | None,
        seen: Tensor,
        dtype: torch.dtype,
    ) -> Tensor:
        ctx.arithmetic = arithmetic
        ctx.seen = seen
        ctx.has_bias = bias is not None
        x, scale = to_operand(x, arithmetic.operands)
        note_scale(seen, scale, INPUTS)
        ctx.save_for_backward(x, weight, scale, draw)
        if arithmetic.is_wide(arithmetic.forward) and arithmetic.operands == "fp32":
            return F.linear(x, weight, bias).to(dtype)

        rounded, weight_scale = to_operand(weight, arithmetic.operands)
        note_scale(seen, weight_scale, WEIGHTS)
        product = arithmetic.product(x, rounded.t(), arithmetic.forward, draw, seen[0])
        y = _unscaled(product, scale, weight_scale)
        if bias is not None:
            y = y + bias
        return y.to(dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> _Gradients:
        x, weight, scale, draw = ctx.saved_tensors
        arithmetic: Arithmetic = ctx.arithmetic
        grad = grad.float()
        grad_x = grad_weight = grad_bias = None
        if ctx.has_bias:
            grad_bias = grad.sum(0)
        grad, grad_scale = to_operand(grad, arithmetic.gradient_operands)
        note_scale(ctx.seen, grad_scale, GRADIENTS)

        if ctx.needs_input_grad[0]:
            rounded, weight_scale = to_operand(weight, arithmetic.operands)
            noise = _next_draw(draw, 1)
            product = arithmetic.product(grad, rounded, arithmetic.grad_input, noise, ctx.seen[1])
            grad_x = _unscaled(product, grad_scale, weight_scale)
        if ctx.needs_input_grad[1]:
            noise = _next_draw(draw, 2)
            product = arithmetic.product(grad.t(), x, arithmetic.grad_weight, noise, ctx.seen[2])
            grad_weight = _unscaled(product, grad_scale, scale)
        return grad_x, grad_weight, grad_bias, None, None, None, None


def _next_draw(draw: Tensor | None, product: int) -> Tensor | None:
    if draw is None:
        return None
    return draw + product


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
        draw: Tensor | None,
        seen: Tensor,
        dtype: torch.dtype,
    ) -> Tensor:
        ctx.arithmetic = arithmetic
        ctx.dtype = dtype
        ctx.seen = seen
        ctx.has_bias = bias is not None
        ctx.save_for_backward(x.to(dtype), weight)
        if bias is not None:
            bias = bias.to(dtype)
        role = arithmetic.forward
        if role is None:
            return F.linear(x.to(dtype), weight.to(dtype), bias)

        format_ = arithmetic.operands
        y, scale, weight_scale = fp8_matmul(
            x, format_, weight, format_, role.fast_accumulation, dtype
        )
        note_scale(seen, scale, INPUTS)
        note_scale(seen, weight_scale, WEIGHTS)
        if bias is not None:
            y = y + bias
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> _Gradients:
        x, weight = ctx.saved_tensors
        arithmetic: Arithmetic = ctx.arithmetic
        of_gradient = arithmetic.gradient_operands
        format_ = arithmetic.operands
        grad_x = grad_weight = grad_bias = None
        if ctx.has_bias:
            grad_bias = grad.float().sum(0)

        if ctx.needs_input_grad[0]:
            role = arithmetic.grad_input
            if role is None:
                grad_x = grad.to(ctx.dtype) @ weight.to(ctx.dtype)
            else:
                grad_x, scale, _ = fp8_matmul(
                    grad, of_gradient, weight.t(), format_, role.fast_accumulation, ctx.dtype
                )
                note_scale(ctx.seen, scale, GRADIENTS)
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
                grad_weight, scale, _ = fp8_matmul(
                    left, of_gradient, right, format_, role.fast_accumulation, torch.float32
                )
                note_scale(ctx.seen, scale, GRADIENTS)
        return grad_x, grad_weight, grad_bias, None, None, None, None


def fp8_matmul(
    a: Tensor,
    format_a: str,
    b: Tensor,
    format_b: str,
    fast: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Multiply `a` (m, k) by `b` (n, k) transposed, each in its fp8 format with one scale.

    Return the product (m, n) in `dtype`, and the scales.

    The units want the left operand by rows and the right one by columns, hence `b` transposed. A
    CPU has no such units: there it is the fp32 product of the fp8 operands, as `torch._scaled_mm`
    would compute it a thousand times slower, and `fast` changes nothing.
    """
    if a.device.type == "cpu":
        left, of_a = to_operand(a.float(), format_a)
        right, of_b = to_operand(b.float(), format_b)
        return _unscaled(left @ right.t(), of_a, of_b).to(dtype), of_a, of_b

    scale_a = scale_of(a, format_a)
    scale_b = scale_of(b, format_b)
    a8 = (a.float() * scale_a).to(FP8[format_a]).contiguous()
    b8 = (b.float() * scale_b).to(FP8[format_b]).contiguous()
    product = torch._scaled_mm(
        a8,
        b8.t(),
        scale_a=scale_a.reciprocal(),
        scale_b=scale_b.reciprocal(),
        out_dtype=dtype,
        use_fast_accum=fast,
    )
    return product, scale_a, scale_b
