"""`efftrain study`: plan, status, rehearsal, or the study itself."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from efftrain_cli.compare.comparison import Comparison
from efftrain_cli.compare.picture import Plot, draw_in_terminal, write_figures
from efftrain_cli.compare.sensitivity import Curve
from efftrain_cli.foundation.console import (
    human_count,
    human_seconds,
    print_folded,
    say,
    silent,
    table_lines,
)
from efftrain_cli.foundation.errors import UsageError
from efftrain_cli.foundation.files import free_bytes
from efftrain_cli.foundation.why import Why
from efftrain_cli.run.directory import run_path, runs_root
from efftrain_cli.study import text
from efftrain_cli.study.conduct import conduct, judge_runs
from efftrain_cli.study.file import StudyFile
from efftrain_cli.study.judge import StudyState
from efftrain_cli.study.load import read_study
from efftrain_cli.study.phases import (
    all_trials,
    best_of_k,
    choices,
    judged_trials,
    phases_of,
    seeds_of,
    sum_phases,
    tuning,
    widened,
)
from efftrain_cli.study.records import Plan, list_outcomes, read_plan, study_folder
from efftrain_cli.study.registration import check_registered, draw_seeds, register
from efftrain_cli.study.rehearse import rehearsal
from efftrain_cli.trials.array import ArrayWriter
from efftrain_cli.trials.curves import sensitivity_curves
from efftrain_cli.trials.pictures import best_of_k_plot, rates_plot
from efftrain_cli.trials.runner import TrialRunner, free_runs, last_loss, tokens_so_far
from efftrain_cli.trials.screen import curve_lines
from efftrain_cli.trials.trial import read_trial, recipe_of, state_of


def print_plan(file: StudyFile, jobs: int, as_json: bool) -> None:
    """Print what the study costs."""
    phases = phases_of(file)
    if not as_json:
        print_folded("\n".join(text.plan_lines(file, phases, jobs, free_bytes(runs_root()))))
        return
    left = sum_phases("all", "", phases)
    runs = []
    for phase, arm, trial, *_ in all_trials(file):
        runs.append(
            {
                "phase": phase,
                "block": file.block_of[trial.seed],
                "arm": arm,
                "name": trial.name,
                "seed": trial.seed,
                "settings": list(trial.settings),
            }
        )
    values = {
        "schema_version": 1,
        "study": file.name,
        "sha256": file.sha256,
        "looks": list(file.looks),
        "phases": [asdict(phase) for phase in phases],
        "runs_left": left.runs_left,
        "tokens_left": left.tokens_left,
        "seconds_left": left.seconds_left,
        "disk_bytes": left.disk_bytes,
        "runs": runs,
    }
    print_json(values)


def print_status(file: StudyFile, as_json: bool) -> None:
    """Print one line per run, and the verdict so far."""
    rows, tuned = [], choices(file)
    chosen = seeds_of(tuned)
    for phase, arm, trial, *_ in all_trials(file, tuned):
        # Before tuning has ended, the recipe of a confirmation run is not chosen.
        state = "new"
        if phase == "tuning" or trial.seed in chosen:
            state = state_of(trial)
        if file.study.blocks:
            phase += f", block {file.block_of[trial.seed]}"
        # The last step may take a run beyond its budget.
        share = min(1.0, tokens_so_far(trial.name) / recipe_of(trial).train.tokens)
        loss = last_loss(trial.name)
        done = (f"{100 * share:.0f} %", "-" if loss is None else f"{loss:.4f}")
        rows.append((phase, arm, str(trial.seed), trial.name, state, *done))
    registration = None
    if read_plan(file.name) is not None:
        registration = check_registered(file, allow=True)
    judgement = judge_runs(file, allow=True)
    if as_json:
        curves = learning_rates(file, judgement)
        print_json(text.as_json(file, judgement, registration, curves) | {"runs": rows})
        return

    head = ("phase", "arm", "seed", "run", "state", "done", "val loss")
    left = sum_phases("all", "", phases_of(file))
    total = f"{left.runs_left} runs left, {human_count(left.tokens_left)} tokens"
    if left.seconds_left is not None:
        total += f", about {human_seconds(left.seconds_left)} one after the other"
    print("\n".join([*table_lines(head, rows), "", total, ""]))
    if registration is not None:
        print_folded("\n".join(text.verdict_lines(file, judgement, registration)))


def run_study(
    file: StudyFile,
    jobs: int,
    device: str,
    allow: bool,
    take_over: str | None,
    as_json: bool,
    plot: bool,
    devices: int = 1,
    array: bool = False,
) -> None:
    """Train what the study still needs, or write the job array of its next phase, and print the verdict."""
    registration = register(file, allow)
    # Another machine may have registered it since the file was read.
    file = widened(draw_seeds(file))
    folder = study_folder(file.name)
    for reason in registration.exploratory:
        say(f"EXPLORATORY: {reason}")
    if take_over is not None:
        names = free_runs([each.trial for each in all_trials(file)], take_over)
        line = f"{len(names)} runs of {take_over} taken over"
        say(": ".join(filter(None, (line, ", ".join(names)))))

    def tell(judgement: StudyState) -> None:
        verdicts = []
        for verdict in judgement.verdicts:
            verdicts.append(f"{verdict.arm} {verdict.outcome} in {verdict.question.title}")
        look, looks = judgement.look, judgement.looks
        if not silent():
            say(f"look {look} of {len(looks)} ({looks[look - 1]} seeds): {', '.join(verdicts)}")

    runner = (ArrayWriter if array else TrialRunner)(
        folder=folder,
        device=device,
        jobs=jobs,
        devices=devices,
        study=registration.sha256,
    )
    judgement = conduct(file, runner, tell, allow, timed_on=None if array else device)
    file = widened(file)
    if array and judgement.complete:
        say("no run of the study is left")
    curves = learning_rates(file, judgement)
    plots = plots_of(judgement, curves)
    figures = write_figures(plots, folder)
    if as_json:
        print_json(text.as_json(file, judgement, registration, curves))
        return
    print_folded(verdict_text(file, judgement, registration, curves))
    if plot:
        print("\n".join(f"\n{draw_in_terminal(each, 80)}" for each in plots))
    if figures:
        print(f"figure: {' and '.join(map(str, figures))}")
    print_folded(
        f"\nreceipts: {folder / 'receipts.csv'}; everything else about the runs, exploratory: "
        f"`efftrain compare --study {file.path}`"
    )


def run_rehearsal(
    file: StudyFile,
    jobs: int,
    device: str,
    as_json: bool,
    devices: int = 1,
) -> None:
    """Run every phase at toy size, in a folder of its own that goes when it worked.

    Raises:
        EfftrainError: a phase failed: the study would too.
    """
    started = time.monotonic()
    folder = study_folder(file.name) / "rehearsal"
    with rehearsal(file, folder, devices) as small:
        registration = register(small, allow=False)
        runner = TrialRunner(
            study_folder(small.name),
            device=device,
            jobs=jobs,
            devices=devices,
            study=registration.sha256,
        )
        judgement = conduct(small, runner)
        curves = learning_rates(small, judgement)
        values = text.as_json(small, judgement, registration, curves)
        # A verdict that cannot be shown fails here.
        verdict_text(small, judgement, registration, curves)
        rows = [(each.phase, each.arm, str(each.runs)) for each in phases_of(small)]
    if as_json:
        print_json(values | {"rehearsal": True})
    else:
        print("\n".join(table_lines(("phase", "arm", "runs"), rows)))
    say(
        f"rehearsal: every phase of {file.name} works, at toy size on made text, in "
        f"{human_seconds(time.monotonic() - started)}; its numbers mean nothing. "
        f"Its runs are in {folder}"
    )


def verdict_text(
    file: StudyFile,
    judgement: StudyState,
    registration: Plan,
    curves: Sequence[Curve],
) -> str:
    """Return the verdicts, how each arm's setting was chosen, and the losses over learning rates."""
    lines = text.verdict_lines(file, judgement, registration)
    if any(arm.tried for arm in judgement.tuned):
        lines += ["", *text.tuning_lines(judgement.tuned)]
    if curves:
        lines += ["", *curve_lines(curves)]
    return "\n".join(lines)


