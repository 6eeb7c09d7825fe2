"""One HTML file for everything: no network, no scripts, for phones too, light and dark; text in templates/."""

from __future__ import annotations

import json
import shlex

from efftrain_cli.compare.comparison import Comparison
from efftrain_cli.compare.formats import SIGNS, gravest_first
from efftrain_cli.compare.groups import Group, shown
from efftrain_cli.compare.picture import inline_svg
from efftrain_cli.compare.plots import plots_of
from efftrain_cli.compare.reading import RunNumbers
from efftrain_cli.compare.tables import answers, equal_point_lines, headline, key_table, tables_of
from efftrain_cli.compare.verdicts import verdict_sentences


def report(comparison: Comparison) -> str:
    """The page."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    others = [group.label for group in comparison.groups if group is not comparison.baseline]
    title = f"{len(others)} recipes" if len(others) > 2 else " and ".join(others)
    first = {"key": key_table(comparison), "answers": answers(comparison)}
    environment = Environment(
        loader=PackageLoader("efftrain_cli.compare"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
    )
    return environment.get_template("report.html").render(
        title=f"{title} against {comparison.baseline.label}"
        if others
        else comparison.baseline.label,
        verdicts=verdict_sentences(comparison),
        headline=headline(comparison),
        first=first,
        labels=gravest_first(comparison.labels),
        signs=SIGNS,
        curves_note=_curves_note(comparison),
        figures=[inline_svg(plot) for plot in plots_of(comparison)],
        equal_points=equal_point_lines(comparison),
        tables=[table for table in tables_of(comparison) if table not in first.values()],
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
    values = {
        key: json.dumps(value) if isinstance(value, str) else shown(value)
        for key, value in group.recipe.items()
    }
    lines = "\n".join(f"{key} = {value}" for key, value in values.items())
    seeds = ", ".join(map(str, group.seeds))
    return {"title": f"{comparison.letter(group)} {group.label} (seeds {seeds})", "text": lines}


def _receipt(run: RunNumbers) -> dict[str, str]:
    origin = dict(run.origin)
    command = origin.pop("command", None)
    words = shlex.join(map(str, command)) if isinstance(command, list) else command
    lines = [f"command: {words}"] if command or isinstance(command, list) else []
    data = origin.pop("data", None)
    lines += [f"{key}: {value}" for key, value in origin.items()]
    lines += (
        [f"data.{key}: {value}" for key, value in data.items()] if isinstance(data, dict) else []
    )
    lines.append(f"steps: {run.step}, training seconds: {run.seconds:.3f}")
    lines += [f"{name.replace('_', ' ')}: {value:.3f}" for name, value in run.other_seconds.items()]
    if run.speeds:
        lines.append(
            f"machine's speed before and after, GFLOP/s: {', '.join(f'{rate:g}' for rate in run.speeds)}"
        )
    lines += [f"mark: {mark.text}" for mark in run.marks]
    return {"title": f"{run.name}: {run.status}", "text": "\n".join(lines)}
