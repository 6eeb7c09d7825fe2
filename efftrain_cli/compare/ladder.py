"""Compute-equivalent gains over budgets and sizes, and whether they hold as models grow.

The gain is the cost at which the baseline reaches an arm's loss, over the arm's own cost: 1.2 means
that the baseline needs 20 % more. Every point is a run whose learning rate decayed over its own
budget: in mid-schedule a method that leads may end behind.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields

import numpy as np
import pandas as pd
from scipy import stats

from efftrain_cli.compare.arms import Arm
from efftrain_cli.compare.inference import paired
from efftrain_cli.recipe.schedules import has_end
from efftrain_cli.run.reading import Run

LEVEL = 0.05
FEWEST_SIZES = 4
"""Sizes that a statement about their trend needs."""
FLAT = 0.05
"""Change of the gain's logarithm per doubling of the size that counts as none."""


@dataclass(frozen=True)
class Gain:
    """The gain of an arm at one size, at one budget or over all budgets."""

    arm: str
    size: float
    """Parameters of blocks and head."""
    budget: float
    """Tokens; NaN for all budgets together."""
    seeds: int
    gain: float
    low: float
    high: float
    slope: float
    """Fall of the loss per unit of the logarithm of the cost, mean of both arms."""


def gains_of(arms: Iterable[Arm], base: str) -> pd.DataFrame:
    """Return a row per `Gain` of every recipe; none if recipe `base` has no second budget.

    Args:
        arms: one per recipe, size and budget.
    """
    points = []
    for arm in arms:
        for run in arm.runs:
            if run.status == "finished" and is_decayed(run):
                cost = np.log(run.spent("flops"))
                points.append([*arm.scale, run.seed, cost, run.final_loss])
    columns = ["arm", "size", "budget", "seed", "cost", "loss"]
    table = pd.DataFrame(points, columns=columns).dropna()
    gains = []
    for size, rungs in table.groupby("size"):
        theirs = rungs[rungs.arm == base]
        for arm, ours in rungs[rungs.arm != base].groupby("arm"):
            both = theirs.merge(ours, on=["seed", "budget"])
            if both.budget.nunique() > 1:
                gains += gains_at(str(arm), float(size), both)
    return pd.DataFrame(gains, columns=[each.name for each in fields(Gain)])


def is_decayed(run: Run) -> bool:
    """Return whether a run's learning rate decays over its own budget, or nobody knows."""
    schedule = run.settings.get("optim.schedule", "cosine")
    decay = run.settings.get("optim.decay_tokens") or run.budget
    return has_end(schedule) and decay == run.budget


def gains_at(
    arm: str,
    size: float,
    both: pd.DataFrame,
) -> list[Gain]:
    """Return the gains of an arm at one size: at each budget, and over all.

    A lead in loss becomes a factor of cost by the slope of loss over the logarithm of cost. As the
    slope is the mean of both arms', their curvature cancels to second order.

    Args:
        both: runs of baseline (x) and arm (y) by seed and budget.
    """
    slopes = []
    for _, rungs in both.groupby("seed"):
        if len(rungs) > 1:
            base_slope = np.polyfit(rungs.cost_x, rungs.loss_x, 1)[0]
            arm_slope = np.polyfit(rungs.cost_y, rungs.loss_y, 1)[0]
            slopes.append(-(base_slope + arm_slope) / 2)
    fall = paired(np.array(slopes))
    slope = fall.mean
    if not fall.tail(slope) < LEVEL:
        # A loss that does not clearly fall says nothing about cost.
        slope = math.nan
    both["log"] = (both.loss_x - both.loss_y) / slope + both.cost_x - both.cost_y
    gains = []
    for budget, rungs in both.groupby("budget"):
        gains.append(
            gain_of(
                arm,
                size,
                budget,
                slope,
                rungs.log,
            )
        )
    by_seed = both.groupby("seed").log.mean()
    return [
        *gains,
        gain_of(
            arm,
            size,
            math.nan,
            slope,
            by_seed,
        ),
    ]


def gain_of(
    arm: str,
    size: float,
    budget: float,
    slope: float,
    logs: pd.Series,
) -> Gain:
    """Return a gain with its interval over the seeds, from its logarithm in each."""
    estimate = paired(logs.to_numpy())
    half = estimate.half_width(LEVEL)
    gain, low, high = np.exp([estimate.mean, estimate.mean - half, estimate.mean + half])
    return Gain(
        arm,
        size,
        budget,
        estimate.n,
        gain,
        low,
        high,
        slope,
    )


def describe_trends(gains: pd.DataFrame) -> list[str]:
    """Return a sentence per arm with enough sizes: its gain holds, fades, grows, or cannot tell.

    The test is of the sizes about their line: by the seeds alone, every error of a size's tuning
    would be a trend.
    """
    sentences = []
    over_all = gains[gains.budget.isna() & gains.gain.notna()]
    for arm, sizes in over_all.groupby("arm"):
        if len(sizes) < FEWEST_SIZES:
            continue
        line = stats.linregress(np.log2(sizes["size"]), np.log(sizes.gain))
        half = line.stderr * stats.t.isf(LEVEL, len(sizes) - 2)
        trend = "cannot tell whether the gain holds"
        if line.pvalue < LEVEL:
            trend = "the gain grows" if line.slope > 0 else "the gain fades"
        elif abs(line.slope) + half < FLAT:
            trend = "the gain holds"
        factor, low, high = np.exp([line.slope, line.slope - half, line.slope + half])
        sentences.append(
            f"{arm}: {trend} over {len(sizes)} sizes;"
            f" {factor:.3f}x per doubling of the size, 90 % [{low:.3f}, {high:.3f}]."
        )
    return sentences
