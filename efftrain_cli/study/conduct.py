"""Conducting a study: tuning, then look by look the runs that it is judged by, until all is decided or all seeds are
used."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from efftrain_cli.compare.comparability import INCOMPARABLE, check
from efftrain_cli.compare.groups import Group
from efftrain_cli.compare.reading import RunNumbers
from efftrain_cli.foundation.console import counted
from efftrain_cli.foundation.files import csv_text, write_whole
from efftrain_cli.foundation.why import Why
from efftrain_cli.study.file import StudyFile
from efftrain_cli.study.judge import StudyState, judge
from efftrain_cli.study.phases import Tuned, all_trials, confirmation, over_rates, tuning
from efftrain_cli.study.records import LOOKS, read_looks, read_plan, study_folder
from efftrain_cli.study.tuning import choices, expected_best, settings_of, tuning_done, widened
from efftrain_cli.trials.array import ArrayWriter
from efftrain_cli.trials.runner import TrialRunner
from efftrain_cli.trials.trial import ENDED, read_trial, state_of


def conduct(
    file: StudyFile,
    runner: TrialRunner | ArrayWriter,
    tell: Callable[[StudyState], None] = lambda judgement: None,
    allow: bool = False,
) -> StudyState:
    """Train what the study still needs, and judge it at every look; or write the job array of its next phase.

    Args:
        tell: is given the judgement of every look that is taken.
        allow: go on, labelled and without a verdict, where the runs are not comparable.

    Raises:
        EfftrainError: as `TrialRunner.train` and `judge_runs`.
    """
    file = tune(file, runner)
    judgement = judge_runs(file, allow)
    if not tuning_done(file):
        return judgement
    chosen = settings_of(judgement.tuned)
    while not judgement.complete:
        seeds = file.seeds[: file.looks[judgement.look]]
        title = f"look {judgement.look + 1} of {len(file.looks)}, {len(seeds)} seeds"
        trials = [*confirmation(file, chosen, seeds), *over_rates(file, chosen, seeds)]
        states = runner.train([trial for _, trial in trials], title)
        judgement = judge_runs(file, allow, judgement.tuned)
        write_receipts(file, chosen)
        if not set(states) <= set(ENDED):
            return judgement
        write_looks(file, judgement)
        tell(judgement)
    return judgement


def tune(file: StudyFile, runner: TrialRunner | ArrayWriter) -> StudyFile:
    """Train the tuning runs until no grid has to grow; return the study with the grids as they are then."""
    trials = tuning(file)
    while trials:
        runner.train([trial for _, trial in trials], "tuning")
        write_receipts(file)
        wider = widened(file)
        if wider.grown == file.grown:
            if tuning_done(file):
                write_expected_best(file, choices(file))
            break
        file = wider
        trials = tuning(file)
    return file


def read_runs(
    file: StudyFile, chosen: Mapping[str, Sequence[str]], rate: float | None = None
) -> dict[str, dict[int, RunNumbers]]:
    """Return arm -> seed -> run, of the confirmation runs that exist.

    Args:
        rate: read the runs over learning rates instead, at this one.

    Raises:
        UsageError: a run has another recipe or seed than the study asks for.
    """
    runs: dict[str, dict[int, RunNumbers]] = {arm.name: {} for arm in file.study.arms}
    if not tuning_done(file):
        # Their settings are not chosen yet.
        return runs
    if rate is None:
        trials = confirmation(file, chosen)
    else:
        trials = over_rates(file, chosen, rates=(rate,))
    for arm, trial in trials:
        # A name alone says nothing of what was trained under it.
        state_of(trial)
        run = read_trial(trial)
        if run is not None:
            runs[arm][trial.seed] = run
    return runs


def judge_runs(file: StudyFile, allow: bool, tuned: tuple[Tuned, ...] | None = None) -> StudyState:
    """Judge the confirmation runs that exist, where `compare` would compare them.

    Args:
        allow: withhold every verdict instead of refusing, where validation sets or tokenizers differ.
        tuned: what the arms were trained with; None: what the tuning runs say now.

    Raises:
        UsageError: a run is not the study's, or the runs are not comparable and `allow` is False.
    """
    tuned = choices(file) if tuned is None else tuned
    chosen = settings_of(tuned)
    runs = read_runs(file, chosen)
    rated = {rate: read_runs(file, chosen, rate) for rate in file.rates}
    labels = check(_groups((runs, *rated.values()), file.seeds), allow)
    unfair = any(label.kind == "allowed" for label in labels)
    judgement = judge(file, runs, INCOMPARABLE if unfair else None, rated)
    if judgement.look:
        # Only what has been judged is worth a reader's attention; but no run of the study may be incomparable.
        judged = check(
            _groups((runs, *rated.values()), file.seeds[: judgement.looks[judgement.look - 1]]),
            allow=True,
        )
        labels = [label for label in labels if label.kind == "allowed"]
        labels += [label for label in judged if label.kind != "allowed"]
    caveats = [*_without_registration(file, (runs, *rated.values())), *_tuning_caveat(file)]
    return replace(judgement, labels=(*labels, *caveats, *judgement.labels), tuned=tuned)


TUNING_ERRORS = {1: "7 to 19 %", 3: "6 to 13 %", 5: "6 to 9 %"}
"""Tuning seeds -> how often identical methods, each tuned so, differ in studies of 3 to 10 seeds
(benchmarks/simulations/simulate_compare.py --only tuned)."""


def _tuning_caveat(file: StudyFile) -> list[Why]:
    """State the error of the verdicts that tuning adds: its own noise is in no interval."""
    seeds = len(file.tuning_seeds)
    if not seeds or seeds > max(TUNING_ERRORS):
        return []
    simulated = max(count for count in TUNING_ERRORS if count <= seeds)
    text = (
        f"each arm was tuned on {counted(seeds, 'seed')}: identical methods, each tuned on {simulated}, differ in "
        f"{TUNING_ERRORS[simulated]} of studies of 3 to 10 seeds"
    )
    return [Why("warning", text)]


def _without_registration(
    file: StudyFile, kinds: Sequence[Mapping[str, Mapping[int, RunNumbers]]]
) -> list[Why]:
    """Label runs that this study's registration did not start."""
    plan = read_plan(file.name)
    if plan is None:
        return []
    names = []
    for kind in kinds:
        for side in kind.values():
            names += [run.name for run in side.values() if run.origin.get("study") != plan.sha256]
    if not names:
        return []
    text = (
        f"{len(names)} of its runs do not carry its registration, such as {names[0]}: it did not start them, or did so with an "
        "efftrain that did not record this"
    )
    return [Why("warning", text)]


