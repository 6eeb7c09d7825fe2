"""A comparison written out: terminal, Markdown, CSV, JSON, LaTeX. The report has its own module."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from efftrain_cli.compare.comparison import Comparison
from efftrain_cli.compare.engine import Verdict
from efftrain_cli.compare.inference import ALPHA
from efftrain_cli.compare.measures import PRIMARY, mean_sd
from efftrain_cli.compare.tables import Table, headline, tables_of
from efftrain_cli.compare.verdicts import verdict_sentences
from efftrain_cli.foundation.files import csv_text
from efftrain_cli.foundation.why import Why

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import Console


SCHEMA_VERSION = 3
"""Format of `--format json`."""
SIGNS = {"allowed": "NOT COMPARABLE", "warning": "warning", "note": "note"}
"""How a label is announced."""


def print_tables(console: Console, tables: Sequence[Table]) -> None:
    """Prints tables. Where the terminal is too narrow for one, its rows become short blocks."""
    from rich import box
    from rich.markup import escape
    from rich.table import Table as RichTable

    for table in tables:
        if table.title:
            console.print(f"[bold]{escape(table.title)}[/bold]", highlight=False)
        widths = [
            max(len(row[i]) for row in (table.header, *table.rows))
            for i in range(len(table.header))
        ]
        # The last column may wrap: it holds words.
        needed = sum(widths[:-1]) + min(widths[-1], 24) + len(widths) - 1
        if console.is_terminal and needed > console.width:
            for row in table.rows:
                if row[0]:  # the others go on with the question above them
                    console.print(escape(row[0]), highlight=False)
                for name, value in zip(table.header[1:], row[1:], strict=True):
                    if value not in ("-", ""):
                        dim = f"[dim]{escape(name)}[/dim] " if name else ""
                        console.print(f"  {dim}{escape(value)}", highlight=False)
        else:
            shown = RichTable(
                box=box.SIMPLE_HEAD,
                pad_edge=False,
                show_edge=False,
                highlight=False,
                padding=(0, 0),
            )
            shown.show_header = any(table.header)  # no head over a table of names and values
            for i, name in enumerate(table.header):
                shown.add_column(escape(name), no_wrap=i < len(table.header) - 1, overflow="fold")
            for row in table.rows:
                shown.add_row(*map(escape, row))
            console.print(shown)
        if table.note:
            console.print(f"[dim]{escape(table.note)}[/dim]", highlight=False)
        console.print()


def print_labels(console: Console, labels: Sequence[Why]) -> None:
    """Prints what a reader must know, the gravest first."""
    from rich.markup import escape

    style = {"allowed": "bold red", "warning": "yellow", "note": "dim"}
    for label in gravest_first(labels):
        sign = f"[{style[label.kind]}]{SIGNS[label.kind]}:[/]"
        console.print(f"{sign} {escape(label.text)}", highlight=False)


def gravest_first(labels: Sequence[Why]) -> list[Why]:
    """Labels in the order of SIGNS."""
    return sorted(labels, key=lambda label: list(SIGNS).index(label.kind))


def opening(comparison: Comparison) -> list[str]:
    """What comes before every table: the verdict, one sentence per recipe, and the target."""
    return [*verdict_sentences(comparison), *headline(comparison)]


def markdown(comparison: Comparison) -> str:
    """The tables in GitHub's Markdown."""
    parts = [f"{line}  " for line in opening(comparison)]
    for table in tables_of(comparison):
        parts += ["", *([f"### {table.title}", ""] if table.title else [])]
        parts.append(_tabulate(table, _MARKDOWN, "github"))
        if table.note:
            parts += ["", table.note]
    if comparison.labels:
        parts += ["", "### Read with care", ""]
        parts += [f"- **{SIGNS[label.kind]}**: {label.text}" for label in comparison.labels]
    return "\n".join(parts).strip() + "\n"


