"""The reading side of run directories: rows, events, recipe, origin and status, without owning the run.

Nothing here writes, locks or imports torch, so a run can be read while it trains, on another machine, or half copied.
"""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from efftrain_cli.foundation.console import printable
from efftrain_cli.foundation.errors import DataError, NewerFormatError
from efftrain_cli.run.lines import Lines, parse, read_lines, split_lines
from efftrain_cli.run.lock import is_locked

if TYPE_CHECKING:
    import numpy as np

SCHEMA_VERSION = 1
"""Format of a run directory."""
NOT_COMPUTED = ("checkpoint.", "wandb.", "eval.sample")
"""Recipe keys that change nothing of what a run computes: a continued run, or another, may differ in them."""


@dataclass(frozen=True)
class Rows:
    """Columns of metrics.jsonl that count: after a resume, the rows from its first step on replace all older ones.

    Of a step written twice, the later value of each column counts.
    """

    columns: dict[str, np.ndarray]
    """float64, one value per step in increasing order, NaN where a row has null or lacks the key."""
    segments: int
    """Starts and resumes that wrote rows."""
    nonfinite_segments: int
    """Segments with a step whose loss or gradient was not finite, replaced ones included."""
    damaged: tuple[tuple[int, str], ...]
    """(number, what is wrong) of lines that are not rows, or not the row that was written. They were dropped."""


@dataclass(frozen=True)
class RunDirectory:
    """What a run's small files say."""

    name: str
    path: Path
    recipe: dict[str, Any]
    """The resolved recipe, as in recipe.toml."""
    origin: dict[str, Any]
    events: tuple[dict[str, Any], ...]
    locked: bool
    """A living process owns the run."""


def read_run(path: Path) -> RunDirectory:
    """Reads a run's recipe, origin and events.

    Raises:
        DataError: a file is missing or damaged, or the directory has a format that this version does not read.
    """
    file = path / "recipe.toml"
    try:
        recipe = tomllib.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DataError(f"{path} is not a run directory: it has no recipe.toml") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DataError(f"{file} is damaged: {error}. {_RESTORE}") from None
    except OSError as error:
        raise unreadable(file, error) from None
    return RunDirectory(
        printable(path.name),
        path,
        recipe,
        cleaned(read_origin(path)),
        read_events(path),
        is_locked(path / "lock"),
    )


def unreadable(path: Path, error: OSError) -> DataError:
    """The error of a file or folder of a run that the system does not let us read."""
    return DataError(
        f"{path} cannot be read: {error.strerror}. Make it readable, or restore it from a copy"
    )


def check_schema(values: dict[str, Any], path: Path) -> None:
    """Accepts the current format and the one before it, to read.

    Raises:
        DataError: another format; the message says which and what to do.
    """
    version = values.get("schema_version")
    if not isinstance(version, int) or isinstance(version, bool):
        raise DataError(
            f"{path} has no schema_version; it was not written by efftrain, or is damaged"
        )
    if version > SCHEMA_VERSION:
        written_by = printable(str(values.get("efftrain") or "unknown"))
        raise NewerFormatError(
            f"{path} has format {version}, this efftrain reads formats up to {SCHEMA_VERSION}. It was written by efftrain "
            f"{written_by}: install a newer efftrain. Nothing was changed"
        )
    if version < SCHEMA_VERSION - 1:
        raise DataError(
            f"{path} has format {version}; this efftrain reads formats {SCHEMA_VERSION - 1} and {SCHEMA_VERSION}. "
            "Read it with the efftrain version named in its origin.json"
        )


def read_events(path: Path) -> tuple[dict[str, Any], ...]:
    """The events of a run, oldest first; torn and damaged lines are left out."""
    return tuple(cleaned(event) for event in read_lines(path / "events.jsonl"))


# --- which rows count ------------------------------------------------------------------------------------------------


def counting(steps: np.ndarray) -> np.ndarray:
    """Indices of the rows that count, in order of steps: those after which the file names no smaller step.

    Rows are appended only, so the later row is the later truth: what a resume or a rewind begins with replaces all
    older rows from its step on, however far they went. A step may count twice: its evaluation was made up for after a
    stop, and then the later value of each column counts.
    """
    import numpy as np

    following = np.append(np.minimum.accumulate(steps[::-1])[::-1][1:], np.inf)
    return np.flatnonzero(steps <= following)


