"""Every number of a comparison, computed once: tables, plots, JSON and report only show them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from efftrain_cli.compare import inference
from efftrain_cli.compare.fairness import Label, check, why_seconds_differ
from efftrain_cli.compare.groups import (
    BEST_RULE,
    Group,
    Trial,
    best_settings,
    differing_keys,
    group_runs,
    rank_of,
    shown,
)
from efftrain_cli.compare.inference import ALPHA, Decision, Estimate, ExactTest, decide
from efftrain_cli.compare.measures import (
    FAILED,
    NOT_REACHED,
    SAME_SCHEDULE,
    Costs,
    EqualPoint,
    Measure,
    equal_points,
    match_ratio,
    match_ratios,
    measure_run,
    measures,
    other_budgets,
    schedule_position,
    why_not_matched,
)
from efftrain_cli.compare.reading import RunNumbers, read_numbers
from efftrain_cli.compare.zero_shot import ZeroShotRow, compare_zero_shot
from efftrain_cli.foundation.errors import DataError, UsageError

PRIMARY = "final_loss"
"""The measure that decides; the others are shown beside it and corrected as one family."""


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
    """Of method - baseline, or of baseline / method where the measure is a cost; NaN where runs have no number."""
    exact: ExactTest | None
    """The exact test that stands in for t where runs failed or did not reach the target, or that the measure asks for."""
    decision: Decision
    seeds: tuple[int, ...]
    """Seeds that both recipes have."""
    reason: str
    """Why the question is not judged: one seed, pending runs, other schedules, other machines; empty where it is. "none":
    there was no failure or jump to ask about."""

    @property
    def p_holm(self) -> float | None:
        """The adjusted p-value; None where nothing was judged."""
        return None if self.reason else self.decision.p

    @property
    def verdict(self) -> str:
        """"better", "worse", "equivalent", "undecided", or the reason why there is none."""
        return self.reason or self.decision.outcome


@dataclass(frozen=True)
class Comparison:
    """A whole comparison."""

    groups: tuple[Group, ...]
    """The baseline first."""
    baseline: Group
    labels: tuple[Label, ...]
    recipe_differences: tuple[tuple[str, tuple[str, ...]], ...]
    """Exactly the dotted keys that differ, with the value of each group."""
    trials: tuple[Trial, ...]
    """Settings that were tried where a recipe stands at its own best; empty where there is nothing to choose."""
    target_loss: float | None
    """As given; None: costs are those to match the worse run's final loss."""
    margin: float | None
    """Nats per token within which final losses count as equivalent; None: not asked."""
    points: dict[str, EqualPoint]
    measures: tuple[Measure, ...]
    cells: dict[tuple[str, str], Cell]
    """By measure key and group label; what compares two runs ("match") has none."""
    differences: tuple[Difference, ...]
    zero_shot: tuple[ZeroShotRow, ...]
    costs: Costs
    exploratory: bool = False
    """The runs are a study's, and what is compared here is no part of its verdict."""

    @property
    def runs(self) -> list[RunNumbers]:
        """All runs, group by group."""
        return [run for group in self.groups for run in group.runs]

    def letter(self, group: Group) -> str:
        """A short name of a group for tables and plots: A is the baseline."""
        place = self.groups.index(group)
        return chr(ord("A") + place) if place < 26 else f"R{place + 1}"

    def difference(self, key: str, label: str) -> Difference | None:
        """A group's difference from the baseline in a measure, where it was compared."""
        return next((d for d in self.differences if d.measure.key == key and d.label == label), None)


def read_all(paths: Sequence[Path]) -> list[RunNumbers]:
    """Reads runs, two at a time: each is reduced before the next is read, so memory does not grow with their number."""
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(read_numbers, paths))


def read_sound(paths: Sequence[Path]) -> tuple[list[RunNumbers], tuple[str, ...]]:
    """Reads runs like `read_all`, without those that cannot be read; and why each of these is left out.

    Raises:
        DataError: none can be read.
    """

    def attempt(path: Path) -> RunNumbers | DataError:
        try:
            return read_numbers(path)
        except DataError as error:
            return error

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(attempt, paths))
    left_out = [error for error in found if isinstance(error, DataError)]
    if left_out and len(left_out) == len(found):
        raise left_out[0]
    return [run for run in found if isinstance(run, RunNumbers)], tuple(map(str, left_out))


