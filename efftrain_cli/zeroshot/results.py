"""zeroshot.json and zeroshot_items.jsonl of a run directory.

zeroshot.json is a list with one entry per (checkpoint sha256, task, protocol, limit); scoring the same again replaces
the entry. zeroshot_items.jsonl has a row per item, with the same four keys, doc_id and doc_hash, so that two
checkpoints can be compared item by item. Scores under a limit are never comparable with full ones: the limit is part of
the key.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from efftrain_cli.foundation.errors import DataError
from efftrain_cli.foundation.files import write_whole

SCHEMA_VERSION = 1
RESULTS = "zeroshot.json"
ITEMS = "zeroshot_items.jsonl"
KEY = ("checkpoint_sha256", "task", "protocol", "limit")


def key_of(entry: Mapping[str, Any]) -> tuple[Any, ...]:
    """What an entry, or a row of items, is about."""
    return tuple(entry[name] for name in KEY)


def read_results(run: Path) -> list[dict[str, Any]]:
    """The entries of a run's zeroshot.json; none where it does not exist. A `DataError` where it is damaged, or
    written by a newer version."""
    path = run / RESULTS
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
        for entry in entries:
            key_of(entry)
        newest = max((entry["schema_version"] for entry in entries), default=SCHEMA_VERSION)
    except FileNotFoundError:
        return []
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} is damaged ({error!r}); remove it and evaluate again") from None
    if newest > SCHEMA_VERSION:
        raise DataError(
            f"{path} has schema_version {newest}; this efftrain reads up to {SCHEMA_VERSION}: update efftrain"
        )
    return entries


def read_items(run: Path) -> Iterator[dict[str, Any]]:
    """The rows of a run's zeroshot_items.jsonl; none where it does not exist."""
    path = run / ITEMS
    if path.exists():
        with path.open(encoding="utf-8") as file:
            for line in file:
                if line.endswith("\n"):  # a torn last line is a killed writer's
                    yield json.loads(line)


def save_result(run: Path, entry: Mapping[str, Any], items: list[dict[str, Any]]) -> None:
    """Adds an entry and its items, in place of those with the same key. Each file appears whole or stays as it was."""
    key = {name: entry[name] for name in KEY}
    rows = [row for row in read_items(run) if key_of(row) != key_of(entry)]
    rows += [{**key, **item} for item in items]
    write_whole(run / ITEMS, "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows))
    entries = [old for old in read_results(run) if key_of(old) != key_of(entry)]
    entries.append(dict(entry))
    write_whole(run / RESULTS, json.dumps(entries, indent=1, allow_nan=False) + "\n")
