"""`efftrain sweep`."""

from __future__ import annotations

from typing import Annotated

from typer import Argument, Option

from efftrain_cli.cli.app import app
from efftrain_cli.cli.complete import override_keys, recipe_names
from efftrain_cli.cli.judged import Details, FailIf, conclude
from efftrain_cli.cli.options import (
    Array,
    Baseline,
    CompareFormat,
    Device,
    Devices,
    Jobs,
    Output,
    PlanOnly,
    Plot,
    Quiet,
    TargetLoss,
)
from efftrain_cli.foundation.errors import UsageError


@app.command(
    rich_help_panel="Judge",
    examples=(
        "efftrain sweep small small-slw --seeds 0..2",
        "efftrain sweep small --set optim.lr=1e-3,2e-3 --seeds 0 --plan",
    ),
)
def sweep(
    recipes: Annotated[
        list[str],
        Argument(help="Recipes to train.", metavar="RECIPE", autocompletion=recipe_names),
    ],
    seeds: Annotated[str, Option(help="0..4 (both included), 1,3,5 or 7.")] = "0..2",
    set_: Annotated[
        list[str] | None,
        Option(
            "--set",
            metavar="KEY=VALUE",
            help="Override for all runs; with several values, every recipe is trained with each:"
            " optim.lr=1e-3,2e-3.",
            autocompletion=override_keys,
        ),
    ] = None,
    name: Annotated[str | None, Option(help="Prefix for the names of the runs.")] = None,
    device: Device = "auto",
    baseline: Baseline = None,
    target_loss: TargetLoss = None,
    details: Details = False,
    format_: CompareFormat = "table",
    output: Output = None,
    plot: Plot = False,
    fail_if: FailIf = None,
    plan: PlanOnly = False,
    jobs: Jobs = 1,
    devices: Devices = 1,
    array: Array = False,
    quiet: Quiet = False,
) -> None:
    """Train every recipe with every seed and setting, then compare. A stopped sweep continues.

    With several values of a setting it also shows the loss at each; with several of train.tokens,
    the compute-equivalent gain, where each point is a run with its own budget.
    """
    from efftrain_cli import sweep as command
    from efftrain_cli.foundation.console import print_folded, print_json
    from efftrain_cli.trials.array import ArrayWriter
    from efftrain_cli.trials.costs import costs_of, disk_lines
    from efftrain_cli.trials.runner import TrialRunner
    from efftrain_cli.trials.trial import Runner, check_trials, grid, parse_seeds, parse_settings

    settings = parse_settings(set_ or [])
    trials = grid(recipes, parse_seeds(seeds), settings, name)
    # A mistake leaves no folder of the sweep.
    check_trials(trials)
    comparison = None
    if plan:
        if format_ not in ("table", "json"):
            raise UsageError(f"--format {format_} does not apply to a plan\n  give table or json")
        rows = command.planned_rows(trials)
        costs = costs_of(trials)
        lines = [*command.row_lines(rows), str(costs), *disk_lines(costs)]
    else:
        folder = command.folder_of(trials, name)
        make = ArrayWriter if array else TrialRunner
        runner: Runner = make(
            folder=folder, device=device, devices=devices, jobs=jobs, study=name or ""
        )
        runs = command.train_sweep(trials, folder, runner)
        comparison = command.compare_sweep(runs, baseline, target_loss)
        rows = command.ended_rows(runs)
        varied = [key for key, values in settings.items() if len(values) > 1]
        lines = command.grid_text(runs, varied) or command.row_lines(rows)
    if comparison is not None:
        conclude(comparison, format_, output, details=details, plot=plot, fail_if=fail_if)
    elif format_ == "json":
        print_json(rows)
    else:
        print_folded("\n".join(lines))
