"""The one module that reads metrics.jsonl: which rows count, as dictionaries or as a frame, and
what is damaged.

Rows are appended only, so the later row is the later truth: what a resume begins with
replaces all older rows from its step on, however far they went. Nothing here writes, locks or
imports torch: a run can be read while it trains, on another machine, or half copied.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from efftrain_cli.foundation.console import counted
from efftrain_cli.foundation.errors import CheckpointError, DataError
from efftrain_cli.run.lines import CHECK, Fields, Lines, Values, parse, read_file, split_lines
from efftrain_cli.run.small_files import unreadable

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd

    Columns = dict[str, np.ndarray]
    """float64 values by column, one per row."""

CorruptLines = tuple[tuple[int, str], ...]
"""(number, what is wrong) of lines that are not rows, or not the row that was written."""
_COUNTERS = ("step", "segment", "nonfinite")
"""Columns that decide which rows count; always read."""
POLL_SECONDS = 1.0
"""Seconds between two looks at a run that is followed."""


@dataclass(frozen=True)
class Metrics:
    """The rows of metrics.jsonl that count, by column."""

    columns: Columns
    """float64, one value per step in increasing order, NaN where a row has null or lacks the
    key."""
    segments: int
    """Starts and resumes that wrote rows."""
    nonfinite_segments: int
    """Segments with a step whose loss or gradient was not finite, replaced ones included."""
    corrupt: CorruptLines
    """Lines that were dropped."""

    @property
    def frame(self) -> pd.DataFrame:
        """A row per step: `step` and `segment` are whole numbers, all other columns float64."""
        import pandas as pd

        whole = [name for name in ("step", "segment") if name in self.columns]
        return pd.DataFrame(self.columns).astype(dict.fromkeys(whole, "int64"))


def read_metrics(run: Path, columns: Sequence[str] = ()) -> Metrics:
    """Read the rows of a run that count, fast, through Arrow; no row if no step was logged.

    Args:
        run: its directory.
        columns: those wanted; empty: all that hold numbers.

    Raises:
        DataError: the file holds no rows, or is damaged in more places than its kills explain.
    """
    import numpy as np

    lines = _read(run)
    corrupt = lines.corrupt
    arrays = _read_by_arrow(lines, columns)
    if arrays is None:
        rows, corrupt = _valid_rows(lines, columns)
        _refuse_ruins(lines, rows, corrupt, run)
        names = columns or dict.fromkeys(chain.from_iterable(rows))
        arrays = columns_of(rows, [*names, *_COUNTERS])

    segment = arrays["segment"]
    starts = np.append(0, np.cumsum(np.diff(segment) != 0))[: len(segment)]
    latest = _latest(arrays["step"])
    kept = {name: values[latest] for name, values in arrays.items()}
    return Metrics(
        {name: kept[name] for name in columns or kept},
        segments=len(np.unique(starts)),
        nonfinite_segments=len(np.unique(starts[arrays["nonfinite"] > 0])),
        corrupt=corrupt,
    )


def latest_rows(run: Path, until: float = math.inf) -> list[Values]:
    """Return the rows that count, as they were written, one per step in increasing order, up to
    step `until`.

    Import nothing that training has not imported, and refuse nothing: damaged lines are left out,
    and a missing file has no rows.
    """
    import numpy as np

    rows = all_rows(run)
    latest = [rows[index] for index in _latest(np.array([row["step"] for row in rows], float))]
    return [row for row in latest if row["step"] <= until]


def all_rows(run: Path) -> list[Values]:
    """Return every row in file order, replaced ones too; refuse nothing, as `latest_rows`."""
    return _valid_rows(_read(run))[0]


def check_nothing_trained(run: Path) -> None:
    """Check that a run without a checkpoint may begin at step 1: it has no step to lose.

    Raises:
        CheckpointError: it logged steps.
    """
    step = last_row(run).get("step", 0)
    if step:
        raise CheckpointError(
            f"run {run.name} logged {counted(step, 'step')} and saved no checkpoint\n"
            f"  from step 1 again: efftrain pretrain --resume {run.name} --from-start"
        )


def last_row(run: Path) -> Values:
    """Return the last whole row of a run, whether it counts or not, else {}. Read the end of the
    file only."""
    try:
        with (run / "metrics.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - (1 << 16)))
            lines = split_lines(file.read()).texts
    except OSError:
        return {}
    for line in reversed(lines):
        row = parse(line)
        if row and "step" in row:
            return row
    return {}


def check_rows(run: Path) -> Lines:
    """Read all lines of a run's rows; those that are not the rows that were written are `corrupt`.

    Raises:
        OSError: the file is there and cannot be read.
    """
    lines = read_file(run / "metrics.jsonl")
    return replace(lines, corrupt=_valid_rows(lines)[1])


def follow_run(run: Path) -> Iterator[Values]:
    """Yield each row and event that another process writes to a run, until standard input closes.

    Rows come in their order, events in theirs; damaged ones are left out. An event has an `event`,
    a row none.
    """
    position = dict.fromkeys(("metrics.jsonl", "events.jsonl"), 0)
    closed = False
    while True:
        for name in position:
            content = b""
            with contextlib.suppress(FileNotFoundError), (run / name).open("rb") as file:
                file.seek(position[name])
                content = file.read()
            # Only whole lines are read past: a resume cuts a torn last one off, and may write
            # others in its place.
            content = content[: content.rfind(b"\n") + 1]
            position[name] += len(content)
            for line in split_lines(content).texts:
                value = parse(line)
                if value and ("event" in value or isinstance(value.get("step"), int)):
                    yield value
        if closed:
            return
        closed = _is_input_closed(POLL_SECONDS)


def _is_input_closed(seconds: float) -> bool:
    """Wait for at most `seconds`; return True as soon as standard input has ended."""
    try:
        ready, _, _ = select.select([sys.stdin], [], [], seconds)
        return bool(ready) and not os.read(sys.stdin.fileno(), 4096)
    except (OSError, ValueError):
        time.sleep(seconds)
        return True


def columns_of(rows: Sequence[Fields], names: Sequence[str]) -> Columns:
    """Return float64 columns of rows; NaN if a row has no number, or one beyond a float."""
    import numpy as np

    return {name: np.array([to_float(row.get(name)) for row in rows], float) for name in names}


def to_float(value: object) -> float:
    """Return a number as a finite float; NaN for anything else."""
    try:
        number = float(value) if isinstance(value, int | float) else math.nan
    except OverflowError:
        return math.nan
    return number if math.isfinite(number) else math.nan


def _valid_rows(lines: Lines, numbers: Sequence[str] = ()) -> tuple[list[Values], CorruptLines]:
    """Return the rows of a file, in file order, and its damaged lines.

    Args:
        numbers: columns that must hold numbers or null.
    """
    corrupt = dict(lines.corrupt)
    rows = {}
    unchecked = set()
    for number, text, checked in zip(lines.numbers, lines.texts, lines.checked, strict=True):
        row = parse(text)
        if row is None:
            corrupt[number] = "it is not a JSON object"
            continue
        row.setdefault("segment", 0)
        wrong = _fault_of(row, numbers)
        if wrong:
            corrupt[number] = wrong
            continue
        rows[number] = row
        if not checked:
            unchecked.add(number)

    # A segment's writer checks all of its rows or none.
    with_checks = {row["segment"] for number, row in rows.items() if number not in unchecked}
    for number in unchecked:
        if rows[number]["segment"] in with_checks:
            del rows[number]
            corrupt[number] = "it has no check value, the others of its segment have"
    return list(rows.values()), tuple(sorted(corrupt.items()))


def _read(run: Path) -> Lines:
    path = run / "metrics.jsonl"
    try:
        return read_file(path)
    except OSError as error:
        raise unreadable(path, error) from None


def _latest(steps: np.ndarray) -> np.ndarray:
    """Return the indices of the rows that count, in order of steps: those that only later steps
    follow in the file."""
    import numpy as np

    following = np.append(np.minimum.accumulate(steps[::-1])[::-1][1:], np.inf)
    return np.flatnonzero(steps < following)


def _refuse_ruins(lines: Lines, rows: Sequence[Values], corrupt: CorruptLines, run: Path) -> None:
    """Refuse a file that lost too much to judge by the rest.

    Raises:
        DataError: it holds lines but no rows, or more damage than kills explain.
    """
    path = run / "metrics.jsonl"
    if lines.texts and not rows:
        raise DataError(f"{path} is not a file of steps: none of its lines is a row with a `step`")
    # Each kill may tear one line. More than that is damage.
    starts = 1 + sum(before["segment"] != after["segment"] for before, after in pairwise(rows))
    if len(corrupt) > starts:
        number, wrong = corrupt[0]
        raise DataError(
            f"{path} is damaged: {len(corrupt)} lines are not rows (line {number} is the first:"
            f" {wrong}), but the run was started {starts} times. Restore the file from a copy,"
            f" or remove those lines: `efftrain runs verify {run.name}` lists them"
        )


def _fault_of(row: Values, numbers: Sequence[str]) -> str:
    for name in ("step", "segment"):
        value = row.get(name)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**53:
            return f"its `{name}` is {value!r:.20}, not a whole number"
    for name in numbers:
        if row.get(name) is not None and math.isnan(to_float(row[name])):
            return f"its `{name}` is {row[name]!r:.20}, not a finite number"
    return ""


def _read_by_arrow(lines: Lines, columns: Sequence[str]) -> Columns | None:
    """Return the columns, or all of numbers, as float64; None unless every line is a row as it was
    written."""
    import pyarrow as pa
    import pyarrow.json as pj

    if lines.corrupt or not lines.texts or not all(lines.checked):
        return None
    types = dict.fromkeys([*columns, *_COUNTERS], pa.float64()) | {"nonfinite": pa.bool_()}
    try:
        table = pj.read_json(
            pa.BufferReader(b"\n".join(lines.texts)),
            read_options=pj.ReadOptions(use_threads=False, block_size=1 << 22),
            parse_options=pj.ParseOptions(
                explicit_schema=pa.schema(types),
                unexpected_field_behavior="ignore" if columns else "infer",
            ),
        )
        if table["step"].null_count or table["segment"].null_count:
            return None
        names = [name for name in table.column_names if name != CHECK]
        return {name: table[name].cast(pa.float64()).to_numpy() for name in names}
    except pa.ArrowInvalid:  # a column holds no numbers
        return None
