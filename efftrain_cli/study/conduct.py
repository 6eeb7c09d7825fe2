"""Conducting a plan: register it, tune, train, look, until every claim is closed.

A look is written once. A claim that it closed is never judged again, and trains no further seeds.
"""

from __future__ import annotations

import contextlib
import math
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from efftrain_cli.compare.comparison import Comparison, compare
from efftrain_cli.compare.inference import shares
from efftrain_cli.compare.judge import Result
from efftrain_cli.compare.show import estimate_text
from efftrain_cli.foundation.console import counted, listed, say
from efftrain_cli.foundation.errors import CheckpointError, UsageError
from efftrain_cli.foundation.files import make_folder, write_whole
from efftrain_cli.run.directory import checkpoints_of, runs_in, runs_root
from efftrain_cli.run.lock import take_lock
from efftrain_cli.run.manifest import keep_weights
from efftrain_cli.run.reading import Run
from efftrain_cli.study.plans import UNEQUAL, Plan
from efftrain_cli.study.race import count_race, file_of
from efftrain_cli.study.registration import read_looks, register, write_look
from efftrain_cli.study.tuning import TUNED, tune, tuning_trials
from efftrain_cli.trials.array import ArrayWriter
from efftrain_cli.trials.command import CommandRunner
from efftrain_cli.trials.runner import TrialRunner
from efftrain_cli.trials.trial import Runner, Trial, check_comparable

CHECKED = 2
"""Steps by which a recipe is checked."""
HOPELESS_FROM = 5
"""Fewest pairs at which a claim may be given up."""


def conduct(plan: Plan, runner: Runner) -> Comparison:
    """Train what a plan needs, and judge it at every look until all claims are closed.

    Raises:
        RunLockedError: another process conducts it.
        EfftrainError: as `register` and `Runner.train`.
    """
    make_folder(plan.folder)
    with take_lock(plan.folder / "lock"):
        path = plan.folder / "plan.json"
        races = count_race(plan) if plan.is_race else 1
        registered = register(path, plan.values).registered
        if plan.is_race:
            write_whole(plan.folder / "study.toml", file_of(plan.study))
        tuned = tune(plan, runner)
        if plan.is_race:
            drop_states(tuning_trials(plan))
        baseline = plan.study.baseline
        arms = plan.arms
        runs: dict[str, Run] = {}
        rows: list[Result] = []
        for number, (pairs, share) in enumerate(zip(plan.looks, shares(plan.looks), strict=True)):
            trials = plan.trials(pairs, tuned.points, arms)
            for run in train_trunks_first(runner, trials, counted(pairs, "pair")):
                runs[run.name] = run
            if plan.is_race:
                drop_states(trials)

            comparison = compare(
                runs.values(),
                baseline=baseline,
                claims=plan.study.primary,
                alpha=plan.study.alpha,
                share=share,
                closed=[row for row in rows if row.closed],
                races=races,
                maximize=plan.study.maximize,
                varied=plan.varied,
            )
            looks = read_looks(path)
            if number < len(looks):
                rows = looks[number]
            else:
                is_last = pairs == plan.looks[-1]
                rows = [close(row, plan, is_last) for row in comparison.verdicts]
                write_look(path, rows)
                tell_look(rows, pairs, plan.study.give_up)
            open_arms = {row.arm for row in rows if not row.closed}
            arms = tuple(arm for arm in arms if arm.name in {baseline, *open_arms})
            if not open_arms:
                break
        written = {row.key: row for row in rows}
        early = early_runs(plan, runs.values(), registered)
        return replace(
            comparison,
            rows=[written.get(row.key, row) for row in comparison.rows],
            caveats=[*tuned.caveats, *early, *comparison.caveats],
            grid=comparison.grid if tuned.grid.empty else tuned.grid,
        )


