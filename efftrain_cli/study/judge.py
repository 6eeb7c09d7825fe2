"""Judging a study's runs: every primary measure of every arm against the baseline, at the looks so
far.

Values, never a terminal: `text.py` shows them. A diverged run is the worst result there is; a run
that has not ended is pending, and the look that needs it waits.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from efftrain_cli.compare.comparability import INCOMPARABLE, check
from efftrain_cli.compare.comparison import at_common_evaluations
from efftrain_cli.compare.engine import Looks, Verdict, correct, judge_question
from efftrain_cli.compare.groups import Group, runs_of
from efftrain_cli.compare.inference import ALPHA
from efftrain_cli.compare.reading import RunNumbers
from efftrain_cli.compare.sensitivity import Curve, why_not_judged, windows
from efftrain_cli.foundation.console import counted
from efftrain_cli.foundation.why import Why
from efftrain_cli.study.file import StudyFile
from efftrain_cli.study.phases import judged_trials, tuning_trials
from efftrain_cli.study.records import read_plan
from efftrain_cli.study.registration import removed_since
from efftrain_cli.trials.curves import curve_of, sensitivity_curves
from efftrain_cli.trials.trial import ENDED, read_trial


class JudgedRun(NamedTuple):
    """A run that the study is judged by."""

    arm: str
    rate: float | None
    """Learning rate, if a primary is over learning rates; None: the arm's own."""
    run: RunNumbers


@dataclass(frozen=True)
class StudyState:
    """A study at its last complete look."""

    file: StudyFile
    look: int = 0
    """Looks taken; 0 before the first."""
    verdicts: tuple[Verdict, ...] = ()
    pending: tuple[str, ...] = ()
    """Runs that the next look waits for."""
    labels: tuple[Why, ...] = ()
    """What a reader of the runs must know; "allowed" makes the study exploratory."""

    @property
    def decided(self) -> bool:
        """Every primary of every arm has been shown; further seeds would change nothing."""
        return bool(self.verdicts) and all(
            verdict.outcome != "undecided" for verdict in self.verdicts
        )

    @property
    def complete(self) -> bool:
        """No look is left, or none is needed."""
        return self.decided or self.look == len(self.file.looks)

    @cached_property
    def curves(self) -> list[Curve]:
        """Each arm's losses over learning rates: of the primary lr_sensitivity, else of its tuning
        grid."""
        file = self.file
        if file.rates:
            trials = judged_trials(file, file.seeds)
            trials = [each for each in trials if each.rate is not None]
        else:
            blocks = [block for block in file.blocks if block.tuned]
            trials = tuning_trials(file, blocks or file.blocks)
        named = []
        for each in trials:
            others = [setting for setting in each.tried if not setting.startswith("optim.lr=")]
            named.append((" ".join((each.arm, *others)), each.trial))
        return sensitivity_curves(named)


def read_runs(file: StudyFile) -> list[JudgedRun]:
    """Return the existing runs that judge the study, none of a seed before its tuning has ended.

    Raises:
        UsageError: a run has another recipe or seed than the study asks for.
    """
    runs = []
    for each in judged_trials(file, file.chosen_seeds):
        run = read_trial(each.trial)
        if run is not None:
            runs.append(JudgedRun(each.arm, each.rate, run))
    return runs


def judge_runs(file: StudyFile, allow: bool) -> StudyState:
    """Judge the confirmation runs that exist, where `compare` would compare them.

    Args:
        allow: withhold every verdict instead of refusing, if validation sets or tokenizers differ.

    Raises:
        UsageError: a run is not the study's, or the runs are not comparable and `allow` is False.
    """
    runs = read_runs(file)
    groups = ended_groups(file, runs)
    labels = check(groups, allow)
    allowed = [label for label in labels if label.kind == "allowed"]
    withheld = INCOMPARABLE if allowed else None
    state = judge(file, runs, withheld)
    if state.look:
        # Other labels are about what was judged; but no run of the study may be incomparable.
        seeds = file.seeds[: file.looks[state.look - 1]]
        judged = [each for each in runs if each.run.seed in seeds]
        of_judged = check(ended_groups(file, judged), allow=True)
        labels = [label for label in of_judged if label.kind != "allowed"]
        labels = [*allowed, *labels]
    caveats = [*_registration_caveats(file, groups), *_tuning_caveat(file), *_alpha_caveat(file)]
    return replace(state, labels=(*labels, *caveats, *state.labels))


