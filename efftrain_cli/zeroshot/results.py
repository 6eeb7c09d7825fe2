"""Read and write zeroshot.json and zeroshot_items.jsonl of a run's folder.

zeroshot.json is a list with one entry per (checkpoint sha256, task, protocol, limit); scoring the
same again replaces the entry. zeroshot_items.jsonl has a row per item, with the same four keys,
doc_id and doc_hash, so that two checkpoints can be compared item by item. Scores under a limit are
never comparable with full ones: the limit is part of the key.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

from efftrain_cli.foundation.files import write_whole
from efftrain_cli.foundation.records import Record, check_record, damaged, read_json
from efftrain_cli.run.lines import parse
from efftrain_cli.run.small_files import cleaned

Result = dict[str, Any]
"""An entry of zeroshot.json."""
SCHEMA_VERSION = 1
RESULTS = "zeroshot.json"
ITEMS = "zeroshot_items.jsonl"
KEY = ("checkpoint_sha256", "task", "protocol", "limit")


class Entry(Record):
    """An entry of zeroshot.json."""

    restore: ClassVar[str] = "remove it and evaluate again"

    schema_version: int
    checkpoint_sha256: str
    task: str
    protocol: str
    limit: int | float | None
    metric: str | None = None
    value: float | None = None
    metrics: dict[str, dict[str, float | None]] | None = None
    """Metric -> its value and stderr."""
    step: int | None = None
    tokens: int | None = None


def read_results(run: Path) -> list[Result]:
    """Return the entries of a run's zeroshot.json, control characters escaped; no entries if it
    does not exist.

    Raises:
        DataError: it is damaged, or written by a newer version.
    """
    path = run / RESULTS
    try:
        entries = read_json(path, Entry.restore)
    except FileNotFoundError:
        return []
    if not isinstance(entries, list):
        raise damaged(path, "it holds no list", Entry.restore)
    records = [check_record(path, entry, Entry) for entry in entries]
    return [cleaned(record.to_json()) for record in records]


def read_items(run: Path) -> list[Result]:
    """Return the rows of a run's zeroshot_items.jsonl that are whole; none if it does not exist."""
    path = run / ITEMS
    if not path.exists():
        return []
    rows = []
    for line in path.read_bytes().splitlines():
        row = parse(line)
        if row is not None:
            rows.append(row)
    return rows


def save_result(run: Path, entry: Result, items: list[Result]) -> None:
    """Add an entry and its items, in place of those with the same key. Each file is whole, or as it
    was."""
    key = {name: entry[name] for name in KEY}

    def without_key(rows: list[Result]) -> list[Result]:
        return [row for row in rows if not key.items() <= row.items()]

    entries = [*without_key(read_results(run)), entry]
    rows = without_key(read_items(run))
    for item in items:
        rows.append({**key, **item})
    text = json.dumps(entries, indent=1, allow_nan=False)
    lines = "".join(f"{json.dumps(row, allow_nan=False)}\n" for row in rows)
    write_whole(run / ITEMS, lines)
    write_whole(run / RESULTS, text + "\n")
