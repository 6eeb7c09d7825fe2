"""The one module that reads metrics.jsonl: which rows count, as dictionaries or as a frame, and
what is damaged.

Rows are appended only, so the later row is the later truth: what a resume begins with
replaces all older rows from its step on, however far they went. Nothing here writes, locks or
imports torch: a run can be read while it trains, on another machine, or half copied.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from efftrain_cli.foundation.errors import DataError
from efftrain_cli.run.lines import Values, newest_lines, read_file, read_lines

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd

_COUNTERS = ("step", "segment")
"""Columns that decide which rows count; always read."""


class Metrics(NamedTuple):
    """The rows of metrics.jsonl that count."""

    frame: pd.DataFrame
    """A row per step, in increasing order: `step` and `segment` are whole numbers, all other
    columns float64, NaN where a row has null or lacks the key."""
    corrupt: tuple[int, ...]
    """Numbers of the lines that were dropped."""


def read_metrics(run: Path, columns: Sequence[str] = ()) -> Metrics:
    """Read the rows of a run that count, fast, through Arrow; no row if no step was logged.

    Args:
        run: its directory.
        columns: those wanted; empty: all that hold numbers.

    Raises:
        DataError: the file is damaged in more places than its kills explain.
    """
    path = run / "metrics.jsonl"
    lines = read_file(path)
    frame = _parse_columns(lines.texts, columns)
    is_start = frame.segment.diff() != 0
    starts = int(is_start.sum())
    # Each kill may tear one line. More than that is damage.
    if len(lines.corrupt) > max(1, starts):
        raise DataError(
            f"{path} is damaged: {len(lines.corrupt)} lines are not rows (line"
            f" {lines.corrupt[0]} is the first), but the run was started {starts} times\n"
            "  restore the file from a copy, or remove those lines:"
            f" `efftrain runs verify {run.name}` lists them"
        )
    latest = _latest(frame.step.to_numpy())
    frame = frame.iloc[latest].reset_index(drop=True)
    frame = frame.astype(dict.fromkeys(_COUNTERS, "int64"))
    if columns:
        frame = frame[list(columns)]
    return Metrics(frame, lines.corrupt)


def latest_rows(run: Path, until: float = math.inf) -> list[Values]:
    """Return the rows that count, as they were written, one per step in increasing order, up to
    step `until`.

    Import nothing that training has not imported, and refuse nothing: damaged lines are left out,
    and a missing file has no rows.
    """
    import numpy as np

    rows = all_rows(run)
    steps = np.array([row["step"] for row in rows], float)
    latest = [rows[index] for index in _latest(steps)]
    return [row for row in latest if row["step"] <= until]


def all_rows(run: Path) -> list[Values]:
    """Return every row in file order, replaced ones too; refuse nothing, as `latest_rows`."""
    return read_lines(run / "metrics.jsonl")


def last_row(run: Path) -> Values:
    """Return the last whole row of a run, whether it counts or not, else {}. Read the end of the
    file only."""
    return next(newest_lines(run / "metrics.jsonl"), {})


def to_float(value: object) -> float:
    """Return a number as a finite float; NaN for anything else."""
    if not isinstance(value, int | float):
        return math.nan
    try:
        number = float(value)
    except OverflowError:
        return math.nan
    return number if math.isfinite(number) else math.nan


def _latest(steps: np.ndarray) -> np.ndarray:
    """Return the indices of the rows that count, in order of steps: those that only later steps
    follow in the file."""
    import numpy as np

    lowest_from_here = np.minimum.accumulate(steps[::-1])[::-1]
    lowest_after = np.append(lowest_from_here[1:], np.inf)
    return np.flatnonzero(steps < lowest_after)


def _parse_columns(lines: list[bytes], columns: Sequence[str]) -> pd.DataFrame:
    """Return columns of lines, or all of numbers, as float64."""
    import pyarrow as pa
    import pyarrow.json as pj

    types = dict.fromkeys([*columns, *_COUNTERS], pa.float64())
    if "nonfinite" in types:
        types["nonfinite"] = pa.bool_()
    schema = pa.schema(types)
    table = schema.empty_table()
    if lines:
        content = pa.BufferReader(b"\n".join(lines))
        options = pj.ParseOptions(
            explicit_schema=schema,
            unexpected_field_behavior="ignore" if columns else "infer",
        )
        table = pj.read_json(
            content,
            # A row must fit in two blocks, of 1 MiB by default.
            read_options=pj.ReadOptions(block_size=1 << 22),
            parse_options=options,
        )
    numbers = []
    for field in table.schema:
        kind = field.type
        if pa.types.is_primitive(kind) or pa.types.is_null(kind):
            numbers.append(field.name)
    frame = table.select(numbers).to_pandas()
    return frame.astype("float64")
