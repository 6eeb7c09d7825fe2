"""Compute multipliers over budgets and sizes, and whether they hold as models grow.

The multiplier is the cost at which the baseline reaches an arm's loss, over the arm's own cost: 1.2
means that the baseline needs 20 % more. Every point is a run whose learning rate decayed over its
own budget: in mid-schedule a method that leads may end behind.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd

from efftrain_cli.compare.arms import Arm
from efftrain_cli.compare.inference import Estimate, paired
from efftrain_cli.foundation.console import human
from efftrain_cli.recipe.schedules import has_end
from efftrain_cli.run.reading import Run

LEVEL = 0.05
FEWEST_SIZES = 4
"""Sizes that a statement about their trend needs."""
FLAT = 0.05
"""Change of the multiplier's logarithm per doubling of the size that counts as none."""
FURTHEST = 4
"""Factor of the largest size up to which the line is extended."""
NOT_IDENTIFIED = "not identified: the loss does not fall with cost beyond its noise"
BEYOND = "a bound: the arm is beyond the baseline's budgets"
TUNING = (
    "these intervals leave out errors of tuning: with rates off by a sd of 0.05 in ln M,"
    " one of 95 % covers 64 %"
)


@dataclass(frozen=True, eq=False)
class Shift:
    """How far an arm's losses are shifted against the baseline's along the logarithm of cost."""

    slope: float
    """s: fall of the loss per unit of the logarithm of cost, mean of both arms and all seeds."""
    noise: float
    """sigma / s: standard deviation of a run's loss between seeds, over `slope`."""
    logs: np.ndarray
    """ln M of each seed, (n,)."""
    why: str
    """Why the multiplier is none or a bound; "" if it is neither."""

    @property
    def interval(self) -> tuple[float, float, float]:
        """M and its t interval over the seeds; of a bound, the bound and what lies beyond it."""
        estimate = paired(self.logs)
        if self.why == BEYOND:
            bound = math.exp(estimate.mean)
            if bound > 1:
                return bound, bound, math.inf
            return bound, 0.0, bound
        return exponentials(estimate.mean, estimate.half_width(LEVEL))


def shift_of(
    base: np.ndarray,
    arm: np.ndarray,
    base_cost: np.ndarray,
    arm_cost: np.ndarray,
) -> Shift:
    """Return the shift of an arm at one size, by one slope that both arms and all seeds share.

    As the slope is the mean of both arms', their curvature cancels to second order.

    Args:
        base, arm: final losses, nats per token, (seeds, budgets).
        base_cost, arm_cost: logarithms of what the runs cost, (seeds, budgets).
    """
    falls = []
    for losses, cost in ((base, base_cost), (arm, arm_cost)):
        centred = cost - cost.mean(1, keepdims=True)
        products = (centred * losses).sum(1)
        squares = np.square(centred).sum(1)
        falls.append(-products / squares)
    fall = paired(np.mean(falls, axis=0))
    slope = fall.mean
    sd = 0.0
    if len(base) > 1:
        variances = [base.var(0, ddof=1), arm.var(0, ddof=1)]
        sd = math.sqrt(np.mean(variances))
    shifts = (base - arm) / slope + base_cost - arm_cost
    logs = shifts.mean(1)
    why = ""
    span = np.ptp(base_cost.mean(0))
    if not fall.tail(slope) < LEVEL:
        why = NOT_IDENTIFIED
        logs = np.full_like(logs, math.nan)
    elif abs(logs.mean()) > span:
        why = BEYOND
        bound = math.copysign(span, logs.mean())
        logs = np.full_like(logs, bound)
    return Shift(slope, sd / abs(slope), logs, why)


def exponentials(mean: float, half: float) -> tuple[float, float, float]:
    """Return a value and the ends of its interval, from their logarithms."""
    value, low, high = np.exp([mean, mean - half, mean + half])
    return float(value), float(low), float(high)


