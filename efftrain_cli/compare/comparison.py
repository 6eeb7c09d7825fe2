"""Every number of a comparison, computed once: tables, plots, JSON and report only show them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from efftrain_cli.compare import statistics
from efftrain_cli.compare.fairness import Label, check
from efftrain_cli.compare.groups import Group, differing_keys, group_runs, shown
from efftrain_cli.compare.measures import (
    NOT_REACHED,
    Costs,
    EqualPoint,
    Measure,
    equal_points,
    measure_run,
    measures,
    quantity,
)
from efftrain_cli.compare.reading import RunNumbers, read_numbers
from efftrain_cli.compare.statistics import Estimate
from efftrain_cli.compare.zero_shot import ZeroShotRow, compare_zero_shot
from efftrain_cli.foundation.errors import UsageError


@dataclass(frozen=True)
class Cell:
    """One measure of one group."""

    values: tuple[float | str, ...]
    """By seed, in the order of the group's seeds: a number, or the reason why there is none."""
    mean: float | None
    """Over the seeds; None where any seed has no number: what is missing is never averaged away."""
    sd: float | None
    """Standard deviation over the seeds, n - 1 in the denominator; None for one seed."""

    @property
    def numbers(self) -> tuple[float, ...]:
        """The values that are numbers."""
        return tuple(value for value in self.values if isinstance(value, float))


@dataclass(frozen=True)
class Difference:
    """How a group differs from the baseline in one measure."""

    measure: Measure
    label: str
    """The group's."""
    estimate: Estimate
    """Of method - baseline, or of baseline / method where the measure is a ratio."""
    p_holm: float | None
    """Adjusted for the number of recipes that are compared with the baseline in this measure."""
    seeds: tuple[int, ...]
    """Seeds that were paired; empty where they could not be."""
    seeds_needed: int | None
    """Seeds per recipe that would show a true difference of the observed size in 80 % of studies."""
    verdict: str
    coverage: float | None = None
    """Measured coverage of the interval where it is a bootstrap."""


@dataclass(frozen=True)
class Comparison:
    """A whole comparison."""

    groups: tuple[Group, ...]
    baseline: Group
    labels: tuple[Label, ...]
    recipe_differences: tuple[tuple[str, tuple[str, ...]], ...]
    """Exactly the dotted keys that differ, with the value of each group."""
    target_loss: float | None
    target_origin: str
    """Where the target comes from, in words."""
    points: dict[str, EqualPoint]
    measures: tuple[Measure, ...]
    cells: dict[tuple[str, str], Cell]
    """By measure key and group label."""
    differences: tuple[Difference, ...]
    zero_shot: tuple[ZeroShotRow, ...]
    costs: Costs

    @property
    def runs(self) -> list[RunNumbers]:
        """All runs, group by group."""
        return [run for group in self.groups for run in group.runs]


def read_all(paths: Sequence[Path]) -> list[RunNumbers]:
    """Reads runs, two at a time: each is reduced before the next is read, so memory does not grow with their number."""
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(read_numbers, paths))


def compare(
    runs: Sequence[RunNumbers],
    *,
    baseline: str | None = None,
    target_loss: float | None = None,
    allow: bool = False,
    costs: Costs | None = None,
) -> Comparison:
    """Compares runs, grouped by recipe, with a baseline.

    Args:
        baseline: a recipe's or group's name, or a run of the group; default: the only recipe without a method's
            section, else the first.
        target_loss: nats per token; default: the loss that every seed of the baseline reached.

    Raises:
        UsageError: runs that must not be compared, an unknown baseline, or fewer than one run.
    """
    costs = costs or Costs()
    if not runs:
        raise UsageError("nothing to compare: name at least one run")
    groups = group_runs(runs, allow)
    labels = check(groups, allow)
    base = _baseline(groups, baseline)
    every_run = [run for group in groups for run in group.runs]
    points = equal_points(every_run)
    target, target_origin = _target(base, target_loss)
    with_bits = any((run.origin.get("data") or {}).get("valid_bytes_per_token") for run in every_run)
    rows = measures(costs, with_bits, points, target)
    cells = {}
    for group in groups:
        per_run = [measure_run(run, points, target, costs) for run in group.runs]
        for measure in rows:
            cells[measure.key, group.label] = _cell([values[measure.key] for values in per_run])
    return Comparison(
        groups=tuple(groups),
        baseline=base,
        labels=(*labels, *_point_notes(points, every_run)),
        recipe_differences=tuple(
            (key, tuple(shown(group.recipe.get(key)) for group in groups))
            for key in differing_keys([group.recipe for group in groups])
        ),
        target_loss=target,
        target_origin=target_origin,
        points=points,
        measures=tuple(rows),
        cells=cells,
        differences=tuple(_differences(groups, base, rows, cells)),
        zero_shot=tuple(compare_zero_shot(groups, base)),
        costs=costs,
    )


def _baseline(groups: Sequence[Group], name: str | None) -> Group:
    if name is None:
        plain = [group for group in groups if not _methods(group)]
        return plain[0] if len(plain) == 1 else groups[0]
    for group in groups:
        if name == group.label:
            return group
    matches = [
        group for group in groups if name in (group.runs[0].recipe_name, *(run.name for run in group.runs))
    ]
    if len(matches) == 1:
        return matches[0]
    names = ", ".join(repr(group.label) for group in groups)
    fault = "stands for several of the recipes compared" if matches else "is none of the recipes compared"
    raise UsageError(f"--baseline {name!r} {fault}; choose one of {names}")


def _methods(group: Group) -> set[str]:
    shared = {"model", "data", "optim", "train", "eval", "checkpoint", "wandb", "base"}
    return {key.split(".")[0] for key in group.recipe} - shared


