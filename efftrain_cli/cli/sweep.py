"""`efftrain sweep`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from efftrain_cli.cli.app import app
from efftrain_cli.cli.compare import CompareFormat
from efftrain_cli.cli.complete import override_keys, recipe_names


@app.command(
    rich_help_panel="Compare",
    examples=(
        "efftrain sweep --recipe small --recipe small-slw --seeds 0..2",
        "efftrain sweep --recipe small --set optim.lr=1e-3,2e-3 --seeds 0 --plan",
    ),
)
def sweep(
    recipe: Annotated[
        list[str], typer.Option(help="Recipe to train; repeat to compare several.", autocompletion=recipe_names)
    ],
    seeds: Annotated[str, typer.Option(help="0..4 (both included), 1,3,5 or 7.")] = "0..2",
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="Override for all runs; with several values, every recipe is trained with each: optim.lr=1e-3,2e-3.",
            autocompletion=override_keys,
        ),
    ] = None,
    name: Annotated[str | None, typer.Option(help="Put before the names of the runs.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    baseline: Annotated[str | None, typer.Option(help="Recipe to compare with.")] = None,
    target_loss: Annotated[float | None, typer.Option(help="Loss to reach, nats per token.")] = None,
    format_: Annotated[CompareFormat, typer.Option("--format", help="Form of the comparison.")] = CompareFormat.table,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="File for the comparison.")] = None,
    plot: Annotated[bool, typer.Option("--plot", help="Draw the loss curves in the terminal too.")] = False,
    allow: Annotated[
        bool, typer.Option("--allow", help="Train and show, labelled, what must not be compared instead of refusing.")
    ] = False,
    plan: Annotated[bool, typer.Option("--plan", help="Print the runs and train nothing.")] = False,
) -> None:
    """Train every recipe with every seed, one run after the other, then compare. A stopped sweep continues."""
    import sys

    from efftrain_cli.sweep import trials as sweep_runs
    from efftrain_cli.sweep.screen import print_choices, print_trials

    trials = sweep_runs.grid(recipe, sweep_runs.parse_seeds(seeds), sweep_runs.parse_settings(set_ or []), name)
    if not allow:
        sweep_runs.check_comparable(trials)
    if plan:
        print_trials([(trial, sweep_runs.state_of(trial), sweep_runs.recipe_of(trial).train.tokens) for trial in trials])
        return
    # Progress goes where the data does not, so that `--format json` can be piped.
    for _ in sweep_runs.run_trials(trials, device, say=lambda text: print(text, file=sys.stderr, flush=True)):
        pass
    choices = sweep_runs.choose(trials)
    if len(choices) > len(recipe):
        print_choices(choices)
    from efftrain_cli.compare.comparison import compare, read_all
    from efftrain_cli.compare.show import show_comparison
    from efftrain_cli.run.directory import runs_root

    names = [run for choice in choices if choice.best for run in choice.names]
    runs = read_all([runs_root() / run for run in names])
    comparison = compare(runs, baseline=baseline, target_loss=target_loss, allow=allow)
    show_comparison(comparison, format_.value, output, plot=plot)
