"""`efftrain runs list|show|verify|rm`."""

from __future__ import annotations

import sys
from functools import partial
from typing import Annotated, Literal

import typer
from typer import Argument, Option

from efftrain_cli.cli.app import Commands, app
from efftrain_cli.cli.complete import run_names, run_or_recipe_names
from efftrain_cli.cli.options import RunArgument, TableOrJson
from efftrain_cli.foundation.console import print_folded, print_json
from efftrain_cli.foundation.errors import UsageError

runs_app = Commands(no_args_is_help=True, help="List, show, verify and remove runs.")
app.add_typer(runs_app, name="runs", rich_help_panel="Runs")


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
    format_: TableOrJson = "table",
) -> None:
    """List runs: status, recipe, seed, tokens, best validation loss, age."""
    from efftrain_cli.run.directory import runs_root
    from efftrain_cli.run_list import read_runs, table_of_runs

    frame = read_runs(names or [], sort)
    if format_ == "json":
        print_json(frame.astype(object).where(frame.notna(), None).to_dict("records"))
        return
    if frame.empty:
        said = f"no runs in {runs_root()}; `efftrain pretrain` makes one"
        if names:
            said = (
                f"no runs called {' or '.join(names)} in {runs_root()};"
                " `efftrain runs list` shows all"
            )
        print_folded(said)
        return
    from efftrain_cli.compare.show import fits, print_tables
    from efftrain_cli.foundation.console import make_console

    console = make_console(result=True)
    print_tables(console, [table_of_runs(frame, partial(fits, console=console))])
    for problem in filter(None, frame.problem):
        print_folded(f"warning: {problem}", stream=sys.stderr)


@runs_app.command(
    examples=(
        "efftrain runs show small-seed1234",
        "efftrain runs show small-seed1234 --format json",
    )
)
def show(name: RunArgument, format_: TableOrJson = "table") -> None:
    """Show one run in full: its numbers, events, checkpoints, recipe and origin."""
    from efftrain_cli.compare.show import print_tables
    from efftrain_cli.foundation.console import make_console
    from efftrain_cli.run.names import find_run
    from efftrain_cli.run_show import tables_of_run, values_of_run

    path = find_run(name)
    if format_ == "json":
        print_json(values_of_run(path))
        return
    print_tables(make_console(result=True), tables_of_run(path))


@runs_app.command(examples=("efftrain runs verify small-seed1234",))
def verify(name: RunArgument) -> None:
    """Compare rows, events and small files with their check values; exit code 3 if one is
    damaged."""
    from efftrain_cli.run.directory import run_path, runs_root
    from efftrain_cli.run.names import find_run
    from efftrain_cli.run_list import verify_run

    is_state = any((runs_root() / name / file).exists() for file in ("plan.json", "search.json"))
    print(verify_run(run_path(name) if is_state else find_run(name)))


@runs_app.command(examples=("efftrain runs rm small-seed1234", "efftrain runs rm 'try-*' --yes"))
def rm(
    names: Annotated[
        list[str],
        Argument(help="Runs, or globs over runs.", metavar="RUN", autocompletion=run_names),
    ],
    yes: Annotated[bool, Option("--yes", "-y", help="Skip the confirmation prompt.")] = False,
) -> None:
    """Remove runs with all their checkpoints; their recipes stay in runs/.removed."""
    from efftrain_cli.foundation.console import counted, human_bytes
    from efftrain_cli.run_list import remove, remove_runs, size_of

    paths = remove_runs(names)
    for path in paths:
        print(f"{path}  {human_bytes(size_of(path))}")
    if not yes:
        if not sys.stdin.isatty():
            raise UsageError("nothing was removed: no terminal to ask on\n  give --yes")
        which = "this run" if len(paths) == 1 else f"these {len(paths)} runs"
        typer.confirm(f"Remove {which} for good?", abort=True)
    for path in paths:
        remove(path)
    print(f"removed {counted(len(paths), 'run')}")