def _target(base: Group, given: float | None) -> tuple[float | None, str]:
    if given is not None:
        if not math.isfinite(given):
            raise UsageError(f"--target-loss {given}: give a loss in nats per token, for example 3.2")
        return given, "given by --target-loss"
    best = [float(run.evaluated["val_loss"].min()) for run in base.runs if len(run.evaluated["val_loss"])]
    if not best:
        return None, f"none: {base.label} was never evaluated"
    if len(best) == 1:
        return best[0], f"the best of {base.label}"
    return max(best), f"the best loss of {base.label} that each of its {len(best)} seeds reached"


def _cell(values: Sequence[float | str]) -> Cell:
    numbers = [value for value in values if isinstance(value, float)]
    whole = len(numbers) == len(values)
    return Cell(
        tuple(values),
        float(np.mean(numbers)) if whole else None,
        float(np.std(numbers, ddof=1)) if whole and len(numbers) > 1 else None,
    )


def _point_notes(points: dict[str, EqualPoint], runs: Sequence[RunNumbers]) -> list[Label]:
    """Says when a run that is not finished decides how far the equal-tokens comparison reaches."""
    by_name = {run.name: run for run in runs}
    limits: dict[str, list[str]] = {}
    for point in points.values():
        if by_name[point.limited_by].status != "finished":
            limits.setdefault(point.limited_by, []).append(quantity(point.value, point.axis))
    return [
        Label("warning", f"{name} is not finished and limits the comparison at equal cost to {', '.join(reached)}")
        for name, reached in limits.items()
    ]


def _differences(
    groups: Sequence[Group], base: Group, rows: Sequence[Measure], cells: dict[tuple[str, str], Cell]
) -> list[Difference]:
    others = [group for group in groups if group is not base]
    found = []
    for measure in rows:
        if not measure.tested:
            continue
        estimates = [
            _estimate(measure, base, cells[measure.key, base.label], group, cells[measure.key, group.label])
            for group in others
        ]
        with_p = [i for i, (estimate, _) in enumerate(estimates) if estimate.p is not None]
        adjusted = dict(zip(with_p, statistics.holm([estimates[i][0].p or 0.0 for i in with_p]), strict=True))
        for i, (group, (estimate, seeds)) in enumerate(zip(others, estimates, strict=True)):
            needed = None
            if estimate.p is not None and estimate.sd:
                size = math.log(estimate.mean) if measure.tested == "ratio" else estimate.mean
                # Planned for the strictest of Holm's steps.
                alpha = statistics.ALPHA / len(with_p)
                needed = statistics.seeds_needed(size, estimate.sd, bool(seeds), alpha)
            found.append(
                Difference(
                    measure=measure,
                    label=group.label,
                    estimate=estimate,
                    p_holm=adjusted.get(i),
                    seeds=seeds,
                    seeds_needed=needed,
                    verdict=_verdict(measure, estimate, adjusted.get(i), needed),
                    coverage=(
                        statistics.bootstrap_coverage(estimate.n) if estimate.method.startswith("bootstrap") else None
                    ),
                )
            )
    return found


def _estimate(measure: Measure, base: Group, before: Cell, group: Group, after: Cell) -> tuple[Estimate, tuple[int, ...]]:
    """The estimate, and the seeds that were paired. Seeds without a number are never left out silently."""
    for name, cell in ((base.label, before), (group.label, after)):
        missing = [value for value in cell.values if not isinstance(value, float)]
        if missing:
            reasons = ", ".join(dict.fromkeys(map(str, missing)))
            of = f"{len(missing)} of {len(cell.values)} seeds" if len(cell.values) > 1 else "it"
            reason = f"{reasons}: no claim" if of == "it" else f"{reasons} ({of} of {name}): no claim"
            return Estimate(math.nan, n=0, reason=reason), ()
    a, b = (dict(zip(g.seeds, c.numbers, strict=True)) for g, c in ((base, before), (group, after)))
    if measure.tested == "ratio":
        if min(*a.values(), *b.values()) <= 0:
            return Estimate(math.nan, reason="reached before the first step: no claim"), ()
        a, b = ({seed: math.log(value) for seed, value in side.items()} for side in (a, b))
    both = tuple(sorted(a.keys() & b.keys()))
    # A ratio is baseline / method: above 1 the method needs less.
    sign = -1.0 if measure.tested == "ratio" else 1.0
    pairs = [sign * (b[seed] - a[seed]) for seed in both]
    if len(both) >= 2 or (both and min(len(a), len(b)) == 1):
        if measure.tested == "ratio":
            return statistics.ratio_of_logs(pairs), both
        return statistics.paired_t(pairs), both
    first, second = (list(b.values()), list(a.values())) if sign < 0 else (list(a.values()), list(b.values()))
    estimate = statistics.welch_t(first, second)
    return (statistics.exponentiate(estimate) if sign < 0 else estimate), ()


def _verdict(measure: Measure, estimate: Estimate, p: float | None, needed: int | None) -> str:
    if p is None:
        return estimate.reason
    if p < statistics.ALPHA:
        if measure.tested == "difference":
            return "lower" if estimate.mean < 0 else "higher"
        return "less needed" if estimate.mean > 1 else "more needed"
    if needed is None:
        return "no difference shown"
    more = max(1, needed - estimate.n)
    return f"no difference shown; to show one of this size, about {more} more seed{'s' if more > 1 else ''}"


def not_reached(cell: Cell) -> int:
    """Seeds that did not come down to the target loss."""
    return sum(value == NOT_REACHED for value in cell.values)
