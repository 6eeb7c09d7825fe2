"""Print a comparison or write it to a file, as text, Markdown, LaTeX, CSV, JSON or HTML."""

from __future__ import annotations

import errno
import json
import math
import sys
from collections.abc import Mapping, Sequence
from io import StringIO
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from efftrain_cli.compare.comparability import SIGNS
from efftrain_cli.compare.comparison import Comparison
from efftrain_cli.compare.frames import as_json, comma_separated
from efftrain_cli.compare.tables import (
    Table,
    opening_lines,
    plan_table,
    tables_of,
)
from efftrain_cli.foundation.console import block_lines, make_console, print_labelled
from efftrain_cli.foundation.errors import UsageError
from efftrain_cli.foundation.files import disk_error, write_whole

TEXT_WIDTH = 24
"""Columns to which a table's last column may be wrapped; a shorter one is not wrapped."""


def print_tables(console: Console, tables: Sequence[Table]) -> None:
    """Print tables; if the terminal is too narrow for one, its rows become blocks of lines."""
    for table in tables:
        if table.title:
            console.print(table.title, style="bold", markup=False)
        if fits(table, console):
            console.print(_drawn(table))
        else:
            lines = block_lines(table.header, table.rows, console.width)
            print_labelled(console, lines, 0)
        if table.note:
            print_labelled(console, table.note.splitlines(), 0, "dim")
        console.print()


def fits(table: Table, console: Console) -> bool:
    """Return whether a table is narrow enough for the terminal; True in a pipe."""
    first, *others = zip(table.header, *table.rows, strict=True)
    # The first column may wrap between its words, and the last one if it is text.
    widths = [max(map(len, " ".join(first).split()))]
    widths += [max(map(len, cells)) for cells in others]
    widths[-1] = min(widths[-1], TEXT_WIDTH)
    return not console.is_terminal or sum(widths) + len(widths) - 1 <= console.width


def _drawn(table: Table) -> RichTable:
    # A table of names and values has no header.
    drawn = RichTable(
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        show_edge=False,
        padding=0,
        show_header=any(table.header),
    )
    wrapped = [0]
    if max(len(row[-1]) for row in table.rows) > TEXT_WIDTH:
        wrapped.append(len(table.header) - 1)
    for i, name in enumerate(table.header):
        drawn.add_column(Text(name), no_wrap=i not in wrapped, overflow="fold")
    for row in table.rows:
        drawn.add_row(*map(Text, row))
    return drawn


PLANNED = (0.005, 0.01, 0.02, 0.05, 0.1)
"""Differences for which `--plan` gives numbers of seeds by default."""


def show_comparison(
    comparison: Comparison,
    kind: str,
    output: Path | None,
    *,
    plot: bool = False,
    figures: Path | None = None,
    details: bool = False,
    first: Mapping[str, Any] | None = None,
) -> None:
    """Print a comparison, or write it to `output`.

    Args:
        kind: table, markdown, csv, json, latex or html.
        first: values that JSON has before the comparison's own.
        details: whether a text has the tables of every measure, test and run; other formats always
            have them.

    Raises:
        UsageError: the output cannot be written.
        DiskError: the disk is full.
    """
    if figures is not None:
        from efftrain_cli.compare.picture import write_figures
        from efftrain_cli.compare.plots import plots_of

        try:
            write_figures(plots_of(comparison), figures)
        except OSError as error:
            refused = UsageError(f"--figures {figures}: {error.strerror or error}")
            raise disk_error(error) or refused from None
    console = make_console(result=True)
    on_screen = kind == "table" and output is None
    if on_screen:
        _print_all(console, comparison, details)
    elif output is None and kind != "html":
        sys.stdout.write(_text_of(comparison, kind, details, first))
    else:
        path = output or Path("report.html")
        _write(path, _text_of(comparison, kind, details, first))
        if kind == "html":
            print(f"report: {path}", file=sys.stderr)
    if plot:
        from efftrain_cli.compare.picture import draw_in_terminal
        from efftrain_cli.compare.plots import terminal_plots

        # Standard output may be data for a program: curves then go to standard error.
        stream = sys.stdout if on_screen else sys.stderr
        colour = stream.isatty() and not console.no_color
        width = min(100, console.width if console.is_terminal else 80)
        drawn = [draw_in_terminal(each, width, colour) for each in terminal_plots(comparison)]
        print("\n\n".join(drawn), file=stream)


def _text_of(
    comparison: Comparison, kind: str, details: bool, first: Mapping[str, Any] | None
) -> str:
    if kind in ("html", "markdown", "latex"):
        from efftrain_cli.compare.report import document

        return document(comparison, kind)
    if kind == "json":
        values = {**(first or {}), **as_json(comparison)}
        return json.dumps(values, indent=1, allow_nan=False) + "\n"
    if kind == "csv":
        return comma_separated(comparison)
    # Without folding, as in a pipe.
    text = StringIO()
    console = Console(file=text, width=10_000, soft_wrap=True, highlight=False)
    _print_all(console, comparison, details)
    return text.getvalue()


def show_plan(comparison: Comparison, sizes: Sequence[float]) -> None:
    """Print how many seeds a difference of each size needs.

    Raises:
        UsageError: a size is not positive, or there is nothing to compare with.
    """
    for size in sizes:
        if not 0 < size < math.inf:
            raise UsageError(
                f"--difference {size:g} is not a size above 0\n"
                "  give nats per token, or a share of cost"
            )
    if len(comparison.groups) < 2:
        raise UsageError(
            "--plan needs the runs of two recipes: their differences have the spread\n"
            "  name runs of a second recipe"
        )
    print_tables(make_console(result=True), [plan_table(comparison, sizes or PLANNED)])


def _print_all(console: Console, comparison: Comparison, details: bool) -> None:
    print_labelled(console, [*opening_lines(comparison), ""], 0)
    print_tables(console, tables_of(comparison, details))
    for label in comparison.labels:
        style = {"allowed": "bold red", "warning": "yellow", "note": "dim"}[label.kind]
        print_labelled(console, [f"{SIGNS[label.kind]}: {label.text}"], 0, style)
    if not details and len(comparison.groups) > 1:
        more = "Every measure, test and run: --details; curves: --plot, --format html"
        print_labelled(console, [more], 0, "dim")


def _write(path: Path, text: str) -> None:
    """Write a text to `path`: atomically to a file, plainly to a pipe or device.

    A link is followed.

    Raises:
        DiskError: the text does not fit on the disk, or exceeds the limit on the size of files. An
            earlier file is then unchanged.
        UsageError: `path` cannot be written.
    """
    path = path.resolve()
    try:
        if path.is_file() or not path.exists():
            write_whole(path, text)
        else:
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            error.filename = str(path)
            raise disk_error(error) or error from None
        raise UsageError(f"--output {path}: {error.strerror or error}") from None
