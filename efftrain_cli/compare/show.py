"""A comparison as text: sentences, tables, and the formats that are made of them."""

from __future__ import annotations

import json
import math
import re
from html import escape

import pandas as pd

from efftrain_cli.compare.comparison import Comparison
from efftrain_cli.compare.figures import inline_svg
from efftrain_cli.compare.grids import keys_of
from efftrain_cli.compare.judge import WITHIN, Result
from efftrain_cli.compare.ladder import describe_trends, gain_table
from efftrain_cli.compare.measures import LABELS
from efftrain_cli.foundation.console import counted, human, human_seconds, table_lines

SCHEMA_VERSION = 1
COSTS = "(tokens|flops)_to_(match|target)"
"""Costs that are shown without --details."""
NUMBERS = {
    "nats/token": "{:.4f}",
    "x": "{:.3f}x",
    "": "{:.5g}",
}
"""Unit -> how a number of it is written."""
CHANGES = {
    "nats/token": "{:+.4f}",
    "x": "{:.3f}x",
    "": "{:+.4g}",
}
"""Unit -> how a change of it is written."""
CLAIMS = {
    "better": "is better than {base}",
    "worse": "is worse than {base}",
    "noninferior": "is not worse than {base} by {margin:g}",
    "equivalent": "is equivalent to {base} within {margin:g}",
    "undecided": "against {base} is undecided",
    "": "against {base} is not judged",
}
"""Verdict -> words."""
MARKS = {
    "better": "+",
    "worse": "-",
    "noninferior": "=",
    "equivalent": "=",
    "undecided": "?",
    "": " ",
}
"""Verdict -> mark of an arm's row."""
GRID = "*: best, compared; !: at the edge of the grid"
LARGE = 1e5
"""Number from which on three digits are enough."""
CAVEATS = 4
"""Caveats that are shown without --details."""
STYLE = "body{font:15px sans-serif;max-width:60em;margin:2em auto}td,th{padding:.2em .6em}"


def sentences(comparison: Comparison) -> list[str]:
    """Return all sentences: settings that differ, the verdicts, and what else an arm changed."""
    base = comparison.arms[0].label
    # The first sentence never says "not judged" while another one claims.
    verdicts = sorted(comparison.verdicts, key=lambda row: not row.verdict)
    lines = []
    for row in verdicts:
        words = CLAIMS[row.verdict].format(base=base, margin=row.margin)
        terms = f", {row.terms}" if row.terms else ""
        lines.append(f"{row.arm} {words} in {row.title}{terms}: {facts_text(row, base)}.")
    return [*comparison.differences, *lines, *comparison.changes]


def facts_text(row: Result, base: str) -> str:
    """Return what a verdict rests on: estimate, interval, p, pairs and remarks."""
    facts = [estimate_text(row, with_unit=True)]
    if not math.isnan(row.p) and not row.given_up:
        p = f"p = {row.p_corrected:.2g}"
        if row.race > 1:
            p += f", as race {row.race} against {base} {row.p_race:.2g}"
        facts.append(p)
    if row.n:
        facts.append(counted(row.n, "pair"))
    facts.append(row.why)
    if row.verdict == "undecided" and not math.isnan(row.could_see):
        size = NUMBERS[row.unit].format(row.could_see)
        facts.append(f"{size} would show in 80 % of cases")
    facts.append(row.remark)
    return "; ".join(fact for fact in facts if fact)


def arm_table(comparison: Comparison) -> pd.DataFrame:
    """Return a row per arm: mark, name, final loss, bounds of costs and training time."""
    base = comparison.arms[0].label
    table = pd.DataFrame(index=[arm.label for arm in comparison.arms])
    table[""] = "  " + table.index
    # The mark is that of an arm's first claim.
    for row in reversed(comparison.verdicts):
        table.loc[row.arm, ""] = f"{MARKS[row.verdict]} {row.arm}"
    for row in comparison.rows:
        if row.measure == "final_loss":
            table.loc[base, row.title] = mean_text(row.baseline, row.unit)
            table.loc[row.arm, row.title] = mean_text(row.mean, row.unit)
        elif re.fullmatch(COSTS, row.measure):
            table.loc[row.arm, row.title] = bound_text(row)
    runs = comparison.runs
    seconds = runs[runs.status == "finished"].groupby("arm").seconds.mean()
    table["time"] = seconds.dropna().map(human_seconds)
    table = table.fillna("")
    return table.loc[:, table.any()]


def bound_text(row: Result) -> str:
    """Return the near end of a ratio's interval: a ratio under a decay lies towards 1."""
    if math.isnan(row.low):
        return ""
    if row.low > 1:
        return f"at least {row.low:.3g}x"
    if row.high < 1:
        return f"at most {row.high:.2g}x"
    return "not told apart"


def result_table(comparison: Comparison) -> pd.DataFrame:
    """Return all results as text, a row per measure and arm."""
    rows = []
    for row in comparison.rows:
        cells = {
            "measure": row.title,
            "arm": row.arm,
            "baseline": mean_text(row.baseline, row.unit),
            "mean": mean_text(row.mean, row.unit),
            f"difference [{100 * row.confidence:.3g} %]": estimate_text(row) or row.why,
            "p": "" if math.isnan(row.p) else f"{row.p_corrected:.2g}",
            "verdict": row.verdict,
        }
        rows.append(cells)
    return pd.DataFrame(rows)


