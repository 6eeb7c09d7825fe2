"""A comparison written out: terminal, Markdown, CSV, JSON, LaTeX. The report has its own module."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from efftrain_cli.compare.comparison import Comparison
from efftrain_cli.compare.differences import PRIMARY, Cell
from efftrain_cli.compare.inference import ALPHA
from efftrain_cli.compare.tables import Table, headline, tables_of
from efftrain_cli.compare.verdicts import verdict_sentences
from efftrain_cli.foundation.files import csv_text

if TYPE_CHECKING:
    from rich.console import Console

    from efftrain_cli.compare.fairness import Label
    from efftrain_cli.compare.groups import Group
    from efftrain_cli.compare.inference import Estimate, ExactTest
    from efftrain_cli.compare.zero_shot import ZeroShotDifference

SCHEMA_VERSION = 2
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


def print_labels(console: Console, labels: Sequence[Label]) -> None:
    """Prints what a reader must know, the gravest first."""
    from rich.markup import escape

    style = {"allowed": "bold red", "warning": "yellow", "note": "dim"}
    for label in gravest_first(labels):
        sign = f"[{style[label.severity]}]{SIGNS[label.severity]}:[/]"
        console.print(f"{sign} {escape(label.text)}", highlight=False)


def gravest_first(labels: Sequence[Label]) -> list[Label]:
    """Labels in the order of SIGNS."""
    return sorted(labels, key=lambda label: list(SIGNS).index(label.severity))


def opening(comparison: Comparison) -> list[str]:
    """What comes before every table: the verdict, one sentence per recipe, and the target."""
    return [*verdict_sentences(comparison), *headline(comparison)]


def markdown(comparison: Comparison) -> str:
    """The tables in GitHub's Markdown."""
    from tabulate import tabulate

    parts = [f"{line}  " for line in opening(comparison)]
    for table in tables_of(comparison):
        parts += ["", *([f"### {table.title}", ""] if table.title else [])]
        cells = [[cell.replace("|", "\\|") for cell in row] for row in (table.header, *table.rows)]
        parts.append(tabulate(cells[1:], cells[0], tablefmt="github", disable_numparse=True))
        if table.note:
            parts += ["", table.note]
    if comparison.labels:
        parts += ["", "### Read with care", ""]
        parts += [f"- **{SIGNS[label.severity]}**: {label.text}" for label in comparison.labels]
    return "\n".join(parts).strip() + "\n"


