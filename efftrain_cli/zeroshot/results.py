"""Read and write zeroshot.json and zeroshot_items.jsonl of a run's folder.

zeroshot.json is a list with one entry per (checkpoint sha256, task, protocol, limit); scoring the
same again replaces the entry. zeroshot_items.jsonl has a row per item, with the same four keys,
doc_id and doc_hash, so that two checkpoints can be compared item by item. Scores under a limit are
never comparable with full ones: the limit is part of the key.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
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


def key_of(entry: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the key of an entry, or of a row of items."""
    return tuple(entry.get(name) for name in KEY)


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
    lines = path.read_bytes().splitlines() if path.exists() else []
    return [row for row in map(parse, lines) if row is not None]


def save_result(run: Path, entry: Result, items: list[Result]) -> None:
    """Add an entry and its items, in place of those with the same key. Each file is whole, or as it
    was."""
    key = {name: entry[name] for name in KEY}
    rows = [row for row in read_items(run) if key_of(row) != key_of(entry)]
    rows += [{**key, **item} for item in items]
    entries = [old for old in read_results(run) if key_of(old) != key_of(entry)]
    entries.append(entry)
    lines = [json.dumps(row, allow_nan=False) + "\n" for row in rows]
    text = json.dumps(entries, indent=1, allow_nan=False)
    write_whole(run / ITEMS, "".join(lines))
    write_whole(run / RESULTS, text + "\n")
