"""How groups differ from the baseline, measure by measure: the test that fits, or why there is none."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from efftrain_cli.compare import inference
from efftrain_cli.compare.fairness import why_cost_not_judged
from efftrain_cli.compare.groups import Group
from efftrain_cli.compare.inference import ALPHA, Decision, Estimate, ExactTest, decide
from efftrain_cli.compare.measures import (
    FAILED,
    NOT_REACHED,
    SAME_SCHEDULE,
    EqualPoint,
    Measure,
    match_ratio,
    match_ratios,
    other_budgets,
    schedule_position,
    why_not_matched,
)
from efftrain_cli.compare.reading import RunNumbers

PRIMARY = "final_loss"
"""The measure that decides; the others are shown beside it and corrected as one family."""


@dataclass(frozen=True)
class Cell:
    """One measure of one group."""

    values: tuple[float | str, ...] = ()
    """By seed, in the order of the group's seeds: a number, or the reason why there is none."""

    @property
    def numbers(self) -> tuple[float, ...]:
        """The values that are numbers."""
        return tuple(value for value in self.values if isinstance(value, float))

    @property
    def mean(self) -> float | None:
        """Over the seeds; None where any seed has no number: what is missing is never averaged away."""
        return float(np.mean(self.numbers)) if 0 < len(self.values) == len(self.numbers) else None

    @property
    def sd(self) -> float | None:
        """Standard deviation over the seeds, n - 1 in the denominator; None for one seed."""
        return (
            float(np.std(self.numbers, ddof=1))
            if 1 < len(self.values) == len(self.numbers)
            else None
        )


@dataclass(frozen=True)
class Difference:
    """How a group differs from the baseline in one measure."""

    measure: Measure
    label: str
    """The group's."""
    estimate: Estimate
    """Of method - baseline, or of baseline / method where the measure is a cost; NaN where runs have no number."""
    exact: ExactTest | None
    """The exact test in the place of t, where runs failed or missed the target, or the measure asks for it."""
    decision: Decision
    seeds: tuple[int, ...]
    """Seeds that both recipes have."""
    reason: str
    """Why the question is not judged: one seed, pending runs, other schedules, other machines; empty where it is.
    "none": there was no failure or jump to ask about."""

    @property
    def p_holm(self) -> float | None:
        """The adjusted p-value; None where nothing was judged."""
        return None if self.reason else self.decision.p

    @property
    def verdict(self) -> str:
        """ "better", "worse", "equivalent", "undecided", or the reason why there is none."""
        return self.reason or self.decision.outcome


def compare_groups(
    groups: Sequence[Group],
    base: Group,
    rows: Sequence[Measure],
    cells: dict[tuple[str, str], Cell],
    points: dict[str, EqualPoint],
    margin: float | None,
    withheld: str,
) -> list[Difference]:
    """Every tested measure of every group against the baseline, in two families: the primary measure, all others."""
    others = [group for group in groups if group is not base]
    found: list[tuple[Measure, Group, Estimate, ExactTest | None, str]] = []
    for measure in rows:
        if not measure.tested or (
            measure.tested == "difference" and _says_nothing_new(measure, points, groups)
        ):
            continue
        for group in others:
            estimate, exact, reason = _one(measure, base, group, cells, points)
            if withheld and reason != "none":
                reason = withheld
            found.append((measure, group, estimate, exact, reason))
    decisions = dict.fromkeys(range(len(found)), Decision("undecided", None))
    for family in (True, False):
        members = [
            i for i, row in enumerate(found) if (row[0].key == PRIMARY) == family and not row[4]
        ]
        results = [found[i][3] or found[i][2] for i in members]
        decisions |= dict(
            zip(members, decide(results, margin=margin if family else None), strict=True)
        )
    shared = {
        group.label: tuple(seed for seed in base.seeds if seed in group.seeds) for group in others
    }
    return [
        Difference(measure, group.label, estimate, exact, decisions[i], shared[group.label], reason)
        for i, (measure, group, estimate, exact, reason) in enumerate(found)
    ]


def _says_nothing_new(
    measure: Measure, points: dict[str, EqualPoint], groups: Sequence[Group]
) -> bool:
    """A loss at equal cost where every finished run ends: that is the final loss."""
    if not measure.key.startswith("loss_at_"):
        return False
    value = points[measure.axis].value
    finished = (run for group in groups for run in group.runs if run.status == "finished")
    return all(float(run.evaluated[measure.axis][-1]) <= 1.001 * value for run in finished)


def _one(
    measure: Measure,
    base: Group,
    group: Group,
    cells: dict[tuple[str, str], Cell],
    points: dict[str, EqualPoint],
) -> tuple[Estimate, ExactTest | None, str]:
    """The estimate, the exact test that decides in its place, and why nothing may be judged ("" where it may)."""
    nothing = Estimate(math.nan)
    pending = [run for run in (*base.runs, *group.runs) if run.pending]
    if pending:
        return (
            nothing,
            None,
            f"pending: {len(pending)} of {len(base.runs) + len(group.runs)} runs not finished",
        )
    if measure.tested == "rank" and not any(
        n for g in (base, group) for n in cells[measure.key, g.label].numbers
    ):
        return nothing, None, "none"
    if measure.tested == "failures":
        a, b = ({run.seed: run.has_diverged for run in g.runs} for g in (base, group))
        if not any((*a.values(), *b.values())):
            return nothing, None, "none"
        test = inference.failure_test(a, b)
        return nothing, test, _too_few(test, base, group)
    reason = why_cost_not_judged(measure.axis, [*base.runs, *group.runs])
    if not reason and (
        measure.key == PRIMARY or measure.tested == "match" or measure.key.startswith("loss_at_")
    ):
        reason = other_schedule(measure, base, group, points)
    if not reason and measure.key.endswith("_to_target"):
        reason = other_budgets([*base.runs, *group.runs])
    if not reason and measure.tested == "match":
        reason = why_not_matched([*base.runs, *group.runs], measure.axis)
    reason = reason and f"not judged: {reason}"
    if measure.tested == "match":
        estimate, exact = _matched(measure.axis, base, group)
    else:
        estimate, exact = _from_cells(measure, base, group, cells)
    if exact is not None:
        return estimate, exact, reason or _too_few(exact, base, group)
    return estimate, None, reason or (estimate.reason if estimate.p is None else "")


