"""`efftrain sweep`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Option

from efftrain_cli.cli.app import app
from efftrain_cli.cli.complete import override_keys, recipe_names
from efftrain_cli.cli.options import (
    Array,
    Baseline,
    CompareFormat,
    Device,
    Devices,
    Jobs,
    Output,
    Plot,
    Quiet,
    TakeOver,
    TargetLoss,
)


@app.command(
    rich_help_panel="Compare",
    examples=(
        "efftrain sweep --recipe small --recipe small-slw --seeds 0..2",
        "efftrain sweep --recipe small --set optim.lr=1e-3,2e-3 --seeds 0 --plan",
    ),
)
def sweep(
    recipe: Annotated[
        list[str],
        Option(help="Recipe to train; repeat to compare several.", autocompletion=recipe_names),
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
    format_: CompareFormat = "table",
    output: Output = None,
    plot: Plot = False,
    allow: Annotated[
        bool,
        Option(
            "--allow",
            help="Train and show recipes that are not comparable, labelled, instead of refusing.",
        ),
    ] = False,
    plan: Annotated[
        bool,
        Option("--plan", help="Print the runs, as a table or with --format json; train nothing."),
    ] = False,
    jobs: Jobs = 1,
    devices: Devices = 1,
    figures: Annotated[
        Path | None,
        Option(help="Folder for the figure of loss against learning rate, as SVG and PNG."),
    ] = None,
    take_over: TakeOver = None,
    array: Array = False,
    quiet: Quiet = False,
) -> None:
    """Train every recipe with every seed and setting, then compare. A stopped sweep continues.

    With several values of optim.lr it also shows loss against learning rate;
    with several of train.tokens, the speed-up at matched loss, where each point
    is a run with its own budget.
    """
    import sys

    from efftrain_cli import sweep as command
    from efftrain_cli.compare.show import show_comparison
    from efftrain_cli.foundation.console import print_folded
    from efftrain_cli.foundation.errors import UsageError
    from efftrain_cli.trials.trial import check_comparable, grid, parse_seeds, parse_settings

    trials = grid(recipe, parse_seeds(seeds), parse_settings(set_ or []), name)
    if not allow:
        check_comparable(trials)
    if plan:
        if format_ not in ("table", "json"):
            raise UsageError(f"--format {format_} does not apply to a plan\n  give table or json")
        command.print_plan(trials, jobs, format_ == "json")
        return
    if not command.train(trials, device, jobs, name, take_over, devices, array):
        return
    comparison = command.compare_trials(trials, baseline, target_loss, allow)
    lines = command.grid_lines(trials, comparison.baseline.recipe_name, plot, figures)
    # With a format for programs, lines for people go to standard error, away from the data.
    for_people = sys.stdout if format_ == "table" and output is None else sys.stderr
    print_folded("\n".join(lines), stream=for_people)
    show_comparison(comparison, format_, output, plot=plot)
