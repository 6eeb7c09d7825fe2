"""Where a comparison goes: the terminal, standard output or a file."""

from __future__ import annotations

import errno
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from efftrain_cli.compare import formats
from efftrain_cli.compare.comparison import Comparison
from efftrain_cli.compare.tables import equal_point_lines, plan_table, tables_of
from efftrain_cli.foundation.console import make_console
from efftrain_cli.foundation.errors import UsageError
from efftrain_cli.foundation.files import disk_error, write_whole

if TYPE_CHECKING:
    from rich.console import Console


PLANNED = (0.005, 0.01, 0.02, 0.05, 0.1)
"""Differences that `--plan` plans for where none is given."""


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
    """Prints a comparison, or writes it to `output`.

    Args:
        kind: table, markdown, csv, json, latex or html.
        first: values that stand before the comparison's own in JSON.
        details: tables of every measure, test and run too; formats for documents and programs always have them.

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
            raise UsageError(f"--figures {figures}: {error.strerror or error}") from None
    if kind == "table" and output is None:
        _print_all(make_console(result=True), comparison, details)
    elif kind == "html":
        path = output or Path("report.html")
        _write(path, _text_of(comparison, kind, details, first))
        print(f"report: {path}", file=sys.stderr)
    elif output is None:
        sys.stdout.write(_text_of(comparison, kind, details, first))
    else:
        _write(output, _text_of(comparison, kind, details, first))
    if plot:
        from efftrain_cli.compare.picture import draw_in_terminal
        from efftrain_cli.compare.plots import terminal_plots

        console = make_console(result=True)
        # Beside a format for programs the curves go where the eye is, not where the data goes.
        stream = sys.stdout if kind == "table" and output is None else sys.stderr
        colour = stream.isatty() and not console.no_color
        width = min(100, console.width if console.is_terminal else 80)
        drawn = [draw_in_terminal(each, width, colour) for each in terminal_plots(comparison)]
        print("\n\n".join(drawn), file=stream)


def _text_of(
    comparison: Comparison, kind: str, details: bool, first: Mapping[str, Any] | None
) -> str:
    match kind:
        case "html":
            from efftrain_cli.compare.report import report

            return report(comparison)
        case "table":
            from io import StringIO

            from rich.console import Console

            out = StringIO()
            # As in a pipe: nothing is folded.
            console = Console(file=out, width=10_000, soft_wrap=True, highlight=False)
            _print_all(console, comparison, details)
            return out.getvalue()
        case "json":
            values = {**(first or {}), **formats.as_json(comparison)}
            return json.dumps(values, indent=1, allow_nan=False) + "\n"
        case "markdown":
            return formats.markdown(comparison)
        case "latex":
            return formats.latex(comparison)
    return formats.comma_separated(comparison)


def show_plan(comparison: Comparison, sizes: Sequence[float]) -> None:
    """Prints how many seeds a difference of each size needs.

    Raises:
        UsageError: a size is not positive, or there is nothing to compare with.
    """
    for size in sizes:
        if size <= 0:
            raise UsageError(
                f"--difference {size:g}: give a size above 0, in nats per token or as a share of cost"
            )
    if len(comparison.groups) < 2:
        raise UsageError(
            "--plan needs the runs of two recipes: the spread of their differences decides the number of seeds"
        )
    formats.print_tables(make_console(result=True), [plan_table(comparison, sizes or PLANNED)])


def _print_all(console: Console, comparison: Comparison, details: bool) -> None:
    for line in formats.opening(comparison):
        console.print(line, markup=False, highlight=False)
    console.print()
    formats.print_tables(console, tables_of(comparison, details))
    if details:
        for line in equal_point_lines(comparison):
            console.print(line, markup=False, highlight=False)
    formats.print_labels(console, comparison.labels)
    if not details and len(comparison.groups) > 1:
        console.print(
            "Every measure, test and run: --details; curves: --plot, --format html",
            style="dim",
            highlight=False,
        )


def _write(path: Path, text: str) -> None:
    """Writes a file whole, replacing a link to it too; anything else (a pipe, /dev/stdout) is written to as it is.

    Raises:
        DiskError: it does not fit on the disk, or under the limit on the size of files; an earlier file is as it was
            then.
        UsageError: this place cannot be written.
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
