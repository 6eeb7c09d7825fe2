"""Conducting a study: tuning, then look by look the runs that it is judged by, until all is decided or all seeds are
used."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from efftrain_cli.compare.comparability import INCOMPARABLE, check
from efftrain_cli.compare.groups import Group
from efftrain_cli.compare.reading import RunNumbers
from efftrain_cli.foundation.console import counted
from efftrain_cli.foundation.files import csv_text, write_whole
from efftrain_cli.foundation.why import Why
from efftrain_cli.run.calibrations import read_calibrations
from efftrain_cli.study.file import StudyFile
from efftrain_cli.study.judge import StudyState, ended_groups, judge
from efftrain_cli.study.phases import (
    StudyTrial,
    Tuned,
    all_trials,
    choices,
    judged_trials,
    seeds_of,
    tuning,
    widened,
)
from efftrain_cli.study.records import LOOKS, read_looks, read_plan, study_folder
from efftrain_cli.study.text import verdict_json
from efftrain_cli.trials.array import ArrayWriter
from efftrain_cli.trials.calibrating import calibrate_once
from efftrain_cli.trials.runner import TrialRunner
from efftrain_cli.trials.trial import ENDED, read_trial, state_of


def conduct(
    file: StudyFile,
    runner: TrialRunner | ArrayWriter,
    tell: Callable[[StudyState], None] = lambda judgement: None,
    allow: bool = False,
    timed_on: str | None = None,
) -> StudyState:
    """Train what the study still needs, and judge it at every look; or write the job array of its next phase.

    Args:
        tell: is given the judgement of every look that is taken.
        allow: go on, labelled and without a verdict, where the runs are not comparable.
        timed_on: device on which steps are timed if a verdict is about seconds; None: nowhere.

    Raises:
        EfftrainError: as `TrialRunner.train` and `judge_runs`.
    """
    judgement = judge_runs(file, allow)
    while not judgement.complete:
        seeds = file.seeds[: file.looks[judgement.look]]
        file, ended = tune(file, runner, seeds)
        if ended:
            tuned = choices(file)
            title = f"look {judgement.look + 1} of {len(file.looks)}, {len(seeds)} seeds"
            ended = _train(file, runner, judged_trials(file, tuned, seeds), title)
            if timed_on is not None and file.study.is_about_seconds:
                arms = read_runs(file, tuned)[None]
                calibrate_once([run for side in arms.values() for run in side.values()], timed_on)
            judgement = judge_runs(file, allow, tuned)
        if not ended:
            return judgement
        write_looks(file, judgement)
        tell(judgement)
    return judgement


def tune(
    file: StudyFile, runner: TrialRunner | ArrayWriter, seeds: Sequence[int]
) -> tuple[StudyFile, bool]:
    """Train the tuning runs that these judged seeds need until no grid has to grow.

    Return the study with the grids as they are then, and whether all these runs have ended.
    """
    while True:
        blocks = [block for block in file.blocks if {*block.seeds} & {*seeds}]
        trials = tuning(file, blocks)
        if trials and not _train(file, runner, trials, "tuning"):
            return file, False
        wider = widened(file)
        if wider.blocks == file.blocks:
            return file, True
        file = wider


def _train(
    file: StudyFile,
    runner: TrialRunner | ArrayWriter,
    trials: Sequence[StudyTrial],
    title: str,
) -> bool:
    """Train runs, or write their job array; return whether all of them have ended."""
    states = runner.train([each.trial for each in trials], title)
    write_receipts(file)
    return set(states) <= set(ENDED)


def read_runs(
    file: StudyFile, tuned: Sequence[Tuned]
) -> dict[float | None, dict[str, dict[int, RunNumbers]]]:
    """Return the runs that exist and the study is judged by: by learning rate, None of those with
    the arms' own, then by arm and seed; none of a seed before its tuning has ended.

    Raises:
        UsageError: a run has another recipe or seed than the study asks for.
    """
    kinds: dict[float | None, dict[str, dict[int, RunNumbers]]] = {}
    for rate in (None, *file.rates):
        kinds[rate] = {arm.name: {} for arm in file.study.arms}
    for each in judged_trials(file, tuned, sorted(seeds_of(tuned))):
        # A name alone says nothing of what was trained under it.
        state_of(each.trial)
        run = read_trial(each.trial)
        if run is not None:
            kinds[each.rate][each.arm][run.seed] = run
    return kinds


def judge_runs(
    file: StudyFile,
    allow: bool,
    tuned: Sequence[Tuned] | None = None,
) -> StudyState:
    """Judge the confirmation runs that exist, where `compare` would compare them.

    Args:
        allow: withhold every verdict instead of refusing, if validation sets or tokenizers differ.
        tuned: what the arms were trained with; None: what the tuning runs say now.

    Raises:
        UsageError: a run is not the study's, or the runs are not comparable and `allow` is False.
    """
    if tuned is None:
        tuned = choices(file)
    runs_by_rate = read_runs(file, tuned)
    kinds = list(runs_by_rate.values())
    groups = ended_groups(file, kinds, file.seeds)
    labels = check(groups, allow)
    allowed = [label for label in labels if label.kind == "allowed"]
    calibrations = read_calibrations()
    rated = {rate: runs for rate, runs in runs_by_rate.items() if rate is not None}
    state = judge(
        file,
        runs_by_rate[None],
        INCOMPARABLE if allowed else None,
        rated,
        calibrations.valid,
    )
    if state.look:
        # Other labels are about what was judged; but no run of the study may be incomparable.
        seeds = file.seeds[: state.looks[state.look - 1]]
        of_judged = check(ended_groups(file, kinds, seeds), allow=True)
        labels = [*allowed, *(label for label in of_judged if label.kind != "allowed")]
    caveats = [*_without_registration(file, groups), *_tuning_caveat(file)]
    if file.study.is_about_seconds:
        for fault in calibrations.faults:
            caveats.append(Why("warning", f"a calibration is left out: {fault}"))
    return replace(state, labels=(*labels, *caveats, *state.labels), tuned=tuple(tuned))


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
        f"each arm was tuned on {counted(seeds, 'seed')}: identical methods, each tuned on {simulated}, differ in "
        f"{TUNING_ERRORS[simulated]} of studies of 3 to 10 seeds"
    )
    return [Why("warning", text)]


def _without_registration(file: StudyFile, groups: Sequence[Group]) -> list[Why]:
    """Label runs that this study's registration did not start."""
    plan = read_plan(file.name)
    if plan is None:
        return []
    names = []
    for group in groups:
        names += [run.name for run in group.runs if run.origin.get("study") != plan.sha256]
    if not names:
        return []
    text = (
        f"{len(names)} of its runs do not carry its registration, such as {names[0]}: it did not start them, or did so with an "
        "efftrain that did not record this"
    )
    return [Why("warning", text)]


