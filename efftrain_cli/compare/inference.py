"""The inference of a comparison of two recipes over a few seeds: plain functions on numbers, nothing of runs or files.

A seed decides initialization and data order, so two recipes trained on the same seeds are compared by their differences
per seed: what the seeds share cancels. A handful of seeds carries Student's t and exact tests by counting; it carries
no bootstrap. One seed supports no claim, and none is made.

Losses and costs are better when lower, so a difference is method less baseline and a ratio is baseline / method.
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
FEWEST_PAIRS = 4
"""Pairs among unpaired runs from which their correlation is used; fewer say too little of it."""
MCNEMAR_FROM = 6
"""Pairs from which McNemar's exact test can reach 5 %."""
COUNTED_SIDE, COUNTED_RUNS = 10, 5_000
"""Ranks are counted exactly up to 50 runs an arm: if runs x runs of the smaller arm are at most COUNTED_RUNS, or the
smaller arm has fewer than COUNTED_SIDE. The time grows with the fourth power of the runs."""

Direction = Literal["different", "better", "noninferior", "equivalent"]
ONE_SEED = Why("one_seed", "one seed: no claim")
NO_SPREAD = Why("no_spread", "no spread between seeds: no claim")


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean with its 95 % interval. Where there is no interval, `why` says so and no claim is made."""

    mean: float
    low: float | None = None
    high: float | None = None
    p: float | None = None
    """Two-sided p-value of "no difference"."""
    n: int = 0
    """Pairs behind the mean; where not every run is paired, runs of the smaller side."""
    sd: float | None = None
    """Standard deviation of the paired differences; of one side's runs, pooled, where not every run is paired."""
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
    """1: the true mean is larger, as runs of the baseline missed the target; -1: smaller, as the method's did."""


def _by_t(
    mean: float, se: float, df: float, n: int, sd: float, method: str, alpha: float
) -> Estimate:
    half = se * float(special.stdtrit(df, 1 - alpha / 2))
    p = float(2 * special.stdtr(df, -abs(mean) / se))
    return Estimate(mean, mean - half, mean + half, p, n, sd, se, df, method)


def at_level(estimate: Estimate, alpha: float) -> Estimate:
    """Return an estimate with the interval that covers 1 - `alpha`."""
    if not estimate.se or estimate.df is None:
        return estimate
    mean = math.log(estimate.mean) if estimate.log else estimate.mean
    half = estimate.se * float(special.stdtrit(estimate.df, 1 - alpha / 2))
    low, high = mean - half, mean + half
    if estimate.log:
        low, high = math.exp(low), math.exp(high)
    return replace(estimate, low=low, high=high)


def widen(estimate: Estimate, sd: float, alpha: float) -> Estimate:
    """Return an estimate with the error that all seeds share, of standard deviation `sd`, in its standard error.

    Args:
        alpha: its interval covers 1 - `alpha`.
    """
    if not estimate.se or estimate.df is None:
        return estimate
    mean = math.log(estimate.mean) if estimate.log else estimate.mean
    se = math.hypot(estimate.se, sd)
    p = float(2 * special.stdtr(estimate.df, -abs(mean) / se))
    return at_level(replace(estimate, se=se, p=p), alpha)


def paired_t(differences: Sequence[float], alpha: float = ALPHA) -> Estimate:
    """Mean of paired differences, with Student's t interval on n - 1 degrees of freedom."""
    values = np.asarray(differences, float)
    n = len(values)
    if n == 0:
        return Estimate(math.nan, why=Why("no_values", "no pairs"))
    mean = float(values.mean())
    if n == 1:
        return Estimate(mean, n=1, paired=True, why=ONE_SEED)
    sd = float(values.std(ddof=1))
    # Differences of numbers that agree to rounding have a spread of rounding: that is not evidence of anything.
    if sd <= 1e-12 * max(1.0, float(np.abs(values).max())):
        return Estimate(mean, n=n, sd=0.0, paired=True, why=NO_SPREAD)
    return replace(_by_t(mean, sd / math.sqrt(n), n - 1, n, sd, "paired t", alpha), paired=True)