TUNING_ERRORS = {
    1: "7 to 19 %",
    3: "6 to 13 %",
    5: "6 to 9 %",
}
"""Tuning seeds -> how often identical methods, each tuned so, differ in studies of 3 to 10 seeds
(benchmarks/simulations/simulate_compare.py --only tuned)."""


def _tuning_caveat(file: StudyFile) -> list[Why]:
    """State the error of the verdicts that tuning adds: its own noise is in no interval."""
    seeds = len(file.tuning_seeds)
    # In blocks it is: each difference holds a tuning of its own.
    if not seeds or seeds > max(TUNING_ERRORS) or file.study.blocks:
        return []
    simulated = max(count for count in TUNING_ERRORS if count <= seeds)
    text = (
        f"each arm was tuned on {counted(seeds, 'seed')}: identical methods, each tuned"
        f" on {simulated}, differ in {TUNING_ERRORS[simulated]} of studies of 3 to 10 seeds"
    )
    return [Why("warning", text)]


def _alpha_caveat(file: StudyFile) -> list[Why]:
    """Name the level of the verdicts if it is above the usual one."""
    if file.study.alpha <= ALPHA:
        return []
    share = f"{100 * file.study.alpha:g} %"
    text = f"alpha = {file.study.alpha:g}: {share} of studies without a difference show one"
    return [Why("warning", text)]


def _registration_caveats(file: StudyFile, groups: Sequence[Group]) -> list[Why]:
    """Label runs that this study's registration did not start, and those removed after it."""
    plan = read_plan(file.name)
    if plan is None:
        return []
    caveats = []
    foreign = [run.name for run in runs_of(groups) if run.origin.get("study") != plan.sha256]
    if foreign:
        text = (
            f"{counted(len(foreign), 'run')} without its registration, such as {foreign[0]}:"
            " it did not start them, or did so with an efftrain that did not record this"
        )
        caveats.append(Why("warning", text))
    removed = removed_since(file, plan)
    if removed:
        text = (
            f"{counted(len(removed), 'run')} of it,"
            f" such as {removed[0]}, removed after its registration: results were seen"
        )
        caveats.append(Why("allowed", text))
    return caveats


def judge(
    file: StudyFile,
    runs: Sequence[JudgedRun],
    withheld: Why | None = None,
) -> StudyState:
    """Judge a study.

    Args:
        runs: those that exist; looks take seeds in their order.
        withheld: why nothing may be judged at all; None where it may.
    """
    runs, notes = _evaluated_alike(runs)
    looks = file.looks_taken(0)
    state = StudyState(file, labels=notes)
    for number, seeds in enumerate(looks.plan, 1):
        pending = _name_pending(file, runs, file.seeds[:seeds])
        if pending:
            return replace(state, pending=tuple(pending))
        verdicts = _judge_look(
            file,
            runs,
            replace(looks, taken=number),
            withheld,
        )
        state = replace(state, look=number, verdicts=tuple(verdicts))
        if state.decided:
            return state
    return state


def _evaluated_alike(runs: Sequence[JudgedRun]) -> tuple[list[JudgedRun], tuple[Why, ...]]:
    """Return the runs, those at their arm's own learning rate reduced to the evaluations that all
    finished ones made, and notes on that, as `compare` reduces them."""
    rated = [each for each in runs if each.rate is not None]
    own = [each for each in runs if each.rate is None]
    reduced, notes = at_common_evaluations([each.run for each in own])
    alike = []
    for each, run in zip(own, reduced, strict=True):
        alike.append(each._replace(run=run))
    return [*alike, *rated], tuple(notes)


