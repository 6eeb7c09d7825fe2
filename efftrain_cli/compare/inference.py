"""Statistics of a comparison of two recipes over a few seeds: functions of numbers, not of runs.

A seed decides initialization and data order. Two recipes that are trained on the same seeds are
therefore compared by their differences per seed, in which the effect of the seed cancels. A few
seeds suffice for Student's t and for exact tests, but not for a bootstrap. One seed supports no
claim.

Losses and costs are better when lower, so a difference is method less baseline and a ratio is
baseline / method.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from scipy import optimize, special, stats

from efftrain_cli.foundation.why import Why

ALPHA = 0.05
"""Error rate of every test; intervals cover 1 - ALPHA."""
POWER = 0.8
"""Chance of showing a true difference, in plans and in the smallest detectable difference."""
LARGEST_EFFECT = 20.0
"""Logarithm of a ratio of costs from which on the ratio counts as infinite."""
FEWEST_PAIRS = 4
"""Pairs from which on their correlation is used if other runs are unpaired."""
MCNEMAR_FROM = 6
"""Pairs from which McNemar's exact test can reach 5 %."""
COUNTED_SIDE = 10
COUNTED_RUNS = 5_000
"""Ranks are counted exactly up to 50 runs an arm: if runs x runs of the smaller arm are at most
COUNTED_RUNS, or the smaller arm has fewer than COUNTED_SIDE. The time grows with the fourth power
of the runs."""

BySeed = Mapping[int, float]
"""Seed -> value."""
Direction = Literal["different", "better", "noninferior", "equivalent"]
ONE_SEED = Why("one_seed", "one seed: no claim")
NO_SPREAD = Why("no_spread", "no spread between seeds: no claim")


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean and its interval; without an interval no claim is made, and `why` says why."""

    mean: float
    low: float | None = None
    high: float | None = None
    p: float | None = None
    """Two-sided p-value of "no difference"."""
    n: int = 0
    """Number of pairs; if not every run is paired, number of runs of the smaller side."""
    sd: float | None = None
    """Standard deviation of the paired differences.

    If not every run is paired, that of the runs of one side, pooled over the two sides.
    """
    se: float | None = None
    """Standard error of the mean."""
    df: float | None = None
    """Degrees of freedom of Student's t."""
    method: str = ""
    """Name of the test, for people."""
    paired: bool = False
    """Whether every run has its pair."""
    why: Why | None = None
    """Why there is no interval; None if there is one."""
    log: bool = False
    """`mean`, `low` and `high` are ratios; `sd`, `se` and tests are those of their logarithm."""
    bound: int = 0
    """1 if the true mean is larger, as baseline runs missed the target; -1 if it is smaller."""

    @property
    def center(self) -> float:
        """Return the mean on the scale of the test: nats, or the logarithm of a ratio."""
        if self.log:
            return math.log(self.mean)
        return self.mean

    @property
    def gain(self) -> float:
        """Return how much better the method is: nats less, or the logarithm of the ratio."""
        if self.log:
            return self.center
        return -self.center

    def scaled(self, size: float) -> float:
        """Return a margin on the scale of the test: nats, or log(1 + size) of a ratio less 1."""
        if self.log:
            return math.log1p(size)
        return size


def no_estimate(text: str) -> Estimate:
    """Return an estimate without a number; `text` says why."""
    return Estimate(math.nan, why=Why("no_values", text))


def _by_t(
    mean: float, se: float, df: float, n: int, sd: float, method: str, alpha: float
) -> Estimate:
    """Return the estimate of a mean with Student's t interval and p-value."""
    half = se * float(special.stdtrit(df, 1 - alpha / 2))
    p = float(2 * special.stdtr(df, -abs(mean) / se))
    return Estimate(
        mean,
        low=mean - half,
        high=mean + half,
        p=p,
        n=n,
        sd=sd,
        se=se,
        df=df,
        method=method,
    )


def half_width(estimate: Estimate, alpha: float) -> float:
    """Return half the width of the interval that covers 1 - `alpha`, on the scale of the test."""
    return (estimate.se or 0.0) * float(special.stdtrit(estimate.df, 1 - alpha / 2))


def paired_t(differences: Sequence[float], alpha: float = ALPHA) -> Estimate:
    """Estimate the mean of paired differences, with a t interval on n - 1 degrees of freedom."""
    values = np.asarray(differences, float)
    n = len(values)
    if n == 0:
        return no_estimate("no pairs")
    mean = float(values.mean())
    if n == 1:
        return Estimate(mean, n=1, paired=True, why=ONE_SEED)
    sd = float(values.std(ddof=1))
    # A spread of the size of rounding errors is not evidence.
    largest = float(np.abs(values).max())
    if sd <= 1e-12 * max(1.0, largest):
        return Estimate(mean, n=n, sd=0.0, paired=True, why=NO_SPREAD)
    se = sd / math.sqrt(n)
    estimate = _by_t(mean, se, df=n - 1, n=n, sd=sd, method="paired t", alpha=alpha)
    return replace(estimate, paired=True)


