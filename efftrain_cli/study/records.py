"""The files of a study's folder that are read back.

runs/<study>-study/
  plan.json       the study's values and their hash, its drawn seeds, the file's text, and what was changed since
  receipts.csv    one row per run: phase, block, arm, settings, seed, how it ended, final loss, tokens, seconds
  looks.csv       one row per look, primary measure and arm: estimate, interval, p, verdict
  logs/           what each run printed
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import Field, model_validator

from efftrain_cli.foundation.records import (
    Part,
    Record,
    damaged,
    digest_of,
    read_record,
    read_small_text,
)
from efftrain_cli.run.directory import run_path

LOOKS = "look seeds measure direction margin arm estimate low high p p_holm outcome"
"""Columns of looks.csv."""


class Change(Part):
    """A change of a registered study that was allowed."""

    time: str
    sha256: str
    differing: list[list[Any]]
    """[key, before, after]."""
    values: dict[str, Any]
    drawn: dict[str, str] = Field(default_factory=dict)
    """Seeds drawn for these values, by their key in the study file."""


class Plan(Record):
    """plan.json of a study."""

    seal: ClassVar[str] = "file_sha256"
    restore: ClassVar[str] = "restore it, or begin a new study under another name"

    schema_version: int
    study: str
    registered: str
    efftrain: str
    sha256: str
    """Of the values that were registered first."""
    values: dict[str, Any]
    drawn: dict[str, str] = Field(default_factory=dict)
    """Seeds drawn at registration, by their key in the study file."""
    text: str
    changes: list[Change]
    exploratory: list[str]

    @property
    def latest(self) -> Plan | Change:
        """The last allowed change, else the registration itself."""
        return self.changes[-1] if self.changes else self

    @model_validator(mode="after")
    def _is_as_registered(self) -> Self:
        if digest_of(self.values) != self.sha256:
            raise ValueError("it was edited: its values do not have the hash it names")
        return self


def study_folder(name: str) -> Path:
    """Return the folder in which a study keeps its state."""
    return run_path(f"{name}-study")


def read_plan(name: str) -> Plan | None:
    """Return a study's registration; None if it has none.

    Raises:
        DataError: it is damaged.
    """
    path = study_folder(name) / "plan.json"
    return read_record(path, Plan) if path.exists() else None


def read_looks(folder: Path) -> list[dict[str, str]]:
    """Return the rows of a study's looks.csv; empty if there is none.

    Raises:
        DataError: it is not a table of looks.
    """
    path = folder / "looks.csv"
    restore = "delete it: efftrain study writes the last look again"
    try:
        rows = list(csv.DictReader(read_small_text(path, restore).splitlines()))
    except FileNotFoundError:
        return []
    except csv.Error as error:
        raise damaged(path, str(error), restore) from None
    for row in rows:
        if not row.keys() >= set(LOOKS.split()) or not row["look"].isdecimal():
            raise damaged(path, "it is not a table of looks", restore)
    return rows


def list_outcomes(rows: Sequence[Mapping[str, Any]]) -> str:
    """Write the verdicts of looks.csv, or those of the same keys in JSON, in words."""
    return "; ".join(f"{row['arm']} {row['outcome']} in {row['measure']}" for row in rows)