def _name_pending(file: StudyFile, runs: Sequence[JudgedRun], seeds: Sequence[int]) -> list[str]:
    """Return the arms and seeds of which a run has not ended."""
    ended = set()
    for each in runs:
        if each.run.status in ENDED:
            ended.add((each.arm, each.run.seed, each.rate))
    pending = []
    for seed, arm in itertools.product(seeds, file.study.arms):
        needed = {(arm.name, seed, rate) for rate in file.judged_rates}
        if not needed <= ended:
            pending.append(f"{arm.name} seed {seed}")
    return pending


def _judge_look(
    file: StudyFile,
    runs: Sequence[JudgedRun],
    looks: Looks,
    withheld: Why | None,
) -> list[Verdict]:
    """Judge every primary of every arm, and correct them as one family."""
    base = file.study.baseline
    verdicts = []
    seeds = file.seeds[: looks.plan[looks.taken - 1]]
    runs = [each for each in runs if each.run.seed in seeds]
    own = [each for each in runs if each.rate is None]
    rated = [each for each in runs if each.rate is not None]
    for primary in file.study.primary:
        question = replace(primary.question, equal=file.study.equal)
        if file.study.stuck_at is not None:
            question = replace(question, stuck_at=file.study.stuck_at)
        for arm in file.study.arms:
            names = (base, arm.name)
            why = None
            note = ""
            if arm.name == base:
                continue
            if question.over_rates:
                groups, why, note = _around_best(names, rated)
            else:
                groups = [_group(name, own) for name in names]
            judged = judge_question(
                question,
                groups[0],
                groups[1],
                looks,
                withheld or why,
            )
            if note and not math.isnan(judged.estimate.mean):
                judged = replace(judged, note=note)
            verdicts.append(judged)
    return correct(verdicts, looks)


def _around_best(
    names: Sequence[str], rated: Sequence[JudgedRun]
) -> tuple[list[Group], Why | None, str]:
    """Return each arm's runs around its own best learning rate, why they cannot be judged, and what
    the measure depends on."""
    curves = []
    for name in names:
        by_rate: dict[float, dict[int, RunNumbers | None]] = {}
        for arm, rate, run in rated:
            if arm == name and rate is not None:
                by_rate.setdefault(rate, {})[run.seed] = run
        curves.append(curve_of(name, by_rate))
    reason = why_not_judged(curves)
    if reason:
        groups = [_group(name, rated) for name in names]
        return groups, Why("not_judged", f"not judged: {reason}"), ""
    groups = []
    for curve, window in zip(curves, windows(curves), strict=True):
        around = curve.rates[window]
        runs = [each for each in rated if each.rate in around]
        groups.append(_group(curve.label, runs))
    return groups, None, _beside_sensitivity(curves[0], curves[1])


def ended_groups(file: StudyFile, runs: Sequence[JudgedRun]) -> list[Group]:
    """Return each arm's ended runs; no group of an arm without any."""
    groups = [_group(arm.name, runs) for arm in file.study.arms]
    return [group for group in groups if group.runs]


def _group(name: str, runs: Sequence[JudgedRun]) -> Group:
    """Return an arm's ended runs, in their order."""
    of_arm = [each.run for each in runs if each.arm == name]
    return Group(name, tuple(run for run in of_arm if run.status in ENDED))


def _beside_sensitivity(base: Curve, arm: Curve) -> str:
    """Say what the measure depends on, and what it leaves out: a recipe that learns little at every
    rate is not sensitive either."""
    places = []
    for curve in (base, arm):
        assert curve.best is not None
        loss = curve.means[curve.best]
        rate = curve.rates[curve.best]
        places.append(f"{curve.label} {loss:.3f} at {rate:g}")
    window = windows((base, arm))[1]
    beside = (window.stop - window.start) // 2
    note = (
        f"mean over each arm's best rate and {beside} on either side; other steps or widths give"
        " other values; optima half a step apart alone differ in up to 97 % of simulated studies"
        f" if the loss is twice as steep on one side; best losses: {' and '.join(places)}"
    )
    failed = sum(row.count(None) for row in arm.losses)
    if failed:
        note += f"; {failed} of its {len(arm.rates) * len(arm.seeds)} runs diverged"
    return note
