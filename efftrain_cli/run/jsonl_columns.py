"""Columns of a JSON-lines file of flat rows, read at several hundred megabytes a second.

A writer that logs one flat object per step repeats the same keys in the same order on every line. Such a line is also
a line of comma-separated values whose cells begin with a constant `"key": `. Arrow's CSV reader splits them about four
times faster than its JSON reader parses them. Each cell's key is checked; a line that breaks the pattern is parsed as
JSON on its own, and a file of many such lines goes through Arrow's JSON reader whole.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa

_BLOCK = 1 << 22
"""Bytes per block: large enough that a thread's start costs nothing, small enough for the memory of a few of them."""
_CELL = 1 << 16
"""Longest text of a number, in bytes; Arrow wants an end to the slice."""
_ODD_LINES = 2000
"""More lines than this off the common pattern, and the file is read by the JSON reader instead."""


@dataclass(frozen=True, slots=True)
class Columns:
    """Rows of a JSON-lines file in file order."""

    table: pa.Table
    """One column per key; numbers as int64 or float64, null where a row has none. Column `_line` is the 1-based line."""
    torn: bool
    """The file ended inside a line, which was dropped: a writer was killed, or is writing now."""
    damaged: tuple[int, ...]
    """1-based numbers of lines that are no JSON object and were dropped."""


def read_columns(path: Path, columns: Sequence[str] | None = None) -> Columns:
    """Reads `columns` (all, where None) of a JSON-lines file of flat rows. A line without its newline is dropped.

    Raises:
        OSError: the file cannot be read.
    """
    import pyarrow as pa

    size = path.stat().st_size
    if size == 0:
        return Columns(pa.table({"_line": pa.array([], pa.int64())}), False, ())
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        end = mapped.rfind(b"\n") + 1
        torn = end < len(mapped)
        if end == 0:
            return Columns(pa.table({"_line": pa.array([], pa.int64())}), torn, ())
        # Arrow keeps no view of the mapping: every column is copied by the conversion to numbers.
        buffer = pa.py_buffer(memoryview(mapped)[:end])
        try:
            found = _read_uniform(buffer, columns)
            if found is None:
                found = _read_json(bytes(memoryview(mapped)[:end]), columns)
        finally:
            del buffer
    table, damaged = found
    return Columns(table, torn, tuple(damaged))


def _pattern(buffer: pa.Buffer) -> tuple[list[str], list[bytes]] | None:
    """Keys and cell prefixes of the longest of the first lines, None where cells cannot be told apart by commas."""
    head = bytes(memoryview(buffer)[: 1 << 16]).split(b"\n")[:-1]
    if not head:
        return None
    parsed = [(line, row) for line in head[:64] if (row := _loads(line.decode("utf-8", "replace"))) is not None]
    if not parsed:
        return None
    line, row = max(parsed, key=lambda pair: len(pair[1]))
    cells = line.split(b",")
    if len(cells) != len(row):
        return None
    prefixes = []
    for position, (key, cell) in enumerate(zip(row, cells, strict=True)):
        name = json.dumps(key).encode() + b":"
        at = cell.find(name)
        if at < 0 or cell[:at].strip() != (b"{" if position == 0 else b""):
            return None
        at += len(name)
        while cell[at : at + 1] == b" ":
            at += 1
        prefixes.append(cell[:at])
    return list(row), prefixes


def _read_uniform(buffer: pa.Buffer, columns: Sequence[str] | None) -> tuple[pa.Table, list[int]] | None:
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.csv as csv

    pattern = _pattern(buffer)
    if pattern is None:
        return None
    keys, prefixes = pattern
    last = len(keys) - 1
    wanted = [i for i, key in enumerate(keys) if columns is None or key in columns]
    read = sorted({0, last, *wanted})
    odd: list[tuple[int, str]] = []

    def keep_odd(row: csv.InvalidRow) -> str:
        odd.append((row.number, row.text))
        return "skip"

    names = [f"f{i}" for i in range(len(keys))]
    try:
        cells = csv.read_csv(
            pa.BufferReader(buffer),
            # One thread: with several, Arrow does not number the odd rows. Runs are read side by side instead.
            read_options=csv.ReadOptions(use_threads=False, block_size=_BLOCK, column_names=names),
            parse_options=csv.ParseOptions(
                delimiter=",", quote_char=False, ignore_empty_lines=False, invalid_row_handler=keep_odd
            ),
            convert_options=csv.ConvertOptions(
                include_columns=[names[i] for i in read],
                column_types={name: pa.binary() for name in names},
                strings_can_be_null=False,
            ),
        )
    except pa.ArrowInvalid:
        return None
    if len(odd) > _ODD_LINES:
        return None
    total = cells.num_rows + len(odd)
    lines = np.delete(np.arange(1, total + 1), [number - 1 for number, _ in odd])

    good = np.ones(cells.num_rows, bool)
    for i in read:
        column = cells.column(names[i])
        good &= pc.starts_with(column, prefixes[i]).to_numpy()
        if i == last:
            good &= pc.ends_with(column, b"}").to_numpy()
    bad = np.flatnonzero(~good)
    if len(bad) > _ODD_LINES:
        return None
    if len(bad):
        text = _lines_at(buffer, [int(lines[i]) for i in bad])
        odd += [(int(lines[i]), line) for i, line in zip(bad, text, strict=True)]
        cells = cells.filter(pa.array(good))
        lines = lines[good]

    values: dict[str, Any] = {}
    for i in wanted:
        text = pc.binary_slice(cells.column(names[i]), len(prefixes[i]), -1 if i == last else _CELL)
        try:
            converted = _convert(text)
        except pa.ArrowInvalid:  # bytes that are no text
            return None
        if converted is None:
            return None
        values[keys[i]] = converted
    values["_line"] = pa.array(lines, pa.int64())
    table = pa.table(values)
    if not odd:
        return table, []
    extra, damaged = _parse_lines(odd, columns)
    if extra is not None:
        table = pa.concat_tables([table, extra], promote_options="permissive").sort_by("_line")
    return table, damaged


