"""`efftrain compare`."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

from typer import Argument, Option

from efftrain_cli.cli.app import app
from efftrain_cli.cli.complete import run_or_recipe_names
from efftrain_cli.cli.options import Baseline, CompareFormat, Output, Plot, TargetLoss
from efftrain_cli.foundation.console import print_folded
from efftrain_cli.foundation.errors import UsageError


@app.command(
    rich_help_panel="Compare",
    examples=(
        "efftrain compare quickstart quickstart-slw",
        "efftrain compare 'small*' --plot",
        "efftrain compare small small-slw --format html -o report.html",
    ),
)
def compare(
    runs: Annotated[
        list[str] | None,
        Argument(
            help="Runs, globs over runs ('small-*'), or recipes: all their seeds.",
            metavar="RUN",
            autocompletion=run_or_recipe_names,
        ),
    ] = None,
    study: Annotated[
        Path | None,
        Option(
            help="Study file to use instead of RUN...:"
            " judge its primaries, and compare its runs, exploratory.",
            metavar="FILE",
        ),
    ] = None,
    baseline: Baseline = None,
    target_loss: TargetLoss = None,
    margin: Annotated[
        float | None,
        Option(
            help="Difference of final losses, nats per token, within"
            " which recipes count as equivalent."
        ),
    ] = None,
    equal: Annotated[
        Literal["tokens", "flops"] | None,
        Option(
            help="Budget that final losses are judged at, equal within 2 %;"
            " without it, tokens, or FLOPs where only these agree."
        ),
    ] = None,
    every_setting: Annotated[
        bool,
        Option("--every-setting", help="Compare every setting of a recipe instead of its best."),
    ] = False,
    details: Annotated[
        bool, Option("--details", help="Print every measure, test and run.")
    ] = False,
    format_: CompareFormat = "table",
    output: Output = None,
    plot: Plot = False,
    figures: Annotated[
        Path | None, Option(help="Folder to write the figures to, as SVG and PNG.")
    ] = None,
    allow: Annotated[
        bool,
        Option("--allow", help="Show runs that are not comparable, labelled, instead of refusing."),
    ] = False,
    price_per_hour: Annotated[
        float | None, Option(min=0, help="Price of an hour of training, in your currency.")
    ] = None,
    power_watts: Annotated[
        float | None, Option(min=0, help="Power while training, in watts.")
    ] = None,
    plan: Annotated[
        bool,
        Option(
            "--plan", help="Print how many seeds would show a difference, given the spread so far."
        ),
    ] = False,
    difference: Annotated[
        list[float] | None,
        Option(help="With --plan: size to plan for, nats per token or share of cost. Repeatable."),
    ] = None,
) -> None:
    """Compare recipes over their seeds: better, worse, equivalent or undecided; by how much, at
    what cost, how stable."""
    from efftrain_cli.compare.comparison import compare as compare_runs
    from efftrain_cli.compare.comparison import read_valid_runs
    from efftrain_cli.compare.measures import Costs
    from efftrain_cli.compare.show import show_comparison, show_plan
    from efftrain_cli.compare.sisters import count_sisters

    on_screen = format_ == "table" and output is None
    verdict = first = None
    arms: dict[str, str] = {}
    from efftrain_cli.study.main import EXPLORATORY, labelled, show_judged

    if study is not None:
        if runs or baseline is not None:
            raise UsageError(
                "--study FILE names the runs and the baseline itself\n"
                "  leave out RUN... and --baseline"
            )
        # As the study printed it: verdicts first; beside a document or what a program reads they go
        # to standard error.
        baseline, arms, verdict = show_judged(study, allow, on_screen)
        runs = list(arms)
        first = {"study": verdict, "exploratory": EXPLORATORY}
    elif not runs:
        raise UsageError(
            "compare needs runs, recipes or a study\n"
            "  name some of `efftrain runs list`, or give --study FILE"
        )
    from efftrain_cli.run.names import select_runs

    paths = select_runs(runs)
    read, left_out = read_valid_runs(paths)
    read = [replace(run, recipe_name=arms.get(run.name, run.recipe_name)) for run in read]
    comparison = compare_runs(
        read,
        baseline=baseline,
        target_loss=target_loss,
        margin=margin,
        every_setting=every_setting or study is not None,
        allow=allow,
        equal=equal,
        costs=Costs(price_per_hour, power_watts),
        left_out=left_out,
        sisters=count_sisters(paths) if study is None else None,
        study=verdict["study"] if verdict else "",
    )
    if plan or difference:
        show_plan(comparison, difference or [])
        return
    if verdict is not None and not on_screen:
        comparison = labelled(comparison, verdict)
    show_comparison(
        comparison, format_, output, plot=plot, figures=figures, details=details, first=first
    )
    if figures is not None:
        print_folded(f"figures: {figures}", stream=sys.stderr)
