"""Measures: the numbers by which arms are compared, losses by difference and costs by ratio."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from efftrain_cli.compare.arms import Pairs
from efftrain_cli.compare.curves import cost_to_reach, log_saving
from efftrain_cli.compare.inference import Estimate, paired, unpaired
from efftrain_cli.foundation.console import human
from efftrain_cli.recipe.schedules import SCHEDULES
from efftrain_cli.run.reading import Run

SAME = 1.02
"""Largest ratio of two budgets that count as equal."""
FEWEST = 6
"""Evaluations that two curves need for their costs to be compared."""


@dataclass(frozen=True)
class Measure:
    """A number of a run. Arms are compared by differences, arm less baseline.

    With the unit x it is a cost, and arms are compared by ratios, baseline / arm: above 1 is
    better. A ratio is tested by its logarithm.
    """

    key: str
    title: str
    unit: str
    read: Callable[..., float]
    """Return the number of a run, or the log ratio of a pair; NaN if there is none."""
    is_of_pairs: bool = False
    """Whether a single run has no such number."""
    better: int = -1
    """Sign of a change for the better."""
    why_incomparable: Callable[[Pairs], str] = lambda pairs: ""
    """Return why the arms do not compare; "" if they do."""
    missing: str = "not recorded"
    """Why a run has no value."""

    def why_blank(self, pairs: Pairs) -> str:
        """Return why the arms do not compare by this measure; "" if they do."""
        if self.is_of_pairs and not pairs.is_paired:
            return "no shared seed"
        return self.why_incomparable(pairs)

    def mean(self, runs: Sequence[Run]) -> float:
        """Return the mean over runs; NaN if one has no value."""
        if self.is_of_pairs:
            return math.nan
        return float(np.mean([self.read(run) for run in runs]))

    def estimate(self, pairs: Pairs) -> Estimate:
        """Estimate the change from baseline to arm, on the scale of the test.

        Its mean is NaN if a run has no value.
        """
        if self.is_of_pairs:
            return paired(np.array([*map(self.read, *pairs.kept)]))
        base, arm = (np.array([self.read(run) for run in runs]) for runs in pairs.kept)
        if self.unit == "x":
            base = -np.log(base)
            arm = -np.log(arm)
        if pairs.is_paired:
            return paired(arm - base)
        return unpaired(base, arm)

    def shown(self, change: float) -> float:
        """Return a change on the scale of the test as it is shown."""
        return math.exp(change) if self.unit == "x" else change

    def margin(self, margin: float) -> float:
        """Return a margin, of a cost a share, on the scale of the test."""
        return math.log1p(margin) if self.unit == "x" else margin


# --- what may be compared -------------------------------------------------------------------------


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


def budget_terms(pairs: Pairs) -> str:
    """Return at which budget final losses are compared; "" if both tokens and FLOPs are equal."""
    tokens = spent_ratio(pairs, "tokens")
    flops = spent_ratio(pairs, "flops")
    if is_one(flops):
        return "" if is_one(tokens) else f"at equal FLOPs and {tokens:.3g}x the tokens"
    if is_one(tokens) and math.isfinite(flops):
        return f"at equal tokens and {flops:.3g}x the FLOPs"
    return ""


def other_schedules(pairs: Pairs) -> str:
    """Return why costs on the way to a loss do not compare; "" if learning rates decay alike.

    At equal cost, a run that has not decayed yet has a higher loss than one that has. With a
    plateau before the decay, any ratio lies near 1: a true 2 is read as 1.07.
    """
    runs = pairs.runs
    if min(len(run.curve) for run in runs) < FEWEST:
        return f"fewer than {FEWEST} evaluations"
    schedules = {schedule_of(run) for run in runs}
    if "" in schedules:
        return "no schedule known"
    if any(SCHEDULES[name].has_plateau for name in schedules & {*SCHEDULES}):
        return "the learning rate decays at the end alone"
    if len(schedules) > 1 or len({end_of_decay(run) for run in runs}) > 1:
        return "learning rates decay in different ways"
    for lengths in ([run.budget for run in runs], [run.spent("tokens") for run in runs]):
        if max(lengths) > SAME * min(lengths):
            return "schedules of different lengths"
    if len({run.settings.get("eval.every") for run in runs}) > 1:
        return "evaluated at different steps"
    return ""


def schedule_of(run: Run) -> str:
    """Return the name of a run's schedule; "" if a table does not say."""
    default = "cosine" if run.conditions else ""
    return str(run.settings.get("optim.schedule", default))


def end_of_decay(run: Run) -> str:
    """Return where a run's learning rate reaches min_lr: "500 tokens", or "budget" at its end."""
    for unit in ("steps", "tokens"):
        end = run.settings.get(f"optim.decay_{unit}")
        if end is not None and end != run.budget:
            return f"{end} {unit}"
    return "budget"


# --- the measures ---------------------------------------------------------------------------------

LABELS = {
    "tokens": "tokens",
    "flops": "FLOPs",
    "seconds": "seconds",
}
"""Cost -> its name in titles and figures."""


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
    loss = Measure(
        "final_loss",
        "final score" if maximize else "final loss",
        "nats/token" if any(run.conditions for run in runs) else "",
        lambda run: run.final_loss,
        better=1 if maximize else -1,
        why_incomparable=unequal_budgets,
    )
    measures = [loss]
    for cost in () if maximize else LABELS:
        if any(run.curve[cost].isna().any() for run in runs):
            continue
        ratio = partial(
            Measure,
            unit="x",
            better=1,
            why_incomparable=other_schedules,
            missing="not reached",
        )
        match = ratio(
            f"{cost}_to_match",
            f"{LABELS[cost]} to match",
            read=partial(log_saving, cost=cost),
            is_of_pairs=True,
        )
        measures.append(match)
        if target is not None:
            reach = ratio(
                f"{cost}_to_target",
                f"{LABELS[cost]} to {target:g}",
                read=partial(cost_to_reach, cost=cost, loss=target),
            )
            measures.append(reach)
    if logs:
        # Each of its runs decays over its own budget, whatever the schedule.
        multiplier = Measure(
            "compute_multiplier",
            "compute multiplier",
            "x",
            lambda _, run: logs.get((run.arm, run.seed), math.nan),
            is_of_pairs=True,
            better=1,
            missing="not identified at the largest size",
        )
        measures.append(multiplier)
    titles: dict[str, float] = {}
    for run in runs:
        titles |= run.facts
    measures += [Measure(title, title, "", partial(fact, title=title)) for title in titles]
    return measures


def fact(run: Run, title: str) -> float:
    """Return one of the run's further numbers."""
    return run.facts.get(title, math.nan)
