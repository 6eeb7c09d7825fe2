"""Rounding to a few bits, by its definition."""

from __future__ import annotations

import numpy as np


def by_definition(x: np.ndarray, bits: int) -> np.ndarray:
    """Round to nearest, ties to even, to `bits` explicit mantissa bits, with an unbounded exponent."""
    mantissa, exponent = np.frexp(x)
    return np.ldexp(np.rint(np.ldexp(mantissa, bits + 1)), exponent - bits - 1)
