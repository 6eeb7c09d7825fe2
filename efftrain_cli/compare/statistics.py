"""The statistics of comparing two recipes over a few seeds.

A seed decides initialization and data order, so two recipes trained on the same seeds are compared by their differences
per seed: what the seeds share cancels. With a handful of seeds an interval must come from Student's t; a percentile
bootstrap of three to eight values covers far less than it says. One seed supports no claim, and none is made.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from scipy import special

ALPHA = 0.05
"""Two-sided error rate of every test; intervals cover 1 - ALPHA."""
POWER = 0.8
"""Chance of detecting a real difference that `seeds_needed` plans for."""
BOOTSTRAP_FROM = 20
"""Pairs from which ratios are bootstrapped; below, the t interval of their logarithms is used."""
MOST_SEEDS = 10_000
"""`seeds_needed` looks no further."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean with its 95 % interval. Where there is no interval, `reason` says why and no claim is made."""

    mean: float
    low: float | None = None
    high: float | None = None
    p: float | None = None
    """Two-sided p-value of "no difference"."""
    n: int = 0
    """Values, or pairs, behind the mean."""
    sd: float | None = None
    """Standard deviation of the values: of the paired differences, or pooled where nothing is paired."""
    method: str = ""
    reason: str = ""
    """Why there is no interval; empty where there is one."""


def paired_t(differences: Sequence[float]) -> Estimate:
    """Mean of paired differences, with Student's t interval on n - 1 degrees of freedom."""
    values = np.asarray(differences, float)
    n = len(values)
    if n == 0:
        return Estimate(math.nan, reason="no pairs")
    mean = float(values.mean())
    if n == 1:
        return Estimate(mean, n=1, reason="one seed: no claim")
    sd = float(values.std(ddof=1))
    # Differences of numbers that agree to rounding have a spread of rounding: that is no evidence of anything.
    if sd <= 1e-12 * max(1.0, float(np.abs(values).max())):
        return Estimate(mean, n=n, sd=0.0, reason="no spread between seeds: no claim")
    half = sd / math.sqrt(n) * float(special.stdtrit(n - 1, 1 - ALPHA / 2))
    t = abs(mean) / (sd / math.sqrt(n))
    return Estimate(mean, mean - half, mean + half, float(2 * special.stdtr(n - 1, -t)), n, sd, "paired t")


def welch_t(baseline: Sequence[float], method: Sequence[float]) -> Estimate:
    """Difference of means of two unpaired samples, method less baseline: Welch's t (1947), for unequal variances."""
    a, b = np.asarray(baseline, float), np.asarray(method, float)
    if len(a) == 0 or len(b) == 0:
        return Estimate(math.nan, reason="no values")
    mean = float(b.mean() - a.mean())
    n = min(len(a), len(b))
    if n == 1:
        return Estimate(mean, n=1, reason="one seed: no claim")
    va, vb = a.var(ddof=1) / len(a), b.var(ddof=1) / len(b)
    scale = max(1.0, float(np.abs(a).max()), float(np.abs(b).max()))
    if math.sqrt(va + vb) <= 1e-12 * scale:
        return Estimate(mean, n=n, sd=0.0, reason="no spread between seeds: no claim")
    df = (va + vb) ** 2 / (va**2 / (len(a) - 1) + vb**2 / (len(b) - 1))
    se = math.sqrt(va + vb)
    half = se * float(special.stdtrit(df, 1 - ALPHA / 2))
    p = float(2 * special.stdtr(df, -abs(mean) / se))
    sd = math.sqrt((a.var(ddof=1) + b.var(ddof=1)) / 2)
    return Estimate(mean, mean - half, mean + half, p, n, sd, "Welch's t, seeds not paired")


def ratio(baseline: Sequence[float], method: Sequence[float], seed: int = 0) -> Estimate:
    """Geometric mean of the paired ratios baseline / method (above 1: the method needs less), with its interval.

    Below 20 pairs the t interval of the log ratios; from 20 a percentile bootstrap over the pairs, seeded, whose
    measured coverage `bootstrap_coverage` tells. `sd` is that of the log ratios.

    Raises:
        ValueError: a value is not positive.
    """
    a, b = np.asarray(baseline, float), np.asarray(method, float)
    if (a <= 0).any() or (b <= 0).any():
        raise ValueError("ratios need positive values")
    return ratio_of_logs(np.log(a) - np.log(b), seed)


def ratio_of_logs(logs: Sequence[float], seed: int = 0) -> Estimate:
    """As `ratio`, from the paired log ratios."""
    values = np.asarray(logs, float)
    on_logs = bootstrap(values, seed) if len(values) >= BOOTSTRAP_FROM else paired_t(values)
    return exponentiate(on_logs)