def mean_text(mean: float, unit: str) -> str:
    """Return a mean with the digits of its unit, a cost or large number as people read it; "" for
    NaN."""
    if math.isnan(mean) or unit == "x" or abs(mean) >= LARGE:
        return cell_text(mean)
    return NUMBERS[unit].format(mean)


def estimate_text(row: Result, with_unit: bool = False) -> str:
    """Return an estimate and its interval: "+0.0094 [-0.0439, +0.0627]"; "" for NaN."""
    if math.isnan(row.estimate):
        return ""
    form = CHANGES[row.unit]
    text = form.format(row.estimate)
    if row.verdict in WITHIN:
        inner = f"[{form.format(row.inner_low)}, {form.format(row.inner_high)}]"
        text += f" {inner} ({100 * (2 * row.confidence - 1):.3g} %)"
    elif not math.isnan(row.low):
        text += f" [{form.format(row.low)}, {form.format(row.high)}]"
    if with_unit and row.unit not in ("x", ""):
        text += f" {row.unit}"
    return text


def grid_lines(grid: pd.DataFrame) -> list[str]:
    """Return the losses of a grid as a table: a row per setting, a column per recipe."""
    if grid.empty:
        return []
    keys = keys_of(grid)
    cells = []
    for row in grid.itertuples():
        loss = "failed" if math.isnan(row.loss) else f"{row.loss:.4f}"
        cells.append(loss + "*" * row.best + "!" * bool(row.edge))
    # An arm that was not tuned over a key has no value of it.
    values = grid[keys].astype(object).fillna("-").astype(str)
    table = values.assign(arm=grid.arm, cell=cells).pivot_table(
        index=keys,
        columns="arm",
        values="cell",
        aggfunc="first",
        sort=False,
    )
    mean = f"nats/token, mean of {counted(int(grid.seeds.max()), 'seed')}"
    return [*frame_lines(table.fillna("").reset_index()), f"{mean}; {GRID}"]


# --- formats --------------------------------------------------------------------------------------


def render(
    comparison: Comparison,
    kind: str,
    details: bool = False,
) -> str:
    """Return a comparison as "table", "csv", "json", "markdown", "latex" or "html".

    CSV and JSON hold the numbers of the results, the others the text of the table.
    """
    match kind:
        case "csv":
            return comparison.results.to_csv(index=False)
        case "json":
            return to_json(comparison)
        case "markdown":
            return result_table(comparison).to_markdown(index=False)
        case "latex":
            return result_table(comparison).to_latex(index=False, escape=True)
        case "html":
            return to_html(comparison)
    return "\n".join(screen_lines(comparison, details))


def screen_lines(comparison: Comparison, details: bool) -> list[str]:
    """Return what a terminal shows: the answer first."""
    lines = sentences(comparison)
    table = arm_table(comparison)
    # Names alone say nothing.
    if len(table.columns) > 1:
        lines += frame_lines(table, "time", f"{LABELS['flops']} to match")
    lines += grid_lines(comparison.grid)
    lines += frame_lines(gain_table(comparison.gains))
    lines += describe_trends(comparison.gains)
    caveats = comparison.caveats
    if details:
        lines += frame_lines(result_table(comparison), "mean", "baseline")
        lines += frame_lines(comparison.settings)
        lines += frame_lines(comparison.runs, "step", "flops")
    elif len(caveats) > CAVEATS:
        caveats = [
            *caveats[:CAVEATS],
            f"{len(caveats) - CAVEATS} more: --details",
        ]
    lines += [f"note: {caveat}" for caveat in caveats]
    return lines


def frame_lines(frame: pd.DataFrame, *spare: str) -> list[str]:
    """Return a frame as a plain table after a blank line; nothing of an empty one.

    Args:
        spare: columns that a narrow terminal may leave out.
    """
    if frame.empty:
        return []
    text = frame.map(cell_text)
    first = text.columns[0]
    repeats = text[first] == text[first].shift()
    text[first] = text[first].mask(repeats, "")
    rows = [tuple(row) for row in text.to_numpy()]
    return ["", *table_lines(tuple(text), rows, spare)]


def cell_text(value: object) -> str:
    """Return a value as a cell: a number as people read it, "" for NaN."""
    if not isinstance(value, float):
        return str(value)
    return "" if math.isnan(value) else human(value)


def to_json(comparison: Comparison) -> str:
    """Return everything that a comparison holds, for programs."""
    values: dict[str, object] = {
        "schema_version": SCHEMA_VERSION,
        "sentences": sentences(comparison),
        "caveats": comparison.caveats,
    }
    for name, frame in comparison.frames.items():
        values[name] = json.loads(frame.to_json(orient="records", double_precision=15))
    return json.dumps(values, indent=1)


def to_html(comparison: Comparison) -> str:
    """Return one page: sentences, results, curves, all numbers and caveats."""
    parts = [f"<meta charset=utf-8><style>{STYLE}</style>"]
    parts += [f"<p>{escape(line)}</p>" for line in sentences(comparison)]
    parts.append(arm_table(comparison).to_html(index=False))
    parts += [inline_svg(figure) for figure in comparison.figures()]
    for title, frame in comparison.frames.items():
        if not frame.empty:
            parts.append(f"<h2>{title}</h2>{frame.map(cell_text).to_html(index=False)}")
    parts += [f"<p>{escape(caveat)}</p>" for caveat in comparison.caveats]
    return "\n".join(parts)