def welch_t(
    baseline: Sequence[float],
    method: Sequence[float],
    name: str = "Welch's t, seeds not paired",
    pairing: tuple[int, float] = (0, 0.0),
) -> Estimate:
    """Difference of the means of two samples of unequal variances.

    Args:
        pairing: pairs among the runs and the correlation within them. With pairs this is the t for partially
            overlapping samples (Derrick, Russ, Toher and White 2017, unequal variances).
    """
    a, b = np.asarray(baseline, float), np.asarray(method, float)
    mean, n = float(b.mean() - a.mean()), min(len(a), len(b))
    if n == 1:
        return Estimate(mean, n=1, why=ONE_SEED)
    va, vb = a.var(ddof=1) / len(a), b.var(ddof=1) / len(b)
    scale = max(1.0, float(np.abs(a).max()), float(np.abs(b).max()))
    if math.sqrt(va + vb) <= 1e-12 * scale:
        return Estimate(mean, n=n, sd=0.0, why=NO_SPREAD)
    df = (va + vb) ** 2 / (va**2 / (len(a) - 1) + vb**2 / (len(b) - 1))
    variance = va + vb
    pairs, r = pairing
    if pairs:
        variance -= 2 * r * math.sqrt(va * vb) * pairs / math.sqrt(len(a) * len(b))
        df = (pairs - 1) + (df - pairs + 1) / (len(a) + len(b)) * (len(a) + len(b) - 2 * pairs)
    sd = math.sqrt((a.var(ddof=1) + b.var(ddof=1)) / 2)
    return _by_t(mean, math.sqrt(variance), df, n, sd, name, ALPHA)


