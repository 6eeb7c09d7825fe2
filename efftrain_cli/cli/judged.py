"""What the commands that end in a comparison share: their options, and how they end."""

from __future__ import annotations

import errno
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from typer import Exit, Option

from efftrain_cli.foundation.console import print_folded

if TYPE_CHECKING:
    from collections.abc import Sequence

    from efftrain_cli.compare.comparison import Comparison

Details = Annotated[
    bool,
    Option("--details", help="Print every measure, setting, run and caveat."),
]
Margin = Annotated[
    float,
    Option(
        min=0,
        help="Nats per token that do not matter: then equivalent is a verdict too.",
    ),
]
FailIf = Annotated[
    Literal["worse", "not-better"] | None,
    Option(
        help="Exit with 10 if an arm is worse, or is not shown better;"
        " with 11 if one could not be judged.",
    ),
]
FAILED = 10
"""Exit code of a verdict that --fail-if names."""
NOT_JUDGED = 11
"""Exit code of --fail-if if an arm could not be judged."""


def conclude(
    comparison: Comparison,
    kind: str,
    output: Path | None,
    *,
    details: bool,
    plot: bool,
    fail_if: str | None,
    before: Sequence[str] = (),
    after: Sequence[str] = (),
) -> None:
    """Print or write a comparison; end as `end_with_verdict`."""
    import shutil

    from efftrain_cli.compare.show import render

    text = render(comparison, kind, details)
    if kind == "table":
        text = "\n".join([*before, text, *after])
    if output is not None:
        write_output(output, text + "\n")
    else:
        print_folded(text)
    if plot:
        from efftrain_cli.compare.figures import curves_figure, draw_in_terminal

        figure = curves_figure(comparison.arms, "tokens")
        # Of runs without tokens there are no curves.
        if figure.axes[0].has_data():
            print(draw_in_terminal(figure, shutil.get_terminal_size().columns))
    if fail_if is not None:
        end_with_verdict(comparison, fail_if)


def write_output(path: Path, text: str) -> None:
    """Write a comparison, whole or not at all; to a device as it is.

    Raises:
        DiskError: it does not fit; an earlier file is unchanged.
        UsageError: the path cannot be written.
    """
    from efftrain_cli.foundation.errors import UsageError
    from efftrain_cli.foundation.files import disk_error, write_whole

    path = path.resolve()
    try:
        if path.is_file() or not path.exists():
            write_whole(path, text)
        else:
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            error.filename = str(path)
            raise disk_error(error) from None
        raise UsageError(f"--output {path}: {error.strerror or error}") from None


def end_with_verdict(comparison: Comparison, fail_if: str) -> None:
    """End with the exit code that --fail-if asks for.

    If a claim has a margin, "worse" passes only arms that are not worse by more than it.

    Raises:
        Exit: a verdict is one of those, or an arm was not judged.
    """
    verdicts = [row.verdict for row in comparison.verdicts]
    passing = {"better"}
    if fail_if == "worse":
        passing |= {"equivalent", "noninferior"}
        if not any(row.margin for row in comparison.verdicts):
            passing.add("undecided")
    if any(verdict and verdict not in passing for verdict in verdicts):
        raise Exit(FAILED)
    if not verdicts or "" in verdicts:
        raise Exit(NOT_JUDGED)
    print_folded(f"fail-if {fail_if}: no arm is {fail_if.replace('-', ' ')}", stream=sys.stderr)
