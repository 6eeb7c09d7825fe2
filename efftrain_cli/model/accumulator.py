"""What a sum is added in, as numbers: no torch, so that recipes load without it."""

from __future__ import annotations

from pydantic import Field
from pydantic.dataclasses import dataclass

from efftrain_cli.foundation.section import SECTION


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
