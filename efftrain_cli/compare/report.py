"""One HTML file with everything: no network, no scripts, readable on a phone, light and dark."""

from __future__ import annotations

import json
import shlex
from html import escape

from efftrain_cli.compare.comparison import Comparison, Difference
from efftrain_cli.compare.formats import SIGNS
from efftrain_cli.compare.groups import Group, shown
from efftrain_cli.compare.plots import inline_svg, plots_of
from efftrain_cli.compare.reading import RunNumbers
from efftrain_cli.compare.tables import Table, equal_point_lines, estimate_text, headline, p_text, tables_of

_CSS = """
:root { color-scheme: light dark; --ink: #1b1f24; --paper: #ffffff; --soft: #5b6470; --line: #d8dde3; --panel: #f6f8fa;
  --warn: #8a5300; --bad: #b3261e; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ed; --paper: #14171b; --soft: #9aa4af; --line: #343b43;
  --panel: #1d2227; --warn: #f0b35c; --bad: #ff8a80; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 15px/1.5 system-ui, -apple-system, "Segoe UI", sans-serif; }
main { max-width: 1160px; margin: 0 auto; padding: 20px 16px 48px; }
h1 { font-size: 1.6rem; line-height: 1.2; margin: 0 0 8px; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 32px 0 8px; }
p { margin: 4px 0; } .soft { color: var(--soft); font-size: .88rem; }
.answers { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(300px, 100%), 1fr)); gap: 12px; margin: 16px 0; }
.answer { background: var(--panel); border: 1px solid var(--line); border-radius: 8px; padding: 12px 14px; overflow-wrap: anywhere; }
.answer h3 { margin: 0 0 6px; font-size: 1rem; } .answer ul { margin: 0; padding-left: 18px; }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(340px, 100%), 1fr)); gap: 16px; }
figure { margin: 0; } figure svg { display: block; width: 100%; height: auto; }
@media (prefers-color-scheme: dark) { figure svg { filter: brightness(1.35); } }
.wide { overflow-x: auto; border: 1px solid var(--line); border-radius: 8px; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; font-size: .9rem; }
th, td { text-align: left; padding: 6px 10px; border-bottom: 1px solid var(--line); vertical-align: top; white-space: nowrap; }
td:last-child { white-space: normal; min-width: 9rem; }
tr:last-child td { border-bottom: 0; } thead th { color: var(--soft); font-weight: 600; }
td:first-child, th:first-child { position: sticky; left: 0; background: var(--paper); }
@media (max-width: 600px) { table { font-size: .82rem; } th, td { padding: 5px 6px; } th { white-space: normal; }
  td:first-child, th:first-child { min-width: 7.5rem; max-width: 44vw; white-space: normal; overflow-wrap: break-word; } }
ul.labels { padding-left: 18px; } .allowed { color: var(--bad); } .warning { color: var(--warn); } .note { color: var(--soft); }
details { border: 1px solid var(--line); border-radius: 8px; padding: 8px 12px; margin: 8px 0; }
summary { cursor: pointer; font-weight: 600; overflow-wrap: anywhere; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; font-size: .82rem; margin: 8px 0 0; }
"""


def report(comparison: Comparison) -> str:
    """The page."""
    others = [group.label for group in comparison.groups if group is not comparison.baseline]
    title = f"{len(others)} recipes" if len(others) > 2 else " and ".join(others)
    title = f"{title} against {comparison.baseline.label}" if others else comparison.baseline.label
    figures = "".join(f"<figure>{inline_svg(plot, comparison)}</figure>" for plot in plots_of(comparison))
    tables = {table.title: table for table in tables_of(comparison)}
    runs = tables.pop("Runs", None)
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(title)}</title><style>{_CSS}</style></head><body><main>",
        f"<h1>{escape(title)}</h1>",
        *(f"<p>{escape(line)}</p>" for line in headline(comparison)),
        *(f'<p class="soft">{escape(line)}</p>' for line in equal_point_lines(comparison)),
        _labels(comparison),
        _answers(comparison),
        "<h2>Curves</h2>",
        f'<p class="soft">{_curves_note(comparison)}</p>',
        f'<div class="figures">{figures}</div>',
        *(_table(table) for table in tables.values()),
        _table(runs) if runs is not None else "",
        "<h2>Recipes</h2>",
        *(_recipe(group) for group in comparison.groups),
        "<h2>Receipts</h2>",
        *(_receipt(run) for run in comparison.runs),
        "</main></body></html>",
    ]
    return "\n".join(part for part in parts if part) + "\n"