def welch_t(
    baseline: Sequence[float],
    method: Sequence[float],
    name: str = "Welch's t, seeds not paired",
    pairing: tuple[int, float] = (0, 0.0),
) -> Estimate:
    """Estimate the difference of the means of two samples of unequal variances.

    Args:
        pairing: pairs among the runs and the correlation within them. With pairs this is the t for
            partially overlapping samples (Derrick, Russ, Toher and White 2017, unequal variances).
    """
    a = np.asarray(baseline, float)
    b = np.asarray(method, float)
    mean = float(b.mean() - a.mean())
    n = min(len(a), len(b))
    if n == 1:
        return Estimate(mean, n=1, why=ONE_SEED)
    na = len(a)
    nb = len(b)
    # Variances of the two means.
    va = a.var(ddof=1) / na
    vb = b.var(ddof=1) / nb
    variance = va + vb
    largest = max(1.0, float(np.abs(a).max()), float(np.abs(b).max()))
    if math.sqrt(variance) <= 1e-12 * largest:
        return Estimate(mean, n=n, sd=0.0, why=NO_SPREAD)

    df = variance**2 / (va**2 / (na - 1) + vb**2 / (nb - 1))
    pairs, r = pairing
    if pairs:
        variance -= 2 * r * math.sqrt(va * vb) * pairs / math.sqrt(na * nb)
        df = (pairs - 1) + (df - pairs + 1) / (na + nb) * (na + nb - 2 * pairs)
    pooled = (a.var(ddof=1) + b.var(ddof=1)) / 2
    return _by_t(
        mean,
        math.sqrt(variance),
        df=df,
        n=n,
        sd=math.sqrt(pooled),
        method=name,
        alpha=ALPHA,
    )


def partly_paired_t(baseline: BySeed, method: BySeed) -> Estimate:
    """Estimate the difference of means of all runs of two samples that share some seeds."""
    shared = sorted(baseline.keys() & method.keys())
    x = np.array([baseline[seed] for seed in shared])
    y = np.array([method[seed] for seed in shared])
    spread = x.std() * y.std()
    r = 0.0
    if spread > 0:
        r = float(np.mean((x - x.mean()) * (y - y.mean())) / spread)
    # Shared seeds cannot cause a negative correlation: it is the noise of a few pairs.
    r = max(0.0, r)
    return welch_t(
        list(baseline.values()),
        list(method.values()),
        f"t for partly paired samples, {len(shared)} pairs",
        pairing=(len(shared), r),
    )


def difference_of_means(baseline: BySeed, method: BySeed, alpha: float = ALPHA) -> Estimate:
    """Estimate mean of `method` less mean of `baseline`, by seed.

    If all seeds are shared, by the paired t; if at least FEWEST_PAIRS are, by the t for partly
    paired samples; else by Welch's t, which ignores pairs.

    Args:
        alpha: level of the paired t's interval; the others have ALPHA.
    """
    if not baseline or not method:
        return no_estimate("no values")
    shared = len(baseline.keys() & method.keys())
    if shared == len(baseline) == len(method):
        differences = [method[seed] - baseline[seed] for seed in sorted(baseline)]
        return paired_t(differences, alpha)
    if shared >= FEWEST_PAIRS:
        return partly_paired_t(baseline, method)
    baseline_values = list(baseline.values())
    method_values = list(method.values())
    if not shared:
        return welch_t(baseline_values, method_values)
    are = "seeds are" if shared > 1 else "seed is"
    name = f"Welch's t; {shared} shared {are} too few to pair"
    return welch_t(baseline_values, method_values, name)


def ratio_of_means(baseline: BySeed, method: BySeed, alpha: float = ALPHA) -> Estimate:
    """Estimate the geometric mean of `baseline` over that of `method`, by seed.

    Above 1 the method needs less.

    Raises:
        ValueError: a value is not positive.
    """
    log_baseline = {seed: math.log(value) for seed, value in baseline.items()}
    log_method = {seed: math.log(value) for seed, value in method.items()}
    log_ratio = difference_of_means(log_method, log_baseline, alpha)
    return exponentiated(log_ratio)


def exponentiated(log_ratio: Estimate) -> Estimate:
    """Return a ratio from the estimate of its logarithm, which keeps `sd`, `se` and `p`."""
    ratio = replace(log_ratio, mean=math.exp(log_ratio.mean), log=True)
    if log_ratio.low is None or log_ratio.high is None:
        return ratio
    return replace(
        ratio,
        low=math.exp(log_ratio.low),
        high=math.exp(log_ratio.high),
        method=f"{log_ratio.method} on log ratios",
    )


