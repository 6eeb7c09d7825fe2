"""How a linear layer multiplies and adds, as numbers: no torch, so that recipes load without it."""

from __future__ import annotations

from typing import Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from efftrain_cli.foundation.section import SECTION

Operands = Literal["fp32", "bf16", "fp8_e4m3", "fp8_e5m2"]


@dataclass(frozen=True, kw_only=True, config=SECTION)
class Accumulator:
    """What one of the three products of a linear layer is added in; every key absent: fp32."""

    bits: int = Field(default=23, ge=1, le=23)
    """Explicit mantissa bits, 1 to 23; 9 is the papers' (1, 6, 9), 23 is fp32."""
    chunk: int = Field(default=0, ge=0)
    """Products per chunk; 0: no chunks."""
    exponent_bits: int = Field(default=8, ge=2, le=8)
    """Exponent bits, 2 to 8: 6 is the papers' (1, 6, 9), 8 is fp32's range; beyond its largest
    number it saturates."""
    fast_accumulation: bool = False
    """With fidelity = "hardware": the tensor core's own accumulator throughout, never promoted to
    fp32 in between."""


@dataclass(frozen=True, kw_only=True, config=SECTION)
class Arithmetic:
    """Formats of the operands of a linear layer's products, and what each product is added in."""

    operands: Operands = "fp32"
    """Format of activations and weights; an 8-bit tensor has one scale, a power of two, by its
    largest magnitude."""
    gradient_operands: Operands | None = None
    """Format of the gradients that come into a layer; absent: as operands."""
    fidelity: Literal["blocked", "hardware"] = "blocked"
    """Emulated, rounded after every 32 products; or the GPU's own."""
    forward: Accumulator | None = None
    """Sums of the output, over a layer's inputs; absent: fp32."""
    grad_input: Accumulator | None = None
    """Sums of the input's gradient, over a layer's outputs; absent: fp32."""
    grad_weight: Accumulator | None = None
    """Sums of the weight's gradient, over the tokens of a micro-batch; absent: fp32."""

    @property
    def gradient_format(self) -> Operands:
        """Format of incoming gradients."""
        return self.gradient_operands or self.operands
