"""The inference of a comparison of two recipes over a few seeds: plain functions on numbers,
nothing of runs or files.

A seed decides initialization and data order, so two recipes trained on the same seeds are compared
by their differences per seed: what the seeds share cancels. A handful of seeds carries Student's t
and exact tests by counting; it carries no bootstrap. One seed supports no claim, and none is made.

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
"""Chance of showing a real difference that plans and "could have seen" stand for."""
LARGEST_EFFECT = 20.0
"""Logarithm of a ratio of costs from which it is called infinite."""
FEWEST_PAIRS = 4
"""Pairs among unpaired runs from which their correlation is used; fewer say too little of it."""
MCNEMAR_FROM = 6
"""Pairs from which McNemar's exact test can reach 5 %."""
COUNTED_SIDE = 10
COUNTED_RUNS = 5_000
"""Ranks are counted exactly up to 50 runs an arm: if runs x runs of the smaller arm are at most
COUNTED_RUNS, or the smaller arm has fewer than COUNTED_SIDE. The time grows with the fourth power
of the runs."""

Direction = Literal["different", "better", "noninferior", "equivalent"]
ONE_SEED = Why("one_seed", "one seed: no claim")
NO_SPREAD = Why("no_spread", "no spread between seeds: no claim")


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean with its 95 % interval. Where there is no interval, `why` says so and no claim is
    made."""

    mean: float
    low: float | None = None
    high: float | None = None
    p: float | None = None
    """Two-sided p-value of "no difference"."""
    n: int = 0
    """Pairs behind the mean; where not every run is paired, runs of the smaller side."""
    sd: float | None = None
    """Standard deviation of the paired differences; of one side's runs, pooled, where not every run
    is paired."""
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
    """1: the true mean is larger, as runs of the baseline missed the target; -1: smaller, as the
    method's did."""

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
        """Return a difference on the test's scale: nats, or the logarithm of a ratio less 1."""
        if self.log:
            return math.log1p(size)
        return size


def _by_t(
    mean: float, se: float, df: float, n: int, sd: float, method: str, alpha: float
) -> Estimate:
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


def widen(estimate: Estimate, sd: float, alpha: float) -> Estimate:
    """Return an estimate with the error that all seeds share, of standard deviation `sd`, in its
    standard error.

    Args:
        alpha: its interval covers 1 - `alpha`.
    """
    if not estimate.se or estimate.df is None:
        return estimate
    center = estimate.center
    se = math.hypot(estimate.se, sd)
    p = float(2 * special.stdtr(estimate.df, -abs(center) / se))
    half = half_width(replace(estimate, se=se), alpha)
    low = center - half
    high = center + half
    if estimate.log:
        low = math.exp(low)
        high = math.exp(high)
    return replace(estimate, se=se, p=p, low=low, high=high)


def paired_t(differences: Sequence[float], alpha: float = ALPHA) -> Estimate:
    """Estimate the mean of paired differences, with a t interval on n - 1 degrees of freedom."""
    values = np.asarray(differences, float)
    n = len(values)
    if n == 0:
        return Estimate(math.nan, why=Why("no_values", "no pairs"))
    mean = float(values.mean())
    if n == 1:
        return Estimate(mean, n=1, paired=True, why=ONE_SEED)
    sd = float(values.std(ddof=1))
    # Differences of numbers that agree to rounding have a spread of rounding: that is not evidence
    # of anything.
    if sd <= 1e-12 * max(1.0, float(np.abs(values).max())):
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
    va = a.var(ddof=1) / na
    vb = b.var(ddof=1) / nb
    variance = va + vb
    scale = max(1.0, float(np.abs(a).max()), float(np.abs(b).max()))
    if math.sqrt(variance) <= 1e-12 * scale:
        return Estimate(mean, n=n, sd=0.0, why=NO_SPREAD)
    df = variance**2 / (va**2 / (na - 1) + vb**2 / (nb - 1))
    pairs, r = pairing
    if pairs:
        variance -= 2 * r * math.sqrt(va * vb) * pairs / math.sqrt(na * nb)
        df = (pairs - 1) + (df - pairs + 1) / (na + nb) * (na + nb - 2 * pairs)
    return _by_t(
        mean,
        math.sqrt(variance),
        df=df,
        n=n,
        sd=math.sqrt((a.var(ddof=1) + b.var(ddof=1)) / 2),
        method=name,
        alpha=ALPHA,
    )