def _convert(text: pa.ChunkedArray) -> pa.ChunkedArray | None:
    """Numbers or truth values of a column of JSON texts; None where a cell is something else."""
    import pyarrow as pa
    import pyarrow.compute as pc

    cells = pc.cast(text, pa.string())
    is_null = pc.equal(cells, "null")
    if pc.all(is_null).as_py():
        return pa.chunked_array([pa.nulls(len(cells), pa.float64())])
    if pc.any(is_null).as_py():
        cells = pc.if_else(is_null, None, cells)
    first = pc.drop_null(cells)[0].as_py()
    if first in ("true", "false"):
        is_true, is_false = pc.equal(cells, "true"), pc.equal(cells, "false")
        return is_true if pc.all(pc.or_(is_true, is_false)).as_py() else None
    for kind in (pa.int64(), pa.float64()) if first.lstrip("-").isdigit() else (pa.float64(),):
        try:
            numbers = pc.cast(cells, kind)
        except pa.ArrowInvalid:
            continue
        # Arrow reads the text nan as a number; JSON has none, and neither has a metrics file.
        if kind == pa.float64() and not pc.all(pc.is_finite(numbers)).as_py():
            return None
        return numbers
    return None


def _lines_at(buffer: pa.Buffer, numbers: Sequence[int]) -> list[str]:
    lines = bytes(memoryview(buffer)).split(b"\n")
    return [lines[number - 1].decode("utf-8", "replace") for number in numbers]


def _parse_lines(
    lines: Sequence[tuple[int, str]], columns: Sequence[str] | None
) -> tuple[pa.Table | None, list[int]]:
    """Rows of single lines. Where a killed writer's torn line was glued to the next one, the whole row at its end counts."""
    import pyarrow as pa

    rows, damaged = [], []
    for number, line in sorted(lines):
        row = _loads(line)
        if row is None:
            damaged.append(number)
            row = _loads(line[line.rfind("{") :]) if line.rfind("{") > 0 else None
        if row is not None:
            kept = {key: value for key, value in row.items() if columns is None or key in columns}
            rows.append({**kept, "_line": number})
    return (pa.Table.from_pylist(_same_keys(rows)) if rows else None), damaged


def _loads(line: str) -> dict[str, Any] | None:
    def refuse(text: str) -> None:
        raise ValueError(f"{text} is not JSON")

    try:
        row = json.loads(line, parse_constant=refuse)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None


def _same_keys(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    keys = dict.fromkeys(key for row in rows for key in row)
    return [{key: row.get(key) for key in keys} for row in rows]


def _read_json(text: bytes, columns: Sequence[str] | None) -> tuple[pa.Table, list[int]]:
    """The careful way: Arrow's JSON reader, or line by line where it meets a damaged line."""
    import pyarrow as pa
    import pyarrow.json as pj

    try:
        table = pj.read_json(
            pa.BufferReader(text), read_options=pj.ReadOptions(use_threads=False, block_size=_BLOCK)
        )
        # Arrow skips blank lines; numbers of lines are only right without them.
        if table.num_rows == text.count(b"\n"):
            keys = [name for name in table.column_names if columns is None or name in columns]
            return table.select(keys).append_column("_line", pa.array(range(1, table.num_rows + 1))), []
    except pa.ArrowInvalid:
        pass
    lines = [(n, line) for n, line in enumerate(text.decode("utf-8", "replace").split("\n")[:-1], 1)]
    table, damaged = _parse_lines(lines, columns)
    return (table if table is not None else pa.table({"_line": pa.array([], pa.int64())})), damaged