def read_counting(path: Path, until: int | None = None) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl that count, one per step in increasing order, up to step `until`, as they were written.

    Imports nothing that training has not imported, and refuses nothing: damaged lines are left out, and a missing file
    has no rows. `path` is the file or its run directory.
    """
    import numpy as np

    path = path / "metrics.jsonl" if path.is_dir() else path
    if not path.exists():
        return []
    rows, _ = rows_of(_read(path))
    found: list[dict[str, Any]] = []
    for index in counting(np.array([row["step"] for row in rows], float)):
        row = rows[index]
        if until is not None and row["step"] > until:
            break
        if found and found[-1]["step"] == row["step"]:
            found[-1] |= {
                key: value
                for key, value in row.items()
                if value is not None or key not in found[-1]
            }
        else:
            found.append(dict(row))
    return found


def read_rows(path: Path, columns: Sequence[str]) -> Rows:
    """The rows of metrics.jsonl that count, as float64 arrays of `columns`: the fast way, through Arrow.

    `path` is the file or its run directory.

    Raises:
        DataError: the file is missing, holds no rows, or is damaged in more places than its kills explain.
    """
    import numpy as np

    path = path / "metrics.jsonl" if path.is_dir() else path
    lines = _read(path)
    wanted = tuple(dict.fromkeys((*columns, "step", "segment", "nonfinite")))
    found = _arrow_columns(lines, wanted)
    if found is None:
        rows, damaged = rows_of(lines, columns)
        _refuse_ruins(lines, rows, damaged, path)
        found = {name: np.array([row.get(name) for row in rows], float) for name in wanted}, damaged
    arrays, damaged = found
    step, segment, nonfinite = (
        arrays["step"],
        np.nan_to_num(arrays["segment"]),
        np.nan_to_num(arrays["nonfinite"]),
    )
    current = counting(step)
    kept = {name: values[current] for name, values in arrays.items()}
    twice = np.flatnonzero(np.diff(kept["step"]) == 0)
    if len(twice):
        kept = {name: _last_there(values, twice) for name, values in kept.items()}
    starts = np.append(0, np.cumsum(np.diff(segment) != 0))[: len(segment)]
    return Rows(
        {name: kept[name] for name in columns},
        segments=len(np.unique(starts)),
        nonfinite_segments=len(np.unique(starts[nonfinite > 0])),
        damaged=damaged,
    )


def last_row(path: Path) -> dict[str, Any]:
    """The last whole row of metrics.jsonl, whether it counts or not, else {}. Reads the end of the file only."""
    try:
        with (path / "metrics.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - (1 << 16)))
            lines = file.read().splitlines()
    except OSError:
        return {}
    rows = (row for line in reversed(lines) if (row := parse(line)) is not None and "step" in row)
    return next(rows, {})


def _read(path: Path) -> Lines:
    try:
        return split_lines(path.read_bytes())
    except FileNotFoundError:
        raise DataError(f"{path} is missing: the run has not logged a step yet") from None
    except OSError as error:
        raise unreadable(path, error) from None


Damage = tuple[tuple[int, str], ...]


def rows_of(lines: Lines, numbers: Sequence[str] = ()) -> tuple[list[dict[str, Any]], Damage]:
    """The rows of a file, in file order, and its damaged lines. `numbers`: columns that must hold numbers or null."""
    import numpy as np

    damaged = dict(lines.damaged)
    rows, at = [], []
    for index, text in enumerate(lines.texts):
        row = parse(text)
        wrong = "it is not a JSON object" if row is None else _wrong_in(row, numbers)
        if row is None or wrong:
            damaged[lines.numbers[index]] = wrong
        else:
            rows.append({"segment": 0, **row})
            at.append(index)
    step, segment = (np.array([row[name] for row in rows], float) for name in ("step", "segment"))
    odd = _odd(step, segment, np.array(lines.checked, bool)[at])
    damaged |= {lines.numbers[at[index]]: wrong for index, wrong in odd.items()}
    return [row for index, row in enumerate(rows) if index not in odd], tuple(
        sorted(damaged.items())
    )


def _refuse_ruins(
    lines: Lines, rows: Sequence[dict[str, Any]], damaged: Damage, path: Path
) -> None:
    """Refuses a file of which too much is lost to judge by the rest.

    Raises:
        DataError: it holds lines but no rows, or more damage than kills explain.
    """
    if lines.texts and not rows:
        raise DataError(f"{path} is not a file of steps: none of its lines is a row with a `step`")
    # Each kill may tear one line, and the next start may glue its first row to it. More than that is damage.
    starts = 1 + sum(before["segment"] != after["segment"] for before, after in pairwise(rows))
    if len(damaged) > starts:
        number, wrong = damaged[0]
        raise DataError(
            f"{path} is damaged: {len(damaged)} lines are not rows (line {number} is the first: {wrong}), but the run was started "
            f"{starts} times. Restore the file from a copy, or remove those lines: `efftrain runs verify {path.parent.name}` "
            "lists them"
        )


def _wrong_in(row: dict[str, Any], numbers: Sequence[str]) -> str:
    for name in ("step", "segment"):
        value = row.get(name, 0 if name == "segment" else None)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**53:
            return f"its `{name}` is {value!r:.20}, not a whole number"
    for name in numbers:
        if not isinstance(row.get(name), (int, float, bool, type(None))):
            return f"its `{name}` is {row[name]!r:.20}, not a number"
    return ""


def _odd(step: np.ndarray, segment: np.ndarray, checked: np.ndarray) -> dict[int, str]:
    """What is wrong with rows that cannot be what was written, by index: rows without a check among checked ones of
    their segment, and rows without one whose step or segment does not fit where the rows before and after fit each
    other."""
    import numpy as np

    if checked.all():
        return {}
    apart = step[2:] - step[:-2]
    neighbours = (segment[:-2] == segment[2:]) & (apart >= 1) & (apart <= 2)
    fits = (segment[1:-1] == segment[:-2]) & (step[1:-1] == step[:-2] + 1)
    out_of_place = {
        i: f"it says step {step[i]:.0f} of segment {segment[i]:.0f}, between steps {step[i - 1]:.0f} and {step[i + 1]:.0f}"
        for i in (1 + np.flatnonzero(neighbours & ~fits & ~checked[1:-1])).tolist()
    }
    among_checked = np.flatnonzero(~checked & np.isin(segment, segment[checked])).tolist()
    return out_of_place | dict.fromkeys(
        among_checked, "it has no check value, the others of its segment have"
    )


def _arrow_columns(
    lines: Lines, wanted: Sequence[str]
) -> tuple[dict[str, np.ndarray], Damage] | None:
    """The columns as float64 and the damaged lines; None where a line needs a closer look."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.json as pj

    n = len(lines.texts)
    text = b"\n".join([*lines.texts, b""])
    # Flat objects only: Arrow's parser must not meet deep nesting. It takes NaN and Infinity for numbers: looking for
    # their capitals, which no column's name has, is twenty times as fast as for the words. It passes over a column
    # whose name is damaged; rows are written in ASCII.
    plain = (
        text.isascii()
        and text.count(b"{") == n
        and not any(mark in text for mark in (b"[", b"N", b"I"))
    )
    if not n or not plain:
        return None
    schema = pa.schema(
        [(name, pa.bool_() if name == "nonfinite" else pa.float64()) for name in wanted]
    )
    try:
        table = pj.read_json(
            pa.BufferReader(text),
            read_options=pj.ReadOptions(use_threads=False, block_size=1 << 22),
            parse_options=pj.ParseOptions(
                explicit_schema=schema, unexpected_field_behavior="ignore"
            ),
        )
    except pa.ArrowInvalid:
        return None
    if table.num_rows != n or table["segment"].null_count:  # blank lines, or rows without a segment
        return None
    arrays = {name: table[name].cast(pa.float64()).to_numpy() for name in wanted}
    step, segment = arrays["step"], np.nan_to_num(arrays["segment"])
    if not (np.isfinite(step) & (step >= 0) & (step < 2**53) & (step == np.floor(step))).all():
        return None
    odd = _odd(step, segment, np.array(lines.checked, bool))
    damaged = dict(lines.damaged) | {lines.numbers[index]: wrong for index, wrong in odd.items()}
    if len(damaged) > 1:
        return None  # more than a kill explains, perhaps
    return {name: np.delete(values, list(odd)) for name, values in arrays.items()}, tuple(
        sorted(damaged.items())
    )