def all_pairs(scores: Sequence[Sequence[float]]) -> Estimate:
    """Estimate the mean score of every pair of runs, if seeds are not shared.

    The standard error is that of the row means and column means together, with Welch's degrees of
    freedom: a run counts once, however many pairs it has.

    Args:
        scores: a row per run of the method, a column per run of the baseline.
    """
    table = np.asarray(scores, float)
    if table.size == 0:
        return no_estimate("no values")
    # Welch's t takes a difference: the columns change their sign, and give their mean to the rows.
    rows = table.mean(1)
    columns = table.mean() - table.mean(0)
    return welch_t(columns, rows, "all pairs of runs, seeds not paired")


def _one_sided_p(estimate: Estimate, center: float) -> float:
    """Return the p-value of a quantity being above 0; 1 if nothing was tested.

    Args:
        estimate: gives the standard error and the degrees of freedom.
        center: estimate of the quantity.
    """
    if estimate.se is None or estimate.df is None:
        return 1.0
    return float(special.stdtr(estimate.df, -center / estimate.se))


def is_better(result: Estimate | ExactTest) -> bool:
    """Return whether the method is better in these data, significant or not."""
    if isinstance(result, ExactTest):
        return result.wins > 0.5
    return result.gain > 0


def claim_p(result: Estimate | ExactTest, direction: Direction, margin: float | None) -> float:
    """Return the p-value of the claim that a direction makes; 1 if nothing was tested.

    Equivalence has the larger of two one-sided tests (Schuirmann 1987).

    Args:
        margin: nats per token, or the share of a cost that is lost, 0.05 for 5 %.

    Raises:
        ValueError: the claim needs a margin, and it is not positive.
    """
    if direction == "different":
        return 1.0 if result.p is None else result.p
    if isinstance(result, ExactTest):
        is_better_side = direction == "better" and result.wins > 0.5
        return result.p / 2 if is_better_side else 1.0
    if direction == "better":
        return _one_sided_p(result, result.gain)
    if margin is None or not (math.isfinite(margin) and margin > 0):
        raise ValueError(f"a margin is a positive number, not {margin}")
    size = result.scaled(margin)
    not_worse = _one_sided_p(result, result.gain + size)
    if direction == "noninferior":
        return not_worse
    return max(not_worse, _one_sided_p(result, size - result.gain))


def detectable(
    estimate: Estimate, alpha: float = ALPHA, power: float = POWER, sides: int = 2
) -> float | None:
    """Return the smallest true difference that a t test with this standard error detects.

    For ratios it is the factor less 1: 0.05 means 1.05x; see `excess_ratio`. None if there is no
    standard error.

    Args:
        power: chance of detecting it.
        sides: 2 for a two-sided test, else 1.
    """
    if not estimate.se or estimate.df is None:
        return None
    df = estimate.df
    critical = float(special.stdtrit(df, 1 - alpha / sides))

    def excess_power(noncentrality: float) -> float:
        # Beyond 36 standard errors the tail below `critical` is NaN instead of 0.
        missed = float(np.nan_to_num(special.nctdtr(df, noncentrality, critical)))
        return 1 - missed - power

    # Rejections in the wrong direction are left out: at power 0.8 they are too rare to matter.
    noncentrality = optimize.brentq(excess_power, 0.0, 10 * critical + 10)
    size = estimate.se * noncentrality
    return excess_ratio(size) if estimate.log else size


def excess_ratio(log: float) -> float:
    """Return the ratio that has this logarithm, less 1; infinite from LARGEST_EFFECT on."""
    return math.expm1(log) if log < LARGEST_EFFECT else math.inf


@dataclass(frozen=True, slots=True)
class ExactTest:
    """Result of an exact test by counting, for runs of which some have no number."""

    p: float
    """Two-sided p-value."""
    smallest_p: float
    """Smallest p-value that so many runs can give without ties; above ALPHA no result decides."""
    wins: float
    """Share of the pairs of runs in which the method is better; an unknown order counts half."""
    method: str
    """Name of the test, for people."""


