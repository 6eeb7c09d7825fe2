"""`efftrain race`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from efftrain_cli.cli.app import app
from efftrain_cli.cli.complete import override_keys, recipe_names
from efftrain_cli.cli.judged import Details, FailIf, Margin, conclude
from efftrain_cli.cli.options import (
    CompareFormat,
    Device,
    Devices,
    Jobs,
    Output,
    Overrides,
    PlanOnly,
    Plot,
    Quiet,
)
from efftrain_cli.foundation.errors import UsageError

if TYPE_CHECKING:
    from efftrain_cli.study.file import Grid
    from efftrain_cli.study.plans import Plan

LONG = 12 * 3600.0
"""Seconds of training above which a race asks first."""
LARGE = 20e9
"""Bytes of disk above which a race asks first."""


@app.command(
    rich_help_panel="Start here",
    examples=(
        "efftrain race quickstart quickstart-slw",
        "efftrain race small small-slw --tune optim.lr=1e-3,2e-3,4e-3",
        "efftrain race adam muon --command 'python train.py {seed} {arm}'",
    ),
)
def race(
    arms: Annotated[
        list[str],
        Argument(
            help="Recipes, the baseline first; with --command, names of the arms.",
            metavar="ARM",
            autocompletion=recipe_names,
        ),
    ],
    pairs: Annotated[
        str, Option(help="Numbers of pairs at which to look, one after the other.")
    ] = "3,5,8",
    tune: Annotated[
        list[str] | None,
        Option(
            metavar="KEY=V,V",
            help="Tune every arm first, on three seeds of its own. Repeatable.",
            autocompletion=override_keys,
        ),
    ] = None,
    set_: Overrides = None,
    margin: Margin = 0.0,
    command: Annotated[
        str | None,
        Option(help="Program that trains an arm, with {seed} and {arm}; the seed is SEED too."),
    ] = None,
    metric: Annotated[
        str | None,
        Option(help="With --command: regular expression; the last match is the final loss."),
    ] = None,
    maximize: Annotated[
        bool, Option("--maximize", help="With --command: larger is better.")
    ] = False,
    failed_exit: Annotated[
        int | None, Option(help="With --command: exit code that means diverged.", min=1)
    ] = None,
    device: Device = "auto",
    devices: Devices = 1,
    jobs: Jobs = 1,
    plan: PlanOnly = False,
    yes: Annotated[
        bool, Option("--yes", "-y", help="Skip the question before a long race.")
    ] = False,
    details: Details = False,
    format_: CompareFormat = "table",
    output: Output = None,
    plot: Plot = False,
    fail_if: FailIf = None,
    quiet: Quiet = False,
) -> None:
    """Train recipes pair by pair until the answer is in: is B better than A?

    The same command continues a race that was stopped. A baseline is trained once for all its
    races, and race k against it multiplies its p by k.
    """
    from efftrain_cli.compare.judge import claim_of
    from efftrain_cli.foundation.console import print_folded
    from efftrain_cli.study.conduct import conduct, runner_of
    from efftrain_cli.study.race import race_plan
    from efftrain_cli.study.text import plan_lines
    from efftrain_cli.trials.command import METRIC
    from efftrain_cli.trials.trial import parse_seeds

    if command is None and (metric or maximize or failed_exit):
        raise UsageError(
            "--metric, --maximize and --failed-exit belong to --command\n  give --command too"
        )
    if command is not None and (set_ or tune):
        raise UsageError(
            "--set and --tune change recipes, and --command has none\n"
            "  write the settings into the command"
        )
    planned = race_plan(
        arms,
        claim_of(margin),
        parse_seeds(pairs, "--pairs"),
        tuple(set_ or []),
        grid=parse_grid(tune or []),
        command=command or "",
        metric=metric or METRIC,
        maximize=maximize,
        device=device,
    )
    if plan:
        print_folded("\n".join(plan_lines(planned)))
        return
    begin(planned, yes)
    runner = runner_of(planned, device, devices, jobs, failed_exit=failed_exit)
    comparison = conduct(planned, runner)
    conclude(comparison, format_, output, details=details, plot=plot, fail_if=fail_if)


def parse_grid(texts: list[str]) -> Grid:
    """Return what --tune gives, as a grid.

    Raises:
        UsageError: one names no key and values.
    """
    from efftrain_cli.recipe.draft import parse_override
    from efftrain_cli.trials.trial import parse_settings

    grid: Grid = {}
    for key, values in parse_settings(texts).items():
        if len(values) < 2:
            raise UsageError(f"--tune {key} has one value\n  use --set {key}={values[0]}")
        grid[key] = tuple(parse_override(f"{key}={value}")[1] for value in values)
    return grid


def begin(plan: Plan, yes: bool) -> None:
    """Print what a race needs, and ask before a long one.

    Raises:
        UsageError: it is long, and nobody can be asked.
    """
    from efftrain_cli.foundation.console import human, human_seconds, say
    from efftrain_cli.study.text import race_line
    from efftrain_cli.study.tuning import tuning_trials
    from efftrain_cli.trials.costs import costs_of

    if plan.study.command:
        say(race_line(plan))
        return
    tuning = tuning_trials(plan)
    first, costs = [
        costs_of([*tuning, *plan.trials(look)], weights_only=True)
        for look in (plan.looks[0], plan.looks[-1])
    ]
    time = costs.time
    if first.seconds and costs.seconds:
        span = f"{human_seconds(first.seconds)} to {human_seconds(costs.seconds)}"
        time = f"about {span} (by earlier runs)"
    say(f"{race_line(plan)}, {time}")
    seconds = costs.seconds or 0.0
    if yes or (seconds <= LONG and costs.disk <= LARGE):
        return
    text = f"this race may take {human_seconds(seconds)}, {human(costs.disk, 'B')}"
    if not sys.stdin.isatty():
        raise UsageError(f"{text}: no terminal to ask on\n  give --yes")
    typer.confirm(f"{text}. Begin?", abort=True)