def partly_paired_t(baseline: Mapping[int, float], method: Mapping[int, float]) -> Estimate:
    """Difference of means of two samples that share some seeds, from every run."""
    shared = sorted(baseline.keys() & method.keys())
    x, y = (np.array([side[seed] for seed in shared]) for side in (baseline, method))
    spread = x.std() * y.std()
    r = float(np.mean((x - x.mean()) * (y - y.mean())) / spread) if spread > 0 else 0.0
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
    """Mean of `method` less mean of `baseline`, both by seed, by the test that fits how their seeds overlap.

    All seeds shared: the paired t. None: Welch's t. Some: the t for partly paired samples; with fewer than FEWEST_PAIRS
    pairs Welch's t, which ignores them. The estimate is always the difference of the two means.

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
    """Geometric mean of `baseline` over that of `method`, both positive and by seed: above 1 the method needs less.

    Raises:
        ValueError: a value is not positive.
    """
    a, b = ({seed: math.log(value) for seed, value in side.items()} for side in (baseline, method))
    return exponentiated(difference_of_means(b, a, alpha))


def exponentiated(on_logs: Estimate) -> Estimate:
    """An estimate of a ratio from the estimate of its logarithm; `sd`, `se` and p stay those of the logarithm."""
    return replace(
        on_logs,
        mean=math.exp(on_logs.mean),
        low=None if on_logs.low is None else math.exp(on_logs.low),
        high=None if on_logs.high is None else math.exp(on_logs.high),
        method=f"{on_logs.method} on log ratios" if on_logs.method else "",
        log=True,
    )


def all_pairs(scores: Sequence[Sequence[float]]) -> Estimate:
    """Mean of a score of every method's run (row) against every baseline's run (column), where no seeds are shared.

    The standard error is that of the row means and the column means together, with Welch's degrees of freedom: a run
    that stands in many pairs counts once.
    """
    table = np.asarray(scores, float)
    if table.size == 0:
        return Estimate(math.nan, why=Why("no_values", "no values"))
    # The columns' share enters a difference with the other sign; the mean of all is kept in the rows.
    rows, columns = table.mean(1), table.mean() - table.mean(0)
    return welch_t(columns, rows, "all pairs of runs, seeds not paired")


def _shift_p(estimate: Estimate, shift: float) -> tuple[float, float]:
    """One-sided p-values of "the difference is at least `shift`" and "at most `shift`", on the scale of the test."""
    if estimate.se is None or estimate.df is None:
        return 1.0, 1.0
    mean = math.log(estimate.mean) if estimate.log else estimate.mean
    t = (mean - shift) / estimate.se
    return float(special.stdtr(estimate.df, t)), float(special.stdtr(estimate.df, -t))


def is_better(result: Estimate | ExactTest) -> bool:
    """Whether the method is the better side in these data, whatever that is worth."""
    if isinstance(result, ExactTest):
        return result.wins > 0.5
    return result.mean > 1 if result.log else result.mean < 0


def claim_p(result: Estimate | ExactTest, direction: Direction, margin: float | None) -> float:
    """p-value of the claim that a direction makes; 1 where nothing was tested. A ratio's margin is the share lost, 0.05
    for 5 %. Equivalence: the larger of two one-sided tests (Schuirmann 1987).

    Raises:
        ValueError: the claim needs a margin, and it is not positive.
    """
    if direction == "different":
        return result.p if result.p is not None else 1.0
    if isinstance(result, ExactTest):
        return result.p / 2 if direction == "better" and result.wins > 0.5 else 1.0
    margin = 0.0 if direction == "better" else margin or 0.0
    if direction != "better" and not (math.isfinite(margin) and margin > 0):
        raise ValueError(f"a margin is a positive number, not {margin}")
    size = math.log1p(margin) if result.log else margin
    if direction == "equivalent":
        return max(_shift_p(result, size)[0], _shift_p(result, -size)[1])
    # Better, or not worse by the margin: a lower loss, a higher ratio.
    return _shift_p(result, -size)[1] if result.log else _shift_p(result, size)[0]


def detectable(
    estimate: Estimate, alpha: float = ALPHA, power: float = POWER, one_sided: bool = False
) -> float | None:
    """The smallest true difference that a t test with this standard error shows in `power` of studies; None without
    one.

    For ratios the factor less 1: 0.05 means 1.05x.
    """
    if not estimate.se or estimate.df is None:
        return None
    df = estimate.df
    critical = float(special.stdtrit(df, 1 - (alpha if one_sided else alpha / 2)))

    def lacking(noncentrality: float) -> float:
        return 1 - float(special.nctdtr(df, noncentrality, critical)) - power

    # The far tail adds nothing that could be seen at power 0.8.
    size = estimate.se * optimize.brentq(lacking, 0.0, 10 * critical + 10)
    return math.expm1(size) if estimate.log else size


@dataclass(frozen=True, slots=True)
class ExactTest:
    """An exact test by counting, where some runs have no number."""

    p: float
    """Two-sided."""
    smallest_p: float
    """The smallest p that so many runs can give without ties: above ALPHA, no result of this study could decide."""
    wins: float
    """Share of the pairs (method's run, baseline's run) in which the method is better; a tie or unknown is half."""
    method: str


def rank_sum(
    baseline: Sequence[float],
    method: Sequence[float],
    baseline_beyond: Sequence[bool] | None = None,
    method_beyond: Sequence[bool] | None = None,
) -> ExactTest:
    """Permutation test of the rank sum, lower values better, seeds not paired; ties and bounds allowed.

    A failed run is math.inf, the worst rank. Where `*_beyond` is True the value is a bound: the run needs more than
    that. Pairs whose order a bound leaves open count as ties (Gehan 1965). Every split of the runs into two groups of
    these sizes is counted; of many runs the normal approximation of that count is taken, with ties and continuity as
    scipy.stats.mannwhitneyu has them.
    """
    values = np.array([*baseline, *method], float)
    beyond = np.array(
        [*(baseline_beyond or [False] * len(baseline)), *(method_beyond or [False] * len(method))],
        bool,
    )
    failed = np.isinf(values)
    v, w = values[:, None], values[None, :]
    above = (v > w) | (beyond[:, None] & (v == w))
    above = np.where(beyond[None, :], False, above) | (failed[:, None] & ~failed[None, :])
    order = above.astype(int) - above.T.astype(int)
    scores = order.sum(1)
    n, k = len(values), len(method)
    if k == 0 or k == n:
        return ExactTest(1.0, 1.0, math.nan, "exact rank sum")
    observed, smaller = abs(int(scores[n - k :].sum())), min(k, n - k)
    if smaller >= COUNTED_SIDE and n * smaller > COUNTED_RUNS:
        spread = math.sqrt(k * (n - k) / (n * (n - 1)) * float((scores**2).sum()))
        far = max(0, observed - 1) / spread if spread else 0.0
        p, words = min(1.0, 2 * float(special.ndtr(-far))), "rank sum, normal approximation"
    else:
        p, words = _share_as_extreme(scores, smaller, observed), "exact rank sum"
    pairs = order[n - k :, : n - k]
    wins = float((pairs < 0).mean() + 0.5 * (pairs == 0).mean())
    return ExactTest(p, min(1.0, 2 / math.comb(n, k)), wins, words)


def _share_as_extreme(scores: np.ndarray, k: int, observed: int) -> float:
    """Share of the k-subsets of `scores`, which sum to 0, whose sum is at least as far from 0 as `observed`."""
    reach = int(np.sort(np.abs(scores))[len(scores) - k :].sum())
    ways = np.zeros((k + 1, 2 * reach + 1))
    ways[0, reach] = 1
    for i, score in enumerate(scores.tolist()):
        for size in range(min(i + 1, k), 0, -1):
            ways[size] += np.roll(ways[size - 1], score)
    far = np.abs(np.arange(-reach, reach + 1)) >= observed
    return float(min(1.0, ways[k][far].sum() / ways[k].sum()))


def failure_test(baseline: Mapping[int, bool], method: Mapping[int, bool]) -> ExactTest:
    """Exact test of whether runs fail equally often; True: the seed's run failed.

    McNemar's test where all seeds are shared and at least MCNEMAR_FROM, else Fisher's.
    """
    shared = baseline.keys() & method.keys()
    na, nb = len(baseline), len(method)
    a, b = sum(baseline.values()), sum(method.values())
    if not na or not nb:
        return ExactTest(1.0, 1.0, math.nan, "Fisher's exact test")
    if len(shared) == na == nb and na >= MCNEMAR_FROM:
        only_a = sum(baseline[seed] and not method[seed] for seed in shared)
        only_b = sum(method[seed] and not baseline[seed] for seed in shared)
        p, smallest, words = mcnemar(only_a, only_b), 2 * 0.5**na, "McNemar's exact test"
    else:
        p = float(stats.fisher_exact([[a, na - a], [b, nb - b]]).pvalue)
        smallest = float(stats.fisher_exact([[na, 0], [0, nb]]).pvalue)
        words = "Fisher's exact test"
    wins = (a * (nb - b) + 0.5 * (a * b + (na - a) * (nb - b))) / (na * nb)
    return ExactTest(p, smallest, wins, words)


def mcnemar(only_baseline: int, only_method: int) -> float:
    """Exact two-sided p-value that two sides are equally often right (or fail) on the same items (McNemar, 1947)."""
    n = only_baseline + only_method
    return float(stats.binomtest(only_baseline, n).pvalue) if n else 1.0


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's (1979) step-down adjustment: the family-wise error of the tests together stays below ALPHA."""
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    adjusted = [0.0] * len(p_values)
    largest = 0.0
    for rank, i in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[i]))
        adjusted[i] = largest
    return adjusted
