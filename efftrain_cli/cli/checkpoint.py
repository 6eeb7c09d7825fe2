"""`efftrain checkpoint list` and `efftrain checkpoint verify`."""

from __future__ import annotations

from typing import Annotated

import typer

from efftrain_cli.cli.app import app
from efftrain_cli.cli.complete import run_names
from efftrain_cli.foundation.errors import CheckpointError

group = typer.Typer(help="List a run's checkpoints, or verify them bit by bit.", no_args_is_help=True)
app.add_typer(group, name="checkpoint", rich_help_panel="Runs")


@group.command("list")
def list_(run: Annotated[str, typer.Argument(help="Name of a run.", autocompletion=run_names)]) -> None:
    """What a run has saved: step, size, time. Reads no tensor."""
    from efftrain_cli.checkpoint import describe_checkpoints

    for line in describe_checkpoints(run):
        print(line)


@group.command()
def verify(run: Annotated[str, typer.Argument(help="Name of a run.", autocompletion=run_names)]) -> None:
    """Compare every file of every checkpoint with the sha256 written beside it; exit code 3 where one differs."""
    from efftrain_cli.checkpoint import verify_checkpoints

    lines, damaged = verify_checkpoints(run)
    for line in lines:
        print(line)
    if damaged:
        raise CheckpointError(f"{damaged} of {len(lines)} checkpoints of run {run!r} are damaged")
