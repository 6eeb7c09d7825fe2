"""Find the runs that failed or got stuck, and state their share."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from scipy import stats

from efftrain_cli.compare.groups import Group, finished_runs
from efftrain_cli.compare.inference import ALPHA
from efftrain_cli.compare.measures import loss_at

FEWEST_FINISHED = 3
"""Fewest pairs, or runs of each arm, that must finish and not be stuck for losses to be judged."""


@dataclass(frozen=True)
class Side:
    """One of the two recipes that a question is about."""

    group: Group
    values: Mapping[int, Any]
    """Values of the question by seed; see `Question.values`."""
    failed: frozenset[int] = frozenset()
    """Seeds whose run failed or got stuck."""

    def without(self, seeds: Collection[int]) -> Side:
        """Return the side without the values of these seeds."""
        kept = {seed: value for seed, value in self.values.items() if seed not in seeds}
        return replace(self, values=kept)

    def first(self, seeds: int) -> dict[int, Any]:
        """Return the values that are left of the group's first seeds."""
        looked_at = self.group.seeds[:seeds]
        return {seed: self.values[seed] for seed in looked_at if seed in self.values}


def stuck_loss(baseline: Group, share: float) -> float | None:
    """Return the loss above which a finished run is stuck, nats per token.

    It is the median, over the baseline's finished runs, of their validation loss at `share` of
    their tokens, linear between evaluations; None if no run has one.
    """
    losses = []
    for run in finished_runs(baseline.runs):
        loss = loss_at(run, "tokens", share * float(run.evaluated["tokens"][-1]))
        if loss is not None:
            losses.append(loss)
    return median(losses) if losses else None


def failed_seeds(group: Group, level: float | None) -> frozenset[int]:
    """Return the seeds whose run diverged, or finished above `level`.

    A seed with runs at several learning rates never fails: a diverged rate counts with the loss
    before training.
    """
    failed = set()
    for seed, runs in group.by_seed.items():
        final = runs[0].final_loss
        stuck = level is not None and final is not None and final > level
        if len(runs) == 1 and (runs[0].failed or stuck):
            failed.add(seed)
    return frozenset(failed)


def shares_text(sides: Sequence[Side]) -> str:
    """Return as text how many runs of each side failed or got stuck.

    Intervals are exact (Clopper and Pearson 1934).
    """
    parts = []
    for side in sides:
        failed = len(side.failed)
        n = len(side.group.seeds)
        interval = stats.binomtest(failed, n).proportion_ci(1 - ALPHA)
        low = 100 * interval.low
        high = 100 * interval.high
        parts.append(f"{side.group.label} {failed} of {n} ({low:.0f} to {high:.0f} %)")
    return f"failed or got stuck: {', '.join(parts)}"