RECEIPTS = "phase block arm settings seed run status final_loss tokens train_seconds marks"
"""Columns of receipts.csv."""


def write_receipts(file: StudyFile) -> None:
    """Write receipts.csv: one row per run that has begun, whatever came of it."""
    rows = []
    for phase, arm, trial, *_ in all_trials(file, choices(file)):
        run = read_trial(trial)
        if run is None:
            continue
        rows.append(
            (
                phase,
                file.block_of[trial.seed],
                arm,
                " ".join(trial.settings),
                trial.seed,
                trial.name,
                run.status,
                "" if run.final_loss is None else f"{run.final_loss:.6f}",
                f"{run.tokens:.0f}",
                f"{run.seconds:.1f}",
                "; ".join(mark.text for mark in run.marks),
            )
        )
    _write(study_folder(file.name) / "receipts.csv", RECEIPTS.split(), rows)


def write_looks(file: StudyFile, state: StudyState) -> None:
    """Write looks.csv: the verdicts of every look up to this one, as they stood then."""
    folder = study_folder(file.name)
    columns = LOOKS.split()
    rows: list[list[object]] = []
    for row in read_looks(folder):
        if int(row["look"]) < state.look:
            rows.append([row[column] for column in columns])
    for verdict in state.verdicts:
        values = verdict_json(file, verdict)
        values |= {"look": state.look, "seeds": len(verdict.seeds)}
        rows.append([_cell(values[column]) for column in columns])
    _write(folder / "looks.csv", columns, rows)


def _write(
    path: Path,
    columns: Sequence[str],
    rows: Sequence[Sequence[object]],
) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, csv_text(columns, rows))


def _cell(value: object) -> object:
    """Return a value as a cell: numbers with six digits, "" if there is none."""
    if isinstance(value, float):
        return "" if math.isnan(value) else f"{value:.6g}"
    return "" if value is None else value