def partly_paired_t(baseline: Mapping[int, float], method: Mapping[int, float]) -> Estimate:
    """Estimate the difference of means of two samples that share some seeds, from every run."""
    shared = sorted(baseline.keys() & method.keys())
    x, y = (np.array([side[seed] for seed in shared]) for side in (baseline, method))
    spread = x.std() * y.std()
    r = 0.0
    if spread > 0:
        r = float(np.mean((x - x.mean()) * (y - y.mean())) / spread)
    return welch_t(
        list(baseline.values()),
        list(method.values()),
        f"t for partly paired samples, {len(shared)} pairs",
        # A negative correlation has no cause here, and would be the noise of a few pairs.
        (len(shared), max(0.0, r)),
    )


def difference_of_means(
    baseline: Mapping[int, float], method: Mapping[int, float], alpha: float = ALPHA
) -> Estimate:
    """Estimate mean of `method` less mean of `baseline`, by the test that fits the seeds' overlap.

    All seeds shared: the paired t. None: Welch's t. Some: the t for partly paired samples; with
    fewer than FEWEST_PAIRS pairs Welch's t, which ignores them. The estimate is always the
    difference of the two means.

    Args:
        alpha: level of the paired t's interval; the others have ALPHA.
    """
    if not baseline or not method:
        return Estimate(math.nan, why=Why("no_values", "no values"))
    shared = len(baseline.keys() & method.keys())
    if shared == len(baseline) == len(method):
        return paired_t([method[seed] - baseline[seed] for seed in sorted(baseline)], alpha)
    if shared >= FEWEST_PAIRS:
        return partly_paired_t(baseline, method)
    sides = list(baseline.values()), list(method.values())
    if not shared:
        return welch_t(*sides)
    are = "seeds are" if shared > 1 else "seed is"
    return welch_t(*sides, f"Welch's t; {shared} shared {are} too few to pair")


def ratio_of_means(
    baseline: Mapping[int, float], method: Mapping[int, float], alpha: float = ALPHA
) -> Estimate:
    """Estimate the geometric mean of `baseline` over that of `method`, by seed: above 1 the method
    needs less.

    Raises:
        ValueError: a value is not positive.
    """
    a, b = ({seed: math.log(value) for seed, value in side.items()} for side in (baseline, method))
    return exponentiated(difference_of_means(b, a, alpha))


def exponentiated(on_logs: Estimate) -> Estimate:
    """Return a ratio from its logarithm's estimate; `sd`, `se` and p stay the logarithm's."""
    ratio = replace(on_logs, mean=math.exp(on_logs.mean), log=True)
    if on_logs.low is None or on_logs.high is None:
        return ratio
    return replace(
        ratio,
        low=math.exp(on_logs.low),
        high=math.exp(on_logs.high),
        method=f"{on_logs.method} on log ratios",
    )


def all_pairs(scores: Sequence[Sequence[float]]) -> Estimate:
    """Estimate the mean score of every method's run (row) against every baseline's (column),
    without shared seeds.

    The standard error is that of the row means and the column means together, with Welch's degrees
    of freedom: a run that stands in many pairs counts once.
    """
    table = np.asarray(scores, float)
    if table.size == 0:
        return Estimate(math.nan, why=Why("no_values", "no values"))
    # The columns' share enters a difference with the other sign; the mean of all is kept in the
    # rows.
    rows = table.mean(1)
    columns = table.mean() - table.mean(0)
    return welch_t(columns, rows, "all pairs of runs, seeds not paired")


def _one_sided_p(estimate: Estimate, lead: float) -> float:
    """Return the one-sided p-value of a quantity estimated as `lead` being above 0; 1 if nothing
    was tested."""
    if estimate.se is None or estimate.df is None:
        return 1.0
    return float(special.stdtr(estimate.df, -lead / estimate.se))


def is_better(result: Estimate | ExactTest) -> bool:
    """Return whether the method is the better side in these data, whatever that is worth."""
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
        shown = direction == "better" and result.wins > 0.5
        return result.p / 2 if shown else 1.0
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
    """Return the smallest true difference that a t test with this standard error shows in `power`
    of studies.

    For ratios it is the factor less 1: 0.05 means 1.05x; see `excess_ratio`. None without a
    standard error.
    """
    if not estimate.se or estimate.df is None:
        return None
    df = estimate.df
    critical = float(special.stdtrit(df, 1 - alpha / sides))

    def lacking(noncentrality: float) -> float:
        # Beyond 36 standard errors the tail below `critical` is NaN instead of 0.
        return 1 - float(np.nan_to_num(special.nctdtr(df, noncentrality, critical))) - power

    # The far tail adds nothing that could be seen at power 0.8.
    size = estimate.se * optimize.brentq(lacking, 0.0, 10 * critical + 10)
    return excess_ratio(size) if estimate.log else size


