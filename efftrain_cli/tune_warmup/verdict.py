"""When a probe's curve of validation losses is unstable, when it is clearly calm, and how sure a share of seeds is. No torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, stdev

Curve = Sequence[tuple[int, float]]
"""(step, validation loss in nats per token), in order of steps."""
FEWEST = 8
"""Validations after the critical step without which nothing is said about the rest."""


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


def chance_of_fluctuation(curve: Curve, critical: int, horizon: int, threshold: float) -> float:
    """A bound for the chance that a validation between the curve's end and `horizon` fluctuates above `threshold`, if the rest
    scatters as the validations since the `critical` step did.

    Of each of those the excess over the best loss before it is taken. The bound for one more validation is Student's t
    prediction interval around their mean, or around 0 where the loss still falls; those left are added up (Bonferroni). It does
    not see a cause that is yet to come. 1.0 with too few validations.
    """
    best, excess = math.inf, []
    for step, loss in curve:
        if step > critical:
            excess.append(loss - best)
        best = min(best, loss)
    n = len(excess)
    if n < FEWEST or not all(map(math.isfinite, excess)):
        return 1.0
    left = -(-(horizon - curve[-1][0]) // max(1, curve[-1][0] - curve[-2][0]))
    room, scatter = math.log(threshold) - max(0.0, fmean(excess)), stdev(excess) * math.sqrt(1 + 1 / n)
    if room <= 0:
        return 1.0
    if scatter == 0:
        return 0.0
    from scipy.special import stdtr

    return min(1.0, left * float(stdtr(n - 1, -room / scatter)))


def share_interval(successes: int, number: int) -> tuple[float, float]:
    """The 95 % interval of a share by Wilson's score (Wilson 1927)."""
    z = 1.959964
    share, extra = successes / number, z * z / number
    middle = (share + extra / 2) / (1 + extra)
    half = z * math.sqrt(share * (1 - share) / number + extra / (4 * number)) / (1 + extra)
    return max(0.0, middle - half), min(1.0, middle + half)
