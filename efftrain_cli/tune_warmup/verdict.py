"""When a probe's curve of validation losses is unstable, and how sure a share of seeds is. No torch."""

from __future__ import annotations

import math
from collections.abc import Sequence

Curve = Sequence[tuple[int, float]]
"""(step, validation loss in nats per token), in order of steps."""


def fluctuation(curve: Curve) -> tuple[float, int]:
    """The largest perplexity over the best perplexity before it, and the step of it.

    A loss that is not finite makes it infinite. 0.0 for a curve of one point.
    """
    best, worst, at = math.inf, 0.0, curve[0][0]
    for index, (step, loss) in enumerate(curve):
        if not math.isfinite(loss):
            return math.inf, step
        # exp(a) / exp(b) = exp(a - b), which does not overflow before the ratio does.
        ratio = math.exp(min(loss - best, 700.0)) if index else 0.0
        if ratio > worst:
            worst, at = ratio, step
        best = min(best, loss)
    return worst, at


def share_interval(successes: int, number: int) -> tuple[float, float]:
    """The 95 % interval of a share by Wilson's score (Wilson 1927)."""
    z = 1.959964
    share, extra = successes / number, z * z / number
    middle = (share + extra / 2) / (1 + extra)
    half = z * math.sqrt(share * (1 - share) / number + extra / (4 * number)) / (1 + extra)
    return max(0.0, middle - half), min(1.0, middle + half)