@dataclass(frozen=True)
class Trend:
    """The line through the logarithms of multipliers over the logarithm of the size."""

    verdict: str
    """fades, grows, holds or cannot tell: of the gain, or of the penalty if M < 1 at the largest
    size."""
    is_gain: bool
    slope: float
    """Change of ln M per doubling of the size."""
    half: float
    """Half the width of its interval of 90 %."""
    largest: tuple[float, float, float]
    """M at the largest size and its interval of 95 %."""
    beyond: tuple[float, float, float]
    """M at FURTHEST times the largest size and its prediction interval of 95 %."""


def trend_of(sizes: np.ndarray, logs: np.ndarray) -> Trend:
    """Judge ln M of each size by the residuals about their line.

    By the seeds alone, every error of a size's tuning would be a trend: a flat truth is then called
    one in 13 to 70 % of studies.

    Args:
        sizes: parameters, (n,), n >= FEWEST_SIZES.
        logs: ln M, (n,).
    """
    from scipy import stats

    doublings = np.log2(sizes)
    line = stats.linregress(doublings, logs)
    df = len(sizes) - 2
    residuals = logs - line.intercept - line.slope * doublings
    sd = math.sqrt(np.square(residuals).sum() / df)
    middle = doublings.mean()
    spread = np.square(doublings - middle).sum()

    def at(doubling: float, new: int) -> tuple[float, float, float]:
        leverage = (doubling - middle) ** 2 / spread
        variance = new + 1 / len(sizes) + leverage
        se = sd * math.sqrt(variance)
        mean = line.intercept + line.slope * doubling
        estimate = Estimate(mean, len(sizes), se, df)
        half = estimate.half_width(LEVEL)
        return exponentials(mean, half)

    end = doublings.max()
    largest = at(end, 0)
    is_gain = largest[0] > 1
    half = line.stderr * stats.t.isf(LEVEL, df)
    verdict = "cannot tell"
    if line.pvalue < LEVEL:
        verdict = "grows" if (line.slope > 0) == is_gain else "fades"
    elif abs(line.slope) + half < FLAT:
        verdict = "holds"
    return Trend(
        verdict,
        is_gain,
        float(line.slope),
        float(half),
        largest,
        at(end + math.log2(FURTHEST), 1),
    )


# --- runs -----------------------------------------------------------------------------------------


POINTS = ["arm", "size", "budget", "seed", "flops", "tokens", "loss"]
"""Columns of a ladder's runs: parameters of blocks and head, tokens, nats per token."""
INTERVALS = [
    "multiplier",
    "low",
    "high",
    "tokens_multiplier",
    "tokens_low",
    "tokens_high",
]
"""Columns of a ladder's multipliers, in FLOPs and in tokens."""
GAINS = ["arm", "size", "budget", "seeds", "slope", "noise", "why", *INTERVALS]
"""Columns of a ladder's gains; `budget` is the largest one, the others are those of `Shift`."""


@dataclass(frozen=True, eq=False)
class Ladder:
    """Final losses over sizes and budgets, and what they come to."""

    points: pd.DataFrame
    """A row per run: POINTS."""
    gains: pd.DataFrame
    """A row per arm and size: GAINS; none if the baseline has one budget."""
    logs: Mapping[tuple[str, int], float]
    """(arm, seed) -> ln M in FLOPs at the largest size."""