def compare(
    runs: Sequence[RunNumbers],
    *,
    baseline: str | None = None,
    target_loss: float | None = None,
    margin: float | None = None,
    every_setting: bool = False,
    allow: bool = False,
    costs: Costs | None = None,
    left_out: Sequence[str] = (),
) -> Comparison:
    """Compares runs, grouped by recipe, with a baseline.

    Args:
        baseline: a recipe's or group's name, or a run of the group; default: the only recipe without a method's
            section, else the first; never one that has no finished run while another has.
        target_loss: nats per token; default: per pair of runs, the worse one's final loss.
        margin: nats per token within which two final losses count as equivalent.
        every_setting: compare each setting of a recipe instead of its best.
        left_out: why runs that were asked for are not among `runs`; a reader of the comparison must know.

    Raises:
        UsageError: runs that must not be compared, an unknown baseline, or fewer than one run.
    """
    costs = costs or Costs()
    if not runs:
        raise UsageError("nothing to compare: name at least one run")
    if target_loss is not None and not math.isfinite(target_loss):
        raise UsageError(f"--target-loss {target_loss}: give a loss in nats per token, for example 3.2")
    if margin is not None and not (math.isfinite(margin) and margin > 0):
        raise UsageError(f"--margin {margin:g}: give a difference above 0 in nats per token, for example 0.01")
    runs, grid_notes = at_common_evaluations(runs)
    every = group_runs(runs, allow)
    named = _named(every, baseline) if baseline is not None else None
    groups, trials = (every, []) if every_setting else best_settings(every)
    if named is not None:
        # A setting that was named as the baseline is what was asked for, best or not.
        own = [g for g in groups if g.recipe_name != named.recipe_name or len({g.recipe_name for g in groups}) == 1]
        groups = [named, *(g for g in (groups if every_setting else own) if g is not named)]
    labels = [*(Label("warning", f"a run is left out: {reason}") for reason in left_out), *check(groups, allow)]
    base = named or _default_baseline(groups)
    groups = [base, *(group for group in groups if group is not base)]
    every_run = [run for group in groups for run in group.runs]
    points = equal_points(every_run)
    with_bits = any((run.origin.get("data") or {}).get("valid_bytes_per_token") for run in every_run)
    rows = measures(costs, with_bits, points, target_loss, several=len(groups) > 1)
    cells = {}
    for group in groups:
        per_run = [measure_run(run, points, target_loss, costs) for run in group.runs]
        for measure in rows:
            if measure.tested != "match":
                cells[measure.key, group.label] = _cell([values[measure.key] for values in per_run])
    withheld = ""
    if named is None and len(groups) > 1 and len({group.recipe_name for group in groups}) == 1:
        withheld = "settings of one recipe: name one with --baseline to test the others against it"
    elif waits := _best_waits_for(every, trials, named if named is not None and baseline != named.recipe_name else None):
        withheld = f"pending: the best setting waits for {waits}"
    incomparable = any(label.severity == "allowed" for label in labels)
    losses_withheld = "not judged: these losses are not comparable" if incomparable else withheld
    return Comparison(
        groups=tuple(groups),
        baseline=base,
        labels=(*labels, *grid_notes, *_trial_notes(every, groups, trials), *_pending_notes(groups)),
        recipe_differences=tuple(
            (key, tuple(shown(group.recipe.get(key)) for group in groups))
            for key in differing_keys([group.recipe for group in groups])
        ),
        trials=tuple(trials),
        target_loss=target_loss,
        margin=margin,
        points=points,
        measures=tuple(rows),
        cells=cells,
        differences=tuple(_differences(groups, base, rows, cells, points, target_loss, margin, losses_withheld)),
        zero_shot=tuple(compare_zero_shot(groups, base, allow, withheld)),
        costs=costs,
    )


def _named(groups: Sequence[Group], name: str) -> Group:
    for group in groups:
        if name == group.label:
            return group
    matches = [group for group in groups if name in (group.recipe_name, *(run.name for run in group.runs))]
    if len(matches) > 1 and name == matches[0].recipe_name:
        # One recipe in several settings: it stands at its own best, as the others do.
        best, _ = best_settings([*matches, *(g for g in groups if g.recipe_name != name)])
        chosen = [group for group in best if group.recipe_name == name]
        if len(chosen) == 1:
            return chosen[0]
    if len(matches) == 1:
        return matches[0]
    names = ", ".join(repr(group.label) for group in groups)
    fault = "stands for several of the recipes compared" if matches else "is not one of the recipes compared"
    raise UsageError(f"--baseline {name!r} {fault}; choose one of {names}")


