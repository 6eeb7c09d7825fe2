"""The files of a study's folder.

runs/<study>-study/
  plan.json       the study's values and their hash, its drawn seeds, the file's text and changes
  receipts.csv    one row per run: phase, block, arm, settings, seed, end, loss, tokens, seconds
  looks.csv       one row per look, primary measure and arm: estimate, interval, p, verdict, whether
                  exploratory
  logs/           what each run printed
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import Field, model_validator

from efftrain_cli.foundation.files import csv_text, write_whole
from efftrain_cli.foundation.records import (
    Part,
    Record,
    damaged,
    digest_of,
    read_record,
    read_small_text,
)
from efftrain_cli.run.directory import run_path
from efftrain_cli.study.file import StudyFile
from efftrain_cli.study.phases import judged_trials, tuning_trials
from efftrain_cli.trials.trial import read_trial

RECEIPTS = "phase block arm settings seed run status final_loss tokens train_seconds marks"
"""Columns of receipts.csv."""
LOOKS = "look seeds measure direction margin arm estimate low high p p_holm outcome"
"""Columns of looks.csv, of which "exploratory" is the last; older files lack that one."""


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
    """Hash of the values that were registered first."""
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
        DataError: plan.json is damaged.
    """
    path = study_folder(name) / "plan.json"
    return read_record(path, Plan) if path.exists() else None


def read_looks(folder: Path) -> list[dict[str, str]]:
    """Return the rows of a study's looks.csv; empty if there is none.

    Raises:
        DataError: looks.csv is not a table of looks.
    """
    path = folder / "looks.csv"
    restore = "delete it: efftrain study writes the last look again"
    try:
        rows = list(csv.DictReader(read_small_text(path, restore).splitlines()))
    except FileNotFoundError:
        return []
    except csv.Error as error:
        raise damaged(path, str(error), restore) from None
    columns = set(LOOKS.split())
    for row in rows:
        has_columns = columns <= row.keys()
        if not has_columns or not row["look"].isdecimal():
            raise damaged(path, "it is not a table of looks", restore)
    return rows


def write_receipts(file: StudyFile) -> None:
    """Write receipts.csv: one row per run that has begun, failed runs included."""
    rows = []
    trials = [*tuning_trials(file, file.blocks), *judged_trials(file, file.chosen_seeds)]
    for study_trial in trials:
        trial = study_trial.trial
        run = read_trial(trial)
        if run is None:
            continue
        final_loss = ""
        if run.final_loss is not None:
            final_loss = f"{run.final_loss:.6f}"
        row = (
            study_trial.phase,
            file.block_of[trial.seed],
            study_trial.arm,
            " ".join(trial.settings),
            trial.seed,
            trial.name,
            run.status,
            final_loss,
            f"{run.tokens:.0f}",
            f"{run.seconds:.1f}",
            "; ".join(mark.text for mark in run.marks),
        )
        rows.append(row)
    table = csv_text(RECEIPTS.split(), rows)
    write_whole(study_folder(file.name) / "receipts.csv", table)


def write_looks(
    folder: Path, look: int, verdicts: Sequence[Mapping[str, Any]], exploratory: bool
) -> None:
    """Write looks.csv: the verdicts of every look up to this one, as they stood then.

    Args:
        verdicts: those of this look, as JSON has them.
        exploratory: whether they are no confirmation.
    """
    rows: list[Mapping[str, Any]] = []
    for earlier in read_looks(folder):
        if int(earlier["look"]) < look:
            rows.append(earlier)
    for verdict in verdicts:
        seeds = len(verdict["seeds"])
        said = str(exploratory).lower()
        rows.append({**verdict, "look": look, "seeds": seeds, "exploratory": said})
    columns = [*LOOKS.split(), "exploratory"]
    cells = []
    for row in rows:
        cells.append([_cell(row.get(column)) for column in columns])
    write_whole(folder / "looks.csv", csv_text(columns, cells))


def _cell(value: object) -> object:
    """Return a value as a cell: a float with six digits, "" for None."""
    if isinstance(value, float):
        return f"{value:.6g}"
    return "" if value is None else value


def list_outcomes(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return one line of text for verdicts, given as rows with the columns of looks.csv."""
    return "; ".join(f"{row['arm']} {row['outcome']} in {row['measure']}" for row in rows)