def excess_ratio(log: float) -> float:
    """Return the ratio that has this logarithm, less 1; infinite from LARGEST_EFFECT on."""
    return math.expm1(log) if log < LARGEST_EFFECT else math.inf


@dataclass(frozen=True, slots=True)
class ExactTest:
    """An exact test by counting, where some runs have no number."""

    p: float
    """Two-sided."""
    smallest_p: float
    """The smallest p that so many runs can give without ties: above ALPHA, no result of this study
    could decide."""
    wins: float
    """Share of the pairs (method's run, baseline's run) in which the method is better; a tie or
    unknown is half."""
    method: str


def rank_sum(
    baseline: Sequence[float],
    method: Sequence[float],
    baseline_beyond: Sequence[bool] | None = None,
    method_beyond: Sequence[bool] | None = None,
) -> ExactTest:
    """Test the rank sum by permutation, lower values better, seeds not paired; ties and bounds
    allowed.

    A failed run is math.inf, the worst rank. Where `*_beyond` is True the value is a bound: the run
    needs more than that. Pairs whose order a bound leaves open count as ties (Gehan 1965). Every
    split of the runs into two groups of these sizes is counted; of many runs the normal
    approximation of that count is taken, with ties and continuity as scipy.stats.mannwhitneyu has
    them.
    """
    values = np.array([*baseline, *method], float)
    beyond = np.array(
        [*(baseline_beyond or [False] * len(baseline)), *(method_beyond or [False] * len(method))],
        bool,
    )
    failed = np.isinf(values)
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
        spread = math.sqrt(k * (n - k) / (n * (n - 1)) * float((scores**2).sum()))
        far = max(0, observed - 1) / spread if spread else 0.0
        p = min(1.0, 2 * float(special.ndtr(-far)))
        words = "rank sum, normal approximation"
    else:
        p = _share_as_extreme(scores, smaller, observed)
        words = "exact rank sum"

    pairs = order[n - k :, : n - k]
    wins = float((pairs < 0).mean() + 0.5 * (pairs == 0).mean())
    smallest = min(1.0, 2 / math.comb(n, k))
    return ExactTest(p, smallest_p=smallest, wins=wins, method=words)


def _share_as_extreme(scores: np.ndarray, k: int, observed: int) -> float:
    """Return the share of k-subsets of `scores` whose sum is at least as far from 0 as `observed`.

    Args:
        scores: their sum is 0.
    """
    reach = int(np.sort(np.abs(scores))[len(scores) - k :].sum())
    ways = np.zeros((k + 1, 2 * reach + 1))
    ways[0, reach] = 1
    for i, score in enumerate(scores.tolist()):
        for size in range(min(i + 1, k), 0, -1):
            ways[size] += np.roll(ways[size - 1], score)
    far = np.abs(np.arange(-reach, reach + 1)) >= observed
    return float(min(1.0, ways[k][far].sum() / ways[k].sum()))


def failure_test(baseline: Mapping[int, bool], method: Mapping[int, bool]) -> ExactTest:
    """Test exactly whether runs fail equally often; True: the seed's run failed.

    McNemar's test where all seeds are shared and at least MCNEMAR_FROM, else Fisher's.
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
    wins = (a * (nb - b) + 0.5 * (a * b + (na - a) * (nb - b))) / (na * nb)
    return ExactTest(p, smallest_p=smallest, wins=wins, method=words)


def mcnemar(only_baseline: int, only_method: int) -> float:
    """Return the exact p-value of two sides being equally often right (or failing) on the same
    items (McNemar 1947)."""
    n = only_baseline + only_method
    if n == 0:
        return 1.0
    return float(stats.binomtest(only_baseline, n).pvalue)


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjust by Holm's (1979) steps: the family-wise error of the tests stays below ALPHA."""
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    adjusted = [0.0] * len(p_values)
    largest = 0.0
    for rank, i in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[i]))
        adjusted[i] = largest
    return adjusted
