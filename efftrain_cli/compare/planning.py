"""Plan the number of seeds of a study from the spread so far."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence

import numpy as np
from scipy import special

from efftrain_cli.compare.inference import ALPHA, Direction, Estimate, detectable

ASSURANCE = 0.8
"""Probability that the true spread is below the one that plans assume."""
MOST_SEEDS = 10_000
"""Largest number of seeds that `seeds_needed` tries."""
CONTINUED = 20_000
"""Simulated continuations of a study."""


def seeds_needed(
    difference: float,
    sd: float,
    paired: bool = True,
    alpha: float = ALPHA,
) -> int | None:
    """Return the fewest seeds per recipe that show a true difference with probability POWER.

    Args:
        sd: standard deviation of the paired differences, or of the runs of one recipe.
        paired: whether the two recipes share their seeds.

    Returns:
        None if more than MOST_SEEDS are needed, or if there is no spread.
    """
    if sd <= 0 or difference == 0 or not math.isfinite(difference):
        return None
    sides = 1 if paired else 2

    def negative_detectable(n: int) -> float:
        se = sd * math.sqrt(sides / n)
        estimate = Estimate(0.0, se=se, df=sides * (n - 1))
        return -(detectable(estimate, alpha) or 0.0)

    # bisect needs a key that rises with n.
    n = 2 + bisect_left(range(2, MOST_SEEDS + 1), -abs(difference), key=negative_detectable)
    return n if n <= MOST_SEEDS else None


def conditional_power(
    gain: float,
    sd: float,
    n: int,
    *,
    more: Sequence[int],
    levels: Sequence[float],
    direction: Direction,
    margin: float,
) -> float:
    """Return the probability that a later look shows the claim.

    Further pairs are drawn from a normal distribution with the mean and spread so far. The
    probability is simulated with CONTINUED continuations, to within 1 %.

    Args:
        gain: mean of the n pairs so far, above 0 if the method is better.
        sd: standard deviation of these pairs, with n - 1 degrees of freedom.
        more: number of pairs that each later look has beyond these n, rising.
        levels: nominal level of each later look's own t test.
        margin: margin of a direction that needs one.
    """
    random = np.random.default_rng(20261123)
    drawn = random.normal(gain, sd, (CONTINUED, more[-1]))
    passed = np.zeros(CONTINUED, bool)
    for added, level in zip(more, levels, strict=True):
        values = drawn[:, :added]
        total = n + added
        mean = (n * gain + values.sum(1)) / total
        squares = (n - 1) * sd**2 + n * gain**2 + (values**2).sum(1)
        se = np.sqrt((squares - total * mean**2) / (total - 1) / total)
        lead = mean
        if direction == "different":
            lead = np.abs(mean)
            level = level / 2
        elif direction == "equivalent":
            lead = margin - np.abs(mean)
        elif direction == "noninferior":
            lead = mean + margin
        passed |= lead > se * special.stdtrit(total - 1, 1 - level)
    return float(passed.mean())


def assured_sd(sd: float, df: float) -> float:
    """Return the bound that the true standard deviation stays below with probability ASSURANCE.

    Args:
        sd: estimate of it with `df` degrees of freedom.
    """
    return sd * math.sqrt(df / float(special.chdtri(df, ASSURANCE)))


def sd_interval(sd: float, n: float) -> tuple[float, float]:
    """Return the 95 % interval of a standard deviation that is estimated from `n` normal values."""
    df = n - 1
    low = math.sqrt(df / float(special.chdtri(df, ALPHA / 2)))
    high = math.sqrt(df / float(special.chdtri(df, 1 - ALPHA / 2)))
    return sd * low, sd * high
