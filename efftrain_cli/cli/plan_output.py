"""How `efftrain pretrain --plan` prints a schedule."""

from __future__ import annotations

import json
import sys
from itertools import islice

from efftrain_cli.plan.preview import assumptions, csv_lines, turning_points
from efftrain_cli.recipe.recipe import Recipe


def print_plan(recipe: Recipe, until: int | None, form: str) -> None:
    """Prints every step as CSV, or the turning points as a table or as JSON lines; what is assumed goes to stderr."""
    for line in assumptions(recipe):
        print(f"assumed: {line}", file=sys.stderr)
    if form == "csv":
        # One write per few thousand lines: a plan of 300,000 steps is printed in seconds.
        lines = csv_lines(recipe, until)
        while chunk := list(islice(lines, 4096)):
            sys.stdout.write("\n".join([*chunk, ""]))
        return
    points = turning_points(recipe, until)
    if form == "json":
        for reason, plan, after in points:
            row = plan._asdict() | {"reason": reason, "tokens": after.tokens, "windows": after.windows}
            print(json.dumps(row))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("step", "tokens", "seq_len", "batch", "tokens/step", "lr"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("")
    for reason, plan, after in points:
        table.add_row(
            f"{plan.step:,}",
            f"{after.tokens:,}",
            str(plan.seq_len),
            str(plan.batch_size),
            f"{plan.batch_size * plan.seq_len:,}",
            f"{plan.lr:.3g}",
            reason,
        )
    Console(highlight=False).print(table)
