"""`efftrain study`: plan, status, rehearsal, or the study itself."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from efftrain_cli.compare import sensitivity
from efftrain_cli.compare.comparison import Comparison
from efftrain_cli.compare.sensitivity import Curve
from efftrain_cli.foundation.console import human_count, human_seconds, say, silent, table_lines
from efftrain_cli.foundation.errors import UsageError
from efftrain_cli.foundation.files import free_bytes
from efftrain_cli.foundation.why import Why
from efftrain_cli.run.directory import run_path, runs_root
from efftrain_cli.study import screen
from efftrain_cli.study.conduct import conduct, judge_runs
from efftrain_cli.study.file import StudyFile
from efftrain_cli.study.judge import StudyState
from efftrain_cli.study.ledger import draw_seeds
from efftrain_cli.study.phases import all_trials, left_of, over_rates, phases_of, tuning
from efftrain_cli.study.reading import read_study
from efftrain_cli.study.records import study_folder
from efftrain_cli.study.registration import Registration, check_registered, register
from efftrain_cli.study.rehearse import rehearsal
from efftrain_cli.study.tuning import choices, settings_of, tuning_done, widened
from efftrain_cli.trials.array import ArrayWriter
from efftrain_cli.trials.curves import sensitivity_curves
from efftrain_cli.trials.pictures import terminal_plot, write_figures
from efftrain_cli.trials.runner import TrialRunner, free_runs, last_loss, tokens_so_far
from efftrain_cli.trials.screen import curve_lines
from efftrain_cli.trials.trial import read_trial, recipe_of, state_of


def print_plan(file: StudyFile, jobs: int, as_json: bool) -> None:
    """Prints what the study costs."""
    phases = phases_of(file)
    if not as_json:
        print("\n".join(screen.plan_lines(file, phases, jobs, free_bytes(runs_root()))))
        return
    values = {
        "schema_version": 1,
        "study": file.name,
        "sha256": file.sha256,
        "looks": list(file.looks),
        "phases": [asdict(phase) for phase in phases],
        **left_of(phases)._asdict(),
        "runs": [
            {
                "phase": phase,
                "arm": arm,
                "name": trial.name,
                "seed": trial.seed,
                "settings": list(trial.settings),
            }
            for phase, (arm, trial) in all_trials(file)
        ],
    }
    print(json.dumps(values, indent=1))


def print_status(file: StudyFile, as_json: bool) -> None:
    """Prints one line per run, and the verdict so far."""
    rows, known = [], tuning_done(file)
    for phase, (arm, trial) in all_trials(file, settings_of(choices(file))):
        # Before tuning has ended, nobody knows the recipe of a confirmation run.
        state = state_of(trial) if known or phase == "tuning" else "new"
        # The last step may take a run beyond its budget.
        share = min(1.0, tokens_so_far(trial.name) / recipe_of(trial).train.tokens)
        done = f"{100 * share:.0f} %"
        loss = last_loss(trial.name)
        shown = "-" if loss is None else f"{loss:.4f}"
        rows.append((phase, arm, str(trial.seed), trial.name, state, done, shown))
    left = left_of(phases_of(file))
    registration = (
        check_registered(file, allow=True)
        if (study_folder(file.name) / "plan.json").exists()
        else None
    )
    judgement = judge_runs(file, allow=True)
    if as_json:
        print(json.dumps(verdict_json(file, judgement, registration) | {"runs": rows}, indent=1))
        return
    print(
        "\n".join(table_lines(("phase", "arm", "seed", "run", "state", "done", "val loss"), rows))
    )
    time_left = (
        ""
        if left.seconds_left is None
        else f", about {human_seconds(left.seconds_left)} one after the other"
    )
    print(f"\n{left.runs_left} runs left, {human_count(left.tokens_left)} tokens{time_left}\n")
    if registration is not None:
        print("\n".join(screen.verdict_lines(file, judgement, registration)))


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
    file = draw_seeds(file)
    folder = study_folder(file.name)
    runner = (ArrayWriter if array else TrialRunner)(
        folder=folder, device=device, jobs=jobs, devices=devices, study=registration.sha256
    )
    for reason in registration.exploratory:
        say(f"EXPLORATORY: {reason}")
    if take_over is not None:
        taken = free_runs([trial for _, (_, trial) in all_trials(file)], take_over)
        say(
            f"{len(taken)} runs of {take_over} taken over"
            + (f": {', '.join(taken)}" if taken else "")
        )

    def tell(judgement: StudyState) -> None:
        found = ", ".join(
            f"{verdict.arm} {verdict.outcome} in {verdict.question.title}"
            for verdict in judgement.verdicts
        )
        look, looks = judgement.look, judgement.looks
        if not silent():
            say(f"look {look} of {len(looks)} ({looks[look - 1]} seeds): {found}")

    judgement = conduct(file, runner, tell, allow)
    if array and judgement.complete:
        say("no run of the study is left")
    file = widened(file)
    curves = learning_rates(file, judgement)
    figures = write_figures(curves, folder) if curves else []
    if as_json:
        print(json.dumps(verdict_json(file, judgement, registration), indent=1))
        return
    print(verdict_text(file, judgement, registration, plot))
    if figures:
        print(f"figure: {' and '.join(map(str, figures))}")
    print(
        f"\nreceipts: {folder / 'receipts.csv'}; everything else about the runs, exploratory: efftrain compare --study {file.path}"
    )


def run_rehearsal(file: StudyFile, jobs: int, device: str, as_json: bool, devices: int = 1) -> None:
    """Runs every phase at toy size, in a folder of its own that goes when it worked.

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
        found = verdict_json(small, judgement, registration) | {"rehearsal": True}
        verdict_text(small, judgement, registration)  # a verdict that cannot be shown fails here
        rows = [(each.phase, each.arm, str(each.runs)) for each in phases_of(small)]
    if as_json:
        print(json.dumps(found, indent=1))
    else:
        print("\n".join(table_lines(("phase", "arm", "runs"), rows)))
    say(
        f"rehearsal: every phase of {file.name} works, at toy size on made text, in "
        f"{human_seconds(time.monotonic() - started)}; its numbers mean nothing. Its runs are in {folder}"
    )


