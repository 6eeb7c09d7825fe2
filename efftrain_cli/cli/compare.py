"""`efftrain compare`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from efftrain_cli.cli.app import app
from efftrain_cli.cli.complete import run_or_recipe_names
from efftrain_cli.cli.judged import Details, FailIf, Margin, conclude
from efftrain_cli.cli.options import Baseline, CompareFormat, Output, Plot, TargetLoss
from efftrain_cli.foundation.errors import UsageError

if TYPE_CHECKING:
    from efftrain_cli.run.reading import Run


@app.command(
    rich_help_panel="Judge",
    examples=(
        "efftrain compare quickstart quickstart-slw",
        "efftrain compare 'small*' --plot",
        "efftrain compare small small-slw --format html -o report.html",
        "efftrain compare --from runs.csv --columns val_loss=eval/loss",
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
    source: Annotated[
        str | None,
        Option(
            "--from",
            metavar="FILE|wandb:ENTITY/PROJECT",
            help="Runs of any program instead: CSV, Parquet, JSON lines, or wandb.",
        ),
    ] = None,
    columns: Annotated[
        list[str] | None,
        Option(
            metavar="OURS=THEIRS",
            help="With --from: what a column is called there. Repeatable.",
        ),
    ] = None,
    baseline: Baseline = None,
    target_loss: TargetLoss = None,
    margin: Margin = 0.0,
    maximize: Annotated[
        bool, Option("--maximize", help="With --from: larger final values are better.")
    ] = False,
    every_setting: Annotated[
        bool,
        Option("--every-setting", help="Compare every setting of a recipe instead of its best."),
    ] = False,
    details: Details = False,
    format_: CompareFormat = "table",
    output: Output = None,
    plot: Plot = False,
    allow: Annotated[
        bool,
        Option("--allow", help="Show losses that do not compare, unjudged, instead of refusing."),
    ] = False,
    fail_if: FailIf = None,
) -> None:
    """Compare trained runs: better, worse, equivalent or undecided; by how much, at what cost."""
    from efftrain_cli.compare.comparison import compare as compare_runs
    from efftrain_cli.compare.judge import claim_of
    from efftrain_cli.compare.sources import load_named_runs

    if bool(runs) == bool(source):
        raise UsageError(
            "compare needs runs or recipes, or --from FILE\n  name some of `efftrain runs list`"
        )
    if columns and source is None:
        raise UsageError("--columns names columns of a table\n  give --from FILE too")
    if maximize and source is None:
        raise UsageError("--maximize is for values of a table\n  leave it out: a loss falls")
    left_out: list[str] = []
    if source is not None:
        selected = read_source(source, columns or [])
    else:
        selected, left_out = load_named_runs(runs or [])
    comparison = compare_runs(
        selected,
        baseline=baseline,
        claims=[claim_of(margin)],
        target=target_loss,
        every_setting=every_setting,
        allow=allow,
        maximize=maximize,
    )
    caveats = [*left_out, "exploratory: nothing was fixed before these runs", *comparison.caveats]
    comparison = replace(comparison, caveats=caveats)
    after = []
    if source is None and all(row.n == 1 for row in comparison.verdicts):
        labels = " ".join(arm.first.arm for arm in comparison.arms)
        number = len(comparison.arms)
        after.append(f"next: efftrain race {labels} ({3 * number} to {8 * number} runs)")
    conclude(
        comparison,
        format_,
        output,
        details=details,
        plot=plot,
        fail_if=fail_if,
        after=after,
    )


def read_source(source: str, columns: list[str]) -> list[Run]:
    """Read runs of any program.

    Raises:
        UsageError: `columns` are not pairs, or there are no such runs.
    """
    from efftrain_cli.compare.sources import read_table, read_wandb

    names = {}
    for column in columns:
        ours, _, theirs = column.partition("=")
        if not (ours and theirs):
            raise UsageError(f"--columns {column!r} is no pair\n  write val_loss=eval/loss")
        names[ours] = theirs
    if source.startswith("wandb:"):
        return read_wandb(source.removeprefix("wandb:"), names)
    return read_table(Path(source), names)
