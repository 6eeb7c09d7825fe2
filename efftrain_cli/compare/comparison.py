"""Compare groups of runs: choose the baseline, judge every question, add what readers must know."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np

from efftrain_cli.compare.comparability import INCOMPARABLE, SIGNS, check
from efftrain_cli.compare.engine import Verdict, correct, judge_question
from efftrain_cli.compare.groups import (
    BEST_RULE,
    Group,
    TriedSetting,
    best_settings,
    differing_keys,
    finished_runs,
    group_runs,
    rank_of,
    runs_of,
)
from efftrain_cli.compare.measures import (
    Cost,
    Costs,
    EqualPoint,
    Question,
    equal_points,
    measures,
)
from efftrain_cli.compare.picture import letter
from efftrain_cli.compare.reading import RunNumbers, read_numbers
from efftrain_cli.compare.zero_shot import score_questions
from efftrain_cli.foundation.console import counted, listed
from efftrain_cli.foundation.errors import DataError, UsageError
from efftrain_cli.foundation.why import Why
from efftrain_cli.recipe.recipe import methods_among


@dataclass(frozen=True)
class Comparison:
    """Every number and verdict of a comparison; frames, tables and plots only print them."""

    groups: tuple[Group, ...]
    """Groups, the baseline first."""
    labels: tuple[Why, ...]
    """Remarks of the kinds "allowed" (losses are not comparable), "warning" and "note", in this
    order."""
    trials: tuple[TriedSetting, ...]
    """Settings from which recipes were given their best; empty if no recipe has several."""
    target_loss: float | None
    """Loss to reach in nats per token; None if costs are to match a final loss."""
    margin: float | None
    """Nats per token within which final losses count as equivalent; None if that is not tested."""
    questions: tuple[Question, ...]
    """Every measure, zero-shot scores last."""
    verdicts: tuple[Verdict, ...]
    """Verdict of each tested question and group except the baseline."""
    caveat: str
    """Statement that verdicts are exploratory, with the reasons; "" if nothing is judged."""

    @property
    def baseline(self) -> Group:
        """The group that the others are compared with."""
        return self.groups[0]

    @property
    def runs(self) -> list[RunNumbers]:
        """All runs, in the order of the groups."""
        return runs_of(self.groups)

    @property
    def points(self) -> dict[str, EqualPoint]:
        """The tokens, FLOPs and seconds at which all runs are compared."""
        return equal_points(self.runs)

    @property
    def recipe_differences(self) -> dict[str, list[object]]:
        """The dotted keys that differ, with the value of each group; None if it has no such key."""
        conditions = [group.conditions for group in self.groups]
        return {key: [each.get(key) for each in conditions] for key in differing_keys(conditions)}

    def letter(self, group: Group) -> str:
        """Return the short name of a group in tables and plots: A for the baseline."""
        return letter(self.groups.index(group))

    def verdict(self, key: str, label: str) -> Verdict | None:
        """Return the verdict on a measure of a group; None if it was not tested."""
        for verdict in self.verdicts:
            if (verdict.question.key, verdict.arm) == (key, label):
                return verdict
        return None


def read_valid_runs(paths: Sequence[Path]) -> tuple[list[RunNumbers], tuple[str, ...]]:
    """Read runs; return the valid ones, and the reasons why others are left out.

    Two are read at a time and then reduced, so that memory does not grow with their number.

    Raises:
        DataError: no run can be read.
    """
    runs = []
    left_out = []
    with ThreadPoolExecutor(2) as pool:
        for future in [pool.submit(read_numbers, path) for path in paths]:
            try:
                runs.append(future.result())
            except DataError as error:
                left_out.append(error)
    if left_out and not runs:
        raise left_out[0]
    return runs, tuple(map(str, left_out))


def compare(
    runs: Sequence[RunNumbers],
    *,
    baseline: str | None = None,
    target_loss: float | None = None,
    margin: float | None = None,
    every_setting: bool = False,
    allow: bool = False,
    equal: Cost | None = None,
    costs: Costs | None = None,
    left_out: Sequence[str] = (),
    sisters: Mapping[str, int] | None = None,
    study: str = "",
) -> Comparison:
    """Compare runs, grouped by recipe, with a baseline.

    Args:
        baseline: name of a recipe, group or run, or a glob over these names. Default: the only
            recipe without a method's section, else the first; one with a finished run goes before
            others.
        target_loss: nats per token; default: per pair of runs, the worse one's final loss.
        margin: nats per token within which two final losses count as equivalent.
        every_setting: compare each setting of a recipe instead of its best.
        equal: cost that must be equal within 2 % for final losses to be judged; default: tokens,
            or FLOPs if only these are equal.
        sisters: recipe -> number of its runs that are not compared.
        left_out: reasons why runs that were named are not among `runs`, for warnings.
        study: name of the study that the runs belong to; "" without one.

    Raises:
        UsageError: runs that must not be compared, an unknown baseline, or fewer than one run.
    """
    if not runs:
        raise UsageError("nothing to compare\n  name at least one run")
    for option, value in (("--target-loss", target_loss), ("--margin", margin)):
        if value is not None and not 0 < value < math.inf:
            raise UsageError(f"{option} {value:g} is no loss\n  give nats per token, above 0")
    runs, grid_notes = at_common_evaluations(runs)
    every = group_runs(runs, allow)
    named = _named(every, baseline)
    groups, trials = _choose_groups(every, named, every_setting)
    base = named or _default_baseline(groups)
    groups = [base, *(group for group in groups if group is not base)]
    labels = [
        *(Why("warning", f"a run is left out: {reason}") for reason in left_out),
        *_copy_notes(runs, every),
        *check(groups, allow),
    ]
    is_best = base.label in {group.label for group in best_settings(every)[0]}

    questions = [
        *measures(groups, target_loss, costs, margin, equal),
        *score_questions(groups),
    ]
    # A baseline that is named by its setting was not chosen among the recipe's settings.
    chosen_from = {trial.recipe_name for trial in trials}
    if named is not None and baseline != named.recipe_name:
        chosen_from.discard(named.recipe_name)
    withheld = None
    if named is None and len(groups) > 1 and len({group.recipe_name for group in groups}) == 1:
        text = "settings of one recipe: name one with --baseline to test the others against it"
        withheld = Why("settings", text)
    waiting = []
    for group in every:
        if group.recipe_name in chosen_from:
            waiting += [run.name for run in group.runs if run.pending]
    if waiting and withheld is None:
        withheld = Why("pending", f"pending: the best setting waits for {listed(waiting)}")

    verdicts = _judge(questions, groups, labels, withheld)
    labels += [*grid_notes, *_trial_notes(every, groups, trials, is_best)]
    caveat = ""
    if len(groups) > 1 or study:
        caveat = _caveat(study, target_loss, margin, equal, sisters or {}, is_best)
    return Comparison(
        groups=tuple(groups),
        labels=tuple(sorted(labels, key=lambda label: list(SIGNS).index(label.kind))),
        trials=tuple(trials),
        target_loss=target_loss,
        margin=margin,
        questions=tuple(questions),
        verdicts=tuple(verdicts),
        caveat=caveat,
    )


def _copy_notes(runs: Sequence[RunNumbers], groups: Sequence[Group]) -> list[Why]:
    """Return a warning that names older runs of one recipe and seed, which --allow leaves out."""
    newest = {run.name for run in runs_of(groups)}
    older = [run.name for run in runs if run.name not in newest]
    if not older:
        return []
    text = f"a newer run of the same recipe and seed is taken instead: {', '.join(older)} left out"
    return [Why("warning", text)]


def _caveat(
    study: str,
    target_loss: float | None,
    margin: float | None,
    equal: Cost | None,
    sisters: Mapping[str, int],
    is_best: bool,
) -> str:
    """Return the statement that verdicts are exploratory: what was chosen after the runs."""
    parts = ["nothing was fixed before the runs"]
    if study:
        parts = [f"not part of the verdicts of study {study}"]
    if target_loss is not None:
        parts.append("the target loss was chosen now (the best of 15 errs in 9 to 15 % of studies)")
    if margin is not None:
        parts.append("the margin was chosen now")
    if equal is not None:
        parts.append("what is equal was chosen now")
    if not is_best and not study:
        parts.append("the baseline is at a setting that is not its best")
    if sisters:
        counts = ", ".join(f"{count} of {recipe}" for recipe, count in sisters.items())
        parts.append(f"runs left out or removed: {counts}")
    return f"Exploratory: {'; '.join(parts)}."


def _choose_groups(
    every: Sequence[Group], named: Group | None, every_setting: bool
) -> tuple[list[Group], list[TriedSetting]]:
    """Return the groups to compare, a named baseline first, and the settings that were tried."""
    groups, trials = best_settings(every)
    if every_setting:
        groups = list(every)
        trials = []
    if named is None:
        return groups, trials
    # A baseline that is named by its setting stays, even if it is not its recipe's best.
    others = [group for group in groups if group is not named]
    if not every_setting and len({group.recipe_name for group in groups}) > 1:
        others = [group for group in others if group.recipe_name != named.recipe_name]
    groups = [named, *others]
    labels = {group.label for group in groups}
    return groups, [replace(trial, chosen=trial.label in labels) for trial in trials]


def _judge(
    questions: Sequence[Question],
    groups: Sequence[Group],
    labels: Sequence[Why],
    withheld: Why | None,
) -> list[Verdict]:
    """Judge every tested question of every group.

    Holm's correction has three families: the primary measure, zero-shot scores, and all others.
    """
    of_losses = withheld
    if any(label.kind == "allowed" for label in labels):
        of_losses = INCOMPARABLE
    primary: list[Verdict] = []
    others: list[Verdict] = []
    scores: list[Verdict] = []
    finished = finished_runs(runs_of(groups))
    for question in questions:
        if not question.tested or _is_final_loss(question, finished):
            continue
        family = others
        why = of_losses
        if question.tested == "score":
            family = scores
            why = withheld
        elif question.is_primary:
            family = primary
        family += [judge_question(question, groups[0], group, withheld=why) for group in groups[1:]]
    return [*correct(primary), *correct(others), *correct(scores)]


def _is_final_loss(question: Question, finished: Sequence[RunNumbers]) -> bool:
    """Return whether a loss at equal cost is the final loss of every finished run."""
    if question.point is None:
        return False
    ends = [float(run.evaluated[question.axis][-1]) for run in finished]
    return max(ends) <= 1.001 * question.point


def _named(groups: Sequence[Group], name: str | None) -> Group | None:
    """Return the group with a label, or a name of a recipe or run that matches; None for None."""
    if name is None:
        return None
    matches = []
    for group in groups:
        if name == group.label:
            return group
        names = (group.recipe_name, *(run.name for run in group.runs))
        if name in names or any(fnmatchcase(each, name) for each in names):
            matches.append(group)
    chosen = matches
    if len(matches) > 1 and name == matches[0].recipe_name:
        # A recipe with several settings: take its best one, as for the other recipes.
        best, _ = best_settings(groups)
        chosen = [group for group in best if group.recipe_name == name]
        if len(matches) < len(groups) and _differ_in_budget(chosen):
            chosen = [max(chosen, key=lambda group: group.budget)]
    if len(chosen) == 1:
        return chosen[0]
    fault = "is not one of the recipes compared"
    if matches:
        fault = "stands for several of the recipes compared"
    labels = ", ".join(repr(group.label) for group in groups)
    raise UsageError(f"--baseline {name!r} {fault}\n  choose one of {labels}")


def _differ_in_budget(groups: Sequence[Group]) -> bool:
    """Return whether all are one recipe with different budgets."""
    names = {group.recipe_name for group in groups}
    budgets = {group.budget for group in groups}
    return len(names) == 1 and len(budgets) == len(groups)


def _default_baseline(groups: Sequence[Group]) -> Group:
    """Return the default baseline.

    If all groups are settings of one recipe, it is the best of them; else the only recipe without a
    method, or the first. Groups with an ended run go before others, and so do those with a finished
    one.
    """
    ended = [group for group in groups if any(not run.pending for run in group.runs)] or groups
    if len({group.recipe_name for group in groups}) == 1:
        return min(ended, key=rank_of)
    plain = []
    for group in ended:
        sections = {key.split(".")[0]: True for key in group.recipe}
        if not methods_among(sections):
            plain.append(group)
    if _differ_in_budget(plain):
        return max(plain, key=lambda group: group.budget)
    finished = [group for group in ended if finished_runs(group.runs)]
    return (finished or ended)[0]


def at_common_evaluations(runs: Sequence[RunNumbers]) -> tuple[list[RunNumbers], list[Why]]:
    """Reduce the evaluations of runs to the steps that all finished runs share, and the last one.

    Runs with equal intervals of evaluation are returned as they are. The second value is a note on
    the reduction.
    """
    if len({run.recipe.get("eval.every") for run in runs}) < 2:
        return list(runs), []
    evaluated = [run for run in runs if len(run.evaluated["step"])]
    # A run that ended early has few evaluations, and must not reduce those of the others.
    grids = [set(run.evaluated["step"].tolist()) for run in finished_runs(runs) or evaluated]
    common = set.intersection(*grids) if grids else set()
    reduced = []
    for run in runs:
        keep = np.isin(run.evaluated["step"], list(common))
        keep[-1:] = True
        evaluated_alike = {name: values[keep] for name, values in run.evaluated.items()}
        reduced.append(replace(run, evaluated=evaluated_alike))
    note = (
        "evaluated at different intervals:"
        f" only the {len(common)} evaluations after the same steps, and the last, count"
    )
    return reduced, [Why("note", note)]


def _trial_notes(
    every: Sequence[Group],
    groups: Sequence[Group],
    trials: Sequence[TriedSetting],
    is_best: bool,
) -> list[Why]:
    """Return notes on how the settings of the recipes were chosen."""
    if not trials:
        return []
    taken = "each recipe" if is_best else "each recipe but the baseline"
    text = f"{taken} is taken at its own best setting: {BEST_RULE}; chosen on these same runs"
    notes = [Why("note", text)]
    tried: dict[str, tuple[int, int]] = {}
    for group in groups:
        same = [other for other in every if other.recipe_name == group.recipe_name]
        tried[group.recipe_name] = len(same), len(runs_of(same))
    if len(set(tried.values())) > 1:
        parts = [
            f"{name} {counted(settings, 'setting')} in {counted(runs, 'run')}"
            for name, (settings, runs) in tried.items()
        ]
        text = (
            f"not tuned alike: {', '.join(parts)}; the best of more settings, or of fewer runs of"
            " each, looks better than it is (20 settings against one: false claims in 15 % of"
            " studies of 5 seeds)"
        )
        notes.append(Why("warning", text))
    return notes
