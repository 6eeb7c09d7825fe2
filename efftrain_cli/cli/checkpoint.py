"""`efftrain checkpoint list` and `efftrain checkpoint verify`."""

from __future__ import annotations

from efftrain_cli.cli.app import Commands, app
from efftrain_cli.cli.options import RunArgument, TableOrJson
from efftrain_cli.foundation.console import print_folded, print_json
from efftrain_cli.foundation.errors import CheckpointError

group = Commands(help="List a run's checkpoints, or verify them bit by bit.", no_args_is_help=True)
app.add_typer(group, name="checkpoint", rich_help_panel="Runs")


@group.command("list", examples=("efftrain checkpoint list small-seed1234",))
def list_(run: RunArgument, format_: TableOrJson = "table") -> None:
    """List what a run has saved: step, size, time."""
    from efftrain_cli.checkpoint import describe_checkpoints, list_checkpoints
    from efftrain_cli.run.names import find_run

    path = find_run(run)
    if format_ == "json":
        print_json(list_checkpoints(path))
    else:
        print("\n".join(describe_checkpoints(path)))


@group.command(examples=("efftrain checkpoint verify small-seed1234",))
def verify(run: RunArgument, format_: TableOrJson = "table") -> None:
    """Compare every file of every checkpoint with the sha256 written beside it; exit code 3 if one
    differs."""
    from efftrain_cli.checkpoint import describe_verified, verify_checkpoints
    from efftrain_cli.run.names import find_run

    path = find_run(run)
    verified = verify_checkpoints(path)
    if format_ == "json":
        print_json(verified)
    else:
        print_folded("\n".join(describe_verified(verified)), indent=9)
    damaged = sum(not each["sound"] for each in verified)
    if damaged:
        raise CheckpointError(
            f"{damaged} of {len(verified)} checkpoints of run {path.name!r} are damaged"
        )
