"""`efftrain study`: plan, status, rehearsal, or the study itself."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from efftrain_cli.compare.comparison import Comparison
from efftrain_cli.compare.picture import Plot, draw_in_terminal, write_figures
from efftrain_cli.foundation.console import (
    counted,
    human_seconds,
    print_folded,
    print_json,
    say,
    silent,
    table_lines,
)
from efftrain_cli.foundation.errors import UsageError
from efftrain_cli.foundation.why import Why
from efftrain_cli.run.directory import run_path
from efftrain_cli.study import text
from efftrain_cli.study.file import StudyFile
from efftrain_cli.study.judge import StudyState, judge_runs
from efftrain_cli.study.load import read_study
from efftrain_cli.study.phases import (
    StudyTrial,
    all_trials,
    best_of_k,
    judged_trials,
    read_costs,
    tuning_trials,
    with_tuning,
)
from efftrain_cli.study.records import (
    Plan,
    list_outcomes,
    read_plan,
    study_folder,
    write_looks,
    write_receipts,
)
from efftrain_cli.study.registration import check_registered, draw_seeds, register
from efftrain_cli.study.rehearse import rehearsal
from efftrain_cli.trials.array import ArrayWriter
from efftrain_cli.trials.costs import total_lines, total_of
from efftrain_cli.trials.pictures import best_of_k_plot, rates_plot
from efftrain_cli.trials.runner import TrialRunner, free_runs, last_loss, tokens_so_far
from efftrain_cli.trials.screen import curve_lines
from efftrain_cli.trials.trial import ENDED, recipe_of


def print_plan(file: StudyFile, jobs: int, as_json: bool) -> None:
    """Print what the study costs."""
    costs = read_costs(file)
    if not as_json:
        print_folded("\n".join(text.plan_lines(file, costs, jobs)))
        return
    total = total_of(costs)
    values = {
        "schema_version": 1,
        "study": file.name,
        "sha256": file.sha256,
        "looks": list(file.looks),
        "phases": text.sum_phases(costs),
        **total,
        "runs_left": total["runs"] - total["done"],
        "runs": costs,
    }
    print_json(values)


def print_status(file: StudyFile, jobs: int, as_json: bool) -> None:
    """Print one line per run, and the verdict so far."""
    costs = read_costs(file)
    rows = []
    for run, each in zip(costs, all_trials(file), strict=True):
        phase = each.phase
        if file.study.blocks:
            phase += f", block {run['block']}"
        # The last step may take a run beyond its budget.
        share = min(1.0, tokens_so_far(run["name"]) / recipe_of(each.trial).train.tokens)
        loss = last_loss(run["name"])
        rows.append(
            (
                phase,
                each.arm,
                str(run["seed"]),
                run["name"],
                run["state"],
                f"{100 * share:.0f} %",
                "-" if loss is None else f"{loss:.4f}",
            )
        )
    registration = None
    if read_plan(file.name) is not None:
        registration = check_registered(file, allow=True)
    judgement = judge_runs(file, allow=True)
    if as_json:
        print_json(text.as_json(judgement, registration) | {"runs": rows})
        return

    head = ("phase", "arm", "seed", "run", "state", "done", "val loss")
    print("\n".join([*table_lines(head, rows, ("phase", "arm", "seed")), ""]))
    print_folded("\n".join([*total_lines(costs, jobs), ""]))
    if registration is not None:
        print_folded("\n".join(text.verdict_lines(judgement, registration)))


def conduct(
    file: StudyFile,
    runner: TrialRunner | ArrayWriter,
    tell: Callable[[StudyState], None] = lambda judgement: None,
    allow: bool = False,
) -> StudyState:
    """Train what the study still needs, and judge it at every look; or write the job array of its
    next phase.

    Args:
        tell: is given the judgement of every look that is taken.
        allow: go on, labelled and without a verdict, where the runs are not comparable.

    Raises:
        EfftrainError: as `TrialRunner.train` and `judge_runs`.
    """
    judgement = judge_runs(file, allow)
    if judgement.look and not (study_folder(file.name) / "looks.csv").exists():
        _write_looks(judgement)
    while not judgement.complete:
        look = judgement.look
        trials, title = next_trials(file, look)
        states = runner.train([each.trial for each in trials], title)
        file = with_tuning(file)
        write_receipts(file)
        judgement = judge_runs(file, allow)
        if not set(states) <= set(ENDED):
            return judgement
        if judgement.look > look:
            _write_looks(judgement)
            tell(judgement)
    return judgement


def next_trials(file: StudyFile, look: int) -> tuple[list[StudyTrial], str]:
    """Return the runs that come next after so many looks, and what they are: tuning until all that
    the next look needs is chosen, then the runs of the look."""
    seeds = file.seeds[: file.looks[look]]
    blocks = [block for block in file.blocks if {*block.seeds} & {*seeds}]
    if not all(block.tuned for block in blocks):
        return tuning_trials(file, blocks), "tuning"
    title = f"look {look + 1} of {len(file.looks)}, {len(seeds)} seeds"
    return judged_trials(file, seeds), title


def _write_looks(judgement: StudyState) -> None:
    name = judgement.file.name
    reasons = text.why_exploratory(judgement, read_plan(name))
    verdicts = text.verdicts_json(judgement)
    write_looks(study_folder(name), judgement.look, verdicts, exploratory=bool(reasons))


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
    """Train what the study still needs, or write the job array of its next phase, and print the
    verdict."""
    registration = register(file, allow)
    # Another machine may have registered it since the file was read.
    file = with_tuning(draw_seeds(file))
    folder = study_folder(file.name)
    for reason in registration.exploratory:
        say(f"EXPLORATORY: {reason}")
    if take_over is not None:
        names = free_runs([each.trial for each in all_trials(file)], take_over)
        line = f"{counted(len(names), 'run')} of {take_over} taken over"
        if names:
            line += f": {', '.join(names)}"
        say(line)

    def tell(judgement: StudyState) -> None:
        verdicts = []
        for verdict in judgement.verdicts:
            verdicts.append(f"{verdict.arm} {verdict.outcome} in {verdict.question.title}")
        look = judgement.look
        looks = file.looks
        if not silent():
            say(f"look {look} of {len(looks)} ({looks[look - 1]} seeds): {', '.join(verdicts)}")

    runner = (ArrayWriter if array else TrialRunner)(
        folder=folder,
        device=device,
        jobs=jobs,
        devices=devices,
        study=registration.sha256,
    )
    judgement = conduct(file, runner, tell, allow)
    if array and judgement.complete:
        say("no run of the study is left")
    plots = plots_of(judgement)
    figures = write_figures(plots, folder)
    if as_json:
        print_json(text.as_json(judgement, registration))
        return
    print_folded(verdict_text(judgement, registration))
    if plot:
        print("\n".join(f"\n{draw_in_terminal(each, 80)}" for each in plots))
    if figures:
        print_folded(f"figures: {', '.join(map(str, figures))}")
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
    """Run every phase at toy size, in a folder of its own, and print how many runs each had but no
    verdict.

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
        # A verdict that cannot be shown fails here.
        verdict_text(judgement, registration)
        text.as_json(judgement, registration)
        phases = text.sum_phases(read_costs(judgement.file))
    if as_json:
        values = {"schema_version": 1, "study": file.name, "rehearsal": True, "phases": phases}
        print_json(values)
    else:
        rows = []
        for each in phases:
            rows.append((each["phase"], each["arm"], str(each["runs"])))
        print("\n".join(table_lines(("phase", "arm", "runs"), rows)))
    say(
        f"rehearsal: every phase of {file.name} works, at toy size on made text,"
        f" in {human_seconds(time.monotonic() - started)}; its numbers mean nothing."
        f" Its runs are in {folder}"
    )