def _default_baseline(groups: Sequence[Group]) -> Group:
    over = [group for group in groups if any(not run.pending for run in group.runs)] or list(groups)
    finished = [group for group in over if any(run.status == "finished" for run in group.runs)]
    plain = [group for group in over if not _methods(group)]
    if len({group.recipe_name for group in groups}) == 1 and len(groups) > 1:
        return min(over, key=rank_of)
    if len(plain) == 1:
        return plain[0]
    return (finished or over)[0]


def _methods(group: Group) -> set[str]:
    shared = {"model", "data", "optim", "train", "eval", "checkpoint", "wandb", "base"}
    return {key.split(".")[0] for key in group.recipe} - shared


def at_common_evaluations(runs: Sequence[RunNumbers]) -> tuple[list[RunNumbers], list[Label]]:
    """Runs evaluated at different intervals, reduced to the steps that all finished ones evaluated, and each one's last."""
    if len({run.recipe.get("eval.every") for run in runs}) < 2:
        return list(runs), []
    evaluated = [run for run in runs if len(run.evaluated["step"])]
    # A run that ended early has few evaluations: it must not take away those that the others share.
    over = [run for run in evaluated if run.status == "finished"] or evaluated
    grids = [set(run.evaluated["step"].tolist()) for run in over]
    common = set.intersection(*grids) if grids else set()
    kept = []
    for run in runs:
        steps = run.evaluated["step"]
        there = np.isin(steps, list(common))
        there[-1:] = True
        kept.append(replace(run, evaluated={name: values[there] for name, values in run.evaluated.items()}))
    note = f"evaluated at different intervals: only the {len(common)} evaluations after the same steps, and the last, count"
    return kept, [Label("note", note)]


def _trial_notes(every: Sequence[Group], groups: Sequence[Group], trials: Sequence[Trial]) -> list[Label]:
    if not trials:
        return []
    notes = [Label("note", f"each recipe stands at its own best setting: {BEST_RULE}; chosen on these same runs")]
    counts = {group.recipe_name: sum(g.recipe_name == group.recipe_name for g in every) for group in groups}
    if len(set(counts.values())) > 1:
        tried = ", ".join(f"{name} {count}" for name, count in counts.items())
        notes.append(Label("warning", f"not tuned alike: settings tried: {tried}; the recipe tried more often looks better than it is"))
    return notes


def _best_waits_for(every: Sequence[Group], trials: Sequence[Trial], given: Group | None) -> str:
    """Runs that have not finished, of recipes in several settings: which one is the best is not known yet. `given` is the setting that
    was asked for by its own name, whose recipe's other settings do not matter."""
    chosen_from = {trial.recipe_name for trial in trials} - ({given.recipe_name} if given is not None else set())
    return _named_briefly([run.name for group in every if group.recipe_name in chosen_from for run in group.runs if run.pending])


