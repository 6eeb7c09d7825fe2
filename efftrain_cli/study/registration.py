"""Registering a study, and the looks that were taken: plan.json in the study's folder."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar

from efftrain_cli.compare.judge import Result
from efftrain_cli.foundation.console import listed
from efftrain_cli.foundation.errors import UsageError
from efftrain_cli.foundation.files import make_folder
from efftrain_cli.foundation.records import (
    Record,
    digest_of,
    read_record,
    utc_now,
    write_record,
)


class Registration(Record):
    """plan.json: what was fixed, when, and every look as it was written."""

    restore: ClassVar[str] = "restore it, or begin a new study under another name"

    schema_version: int
    registered: str
    values_sha256: str
    """Hash of the values."""
    values: dict[str, Any]
    looks: list[list[dict[str, Any]]]
    """Fields of the results that are claims, look by look; null for NaN."""


def register(path: Path, values: dict[str, Any]) -> Registration:
    """Register values, or check that they are the registered ones.

    Raises:
        UsageError: a value was changed since.
    """
    if not path.exists():
        make_folder(path.parent)
        first = Registration(
            schema_version=Registration.newest,
            registered=utc_now(),
            values_sha256=digest_of(values),
            values=values,
            looks=[],
        )
        write_record(path, first)
    registration = read_record(path, Registration)
    changed = changed_keys(registration, values)
    if changed:
        raise UsageError(
            f"the study was changed since {registration.registered}: {listed(changed)}\n"
            f"  restore what {path} holds, or give the file a new name: a new study"
        )
    return registration


def changed_keys(registration: Registration, values: dict[str, Any]) -> list[str]:
    """Return the keys whose values are not the registered ones."""
    # As the file holds them: tuples become lists.
    now: dict[str, Any] = json.loads(json.dumps(values))
    known = registration.values
    return [key for key in known | now if known.get(key) != now.get(key)]


def read_looks(path: Path) -> list[list[Result]]:
    """Return the claims of every look as they were written."""
    looks = []
    for look in read_record(path, Registration).looks:
        rows = []
        for values in look:
            known: dict[str, Any] = {}
            for key, value in values.items():
                known[key] = math.nan if value is None else value
            rows.append(Result(**known))
        looks.append(rows)
    return looks


def write_look(path: Path, rows: Sequence[Result]) -> None:
    """Append the claims of a look."""
    look = []
    for row in rows:
        values = asdict(row).items()
        look.append({key: None if value != value else value for key, value in values})
    registration = read_record(path, Registration)
    update = {"looks": [*registration.looks, look]}
    write_record(path, registration.model_copy(update=update))