def ladder_of(arms: Iterable[Arm], base: str) -> Ladder:
    """Return the ladder of every recipe against recipe `base`.

    Args:
        arms: one per recipe, size and budget.
    """
    rows = []
    for arm in arms:
        for run in arm.runs:
            if run.status == "finished" and is_decayed(run):
                costs = [run.spent("flops"), run.spent("tokens")]
                rows.append([*arm.scale, run.seed, *costs, run.final_loss])
    points = pd.DataFrame(rows, columns=POINTS).dropna()
    gains = []
    logs = {}
    for size, rungs in points.groupby("size"):
        theirs = rungs[rungs.arm == base]
        for name, ours in rungs[rungs.arm != base].groupby("arm"):
            both = theirs.merge(ours, on=["seed", "budget"])
            # A seed counts if it has all budgets.
            wide = both.pivot(index="seed", columns="budget").dropna()
            if both.budget.nunique() < 2 or wide.empty:
                continue
            flops, tokens = (
                shift_of(
                    wide.loss_x.to_numpy(),
                    wide.loss_y.to_numpy(),
                    np.log(wide[f"{cost}_x"].to_numpy()),
                    np.log(wide[f"{cost}_y"].to_numpy()),
                )
                for cost in ("flops", "tokens")
            )
            of_size = [name, size, both.budget.max(), len(wide)]
            of_fit = [flops.slope, flops.noise, flops.why]
            gains.append([*of_size, *of_fit, *flops.interval, *tokens.interval])
            # Sizes come in their order: the largest one stays.
            for seed, log in zip(wide.index, flops.logs, strict=True):
                logs[str(name), int(seed)] = float(log)
    return Ladder(points, pd.DataFrame(gains, columns=GAINS), logs)


def is_decayed(run: Run) -> bool:
    """Return whether a run's learning rate decays over its own budget, or nobody knows."""
    schedule = run.settings.get("optim.schedule", "cosine")
    decay = run.settings.get("optim.decay_tokens") or run.budget
    return has_end(schedule) and decay == run.budget


# --- text -----------------------------------------------------------------------------------------


def gain_table(gains: pd.DataFrame) -> pd.DataFrame:
    """Return the multipliers as text, a row per arm and size."""
    columns = {
        "arm": gains.arm,
        "parameters": gains["size"].map(human),
        "D/N": (gains.budget / gains["size"]).map("{:.3g}".format),
        "seeds": gains.seeds.map(str),
        "s": gains.slope.map("{:.3f}".format),
        "sigma/s": gains.noise.map("{:.3f}".format),
        "M in FLOPs": [interval_text(*row) for row in gains[INTERVALS[:3]].to_numpy()],
        "M in tokens": [interval_text(*row) for row in gains[INTERVALS[3:]].to_numpy()],
    }
    if gains.why.any():
        columns[""] = gains.why
    return pd.DataFrame(columns)


def interval_text(value: float, low: float, high: float) -> str:
    """Return a multiplier and its interval, or a bound; "" for NaN."""
    if math.isnan(value):
        return ""
    if math.isinf(high):
        return f"> {value:.2f}x"
    if not low:
        return f"< {value:.2f}x"
    return f"{value:.2f}x [{low:.2f}, {high:.2f}]"


def trends_of(gains: pd.DataFrame) -> dict[str, Trend]:
    """Return the trend of each arm with enough sizes; bounds do not count."""
    trends = {}
    for arm, sizes in gains[gains.why == ""].groupby("arm"):
        if len(sizes) >= FEWEST_SIZES:
            logs = np.log(sizes.multiplier.to_numpy())
            trends[str(arm)] = trend_of(sizes["size"].to_numpy(), logs)
    return trends


def describe_trends(gains: pd.DataFrame) -> list[str]:
    """Return a sentence per arm with enough sizes, and what the intervals leave out."""
    sentences = []
    for arm, trend in trends_of(gains).items():
        what = "gain" if trend.is_gain else "penalty"
        words = f"the {what} {trend.verdict}"
        if trend.verdict == "cannot tell":
            words = f"cannot tell whether the {what} holds"
        of_arm = gains[(gains.arm == arm) & (gains.why == "")]
        size = of_arm["size"].max()
        factor = interval_text(*exponentials(trend.slope, trend.half))
        sentences.append(
            f"{arm}: {words} over {len(of_arm)} sizes; M changes {factor} (90 %) per doubling of"
            f" the size; by the line {interval_text(*trend.largest)} at {human(size)} parameters,"
            f" extended to {human(FURTHEST * size)} {interval_text(*trend.beyond)} (prediction)."
        )
    return [*sentences, f"note: {TUNING}"] if len(gains) else []