_LATEX = str.maketrans(
    {character: f"\\{character}" for character in "&%$#_{}"}
    | {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    | {"±": r"$\pm$", "<": "$<$", ">": "$>$"}
    | {mark: f"$^{digit}$" for digit, mark in enumerate("⁰¹²³⁴⁵⁶⁷⁸⁹")}
)


def latex(comparison: Comparison) -> str:
    """The tables for LaTeX with the booktabs package."""
    from tabulate import tabulate

    parts = ["% needs \\usepackage{booktabs}", *(f"% {line}" for line in opening(comparison))]
    parts += [f"% {SIGNS[label.severity]}: {label.text}" for label in comparison.labels]
    for table in tables_of(comparison):
        words = ". ".join(
            text.translate(_LATEX).rstrip(".") for text in (table.title, table.note) if text
        )
        cells = [[cell.translate(_LATEX) for cell in row] for row in (table.header, *table.rows)]
        tabular = tabulate(cells[1:], cells[0], tablefmt="latex_raw", disable_numparse=True)
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


_COLUMNS = (
    "section measure unit recipe baseline seeds values mean sd difference kind low high p p_holm shared_seeds method verdict "
    "exploratory"
)


def comma_separated(comparison: Comparison) -> str:
    """One row per measure and recipe at full precision: values by seed, mean, spread, test against the baseline."""
    rows: list[list[str]] = []

    def add(
        of: tuple[str, str, str],
        group: Group,
        values: Sequence[object],
        test: Sequence[str],
        *mean: str,
    ) -> None:
        who = [
            group.label,
            str(group is comparison.baseline).lower(),
            " ".join(map(str, group.seeds)),
        ]
        # A reason may hold spaces, so values are set apart by semicolons.
        numbers = [";".join(map(str, values)), *(mean or ("", ""))]
        rows.append([*of, *who, *numbers, *(test or [""] * 9), str(comparison.exploratory).lower()])

    for measure in comparison.measures:
        what = measure.section, measure.key, measure.unit
        for group in comparison.groups:
            cell = comparison.cells.get((measure.key, group.label), Cell())
            test = []
            if (d := comparison.difference(measure.key, group.label)) is not None:
                test = _test(
                    d.estimate,
                    measure.tested,
                    d.exact or d.estimate,
                    d.p_holm,
                    len(d.seeds),
                    d.verdict,
                )
            add(what, group, cell.values, test, _blank(cell.mean), _blank(cell.sd))
    for score in comparison.zero_shot:
        what = "Zero-shot", f"{score.task}/{score.protocol}/{score.limit}/{score.metric}", ""
        differences = {d.label: d for d in score.differences}
        for group in comparison.groups:
            values = ["missing" if value is None else value for value in score.scores[group.label]]
            test = []
            if (z := differences.get(group.label)) is not None:
                test = _test(
                    z.over_seeds, "difference", z.over_seeds, z.p_holm, z.over_seeds.n, z.verdict
                )
            add(what, group, values, test)
    return csv_text(_COLUMNS.split(), rows)


def _test(
    estimate: Estimate,
    kind: str,
    test: Estimate | ExactTest,
    p_holm: float | None,
    n: int,
    verdict: str,
) -> list[str]:
    numbers = (estimate.low, estimate.high, test.p, p_holm)
    return [_blank(estimate.mean), kind, *map(_blank, numbers), str(n), test.method, verdict]


def _blank(value: float | None) -> str:
    return "" if value is None or math.isnan(value) else repr(value)


def as_json(comparison: Comparison) -> dict[str, Any]:
    """Everything as plain values, at full precision; None where there is no number."""
    by_run = [measure.key for measure in comparison.measures if measure.tested != "match"]
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
        "labels": [asdict(label) for label in comparison.labels],
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
                        "marks": list(run.marks),
                        "steps": run.step,
                        "seconds": run.all_seconds,
                        "speeds_gflops": list(run.speeds),
                        "measures": {key: _number(cell.values[i]) for key, cell in cells.items()},
                        "missing": {
                            k: cell.values[i]
                            for k, cell in cells.items()
                            if isinstance(cell.values[i], str)
                        },
                    }
                    for i, run in enumerate(group.runs)
                ],
                "mean": {key: cell.mean for key, cell in cells.items()},
                "sd": {key: cell.sd for key, cell in cells.items()},
            }
            for group in comparison.groups
            for cells in [{key: comparison.cells[key, group.label] for key in by_run}]
        ],
        "differences": [
            {
                "measure": difference.measure.key,
                "kind": difference.measure.tested,
                "recipe": difference.label,
                **_estimate(difference.estimate),
                "exact": None
                if (test := difference.exact) is None
                else asdict(test) | {"wins": _number(test.wins)},
                "p_holm": difference.p_holm,
                "p_equivalent": difference.decision.p_equivalent,
                "could_see": difference.decision.could_see,
                "shared_seeds": list(difference.seeds),
                "outcome": None if difference.reason else difference.decision.outcome,
                "not_judged": difference.reason or None,
            }
            for difference in comparison.differences
        ],
        "zero_shot": [
            asdict(row) | {"differences": [_zero_shot(found) for found in row.differences]}
            for row in comparison.zero_shot
        ],
    }


def _zero_shot(difference: ZeroShotDifference) -> dict[str, Any]:
    items = difference.over_items
    return {
        "recipe": difference.label,
        "over_seeds": _estimate(difference.over_seeds),
        "over_items": None if items is None else _estimate(items),
        "mcnemar_p": difference.mcnemar_p,
        "p_holm": difference.p_holm,
        "verdict": difference.verdict,
    }


def _estimate(estimate: Estimate) -> dict[str, Any]:
    values = asdict(estimate)
    del values["log"]
    bound = {1: "more than", -1: "less than"}.get(values.pop("bound"))
    return {"estimate": _number(values.pop("mean")), "bound": bound, **values}


def _number(value: float | str) -> float | None:
    return value if isinstance(value, float) and math.isfinite(value) else None