def _too_few(test: ExactTest, base: Group, group: Group) -> str:
    if min(len(base.runs), len(group.runs)) == 1:
        return inference.ONE_SEED
    if test.smallest_p >= ALPHA:
        return f"undecided: so few runs cannot give p below {test.smallest_p:.2g}"
    return ""


def other_schedule(
    measure: Measure, base: Group, group: Group, points: dict[str, EqualPoint]
) -> str:
    """Why the two are at different places of their learning rates' decay; "" where they do not."""

    at_point = measure.key.startswith("loss_at_")
    axis = measure.axis if at_point else "tokens"
    ends = [
        [run for run in side.runs if run.status == "finished" and len(run.evaluated["step"])]
        for side in (base, group)
    ]

    def position(runs: Sequence[RunNumbers]) -> float | None:
        """On average; None where nothing decays, NaN where it is unknown."""
        places = [
            schedule_position(
                run, axis, points[axis].value if at_point else float(run.evaluated[axis][-1])
            )
            for run in runs
        ]
        there = [place for place in places if place is not None]
        return sum(there) / len(there) if there else None

    if not all(ends):
        return ""
    a, b = map(position, ends)
    unknown = [
        side.label for side, at in ((base, a), (group, b)) if at is not None and math.isnan(at)
    ]
    if unknown:
        return f"where {' and '.join(unknown)} stood on the learning-rate schedule is known only at the run's end"
    if a is not None and b is not None:
        apart = abs(a - b) > SAME_SCHEDULE
        return (
            f"{base.label} is at {100 * a:.0f} % of its decay, {group.label} at {100 * b:.0f} %"
            if apart
            else ""
        )
    known, decaying, constant = (a, base, group) if b is None else (b, group, base)
    # A learning rate that never comes down is where it always is; the other must have come to the end of its own.
    if known is not None and known < 1 - SAME_SCHEDULE:
        return f"{decaying.label} is at {100 * known:.0f} % of its decay, {constant.label} does not decay"
    return ""


def _matched(axis: str, base: Group, group: Group) -> tuple[Estimate, ExactTest | None]:
    """How much less the better one needs for the worse one's final loss: per shared seed, or over all pairs of runs."""
    losses = [
        [math.inf if run.final_loss is None else run.final_loss for run in side.runs]
        for side in (base, group)
    ]
    if math.inf in (*losses[0], *losses[1]):
        # At equal cost, which of two runs is ahead on this scale is which has the lower final loss.
        return Estimate(math.nan), inference.rank_sum(losses[0], losses[1])
    if base.seeds == group.seeds:
        pairs = zip(base.runs, group.runs, strict=True)
        estimate = inference.paired_t([match_ratio(a, b, axis) for a, b in pairs])
    else:
        estimate = inference.all_pairs(match_ratios(base.runs, group.runs, axis))
    if math.isnan(estimate.mean):
        return Estimate(math.nan, reason="matched before the first step: no claim"), None
    return inference.exponentiated(estimate), None


def _from_cells(
    measure: Measure, base: Group, group: Group, cells: dict[tuple[str, str], Cell]
) -> tuple[Estimate, ExactTest | None]:
    """By t where every run has a number; by ranks where one failed or missed the target, or the measure asks."""
    before, after = cells[measure.key, base.label], cells[measure.key, group.label]
    by_run = [
        *zip(base.runs, before.values, strict=True),
        *zip(group.runs, after.values, strict=True),
    ]
    bounds = [run.failed or value in (NOT_REACHED, FAILED) for run, value in by_run]
    why = dict.fromkeys(
        v for (_, v), bound in zip(by_run, bounds, strict=True) if isinstance(v, str) and not bound
    )
    if why:
        return Estimate(math.nan, reason=f"{', '.join(why)}: no claim"), None
    if measure.tested == "rank" or any(bounds):
        short = [value == NOT_REACHED and not run.failed for run, value in by_run]
        values = [
            math.inf if run.failed else float(run.evaluated[measure.axis][-1] if beyond else value)
            for (run, value), beyond in zip(by_run, short, strict=True)
        ]
        n = len(base.runs)
        (a, a_beyond), (b, b_beyond) = (values[:n], short[:n]), (values[n:], short[n:])
        estimate = Estimate(math.nan)
        if any(a_beyond) != any(b_beyond) and all(0 < value < math.inf for value in (*a, *b)):
            mean = math.exp(float(np.mean(np.log(a)) - np.mean(np.log(b))))
            estimate = Estimate(mean, log=True, bound=1 if any(a_beyond) else -1)
        return estimate, inference.rank_sum(a, b, a_beyond, b_beyond)
    numbers, others = (
        dict(zip(g.seeds, c.numbers, strict=True)) for g, c in ((base, before), (group, after))
    )
    if measure.tested == "ratio":
        if min(*numbers.values(), *others.values()) <= 0:
            return Estimate(math.nan, reason="reached before the first step: no claim"), None
        return inference.ratio_of_means(numbers, others), None
    return inference.difference_of_means(numbers, others), None