def exponentiate(on_logs: Estimate) -> Estimate:
    """An estimate of a ratio from the estimate of its logarithm; `sd` stays that of the logarithms."""
    return Estimate(
        math.exp(on_logs.mean),
        None if on_logs.low is None else math.exp(on_logs.low),
        None if on_logs.high is None else math.exp(on_logs.high),
        on_logs.p,
        on_logs.n,
        on_logs.sd,
        f"{on_logs.method} on log ratios" if on_logs.method else "",
        on_logs.reason,
    )


def bootstrap(values: Sequence[float], seed: int = 0, resamples: int = 10_000) -> Estimate:
    """Mean with a percentile bootstrap interval over `resamples` draws from the generator of `seed`."""
    sample = np.asarray(values, float)
    n = len(sample)
    if n < 2:
        return paired_t(sample)
    means = sample[np.random.default_rng(seed).integers(0, n, (resamples, n))].mean(1)
    low, high = np.quantile(means, (ALPHA / 2, 1 - ALPHA / 2))
    tail = min(int((means <= 0).sum()), int((means >= 0).sum()))
    # The two-sided share of resampled means beyond zero, never less than what so many resamples can tell.
    p = min(1.0, 2 * (tail + 1) / (resamples + 1))
    return Estimate(
        float(sample.mean()), float(low), float(high), p, n, float(sample.std(ddof=1)), "bootstrap over pairs"
    )


@cache
def bootstrap_coverage(n: int, draws: int = 2000, resamples: int = 1000, seed: int = 0) -> float:
    """Share of `draws` samples of `n` normal values whose percentile bootstrap interval holds the true mean."""
    random = np.random.default_rng(seed)
    covered = 0
    for _ in range(draws):
        sample = random.standard_normal(n)
        means = sample[random.integers(0, n, (resamples, n))].mean(1)
        low, high = np.quantile(means, (ALPHA / 2, 1 - ALPHA / 2))
        covered += low <= 0 <= high
    return covered / draws


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's (1979) step-down adjustment: the family-wise error of the tests together stays below ALPHA."""
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    adjusted = [0.0] * len(p_values)
    largest = 0.0
    for rank, i in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[i]))
        adjusted[i] = largest
    return adjusted


def power_of(n: int, effect: float, paired: bool = True, alpha: float = ALPHA) -> float:
    """Chance that a two-sided t test finds a true difference of `effect` standard deviations with `n` seeds per recipe."""
    df, noncentrality = (n - 1, effect * math.sqrt(n)) if paired else (2 * n - 2, effect * math.sqrt(n / 2))
    if noncentrality > 30:
        return 1.0
    critical = float(special.stdtrit(df, 1 - alpha / 2))
    upper = special.nctdtr(df, noncentrality, critical)
    lower = special.nctdtr(df, noncentrality, -critical)
    return float(1 - upper + (0.0 if math.isnan(lower) else lower))


def seeds_needed(difference: float, sd: float, paired: bool = True, alpha: float = ALPHA) -> int | None:
    """Fewest seeds per recipe that find a true `difference` in POWER of all studies, given the spread `sd`.

    `sd` is that of the paired differences, or of the runs of one recipe where `paired` is False. None: more than
    MOST_SEEDS, or no spread to plan with.
    """
    if sd <= 0 or difference == 0 or not math.isfinite(difference):
        return None
    effect = abs(difference) / sd
    low, high = 2, 2
    while power_of(high, effect, paired, alpha) < POWER:
        low, high = high, high * 2
        if low > MOST_SEEDS:
            return None
    while low < high:
        middle = (low + high) // 2
        if power_of(middle, effect, paired, alpha) >= POWER:
            high = middle
        else:
            low = middle + 1
    return high if high <= MOST_SEEDS else None


def sd_interval(sd: float, n: int) -> tuple[float, float]:
    """95 % interval of a standard deviation estimated from `n` normal values (chi-squared)."""
    df = n - 1
    return (
        sd * math.sqrt(df / float(special.chdtri(df, ALPHA / 2))),
        sd * math.sqrt(df / float(special.chdtri(df, 1 - ALPHA / 2))),
    )


def mcnemar(only_baseline: int, only_method: int) -> float:
    """Exact two-sided p-value that two classifiers are equally often right on the same items (McNemar, 1947)."""
    n = only_baseline + only_method
    if n == 0:
        return 1.0
    k = min(only_baseline, only_method)
    return min(1.0, 2 * float(special.bdtr(k, n, 0.5)))


def item_differences(differences: Sequence[float]) -> Estimate:
    """Mean difference of two models' scores on the same items, with the normal interval over items (t below 30 is wider).

    It says how sure the difference of these two checkpoints is; it says nothing about other seeds.
    """
    estimate = paired_t(differences)
    return Estimate(
        estimate.mean,
        estimate.low,
        estimate.high,
        estimate.p,
        estimate.n,
        estimate.sd,
        "paired over items",
        estimate.reason.replace("one seed", "one item").replace("between seeds", "between items"),
    )
