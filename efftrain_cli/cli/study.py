"""`efftrain study`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from efftrain_cli.cli.app import app
from efftrain_cli.cli.options import (
    Array,
    Device,
    Devices,
    Jobs,
    Quiet,
    TableOrJson,
    TakeOver,
)
from efftrain_cli.foundation.errors import UsageError


@app.command(
    rich_help_panel="Compare",
    examples=(
        "efftrain study study.toml --plan",
        "efftrain study study.toml --rehearse",
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
    plan: Annotated[
        bool, Option("--plan", help="Print runs, tokens, time and disk; train nothing.")
    ] = False,
    rehearse: Annotated[
        bool,
        Option(
            "--rehearse",
            help="Run every phase at toy size, in a minute or so; it supports no claim.",
        ),
    ] = False,
    status: Annotated[
        bool,
        Option("--status", help="Print the state of the study, one line per run; train nothing."),
    ] = False,
    jobs: Jobs = 1,
    devices: Devices = 1,
    device: Device = "auto",
    allow: Annotated[
        bool,
        Option(
            "--allow",
            help="Continue even if the study was changed after its first run;"
            " it is then exploratory.",
        ),
    ] = False,
    take_over: TakeOver = None,
    array: Array = False,
    plot: Annotated[
        bool, Option("--plot", help="Draw the losses over learning rates in the terminal too.")
    ] = False,
    format_: TableOrJson = "table",
    quiet: Quiet = False,
) -> None:
    """Train the runs of a study file, and judge them by the rules that it fixed beforehand.

    To continue a study that was stopped or killed, give the same command again; finished runs are
    never trained twice.
    """
    if plan + rehearse + status > 1:
        raise UsageError("--plan, --rehearse and --status exclude each other\n  give one of them")
    from efftrain_cli.study import main
    from efftrain_cli.study.load import read_study
    from efftrain_cli.training.launch import check_devices

    study_file = read_study(file)
    check_devices(device, devices, 1 if array else jobs)
    as_json = format_ == "json"
    if plan:
        main.print_plan(study_file, jobs, as_json)
    elif status:
        main.print_status(study_file, jobs, as_json)
    elif rehearse:
        main.run_rehearsal(study_file, jobs, device, as_json, devices)
    else:
        main.run_study(study_file, jobs, device, allow, take_over, as_json, plot, devices, array)
