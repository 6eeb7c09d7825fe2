"""Conducting a study: tuning, then look by look the runs that it is judged by, until all is decided or all seeds are
used."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from efftrain_cli.compare.comparability import INCOMPARABLE, check
from efftrain_cli.compare.groups import Group, runs_of
from efftrain_cli.foundation.console import counted
from efftrain_cli.foundation.files import csv_text, write_whole
from efftrain_cli.foundation.why import Why
from efftrain_cli.run.calibrations import read_calibrations
from efftrain_cli.study.file import StudyFile
from efftrain_cli.study.judge import JudgedRun, StudyState, ended_groups, judge
from efftrain_cli.study.phases import (
    StudyTrial,
    judged_trials,
    tuning_trials,
    with_tuning,
)
from efftrain_cli.study.records import LOOKS, read_looks, read_plan, study_folder
from efftrain_cli.study.registration import removed_since
from efftrain_cli.study.text import verdict_json
from efftrain_cli.trials.array import ArrayWriter
from efftrain_cli.trials.calibrating import calibrate_once
from efftrain_cli.trials.runner import TrialRunner
from efftrain_cli.trials.trial import ENDED, read_trial


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
    if judgement.look and not (study_folder(file.name) / "looks.csv").exists():
        write_looks(judgement)
    while not judgement.complete:
        look = judgement.look
        trials, title = next_trials(file, look)
        states = runner.train([each.trial for each in trials], title)
        file = with_tuning(file)
        write_receipts(file)
        if timed_on is not None and file.study.is_about_seconds:
            runs = [each.run for each in read_runs(file) if each.rate is None]
            calibrate_once(runs, timed_on)
        judgement = judge_runs(file, allow)
        if not set(states) <= set(ENDED):
            return judgement
        if judgement.look > look:
            write_looks(judgement)
            tell(judgement)
    return judgement


def next_trials(file: StudyFile, look: int) -> tuple[list[StudyTrial], str]:
    """Return the runs that come next after so many looks, and what they are: tuning until all that the next look needs
    is chosen, then the runs of the look."""
    seeds = file.seeds[: file.looks[look]]
    blocks = [block for block in file.blocks if {*block.seeds} & {*seeds}]
    if not all(block.tuned for block in blocks):
        return tuning_trials(file, blocks), "tuning"
    title = f"look {look + 1} of {len(file.looks)}, {len(seeds)} seeds"
    return judged_trials(file, seeds), title


def read_runs(file: StudyFile) -> list[JudgedRun]:
    """Return the runs that exist and the study is judged by, none of a seed before its tuning has ended.

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
    calibrations = read_calibrations()
    withheld = INCOMPARABLE if allowed else None
    state = judge(file, runs, withheld, calibrations.valid)
    if state.look:
        # Other labels are about what was judged; but no run of the study may be incomparable.
        seeds = file.seeds[: file.looks[state.look - 1]]
        judged = [each for each in runs if each.run.seed in seeds]
        of_judged = check(ended_groups(file, judged), allow=True)
        labels = [*allowed, *(label for label in of_judged if label.kind != "allowed")]
    caveats = [*_registration_caveats(file, groups), *_tuning_caveat(file)]
    if file.study.is_about_seconds:
        for fault in calibrations.faults:
            caveats.append(Why("warning", f"a calibration is left out: {fault}"))
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
        f"each arm was tuned on {counted(seeds, 'seed')}: identical methods, each tuned on {simulated}, differ in "
        f"{TUNING_ERRORS[simulated]} of studies of 3 to 10 seeds"
    )
    return [Why("warning", text)]


def _registration_caveats(file: StudyFile, groups: Sequence[Group]) -> list[Why]:
    """Label runs that this study's registration did not start, and those that were removed after it."""
    plan = read_plan(file.name)
    if plan is None:
        return []
    caveats = []
    foreign = [run.name for run in runs_of(groups) if run.origin.get("study") != plan.sha256]
    if foreign:
        text = (
            f"{counted(len(foreign), 'run')} without its registration, such as {foreign[0]}: it did not start them, or did so "
            "with an efftrain that did not record this"
        )
        caveats.append(Why("warning", text))
    removed = removed_since(file, plan)
    if removed:
        text = f"{counted(len(removed), 'run')} of it, such as {removed[0]}, removed after its registration: results were seen"
        caveats.append(Why("allowed", text))
    return caveats


RECEIPTS = "phase block arm settings seed run status final_loss tokens train_seconds marks"
"""Columns of receipts.csv."""


def write_receipts(file: StudyFile) -> None:
    """Write receipts.csv: one row per run that has begun, whatever came of it."""
    rows = []
    trials = [*tuning_trials(file, file.blocks), *judged_trials(file, file.chosen_seeds)]
    for phase, arm, trial, *_ in trials:
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


def write_looks(state: StudyState) -> None:
    """Write looks.csv: the verdicts of every look up to this one, as they stood then."""
    folder = study_folder(state.file.name)
    columns = LOOKS.split()
    rows: list[list[object]] = []
    for row in read_looks(folder):
        if int(row["look"]) < state.look:
            rows.append([row[column] for column in columns])
    for verdict in state.verdicts:
        values = verdict_json(state.file, verdict)
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