def _named_briefly(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _pending_notes(groups: Sequence[Group]) -> list[Label]:
    waiting = [run.name for group in groups for run in group.runs if run.pending]
    if not waiting or len(groups) < 2:
        return []
    return [Label("warning", f"the verdict waits for runs that have not finished: {_named_briefly(waiting)}")]


def _cell(values: Sequence[float | str]) -> Cell:
    numbers = [value for value in values if isinstance(value, float)]
    whole = len(numbers) == len(values)
    return Cell(
        tuple(values),
        float(np.mean(numbers)) if whole else None,
        float(np.std(numbers, ddof=1)) if whole and len(numbers) > 1 else None,
    )


def _differences(
    groups: Sequence[Group],
    base: Group,
    rows: Sequence[Measure],
    cells: dict[tuple[str, str], Cell],
    points: dict[str, EqualPoint],
    target: float | None,
    margin: float | None,
    withheld: str,
) -> list[Difference]:
    """Every tested measure of every group against the baseline; the primary measure and all others are a family each."""
    others = [group for group in groups if group is not base]
    found: list[tuple[Measure, Group, Estimate, ExactTest | None, str]] = []
    for measure in rows:
        if not measure.tested or (measure.tested == "difference" and _says_nothing_new(measure, points, groups)):
            continue
        for group in others:
            estimate, exact, reason = _one(measure, base, group, cells, points, target)
            if withheld and reason != "none":
                reason = withheld
            found.append((measure, group, estimate, exact, reason))
    decisions: dict[int, Decision] = {}
    for family in (True, False):
        members = [i for i, row in enumerate(found) if (row[0].key == PRIMARY) == family and not row[4]]
        results = [found[i][3] or found[i][2] for i in members]
        decisions |= dict(zip(members, decide(results, margin=margin if family else None), strict=True))
    return [
        Difference(measure, group.label, estimate, exact, decisions.get(i, Decision("undecided", None)), _shared(base, group), reason)
        for i, (measure, group, estimate, exact, reason) in enumerate(found)
    ]


def _says_nothing_new(measure: Measure, points: dict[str, EqualPoint], groups: Sequence[Group]) -> bool:
    """A loss at equal cost where every finished run ends: that is the final loss."""
    if not measure.key.startswith("loss_at_"):
        return False
    ends = [
        float(run.evaluated[measure.axis][-1]) for group in groups for run in group.runs if run.status == "finished"
    ]
    value = points[measure.axis].value
    return all(end <= 1.001 * value for end in ends)


def _shared(base: Group, group: Group) -> tuple[int, ...]:
    return tuple(sorted(set(base.seeds) & set(group.seeds)))


def _one(
    measure: Measure,
    base: Group,
    group: Group,
    cells: dict[tuple[str, str], Cell],
    points: dict[str, EqualPoint],
    target: float | None,
) -> tuple[Estimate, ExactTest | None, str]:
    """The estimate, the exact test that decides in its place, and why nothing may be judged ("" where it may)."""
    nothing = Estimate(math.nan)
    pending = [run for run in (*base.runs, *group.runs) if run.pending]
    if pending:
        return nothing, None, f"pending: {len(pending)} of {len(base.runs) + len(group.runs)} runs not finished"
    if measure.tested == "rank" and not any(n for g in (base, group) for n in cells[measure.key, g.label].numbers):
        return nothing, None, "none"
    if measure.tested == "failures":
        a, b = ({run.seed: run.has_diverged for run in g.runs} for g in (base, group))
        if not any((*a.values(), *b.values())):
            return nothing, None, "none"
        test = inference.failure_test(a, b)
        return nothing, test, _too_few(test, base, group)
    reason = ""
    if measure.axis == "seconds":
        reason = why_seconds_differ([*base.runs, *group.runs])
    if not reason and (measure.key == PRIMARY or measure.tested == "match" or measure.key.startswith("loss_at_")):
        reason = other_schedule(measure, base, group, points)
    if not reason and measure.key.endswith("_to_target"):
        reason = other_budgets([*base.runs, *group.runs])
    if not reason and measure.tested == "match":
        reason = why_not_matched([*base.runs, *group.runs], measure.axis)
    reason = reason and f"not judged: {reason}"
    if measure.tested == "match":
        estimate, exact = _matched(measure.axis, base, group)
    else:
        estimate, exact = _from_cells(measure, base, group, cells, target)
    if exact is not None:
        return estimate, exact, reason or _too_few(exact, base, group)
    return estimate, None, reason or (estimate.reason if estimate.p is None else "")


def _too_few(test: ExactTest, base: Group, group: Group) -> str:
    if min(len(base.runs), len(group.runs)) == 1:
        return inference.ONE_SEED
    if test.smallest_p >= ALPHA:
        return f"undecided: so few runs cannot give p below {test.smallest_p:.2g}"
    return ""


def other_schedule(measure: Measure, base: Group, group: Group, points: dict[str, EqualPoint]) -> str:
    """Why the two stand at different places of their learning rates' decay; "" where they do not."""

    def position(side: Group) -> float | None:
        """Of its finished runs, on average; None where nothing decays, NaN where it is unknown."""
        found = []
        for run in side.runs:
            if run.status == "finished" and len(run.evaluated["step"]):
                axis = measure.axis if measure.key.startswith("loss_at_") else "tokens"
                at = points[axis].value if measure.key.startswith("loss_at_") else float(run.evaluated[axis][-1])
                found.append(schedule_position(run, axis, at))
        there = [value for value in found if value is not None]
        return sum(there) / len(there) if there else None

    if not all(any(run.status == "finished" and len(run.evaluated["step"]) for run in side.runs) for side in (base, group)):
        return ""
    a, b = position(base), position(group)
    unknown = [side.label for side, at in ((base, a), (group, b)) if at is not None and math.isnan(at)]
    if unknown:
        return f"where {' and '.join(unknown)} stood on the learning-rate schedule is known only at the run's end"
    if a is None and b is None:
        return ""
    if a is not None and b is not None:
        return "" if abs(a - b) <= SAME_SCHEDULE else f"{base.label} is at {100 * a:.0f} % of its decay, {group.label} at {100 * b:.0f} %"
    known, decaying, constant = (a, base, group) if b is None else (b, group, base)
    # A learning rate that never comes down is where it always is; the other must have come to the end of its own.
    if known is not None and known < 1 - SAME_SCHEDULE:
        return f"{decaying.label} is at {100 * known:.0f} % of its decay, {constant.label} does not decay"
    return ""


def _matched(axis: str, base: Group, group: Group) -> tuple[Estimate, ExactTest | None]:
    """How much less the better one needs for the worse one's final loss: per shared seed, or over all pairs of runs."""
    if any(run.failed or not len(run.evaluated["val_loss"]) for run in (*base.runs, *group.runs)):
        # At equal cost, which of two runs is ahead on this scale is which has the lower final loss.
        return Estimate(math.nan), _ranks(base, group, lambda run: run.evaluated["val_loss"][-1:])
    if base.seeds == group.seeds:
        pairs = zip(base.runs, group.runs, strict=True)
        estimate = inference.paired_t([match_ratio(a, b, axis) for a, b in pairs])
    else:
        estimate = inference.all_pairs(match_ratios(base.runs, group.runs, axis))
    if math.isnan(estimate.mean):
        return Estimate(math.nan, reason="matched before the first step: no claim"), None
    return inference.exponentiated(estimate), None


def _ranks(base: Group, group: Group, read: Callable[[RunNumbers], np.ndarray]) -> ExactTest:
    def side(runs: Sequence[RunNumbers]) -> list[float]:
        return [math.inf if run.failed or not len(read(run)) else float(read(run)[0]) for run in runs]

    return inference.rank_sum(side(base.runs), side(group.runs))


def _from_cells(
    measure: Measure,
    base: Group,
    group: Group,
    cells: dict[tuple[str, str], Cell],
    target: float | None,
) -> tuple[Estimate, ExactTest | None]:
    """By t where every run has a number; by ranks where a run failed, or did not reach the target, or the measure asks."""
    before, after = cells[measure.key, base.label], cells[measure.key, group.label]
    by_run = [*zip(base.runs, before.values, strict=True), *zip(group.runs, after.values, strict=True)]
    bounds = [run.failed or value in (NOT_REACHED, FAILED) for run, value in by_run]
    missing = [str(value) for (_, value), bound in zip(by_run, bounds, strict=True) if isinstance(value, str) and not bound]
    if missing:
        return Estimate(math.nan, reason=f"{', '.join(dict.fromkeys(missing))}: no claim"), None
    if measure.tested == "rank" or any(bounds):
        sides = []
        for runs, cell in ((base.runs, before), (group.runs, after)):
            values, beyond = [], []
            for run, value in zip(runs, cell.values, strict=True):
                short = value == NOT_REACHED and not run.failed
                beyond.append(short)
                spent = float(run.evaluated[measure.axis][-1]) if short else 0.0
                values.append(math.inf if run.failed else spent if short else float(value))
            sides.append((values, beyond))
        (a, a_beyond), (b, b_beyond) = sides
        estimate = Estimate(math.nan)
        if any(a_beyond) != any(b_beyond) and all(0 < value < math.inf for value in (*a, *b)):
            mean = math.exp(float(np.mean(np.log(a)) - np.mean(np.log(b))))
            estimate = Estimate(mean, log=True, bound=1 if any(a_beyond) else -1)
        return estimate, inference.rank_sum(a, b, a_beyond, b_beyond)
    numbers, others = (dict(zip(g.seeds, c.numbers, strict=True)) for g, c in ((base, before), (group, after)))
    if measure.tested == "ratio":
        if min(*numbers.values(), *others.values()) <= 0:
            return Estimate(math.nan, reason="reached before the first step: no claim"), None
        return inference.ratio_of_means(numbers, others), None
    return inference.difference_of_means(numbers, others), None
