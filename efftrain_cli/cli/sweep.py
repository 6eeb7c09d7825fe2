"""`efftrain sweep`."""

from __future__ import annotations

from typing import Annotated

from typer import Argument, Option

from efftrain_cli.cli.app import app
from efftrain_cli.cli.complete import override_keys, recipe_names
from efftrain_cli.cli.judged import Details, FailIf
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
        list[str] | None,
        Argument(help="Recipes to train.", metavar="RECIPE", autocompletion=recipe_names),
    ] = None,
    recipe: Annotated[
        list[str] | None,
        Option(help="The same, repeatable.", autocompletion=recipe_names),
    ] = None,
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
    plan: Annotated[
        bool, Option("--plan", help="Print the runs and their costs; train nothing.")
    ] = False,
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
    from efftrain_cli.cli.judged import end_with_verdict, show
    from efftrain_cli.foundation.console import print_folded, print_json
    from efftrain_cli.foundation.files import make_folder
    from efftrain_cli.run.lock import take_lock
    from efftrain_cli.trials.array import ArrayWriter
    from efftrain_cli.trials.runner import TrialRunner
    from efftrain_cli.trials.trial import (
        Runner,
        check_comparable,
        grid,
        parse_seeds,
        parse_settings,
    )

    settings = parse_settings(set_ or [])
    trials = grid([*(recipes or []), *(recipe or [])], parse_seeds(seeds), settings, name)
    check_comparable(trials)
    if plan:
        if format_ not in ("table", "json"):
            raise UsageError(f"--format {format_} does not apply to a plan\n  give table or json")
        if format_ == "json":
            print_json(command.plan_rows(trials))
        else:
            print_folded("\n".join(command.plan_lines(trials)))
        return
    folder = command.folder_of(trials, name)
    runner: Runner
    if array:
        runner = ArrayWriter(
            folder=folder, device=device, devices=devices, jobs=jobs, study=name or ""
        )
    else:
        runner = TrialRunner(folder, device=device, jobs=jobs, devices=devices, study=name or "")
    make_folder(folder)
    with take_lock(folder / "lock"):
        runs = runner.train(trials, "sweep")
    varied = [key for key, values in settings if len(values) > 1]
    comparison = command.compare_sweep(runs, baseline, target_loss)
    if comparison is None and format_ == "json":
        print_json(command.run_rows(runs))
    elif comparison is None:
        lines = command.grid_text(runs, varied)
        print_folded("\n".join(lines or command.run_lines(runs)))
    if comparison is None:
        return
    show(comparison, format_, output, details=details, plot=plot)
    end_with_verdict(comparison, fail_if)