def plots_of(judgement: StudyState, curves: Sequence[Curve]) -> list[Plot]:
    """Return loss against learning rate, and the lowest to expect of k settings, of what the study has of these."""
    plots = []
    if curves:
        plots.append(rates_plot(curves))
    lowest = best_of_k(judgement.tuned)
    if lowest:
        plots.append(best_of_k_plot(lowest))
    return plots


def print_json(values: Mapping[str, Any]) -> None:
    """Print values as a JSON document."""
    print(json.dumps(values, indent=1))


def learning_rates(file: StudyFile, judgement: StudyState) -> list[Curve]:
    """Return each arm's losses over learning rates: of the primary lr_sensitivity, else of its tuning grid; empty if
    there are neither."""
    chosen = seeds_of(judgement.tuned)
    blocks = [block for block in file.blocks if chosen >= {*block.seeds}]
    trials = tuning(file, blocks or None)
    if file.rates:
        trials = [each for each in judged_trials(file, judgement.tuned) if each.rate is not None]
    named = []
    for each in trials:
        others = [setting for setting in each.tried if not setting.startswith("optim.lr=")]
        named.append((" ".join((each.arm, *others)), each.trial))
    return sensitivity_curves(named, read_trial)


# --- for `compare --study` --------------------------------------------------------------------

EXPLORATORY = (
    "Exploratory: everything below was not fixed beforehand, and is not part of the verdict"
)


def labelled(comparison: Comparison, verdict: dict[str, Any]) -> Comparison:
    """Return a comparison of a study's runs that says in every format that it is not part of the verdict, and what that
    is."""
    label = (
        "exploratory: what is compared here was not fixed beforehand. The verdicts of study "
        f"{verdict['study']}: {list_outcomes(verdict['verdicts']) or 'none yet'}"
    )
    return replace(comparison, labels=(Why("warning", label), *comparison.labels))


def show_judged(
    path: Path, allow: bool, on_stdout: bool
) -> tuple[str, dict[str, str], dict[str, Any]]:
    """Print a study's verdicts for `compare --study`.

    Return a run of the baseline, the arm of each run to compare by the run's name, and its JSON values.

    Raises:
        UsageError: the study was never registered, was changed since, or has no runs to compare.
    """
    file = read_study(path)
    registration = check_registered(file, allow)
    judgement = judge_runs(file, allow)
    curves = learning_rates(file, judgement)
    verdicts = verdict_text(file, judgement, registration, curves)
    arms = {}
    for phase, arm, trial, *_ in all_trials(file):
        if phase != "tuning" and (run_path(trial.name) / "metrics.jsonl").is_file():
            arms[trial.name] = arm
    of_baseline = [name for name, arm in arms.items() if arm == file.study.baseline]
    if not of_baseline:
        raise UsageError(
            f"study {file.name!r} has no run of its baseline {file.study.baseline!r} yet\n"
            f"  train it: efftrain study {path}"
        )
    print_folded(
        f"{verdicts}\n\n{EXPLORATORY}\n{'-' * len(EXPLORATORY)}",
        stream=sys.stdout if on_stdout else sys.stderr,
    )
    values = text.as_json(file, judgement, registration, curves)
    return of_baseline[0], arms, values