def _last_there(values: np.ndarray, twice: np.ndarray) -> np.ndarray:
    """One value per step where row `twice[i]` and the next are of one step: the later one, else the earlier."""
    import numpy as np

    values = values.copy()
    for i in twice:
        if np.isnan(values[i + 1]):
            values[i + 1] = values[i]
    return np.delete(values, twice)


# --- small files -----------------------------------------------------------------------------------------------------


def read_origin(path: Path) -> dict[str, Any]:
    """What origin.json of the run in this directory says.

    Raises:
        DataError: it is missing or damaged, or the run has a format that this version does not read.
    """
    file = path / "origin.json"
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DataError(
            f"{file} is missing: without it nobody can say what the run was trained on. {_RESTORE}"
        ) from None
    except OSError as error:
        raise unreadable(file, error) from None
    except (ValueError, RecursionError) as error:
        reason = (
            "it is not UTF-8 text" if isinstance(error, UnicodeDecodeError) else str(error)[:200]
        )
        raise DataError(f"{file} is damaged: {reason}. {_RESTORE}") from None
    if not isinstance(value, dict):
        raise DataError(f"{file} is damaged: it holds no JSON object. {_RESTORE}")
    check_schema(value, file)
    return value


_RESTORE = "Restore it from a copy of the run, or remove the run with `efftrain runs rm`"


def origin_data(path: Path) -> dict[str, Any]:
    """What origin.json says of the data: hashes and the vocabulary's size.

    Raises:
        DataError: as `read_origin`, or it says nothing of them.
    """
    data = read_origin(path).get("data")
    needed = ("tokenizer_hash", "vocab_size", "train_hash", "valid_hash")
    if not isinstance(data, dict) or any(name not in data for name in needed):
        raise DataError(
            f"{path / 'origin.json'} is damaged: its `data` does not say {', '.join(needed)}. {_RESTORE}"
        )
    return data


def cleaned(value: Any) -> Any:
    """`value` with all control characters escaped: a run may come from anywhere, and what it says is printed."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, dict):
        return {printable(str(key)): cleaned(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [cleaned(entry) for entry in value]
    return value