def _curves_note(comparison: Comparison) -> str:
    text = "Loss at full length on the validation text."
    if any(len(group.runs) > 1 for group in comparison.groups):
        text += " Lines are means over seeds, bands reach from the lowest to the highest seed."
    if comparison.target_loss is not None:
        text += " The dotted line is the target loss."
    return text + " Loss ratios show the largest of each stretch of steps; dotted lines are at 1.2 and 1.5."


def _answers(comparison: Comparison) -> str:
    """A card per recipe: what it needs to reach the target, and whether that is more than chance."""
    cards = []
    for group in comparison.groups:
        if group is comparison.baseline:
            continue
        own = [difference for difference in comparison.differences if difference.label == group.label]
        items = "".join(f"<li>{escape(_sentence(difference))}</li>" for difference in own if _in_card(difference))
        cards.append(f'<div class="answer"><h3>{escape(group.label)}</h3><ul>{items}</ul></div>')
    return f'<div class="answers">{"".join(cards)}</div>' if cards else ""


def _in_card(difference: Difference) -> bool:
    return difference.measure.tested == "ratio" or difference.measure.key == "best_loss"


def _sentence(difference: Difference) -> str:
    measure, estimate = difference.measure, difference.estimate
    what = f"{measure.title} to target" if measure.tested == "ratio" else "best loss"
    number = estimate_text(measure, estimate)
    p = f", p = {p_text(difference.p_holm)}" if difference.p_holm is not None else ""
    return f"{what}: {difference.verdict}{p}" if number == "-" else f"{what}: {number}: {difference.verdict}{p}"


def _labels(comparison: Comparison) -> str:
    if not comparison.labels:
        return ""
    items = "".join(
        f'<li class="{label.severity}"><strong>{SIGNS[label.severity]}:</strong> {escape(label.text)}</li>'
        for severity in SIGNS
        for label in comparison.labels
        if label.severity == severity
    )
    return f'<h2>Read with care</h2><ul class="labels">{items}</ul>'


def _table(table: Table) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in table.header)
    body = "".join(f"<tr><td>{_breakable(row[0])}</td>" + "".join(f"<td>{escape(cell)}</td>" for cell in row[1:]) + "</tr>"
                   for row in table.rows)
    note = f'<p class="soft">{escape(table.note)}</p>' if table.note else ""
    return (
        f"<h2>{escape(table.title)}</h2>"
        f'<div class="wide" tabindex="0"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>{note}'
    )


def _breakable(name: str) -> str:
    """A name that may be broken where its words end; recipe keys have no spaces."""
    return escape(name).replace("_", "_<wbr>").replace(".", ".<wbr>")


def _recipe(group: Group) -> str:
    lines = "\n".join(
        f"{key} = {json.dumps(value) if isinstance(value, str) else shown(value)}" for key, value in group.recipe.items()
    )
    seeds = ", ".join(map(str, group.seeds))
    return f"<details><summary>{escape(group.label)} (seeds {seeds})</summary><pre>{escape(lines)}</pre></details>"


def _receipt(run: RunNumbers) -> str:
    origin = dict(run.origin)
    command = origin.pop("command", None)
    lines = []
    if isinstance(command, list):
        lines.append("command: " + shlex.join(str(word) for word in command))
    elif command:
        lines.append(f"command: {command}")
    data = origin.pop("data", None)
    lines += [f"{key}: {value}" for key, value in origin.items()]
    lines += [f"data.{key}: {value}" for key, value in data.items()] if isinstance(data, dict) else []
    lines.append(f"steps: {run.step}, training seconds: {run.seconds:.3f}")
    lines += [f"{name.replace('_', ' ')}: {value:.3f}" for name, value in run.other_seconds.items()]
    lines += [f"mark: {mark}" for mark in run.marks]
    summary = f"{escape(run.name)}: {escape(run.status)}"
    return f"<details><summary>{summary}</summary><pre>{escape(chr(10).join(lines))}</pre></details>"
