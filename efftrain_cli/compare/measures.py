"""Measures: the numbers by which arms are compared, losses by difference and costs by ratio."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import numpy as np

from efftrain_cli.compare.arms import Pairs
from efftrain_cli.compare.curves import FEWEST, cost_to_reach, log_saving
from efftrain_cli.compare.inference import Estimate, paired, unpaired
from efftrain_cli.foundation.console import human
from efftrain_cli.recipe.schedules import SCHEDULES
from efftrain_cli.run.reading import COSTS, Run

SAME = 1.02
"""Largest ratio of two budgets that count as equal."""


@dataclass(frozen=True)
class Measure:
    """A number of a run. Arms are compared by differences, arm less baseline."""

    key: str
    title: str
    unit: str
    read: Callable[..., float]
    """Return the number; NaN if the run has none."""
    better: int = -1
    """Sign of a change for the better."""
    missing: ClassVar[str] = "not recorded"
    """Why a run has no value."""

    def mean(self, runs: Sequence[Run]) -> float:
        """Return the mean over runs; NaN if one has no value."""
        return float(np.mean([self.read(run) for run in runs]))

    def values(self, pairs: Pairs) -> list[np.ndarray]:
        """Return the values of baseline and arm, on the scale of the test."""
        return [np.array([self.read(run) for run in runs]) for runs in pairs.kept]

    def shown(self, change: float) -> float:
        """Return a change on the scale of the test as it is shown."""
        return change

    def margin(self, margin: float) -> float:
        """Return a margin on the scale of the test."""
        return margin

    def estimate(self, pairs: Pairs) -> Estimate:
        """Estimate the change from baseline to arm, on the scale of the test.

        Its mean is NaN if a run has no value.
        """
        base, arm = self.values(pairs)
        if pairs.is_paired:
            return paired(arm - base)
        return unpaired(base, arm)

    def why_blank(self, pairs: Pairs) -> str:
        """Return why the arms do not compare by this measure; "" if they do."""
        return ""

    def terms(self, pairs: Pairs) -> str:
        """Return under which terms the arms are compared, if a reader must know them; else ""."""
        return ""


class FinalLoss(Measure):
    """A loss at the end of a budget: compared at equal tokens, or else at equal FLOPs."""

    def why_blank(self, pairs: Pairs) -> str:
        """Return why the arms do not compare by this measure; "" if they do."""
        return unequal_budgets(pairs)

    def terms(self, pairs: Pairs) -> str:
        """Return at which budget the losses are compared, unless all of them are equal."""
        tokens = spent_ratio(pairs, "tokens")
        flops = spent_ratio(pairs, "flops")
        if is_one(flops):
            return "" if is_one(tokens) else f"at equal FLOPs and {tokens:.3g}x the tokens"
        if is_one(tokens) and math.isfinite(flops):
            return f"at equal tokens and {flops:.3g}x the FLOPs"
        return ""


def spent_ratio(pairs: Pairs, column: str) -> float:
    """Return what the arm spent over what the baseline spent; NaN if it is unknown."""
    base, arm = (np.mean([run.spent(column) for run in runs]) for runs in pairs.kept)
    return float(arm / base) if base else math.nan


def is_one(ratio: float) -> bool:
    """Return whether a ratio of budgets counts as 1."""
    return 1 / SAME <= ratio <= SAME


def unequal_budgets(pairs: Pairs) -> str:
    """Return why final losses do not compare; "" if tokens or FLOPs agree.

    Of runs without tokens and FLOPs, the numbers of the last steps must agree.
    """
    tokens = spent_ratio(pairs, "tokens")
    flops = spent_ratio(pairs, "flops")
    if is_one(tokens) or is_one(flops):
        return ""
    if math.isnan(tokens):
        steps = spent_ratio(pairs, "step")
        same_length = math.isnan(steps) or is_one(steps)
        return "" if same_length else "the last steps differ by more than 2 %"
    base, arm = (runs[0].spent("tokens") for runs in pairs.kept)
    return (
        f"budgets differ: {human(arm)} tokens, {human(base)} of the baseline;"
        f" --set train.tokens={base:.0f} for both would make them equal"
    )


class Cost(Measure):
    """A cost to reach a loss. Arms are compared by ratios, baseline / arm: above 1 is better."""

    missing = "not reached"

    def values(self, pairs: Pairs) -> list[np.ndarray]:
        """Return values whose difference is the logarithm of the ratio."""
        return [-np.log(values) for values in super().values(pairs)]

    def shown(self, change: float) -> float:
        """Return the ratio."""
        return math.exp(change)

    def margin(self, margin: float) -> float:
        """Return a share of the cost as a logarithm."""
        return math.log1p(margin)

    def why_blank(self, pairs: Pairs) -> str:
        """Return why the arms do not compare by this measure; "" if they do."""
        fewest = min(len(run.curve) for run in pairs.runs)
        return f"fewer than {FEWEST} evaluations" if fewest < FEWEST else other_schedules(pairs)


class Match(Cost):
    """A cost to match the worse run's final loss: `read` takes a pair, and returns a log ratio."""

    def mean(self, runs: Sequence[Run]) -> float:
        """Return NaN: a single run has no such cost."""
        return math.nan

    def values(self, pairs: Pairs) -> list[np.ndarray]:
        """Return zeros, and the logarithm of each pair's ratio."""
        ratios = np.array([*map(self.read, *pairs.kept)])
        return [np.zeros_like(ratios), ratios]

    def why_blank(self, pairs: Pairs) -> str:
        """Return why the arms do not compare by this measure; "" if they do."""
        return super().why_blank(pairs) if pairs.is_paired else "no shared seed"


