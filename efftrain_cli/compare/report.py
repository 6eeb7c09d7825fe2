"""A comparison as a document: HTML, Markdown or LaTeX, whose text is in templates/.

The page is one file for everything: no network, no scripts, for phones too, light and dark.
"""

from __future__ import annotations

import json
import shlex
from functools import partial

from efftrain_cli.compare.comparison import Comparison
from efftrain_cli.compare.formats import format_value
from efftrain_cli.compare.groups import Group
from efftrain_cli.compare.picture import inline_svg
from efftrain_cli.compare.plots import plots_of
from efftrain_cli.compare.reading import RunNumbers
from efftrain_cli.compare.tables import SIGNS, Table, gravest_first, opening_lines, tables_of
from efftrain_cli.recipe.toml import flatten


def document(comparison: Comparison, kind: str) -> str:
    """Return the page ("html"), GitHub's "markdown", or "latex" for the booktabs package."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("efftrain_cli.compare"),
        autoescape=kind == "html",
        undefined=StrictUndefined,
        trim_blocks=True,
    )
    environment.filters["markdown"] = partial(_tabulate, form="github", escapes=_MARKDOWN)
    environment.filters["booktabs"] = _booktabs
    environment.filters["latex"] = lambda text: text.translate(_LATEX).rstrip(".")
    values = {
        "comparison": comparison,
        "opening": opening_lines(comparison),
        "signs": SIGNS,
        "tables": tables_of(comparison),
    }
    if kind == "html":
        values |= _page(comparison)
    text = environment.get_template(f"report.{kind}").render(values)
    return f"{text.strip()}\n"


def _page(comparison: Comparison) -> dict[str, object]:
    """Return what only the page shows."""
    title, *others = (group.label for group in comparison.groups)
    if others:
        against = f"{len(others)} recipes" if len(others) > 2 else " and ".join(others)
        title = f"{against} against {title}"
    return {
        "title": title,
        "labels": gravest_first(comparison.labels),
        "has_seeds": any(len(group.runs) > 1 for group in comparison.groups),
        "figures": [inline_svg(plot) for plot in plots_of(comparison)],
        "recipes": [_recipe(comparison, group) for group in comparison.groups],
        "receipts": [_receipt(run) for run in comparison.runs],
    }


_MARKDOWN = str.maketrans({"|": "\\|"})
_LATEX = str.maketrans(
    {character: f"\\{character}" for character in "&%$#_{}"}
    | {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    | {"±": r"$\pm$", "<": "$<$", ">": "$>$"}
    | {mark: f"$^{digit}$" for digit, mark in enumerate("⁰¹²³⁴⁵⁶⁷⁸⁹")}
)


def _booktabs(table: Table) -> str:
    text = _tabulate(table, "latex_raw", _LATEX)
    for rule in ("toprule", "midrule", "bottomrule"):
        text = text.replace("\\hline", f"\\{rule}", 1)
    return text


def _tabulate(table: Table, form: str, escapes: dict[int, str]) -> str:
    from tabulate import tabulate

    head, *rows = [[cell.translate(escapes) for cell in row] for row in (table.header, *table.rows)]
    return tabulate(rows, head, tablefmt=form, disable_numparse=True)


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
    values["marks"] = "; ".join(mark.text for mark in run.marks)
    lines = [f"{key}: {value}" for key, value in values.items() if value not in (None, "")]
    return {"title": f"{run.name}: {run.status}", "text": "\n".join(lines)}
