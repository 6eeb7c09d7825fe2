"""Round to a few bits, and sum so, by definition: exact arithmetic in fp64, the reference of what
is emulated."""

from __future__ import annotations

import numpy as np


def by_definition(x: np.ndarray, bits: int) -> np.ndarray:
    """Round to nearest, ties to even, to `bits` explicit mantissa bits, with an unbounded
    exponent."""
    mantissa, exponent = np.frexp(x)
    return np.ldexp(np.rint(np.ldexp(mantissa, bits + 1)), exponent - bits - 1)


def sum_in_order(terms: np.ndarray, bits: int, chunk: int = 0) -> np.ndarray:
    """Sum `terms` (n, ...) over the first dimension, in order, rounded to nearest after every
    addition: fp64 (...).

    With `chunk` > 0 sums of so many terms first, and then the sum of those.
    """
    terms = np.asarray(terms, dtype=np.float64)
    length = chunk or len(terms)
    padding = np.zeros((-len(terms) % length, *terms.shape[1:]))
    chunks = np.concatenate([terms, padding]).reshape(-1, length, *terms.shape[1:])
    partial = _running(chunks.swapaxes(0, 1), bits)
    return partial[0] if len(partial) == 1 else _running(partial, bits)


def _running(terms: np.ndarray, bits: int) -> np.ndarray:
    total = np.zeros(terms.shape[1:])
    for term in terms:
        total = by_definition(total + term, bits)
    return total