def runner_of(
    plan: Plan,
    device: str,
    devices: int = 1,
    jobs: int = 1,
    *,
    array: bool = False,
    failed_exit: int | None = None,
) -> Runner:
    """Return what trains the arms of a plan: their recipes, here or as a job array, or a command.

    Raises:
        UsageError: an array of a command.
    """
    if plan.study.command:
        if array:
            raise UsageError("--array trains recipes, and this study has a command")
        table = plan.runs_folder / "runs.csv"
        return CommandRunner(table, plan.study.metric, failed_exit=failed_exit)
    make = ArrayWriter if array else TrialRunner
    return make(
        folder=plan.folder,
        device=device,
        jobs=jobs,
        devices=devices,
        study="race" if plan.is_race else plan.name,
    )


def check_steps(plan: Plan, device: str, devices: int) -> list[str]:
    """Train CHECKED real steps of each recipe of a plan, in a folder that is removed; return a line
    each.

    Raises:
        EfftrainError: a recipe does not train.
    """
    trials = [trial for trial in plan.trials(1) if trial.trunk is None]
    check_comparable(trials)
    lines = []
    with tempfile.TemporaryDirectory(prefix="efftrain-check-") as folder, runs_in(Path(folder)):
        runner = TrialRunner(Path(folder), device=device, devices=devices)
        for trial in trials:
            (run,) = runner.train([replace(trial, until=CHECKED)], f"check of {trial.arm}")
            loss = run.spent("val_loss")
            lines.append(f"{trial.arm}: {CHECKED} steps, validation loss {loss:.4f}")
    return lines


def drop_states(trials: Iterable[Trial]) -> None:
    """Leave of the checkpoints of ended runs the weights: no race goes on from them."""
    for trial in trials:
        for checkpoint in checkpoints_of(runs_root() / trial.name):
            # A damaged checkpoint is for `runs verify` to name.
            with contextlib.suppress(CheckpointError):
                keep_weights(checkpoint)


def train_trunks_first(
    runner: Runner,
    trials: Sequence[Trial],
    title: str,
) -> list[Run]:
    """Train trials, those that others branch off first; a failed trunk has no branches."""
    runs = runner.train([trial for trial in trials if trial.trunk is None], title)
    ended = {run.name for run in runs if run.status == "finished"}
    branches = [trial for trial in trials if trial.trunk is not None and trial.trunk.run in ended]
    if branches:
        runs += runner.train(branches, f"{title}, branches")
    return runs


def close(
    row: Result,
    plan: Plan,
    is_last: bool,
) -> Result:
    """Return a claim as a look leaves it: closed if it is decided, given up as hopeless, or without
    p and verdict."""
    if row.closed:
        return row
    if not plan.is_judged(row.arm):
        return replace(
            row,
            p=math.nan,
            p_look=math.nan,
            p_corrected=math.nan,
            p_race=math.nan,
            outcome="",
            verdict="",
            why=UNEQUAL,
        )
    is_decided = row.verdict not in ("", "undecided")
    is_hopeless = not is_decided and row.p > plan.study.give_up and row.n >= HOPELESS_FROM
    remarks = []
    if row.outcome and plan.is_race and not plan.study.command:
        remarks.append(TUNED if plan.study.tuning else "rates as written")
    if is_decided and not is_last:
        remarks.append("stopped early: likely overstated")
    return replace(
        row,
        closed=is_decided or is_hopeless,
        given_up=is_hopeless,
        remark="; ".join(remarks),
    )


def tell_look(rows: Sequence[Result], pairs: int, give_up: float) -> None:
    """Print a line per claim about what a look says."""
    for row in rows:
        estimate = estimate_text(row, with_unit=True) or row.why
        verdict = row.verdict or "not judged"
        if row.given_up:
            verdict = f"given up, p > {give_up:g}"
        name = row.arm if row.measure == "final_loss" else f"{row.arm}, {row.title},"
        say(f"{counted(pairs, 'pair')}: {name} {estimate}: {verdict}")


def early_runs(
    plan: Plan,
    runs: Iterable[Run],
    registered: str,
) -> list[str]:
    """Return a caveat about runs that are older than the registration."""
    # A run of unknown start counts as later.
    early = [run.name for run in runs if str(run.conditions.get("started", "~")) < registered]
    if not early:
        return []
    if plan.is_race:
        return [f"{counted(len(early), 'run')} of an earlier race are used"]
    return [f"older than the registration: {listed(early)}"]
