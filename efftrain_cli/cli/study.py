"""`efftrain study`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from efftrain_cli.cli.app import app
from efftrain_cli.cli.judged import Details, FailIf, conclude
from efftrain_cli.cli.options import (
    Array,
    CompareFormat,
    Device,
    Devices,
    Jobs,
    Output,
    PlanOnly,
    Plot,
    Quiet,
)
from efftrain_cli.foundation.errors import UsageError


@app.command(
    rich_help_panel="Judge",
    examples=(
        "efftrain study study.toml --plan",
        "efftrain study study.toml --check",
        "efftrain study study.toml --jobs 2",
    ),
)
def study(
    file: Annotated[
        Path,
        Argument(
            help="The study file, TOML: a question, seeds, primaries with their margins, and arms.",
            metavar="FILE",
        ),
    ],
    plan: PlanOnly = False,
    check: Annotated[
        bool, Option("--check", help="Train two steps of each distinct recipe, as it is.")
    ] = False,
    status: Annotated[
        bool, Option("--status", help="Print how far the study is; train nothing.")
    ] = False,
    jobs: Jobs = 1,
    devices: Devices = 1,
    device: Device = "auto",
    array: Array = False,
    details: Details = False,
    format_: CompareFormat = "table",
    output: Output = None,
    plot: Plot = False,
    fail_if: FailIf = None,
    quiet: Quiet = False,
) -> None:
    """Train the runs of a study file, and judge them by the rules that it fixed beforehand.

    The same command continues a study that was stopped or killed; finished runs are never trained
    twice.
    """
    if plan + check + status > 1:
        raise UsageError("--plan, --check and --status exclude each other\n  give one of them")
    from efftrain_cli.foundation.console import print_folded
    from efftrain_cli.study.conduct import check_steps, conduct, runner_of
    from efftrain_cli.study.plans import read_study
    from efftrain_cli.study.text import check_judgeable, plan_lines, status_lines

    planned = read_study(file)
    if plan:
        print_folded("\n".join(plan_lines(planned)))
        return
    if status:
        print_folded("\n".join(status_lines(planned)))
        return
    check_judgeable(planned)
    if check:
        print_folded("\n".join(check_steps(planned, device, devices)))
        return
    runner = runner_of(planned, device, devices, jobs, array=array)
    comparison = conduct(planned, runner)
    before = [planned.study.question] if planned.study.question else []
    conclude(
        comparison, format_, output, details=details, plot=plot, fail_if=fail_if, before=before
    )