class Multiplier(Match):
    """The compute multiplier at the largest size: `read` takes a pair, and returns its ln M."""

    missing = "not identified at the largest size"

    def why_blank(self, pairs: Pairs) -> str:
        """Return why the arms do not compare by this measure; "" if they do."""
        # Each of its runs decays over its own budget, whatever the schedule.
        return "" if pairs.is_paired else "no shared seed"


def other_schedules(pairs: Pairs) -> str:
    """Return why costs on the way to a loss do not compare; "" if learning rates decay alike.

    At equal cost, a run that has not decayed yet has a higher loss than one that has. With a
    plateau before the decay, any ratio lies near 1: a true 2 is read as 1.07.
    """
    schedules = {schedule_of(run) for run in pairs.runs}
    if "" in schedules:
        return "no schedule known"
    if any(has_plateau(schedule) for schedule in schedules):
        return "the learning rate decays at the end alone"
    if len(schedules) > 1 or len({end_of_decay(run) for run in pairs.runs}) > 1:
        return "learning rates decay in different ways"
    budgets = [run.budget for run in pairs.runs]
    spent = [run.spent("tokens") for run in pairs.runs]
    if max(budgets) > SAME * min(budgets) or max(spent) > SAME * min(spent):
        return "schedules of different lengths"
    if len({run.settings.get("eval.every") for run in pairs.runs}) > 1:
        return "evaluated at different steps"
    return ""


def schedule_of(run: Run) -> str:
    """Return the name of a run's schedule; "" if a table does not say."""
    default = "cosine" if run.conditions else ""
    return str(run.settings.get("optim.schedule", default))


def end_of_decay(run: Run) -> tuple[str, float]:
    """Return where a run's learning rate reaches its least: the unit, and the number of them.

    Runs of other budgets are told apart by these.
    """
    for unit in ("steps", "tokens"):
        end = run.settings.get(f"optim.decay_{unit}")
        if end is not None and end != run.budget:
            return unit, float(end)
    return "budget", 1.0


def has_plateau(schedule: str) -> bool:
    """Return whether a schedule keeps its peak until a last share of the budget."""
    known = SCHEDULES.get(schedule)
    return known is not None and known.has_plateau


WORDS = {
    "tokens": "tokens",
    "flops": "FLOPs",
    "seconds": "seconds, by these machines' clocks,",
}
"""Cost -> its name in titles."""


def measures_of(
    runs: Sequence[Run],
    target: float | None = None,
    maximize: bool = False,
    logs: Mapping[tuple[str, int], float] = {},
) -> list[Measure]:
    """Return the measures of a comparison, in the order of its table.

    Args:
        target: loss to reach, nats per token; None for costs to match a final loss alone.
        maximize: the final values are scores, of which the higher is better.
        logs: see `Ladder.logs`.
    """
    unit = "nats/token" if any(run.conditions for run in runs) else ""
    if maximize:
        first = FinalLoss(
            "final_loss",
            "final score",
            unit,
            final_loss,
            better=1,
        )
    else:
        first = FinalLoss(
            "final_loss",
            "final loss",
            unit,
            final_loss,
        )
    measures: list[Measure] = [first]
    for cost in () if maximize else COSTS:
        if any(run.curve[cost].isna().any() for run in runs):
            continue
        word = WORDS[cost]
        read = partial(log_saving, cost=cost)
        measures.append(
            Match(
                f"{cost}_to_match",
                f"{word} to match",
                "x",
                read,
                better=1,
            )
        )
        if target is not None:
            read = partial(cost_to_reach, cost=cost, loss=target)
            measures.append(
                Cost(
                    f"{cost}_to_target",
                    f"{word} to {target:g}",
                    "x",
                    read,
                    better=1,
                )
            )
    if logs:
        measures.append(
            Multiplier(
                "compute_multiplier",
                "compute multiplier",
                "x",
                lambda _, run: logs.get((run.arm, run.seed), math.nan),
                better=1,
            )
        )
    titles: dict[str, float] = {}
    for run in runs:
        titles |= run.facts
    for title in titles:
        measures.append(
            Measure(
                title,
                title,
                "",
                partial(fact, title=title),
            )
        )
    return measures


def final_loss(run: Run) -> float:
    """Return the final loss of a run; NaN unless it finished."""
    return run.final_loss


def fact(run: Run, title: str) -> float:
    """Return one of the run's further numbers."""
    return run.facts.get(title, math.nan)