def verdict_text(judgement: StudyState, registration: Plan) -> str:
    """Return the verdicts, how each arm's setting was chosen, the losses over learning rates."""
    lines = text.verdict_lines(judgement, registration)
    tuned = judgement.file.tuned
    if any(arm.tried for arm in tuned):
        lines += ["", *text.tuning_lines(tuned)]
    if judgement.curves:
        lines += ["", *curve_lines(judgement.curves)]
    return "\n".join(lines)


def plots_of(judgement: StudyState) -> list[Plot]:
    """Return loss against learning rate, and the lowest to expect of k settings, of what the study
    has of these."""
    plots = []
    if judgement.curves:
        plots.append(rates_plot(judgement.curves))
    lowest = best_of_k(judgement.file.tuned)
    if lowest:
        plots.append(best_of_k_plot(lowest))
    return plots


# --- for `compare --study` --------------------------------------------------------------------

EXPLORATORY = (
    "Exploratory: everything below was not fixed beforehand, and is not part of the verdict"
)


def labelled(comparison: Comparison, verdict: dict[str, Any]) -> Comparison:
    """Return a comparison of a study's runs that says in every format that it is not part of the
    verdict, and what that is, with all that is said of it."""
    study = verdict["study"]
    texts = [
        "exploratory: what is compared here was not fixed beforehand. The verdicts of study "
        f"{study}: {list_outcomes(verdict['verdicts']) or 'none yet'}"
    ]
    texts += [f"study {study} is exploratory: {reason}" for reason in verdict["exploratory"]]
    said = {label.text for label in comparison.labels}
    warnings = [each["text"] for each in verdict["labels"] if each["severity"] == "warning"]
    for arm in verdict["tuning"]["arms"]:
        warnings += arm["warnings"]
    texts += [f"study {study}: {text}" for text in dict.fromkeys(warnings) if text not in said]
    labels = [Why("warning", text) for text in texts]
    return replace(comparison, labels=(*labels, *comparison.labels))


def show_judged(
    path: Path, allow: bool, on_stdout: bool
) -> tuple[str, dict[str, str], dict[str, Any]]:
    """Print a study's verdicts for `compare --study`.

    Return a run of the baseline, the arm of each run to compare by the run's name, and its JSON
    values.

    Raises:
        UsageError: the study was never registered, was changed since, or has no runs to compare.
    """
    file = read_study(path)
    registration = check_registered(file, allow)
    judgement = judge_runs(file, allow)
    verdicts = verdict_text(judgement, registration)
    arms = {}
    for each in judged_trials(file, file.seeds):
        if (run_path(each.trial.name) / "metrics.jsonl").is_file():
            arms[each.trial.name] = each.arm
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
    return of_baseline[0], arms, text.as_json(judgement, registration)
