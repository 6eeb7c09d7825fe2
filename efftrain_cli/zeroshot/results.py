"""Read and write zeroshot.json and zeroshot_items.jsonl of a run's folder.

zeroshot.json is a list with one entry per (checkpoint sha256, task, protocol, limit); scoring the
same again replaces the entry. zeroshot_items.jsonl has a row per item, with the same four keys,
doc_id and doc_hash, so that two checkpoints can be compared item by item. Scores under a limit are
never comparable with full ones: the limit is part of the key.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

from pydantic import ValidationError

from efftrain_cli.foundation.files import write_whole
from efftrain_cli.foundation.records import (
    Part,
    Record,
    check_record,
    damaged,
    first_fault,
    read_json,
)
from efftrain_cli.run.lines import parse
from efftrain_cli.run.small_files import cleaned

Result = dict[str, Any]
"""An entry of zeroshot.json."""
SCHEMA_VERSION = 1
RESULTS = "zeroshot.json"
ITEMS = "zeroshot_items.jsonl"
KEY = ("checkpoint_sha256", "task", "protocol", "limit")


class Metric(Part):
    """One metric of a task."""

    value: float | None = None
    stderr: float | None = None


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
    metrics: dict[str, Metric] | None = None
    step: int | None = None
    tokens: int | None = None


class Item(Part):
    """A row of zeroshot_items.jsonl."""

    checkpoint_sha256: str
    task: str
    protocol: str
    limit: int | float | None
    doc_id: int | str


def key_of(entry: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the key of an entry, or of a row of items."""
    return tuple(entry[name] for name in KEY)


def read_results(run: Path) -> list[Result]:
    """Return the entries of a run's zeroshot.json, control characters escaped; no entries if it
    does not exist.

    Raises:
        DataError: it is damaged, or written by a newer version.
    """
    return [cleaned(entry.to_json()) for entry in read_entries(run)]


def read_entries(run: Path) -> list[Entry]:
    """Return the entries of a run's zeroshot.json as written; otherwise as `read_results`."""
    path = run / RESULTS
    try:
        entries = read_json(path, Entry.restore)
    except FileNotFoundError:
        return []
    if not isinstance(entries, list):
        raise damaged(path, "it holds no list", Entry.restore)
    return [check_record(path, entry, Entry) for entry in entries]


def read_items(run: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a run's zeroshot_items.jsonl; no rows if it does not exist.

    Raises:
        DataError: a row is damaged.
    """
    path = run / ITEMS
    if path.exists():
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    return  # a torn last line is a killed writer's
                try:
                    row = Item.model_validate(parse(line)).model_dump()
                except ValidationError as error:
                    fault = f"line {number}: {first_fault(error)}"
                    raise damaged(path, fault, Entry.restore) from None
                yield row


def save_result(run: Path, entry: Mapping[str, Any], items: list[dict[str, Any]]) -> None:
    """Add an entry and its items, in place of those with the same key. Each file is whole, or as it
    was."""
    key = {name: entry[name] for name in KEY}
    rows = [row for row in read_items(run) if key_of(row) != key_of(entry)]
    rows += [{**key, **item} for item in items]
    write_whole(run / ITEMS, "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows))
    entries = [old.to_json() for old in read_entries(run)]
    entries = [old for old in entries if key_of(old) != key_of(entry)]
    entries.append(dict(entry))
    text = json.dumps(entries, indent=1, allow_nan=False)
    write_whole(run / RESULTS, text + "\n")