def _groups(
    kinds: Sequence[Mapping[str, Mapping[int, RunNumbers]]], seeds: Sequence[int]
) -> list[Group]:
    """Return the arms' ended runs with these seeds, those at one learning rate after those at another."""
    groups = []
    for arm in kinds[0]:
        ended = []
        for runs in kinds:
            of_seeds = (runs[arm][seed] for seed in seeds if seed in runs[arm])
            ended += [run for run in of_seeds if run.status in ENDED]
        if ended:
            groups.append(Group(arm, tuple(ended)))
    return groups


RECEIPTS = (
    "phase",
    "arm",
    "settings",
    "seed",
    "run",
    "status",
    "final_loss",
    "tokens",
    "train_seconds",
    "marks",
)
"""Columns of receipts.csv."""


def write_receipts(file: StudyFile, chosen: Mapping[str, Sequence[str]] | None = None) -> None:
    """Write receipts.csv: one row per run that has begun, whatever came of it."""
    rows: list[list[object]] = []
    for phase, (arm, trial) in all_trials(file, chosen):
        run = read_trial(trial)
        if run is None:
            continue
        loss = "" if run.final_loss is None else f"{run.final_loss:.6f}"
        settings = " ".join(trial.settings)
        numbers = [
            loss,
            f"{run.tokens:.0f}",
            f"{run.seconds:.1f}",
            "; ".join(mark.text for mark in run.marks),
        ]
        rows.append([phase, arm, settings, trial.seed, trial.name, run.status, *numbers])
    _write(study_folder(file.name) / "receipts.csv", RECEIPTS, rows)


def write_looks(file: StudyFile, judgement: StudyState) -> None:
    """Write looks.csv: the verdicts of every look up to this one, as they stood then."""
    folder = study_folder(file.name)
    rows: list[list[object]] = [
        [row[column] for column in LOOKS]
        for row in read_looks(folder)
        if int(row["look"]) < judgement.look
    ]
    for verdict in judgement.verdicts:
        estimate, question = verdict.estimate, verdict.question
        numbers = [
            _number(value)
            for value in (estimate.mean, estimate.low, estimate.high, verdict.p, verdict.p_holm)
        ]
        words = [
            question.key,
            question.direction,
            "" if question.margin is None else question.margin,
            verdict.arm,
        ]
        rows.append([judgement.look, len(verdict.seeds), *words, *numbers, verdict.outcome])
    _write(folder / "looks.csv", LOOKS, rows)


def write_expected_best(file: StudyFile, tuned: Sequence[Tuned]) -> None:
    """Write best-of-k.csv: the lowest loss to expect of k of an arm's settings."""
    rows: list[list[object]] = []
    for arm in tuned:
        for k, loss in enumerate(expected_best(arm), 1):
            rows.append([arm.arm, k, k * len(file.tuning_seeds), f"{loss:.6f}"])
    columns = ("arm", "settings", "runs", "expected_loss")
    _write(study_folder(file.name) / "best-of-k.csv", columns, rows)


def _write(path: Path, columns: Sequence[str], rows: list[list[object]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, csv_text(columns, rows))


def _number(value: float | None) -> str:
    return "" if value is None or math.isnan(value) else f"{value:.6g}"