def rank_sum(
    baseline: Sequence[float],
    method: Sequence[float],
    baseline_beyond: Sequence[bool] | None = None,
    method_beyond: Sequence[bool] | None = None,
) -> ExactTest:
    """Test the rank sum by permutation, without pairing seeds; lower values are better.

    A failed run has math.inf, the worst rank. Pairs whose order a bound leaves open count as ties
    (Gehan 1965). All splits of the runs into two groups of these sizes are counted. For many runs
    the count is approximated by the normal distribution, with the corrections for ties and
    continuity of scipy.stats.mannwhitneyu.

    Args:
        baseline_beyond: whether each value is a bound: the run needs more than that.
        method_beyond: the same for `method`.
    """
    values = np.array([*baseline, *method], float)
    if baseline_beyond is None:
        baseline_beyond = [False] * len(baseline)
    if method_beyond is None:
        method_beyond = [False] * len(method)
    beyond = np.array([*baseline_beyond, *method_beyond], bool)
    failed = np.isinf(values)
    # (i, j): whether run i is certainly worse than run j.
    above = (values[:, None] > values) | (beyond[:, None] & (values[:, None] == values))
    above = (above & ~beyond) | (failed[:, None] & ~failed)
    order = above.astype(int) - above.T.astype(int)
    scores = order.sum(1)

    n = len(values)
    k = len(method)
    if k == 0 or k == n:
        return ExactTest(1.0, 1.0, math.nan, "exact rank sum")
    observed = abs(int(scores[n - k :].sum()))
    smaller = min(k, n - k)
    if smaller >= COUNTED_SIDE and n * smaller > COUNTED_RUNS:
        squares = float((scores**2).sum())
        spread = math.sqrt(k * (n - k) / (n * (n - 1)) * squares)
        deviate = max(0, observed - 1) / spread if spread else 0.0
        p = min(1.0, 2 * float(special.ndtr(-deviate)))
        words = "rank sum, normal approximation"
    else:
        p = _share_as_extreme(scores, smaller, observed)
        words = "exact rank sum"

    pairs = order[n - k :, : n - k]
    wins = float((pairs < 0).mean() + 0.5 * (pairs == 0).mean())
    smallest = min(1.0, 2 / math.comb(n, k))
    return ExactTest(p, smallest_p=smallest, wins=wins, method=words)


def _share_as_extreme(scores: np.ndarray, k: int, observed: int) -> float:
    """Return the share of the k-subsets of `scores` whose sum has at least the size `observed`.

    Args:
        scores: whole numbers with the sum 0.
    """
    largest = np.sort(np.abs(scores))[len(scores) - k :]
    reach = int(largest.sum())
    # (size, reach + sum): number of subsets with that size and sum.
    counts = np.zeros((k + 1, 2 * reach + 1))
    counts[0, reach] = 1
    for i, score in enumerate(scores.tolist()):
        for size in range(min(i + 1, k), 0, -1):
            counts[size] += np.roll(counts[size - 1], score)

    is_extreme = np.abs(np.arange(-reach, reach + 1)) >= observed
    share = counts[k][is_extreme].sum() / counts[k].sum()
    return float(min(1.0, share))


def failure_test(baseline: Mapping[int, bool], method: Mapping[int, bool]) -> ExactTest:
    """Test exactly whether the runs of two sides fail equally often.

    By McNemar's test if all seeds are shared and there are at least MCNEMAR_FROM, else by Fisher's.

    Args:
        baseline: seed -> whether its run failed.
        method: the same.
    """
    shared = baseline.keys() & method.keys()
    na = len(baseline)
    nb = len(method)
    a = sum(baseline.values())
    b = sum(method.values())
    if not na or not nb:
        return ExactTest(1.0, 1.0, math.nan, "Fisher's exact test")
    if len(shared) == na == nb and na >= MCNEMAR_FROM:
        only_a = sum(baseline[seed] and not method[seed] for seed in shared)
        only_b = sum(method[seed] and not baseline[seed] for seed in shared)
        p = mcnemar(only_a, only_b)
        smallest = 2 * 0.5**na
        words = "McNemar's exact test"
    else:
        p = float(stats.fisher_exact([[a, na - a], [b, nb - b]]).pvalue)
        smallest = float(stats.fisher_exact([[na, 0], [0, nb]]).pvalue)
        words = "Fisher's exact test"
    only_baseline_fails = a * (nb - b)
    ties = a * b + (na - a) * (nb - b)
    wins = (only_baseline_fails + 0.5 * ties) / (na * nb)
    return ExactTest(p, smallest_p=smallest, wins=wins, method=words)


def mcnemar(only_baseline: int, only_method: int) -> float:
    """Return McNemar's (1947) exact p-value for two sides that answer or fail on the same items.

    Args:
        only_baseline: number of items on which only the baseline does.
        only_method: the same for the method.
    """
    n = only_baseline + only_method
    if n == 0:
        return 1.0
    return float(stats.binomtest(only_baseline, n).pvalue)


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p-values adjusted by Holm's (1979) steps for the family-wise error rate."""
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    adjusted = [0.0] * len(p_values)
    largest = 0.0
    for rank, i in enumerate(order):
        p = min(1.0, (len(p_values) - rank) * p_values[i])
        largest = max(largest, p)
        adjusted[i] = largest
    return adjusted
