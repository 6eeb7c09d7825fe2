"""`efftrain runs list|show|checkpoints|verify|rm`."""

from __future__ import annotations

import sys
from typing import Annotated, Literal

import typer
from typer import Argument, Option

from efftrain_cli.cli.app import Commands, app
from efftrain_cli.cli.complete import run_or_group_names, run_or_recipe_names
from efftrain_cli.cli.options import RunArgument, TableOrJson
from efftrain_cli.foundation.console import print_folded, print_json
from efftrain_cli.foundation.errors import UsageError

SHOWN = 20
"""Runs that are listed without --all."""
runs_app = Commands(
    no_args_is_help=True, help="List, show, verify and remove runs and their checkpoints."
)
app.add_typer(runs_app, name="runs", rich_help_panel="Start here")


@runs_app.command(
    "list",
    examples=(
        "efftrain runs list",
        "efftrain runs list 'small*' --sort loss",
        "efftrain runs list --format json",
    ),
)
def list_(
    names: Annotated[
        list[str] | None,
        Argument(
            help="Names or their beginnings, globs, or recipes; default all.",
            metavar="RUN",
            autocompletion=run_or_recipe_names,
        ),
    ] = None,
    sort: Annotated[
        Literal["age", "name", "loss", "tokens"],
        Option(help="age: newest first; name; loss: lowest first; tokens: most first."),
    ] = "age",
    every: Annotated[bool, Option("--all", help="All of them, not only the first twenty.")] = False,
    format_: TableOrJson = "table",
) -> None:
    """List runs: status, tokens, last validation loss, age."""
    import math
    import time

    from efftrain_cli.foundation.console import human, human_seconds, table_lines
    from efftrain_cli.run.directory import runs_root
    from efftrain_cli.run_list import glance_at_runs, read_runs

    if format_ == "json":
        frame = read_runs(names or [])
        print_json(frame.astype(object).where(frame.notna(), None).to_dict("records"))
        return
    runs = glance_at_runs(names or [], sort)
    if not runs:
        said = f"no runs in {runs_root()}; `efftrain pretrain` makes one"
        if names:
            said = (
                f"no runs called {' or '.join(names)} in {runs_root()};"
                " `efftrain runs list` shows all"
            )
        print_folded(said)
        return
    shown = runs if every else runs[:SHOWN]
    rows = []
    for run in shown:
        # An age's first unit is enough.
        age = " ".join(human_seconds(max(0.0, time.time() - run.written)).split()[:2])
        if run.status.endswith("%"):
            age = "now"
        loss = "" if math.isnan(run.val_loss) else f"{run.val_loss:.4f}"
        tokens = "" if math.isnan(run.tokens) else human(run.tokens)
        rows.append((run.name, run.status, tokens, loss, age))
    header = ("run", "status", "tokens", "val loss", "age")
    print("\n".join(table_lines(header, rows, ("tokens", "age"))))
    if len(shown) < len(runs):
        print(f"... {len(runs) - len(shown):,} more: --all")
    for run in shown:
        if run.problem:
            print_folded(f"warning: {run.problem}", stream=sys.stderr)


@runs_app.command(
    examples=(
        "efftrain runs show small-seed1234",
        "efftrain runs show small-seed1234 --format json",
    )
)
def show(
    name: RunArgument,
    format_: TableOrJson = "table",
) -> None:
    """Show one run: its result, what it spent, stability, recipe, text and disk; as JSON also its
    time, events, checkpoints, whole recipe and origin."""
    from efftrain_cli.run.names import find_run

    path = find_run(name)  # before pandas is imported
    from efftrain_cli.plan.describe import LABEL
    from efftrain_cli.run_show import lines_of_run, values_of_run

    if format_ == "json":
        print_json(values_of_run(path))
    else:
        print_folded("\n".join(lines_of_run(path)), indent=LABEL)


@runs_app.command(examples=("efftrain runs checkpoints small-seed1234",))
def checkpoints(name: RunArgument) -> None:
    """List what a run has saved: step, size, time."""
    from efftrain_cli.run.names import find_run

    path = find_run(name)
    from efftrain_cli.run_show import describe_checkpoints

    print("\n".join(describe_checkpoints(path)))


@runs_app.command(examples=("efftrain runs verify small-seed1234",))
def verify(name: RunArgument) -> None:
    """Compare rows, events, small files and checkpoints with their check values; exit code 3 if one
    is damaged."""
    from efftrain_cli.run.directory import run_path, runs_root
    from efftrain_cli.run.names import find_run

    is_study = (runs_root() / name / "plan.json").exists()
    path = run_path(name) if is_study else find_run(name)
    from efftrain_cli.run_show import verify_run

    print(verify_run(path))


@runs_app.command(examples=("efftrain runs rm small-seed1234", "efftrain runs rm 'try-*' --yes"))
def rm(
    names: Annotated[
        list[str],
        Argument(
            help="Runs, or globs over runs.", metavar="RUN", autocompletion=run_or_group_names
        ),
    ],
    yes: Annotated[bool, Option("--yes", "-y", help="Skip the confirmation prompt.")] = False,
) -> None:
    """Remove runs with all their checkpoints."""
    from efftrain_cli.foundation.console import counted, human
    from efftrain_cli.run_list import remove, remove_runs, size_of

    paths = remove_runs(names)
    for path in paths:
        print(f"{path}  {human(size_of(path), 'B')}")
    if not yes:
        if not sys.stdin.isatty():
            raise UsageError("nothing was removed: no terminal to ask on\n  give --yes")
        typer.confirm(f"Remove {counted(len(paths), 'run')} for good?", abort=True)
    for path in paths:
        remove(path)
    print(f"removed {counted(len(paths), 'run')}")
