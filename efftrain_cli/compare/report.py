"""One HTML file for everything: no network, no scripts, for phones too, light and dark; text in templates/."""

from __future__ import annotations

import json
import shlex

from efftrain_cli.compare.comparison import Comparison
from efftrain_cli.compare.formats import format_value
from efftrain_cli.compare.groups import Group
from efftrain_cli.compare.picture import inline_svg
from efftrain_cli.compare.plots import plots_of
from efftrain_cli.compare.reading import RunNumbers
from efftrain_cli.compare.tables import (
    SIGNS,
    gravest_first,
    opening_lines,
    tables_of,
)
from efftrain_cli.recipe.toml import flatten


def report(comparison: Comparison) -> str:
    """Return the page."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    title, *others = (group.label for group in comparison.groups)
    if others:
        against = f"{len(others)} recipes" if len(others) > 2 else " and ".join(others)
        title = f"{against} against {title}"
    environment = Environment(
        loader=PackageLoader("efftrain_cli.compare"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
    )
    return environment.get_template("report.html").render(
        title=title,
        opening=opening_lines(comparison),
        labels=gravest_first(comparison.labels),
        signs=SIGNS,
        curves_note=_curves_note(comparison),
        figures=[inline_svg(plot) for plot in plots_of(comparison)],
        tables=tables_of(comparison),
        recipes=[_recipe(comparison, group) for group in comparison.groups],
        receipts=[_receipt(run) for run in comparison.runs],
    )


def _curves_note(comparison: Comparison) -> str:
    text = "Loss at full length on the validation text."
    if any(len(group.runs) > 1 for group in comparison.groups):
        text += " Lines are means over seeds, bands reach from the lowest to the highest seed; differences have their 95 % interval."
    if comparison.target_loss is not None:
        text += " The dotted line is the target loss."
    return f"{text} Gradient norms and loss ratios show the largest of each stretch of steps; dotted lines are at 1.2 and 1.5."


def _recipe(comparison: Comparison, group: Group) -> dict[str, str]:
    lines = []
    for key, value in group.recipe.items():
        text = json.dumps(value) if isinstance(value, str) else format_value(value)
        lines.append(f"{key} = {text}")
    seeds = ", ".join(map(str, group.seeds))
    title = f"{comparison.letter(group)} {group.label} (seeds {seeds})"
    return {"title": title, "text": "\n".join(lines)}


def _receipt(run: RunNumbers) -> dict[str, str]:
    values = flatten(run.origin) | {"steps": run.step}
    command = run.origin.get("command")
    if isinstance(command, list):
        values["command"] = shlex.join(map(str, command))
    for name, seconds in run.all_seconds.items():
        if seconds:
            values[name.replace("_", " ")] = f"{seconds:.3f}"
    rates = ", ".join(f"{rate:g}" for rate in run.speeds)
    values["machine's speed before and after, GFLOP/s"] = rates
    values["marks"] = "; ".join(mark.text for mark in run.marks)
    lines = [f"{key}: {value}" for key, value in values.items() if value not in (None, "")]
    return {"title": f"{run.name}: {run.status}", "text": "\n".join(lines)}