_MARKDOWN = str.maketrans({"|": "\\|"})
_LATEX = str.maketrans(
    {character: f"\\{character}" for character in "&%$#_{}"}
    | {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    | {"±": r"$\pm$", "<": "$<$", ">": "$>$"}
    | {mark: f"$^{digit}$" for digit, mark in enumerate("⁰¹²³⁴⁵⁶⁷⁸⁹")}
)


def _tabulate(table: Table, escapes: dict[int, str], form: str) -> str:
    from tabulate import tabulate

    head, *rows = [[cell.translate(escapes) for cell in row] for row in (table.header, *table.rows)]
    return tabulate(rows, head, tablefmt=form, disable_numparse=True)


def latex(comparison: Comparison) -> str:
    """The tables for LaTeX with the booktabs package."""
    parts = ["% needs \\usepackage{booktabs}", *(f"% {line}" for line in opening(comparison))]
    parts += [f"% {SIGNS[label.kind]}: {label.text}" for label in comparison.labels]
    for table in tables_of(comparison):
        words = ". ".join(
            text.translate(_LATEX).rstrip(".") for text in (table.title, table.note) if text
        )
        tabular = _tabulate(table, _LATEX, "latex_raw")
        for rule in ("toprule", "midrule", "bottomrule"):
            tabular = tabular.replace("\\hline", f"\\{rule}", 1)
        parts += [
            "",
            "\\begin{table}",
            "\\centering",
            f"\\caption{{{words}}}",
            tabular,
            "\\end{table}",
        ]
    return "\n".join(parts) + "\n"


COLUMNS = "section measure unit arm baseline seeds values mean sd estimate low high p p_holm verdict reason kind"
"""Of the frame: a row per measure and recipe."""
_MORE = "tested shared_seeds method n spread se df bound exact p_equivalent could_see items items_p text"
"""What JSON's rows hold besides."""
_CSV_COLUMNS = (
    "section measure unit recipe baseline seeds values mean sd estimate kind low high p p_holm shared_seeds method verdict "
    "exploratory"
)


def frame_of(comparison: Comparison) -> pd.DataFrame:
    """A row per measure and recipe, in COLUMNS: values by seed, mean, spread, test against the baseline.

    `seeds` and `values` are lists; a value without a number is the reason in words. `verdict` is empty where nothing
    was judged: `reason` says why in words, `kind` for programs.
    """
    import pandas as pd

    return pd.DataFrame(_rows(comparison))[COLUMNS.split()]


def _rows(comparison: Comparison) -> list[dict[str, Any]]:
    verdicts = {(found.question.key, found.arm): found for found in comparison.verdicts}
    untested = dict.fromkeys(f"{COLUMNS} {_MORE}".split())
    rows = []
    for question in comparison.questions:
        for group in comparison.groups:
            row = untested | {
                "section": question.section,
                "measure": question.key,
                "unit": question.unit,
                "arm": group.label,
                "baseline": group is comparison.baseline,
                "seeds": list(group.seeds),
                "values": [],
            }
            # A cost to match is of a pair of runs.
            if question.tested != "match":
                values = comparison.values[question.key, group.label].values()
                row["values"] = [v.text if isinstance(v, Why) else v for v in values]
                row["mean"], row["sd"] = mean_sd(values)
            found = verdicts.get((question.key, group.label))
            rows.append(row | _test(found) if found else row)
    return rows


def _test(found: Verdict) -> dict[str, Any]:
    why, estimate, exact = found.why, found.estimate, found.exact
    return {
        "estimate": _number(estimate.mean),
        "low": estimate.low,
        "high": estimate.high,
        "p": found.test.p,
        "p_holm": found.p_holm,
        "verdict": None if why else found.outcome,
        "reason": why.text if why else None,
        "kind": why.kind if why else None,
        "tested": found.question.tested,
        "shared_seeds": list(found.seeds),
        "method": found.test.method,
        "n": estimate.n,
        "spread": estimate.sd,
        "se": estimate.se,
        "df": estimate.df,
        "bound": {1: "more than", -1: "less than"}.get(estimate.bound),
        "exact": exact and asdict(exact) | {"wins": _number(exact.wins)},
        "p_equivalent": found.p_equivalent,
        "could_see": found.min_detectable_effect,
        "items": found.items and asdict(found.items),
        "items_p": found.items_p,
        "text": found.text,
    }


def comma_separated(comparison: Comparison) -> str:
    """The frame at full precision; `recipe` is its arm and `kind` how two recipes are compared."""
    columns, rows = _CSV_COLUMNS.split(), []
    for row in _rows(comparison):
        shared = row["shared_seeds"]
        row |= {
            "recipe": row["arm"],
            "baseline": str(row["baseline"]).lower(),
            "seeds": " ".join(map(str, row["seeds"])),
            # A reason may hold spaces, so values are set apart by semicolons.
            "values": ";".join(map(str, row["values"])),
            "kind": row["tested"],
            "shared_seeds": None if shared is None else len(shared),
            "verdict": row["text"],
            "exploratory": str(comparison.exploratory).lower(),
        }
        rows.append(["" if row[name] is None else str(row[name]) for name in columns])
    return csv_text(columns, rows)


def as_json(comparison: Comparison) -> dict[str, Any]:
    """Everything as plain values, at full precision; None where there is no number."""
    return {
        "schema_version": SCHEMA_VERSION,
        "verdicts": verdict_sentences(comparison),
        "baseline": comparison.baseline.label,
        "primary": PRIMARY,
        "alpha": ALPHA,
        "margin": comparison.margin,
        "target_loss": comparison.target_loss,
        "equal_points": {
            axis: {"value": point.value, "limited_by": point.limited_by}
            for axis, point in comparison.points.items()
        },
        "labels": [{"severity": each.kind, "text": each.text} for each in comparison.labels],
        "recipe_differences": {
            key: {group.label: group.conditions.get(key) for group in comparison.groups}
            for key, _ in comparison.recipe_differences
        },
        "settings_tried": [asdict(trial) for trial in comparison.trials],
        "groups": [
            {
                "letter": comparison.letter(group),
                "label": group.label,
                "recipe": group.recipe_name,
                "runs": [
                    {
                        "name": run.name,
                        "seed": run.seed,
                        "status": run.status,
                        "marks": [mark.text for mark in run.marks],
                        "steps": run.step,
                        "seconds": run.all_seconds,
                        "speeds_gflops": list(run.speeds),
                    }
                    for run in group.runs
                ],
            }
            for group in comparison.groups
        ],
        "rows": _rows(comparison),
    }


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None