def judged(file: StudyFile, allow: bool) -> tuple[StudyState, Registration]:
    """The study's verdicts from the runs there are, without training any.

    Raises:
        UsageError: the study was never registered, or was changed since; or its runs are not the study's, or not
            comparable.
    """
    registration = check_registered(file, allow)
    return judge_runs(file, allow), registration


def verdict_text(
    file: StudyFile, judgement: StudyState, registration: Registration, plot: bool = False
) -> str:
    """The verdicts, how each arm's setting was chosen, and the losses over learning rates."""
    lines = screen.verdict_lines(file, judgement, registration)
    if any(arm.tried for arm in judgement.tuned):
        lines += ["", *screen.tuning_lines(judgement.tuned)]
    if curves := learning_rates(file, judgement):
        lines += ["", *curve_lines(curves), *screen.optima_line(curves)]
        if plot:
            lines += ["", terminal_plot(curves, 80)]
    return "\n".join(lines)


def verdict_json(
    file: StudyFile, judgement: StudyState, registration: Registration | None
) -> dict[str, Any]:
    """The same as plain values."""
    rates = sensitivity.as_json(learning_rates(file, judgement))
    return screen.as_json(file, judgement, registration) | {"sensitivity": rates}


def learning_rates(file: StudyFile, judgement: StudyState) -> list[Curve]:
    """Each arm's losses over learning rates: of the primary lr_sensitivity, else of its tuning grid; empty where there
    are neither."""
    if file.rates:
        return sensitivity_curves(over_rates(file, settings_of(judgement.tuned)), read_trial)
    given = {arm.name: len(file.settings_of(arm)) for arm in file.study.arms}
    named = []
    for arm, trial in tuning(file):
        tried = trial.settings[given[arm] :]
        others = [setting for setting in tried if not setting.startswith("optim.lr=")]
        named.append((" ".join((arm, *others)), trial))
    return sensitivity_curves(named, read_trial)


EXPLORATORY = (
    "Exploratory: everything below was not fixed beforehand, and is not part of the verdict"
)


def labelled(comparison: Comparison, verdict: dict[str, Any]) -> Comparison:
    """A comparison of a study's runs that says in every format that it is not part of the verdict, and what that is."""
    found = "; ".join(
        f"{each['arm']} {each['outcome']} in {each['measure']}" for each in verdict["verdicts"]
    )
    text = f"exploratory: what is compared here was not fixed beforehand. The verdicts of study {verdict['study']}: {found or 'none yet'}"
    return replace(comparison, labels=(Why("warning", text), *comparison.labels), exploratory=True)


def show_judged(
    path: Path, allow: bool, on_stdout: bool
) -> tuple[str, dict[str, str], dict[str, Any]]:
    """Print a study's verdicts for `compare --study`. Return a run of the baseline, the arm of each run to compare by
    the run's name, and `verdict_json`.

    Raises:
        UsageError: the study was never registered, was changed since, or has no runs to compare.
    """
    file = read_study(path)
    judgement, registration = judged(file, allow)
    text = verdict_text(file, judgement, registration)
    arms = {
        trial.name: arm
        for phase, (arm, trial) in all_trials(file)
        if phase != "tuning" and (run_path(trial.name) / "metrics.jsonl").is_file()
    }
    first = next((name for name, arm in arms.items() if arm == file.study.baseline), None)
    if first is None:
        raise UsageError(
            f"study {file.name!r} has no run of its baseline {file.study.baseline!r} yet\n  train it: efftrain study {path}"
        )
    print(
        f"{text}\n\n{EXPLORATORY}\n{'-' * len(EXPLORATORY)}",
        file=sys.stdout if on_stdout else sys.stderr,
        flush=True,
    )
    return first, arms, verdict_json(file, judgement, registration)
