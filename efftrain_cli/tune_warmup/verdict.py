"""When a probe's curve of validation losses is unstable, when it is clearly calm, and how sure a share of seeds is. No
torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, linear_regression, stdev

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


def chance_of_fluctuation(
    curve: Curve, critical: int, first_look: int, horizon: int, threshold: float
) -> float:
    """A bound for the chance that a probe is called calm at one of its looks and fluctuates above `threshold` after it,
    up to `horizon`, if its validations go on as those since the `critical` step did.

    Of each of those the excess over the best loss before it is taken, which is the logarithm of the perplexity's ratio.
    The bound for one more validation is Student's t prediction interval: around the mean of the excesses, or 0 where
    the loss still falls, and where they rise also around the straight line through them, whichever is the larger
    chance. The validations left are added up, and so are the looks (Bonferroni): one at every validation from step
    `first_look` on, as a bound looked at ten times is wrong up to ten times as often. It does not see a cause that is
    yet to come.

    1.0, so never calm: before `first_look`, with too few validations, and while the last `FEWEST` ratios rise.
    """
    best, steps, excess = math.inf, [], []
    for step, loss in curve:
        if step > critical:
            steps.append(step)
            excess.append(loss - best)
        best = min(best, loss)
    n, last = len(excess), curve[-1][0]
    if last < first_look or n < FEWEST or not all(map(math.isfinite, excess)):
        return 1.0
    if (
        linear_regression(steps[-FEWEST:], [max(0.0, value) for value in excess[-FEWEST:]]).slope
        > 0
    ):
        return 1.0
    every = last - curve[-2][0]
    looks = -(-(horizon - first_look) // every)
    slope, intercept = linear_regression(steps, excess)
    middle, spread = fmean(steps), stdev(steps) ** 2 * (n - 1)
    off_line = math.hypot(
        *(value - intercept - slope * step for step, value in zip(steps, excess, strict=True))
    ) / math.sqrt(n - 2)
    level, off_level = max(0.0, fmean(excess)), stdev(excess)
    chance = 0.0
    for step in range(last + every, horizon + every, every):
        one = _tail(math.log(threshold) - level, off_level * math.sqrt(1 + 1 / n), n - 1)
        if slope > 0:
            off = off_line * math.sqrt(1 + 1 / n + (step - middle) ** 2 / spread)
            one = max(one, _tail(math.log(threshold) - intercept - slope * step, off, n - 2))
        chance += one
    return min(1.0, looks * chance)


def _tail(room: float, scatter: float, freedom: int) -> float:
    """Chance that a Student's t variable with `freedom` degrees of freedom, times `scatter`, is above `room`."""
    if room <= 0:
        return 1.0
    if scatter == 0:
        return 0.0
    from scipy.special import stdtr

    return float(stdtr(freedom, -room / scatter))


def share_interval(successes: int, number: int) -> tuple[float, float]:
    """The 95 % interval of a share by Wilson's score (Wilson 1927)."""
    z = 1.959964
    share, extra = successes / number, z * z / number
    middle = (share + extra / 2) / (1 + extra)
    half = z * math.sqrt(share * (1 - share) / number + extra / (4 * number)) / (1 + extra)
    return max(0.0, middle - half), min(1.0, middle + half)
