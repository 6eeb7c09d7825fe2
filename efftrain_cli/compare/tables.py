"""Runs of any program, read from a table: a row per evaluation, or a row per run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from efftrain_cli.foundation.console import listed
from efftrain_cli.foundation.errors import DataError, UsageError, nearest
from efftrain_cli.run.reading import CURVE, Run

READERS = {
    ".csv": pd.read_csv,
    ".parquet": pd.read_parquet,
    ".jsonl": lambda path: pd.read_json(path, lines=True),
}
COLUMNS = (
    "run",
    "arm",
    *CURVE,
    "seed",
    "failed",
    "schedule",
    "size",
    "budget",
)
"""Columns that a table may have."""
SAME = 1.02
"""Largest ratio of the steps of runs that ended at the same step."""
UNKNOWN = "nothing here says on which text a loss was measured, or how learning rates decayed"
"""Caveat of runs that are read from a table."""


def read_table(path: Path, columns: Mapping[str, str] | None = None) -> list[Run]:
    """Read the runs of a table: CSV, Parquet or JSON lines; otherwise as `runs_of`.

    Raises:
        UsageError: the format is unknown, or the table does not hold runs.
        DataError: the file cannot be read.
    """
    if path.suffix not in READERS:
        raise UsageError(f"{path} is no table\n  give one of {', '.join(READERS)}")
    try:
        table = READERS[path.suffix](path)
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {error}") from None
    return runs_of(table, str(path), columns)


def runs_of(
    table: pd.DataFrame,
    source: str,
    columns: Mapping[str, str] | None = None,
) -> list[Run]:
    """Return the runs of a table.

    Columns `arm` and `val_loss` are required; the others of COLUMNS are used if present. Rows
    without a loss are left out. A run failed if `failed` says so or its last loss is not finite;
    one that ends before the others of its arm may still finish. Without `seed`, no run is paired.

    Args:
        source: name of the table in messages.
        columns: our name -> name in the table.

    Raises:
        UsageError: a required column is missing, or a run has two rows of one step.
    """
    names = {"arm": "arm", "val_loss": "val_loss", **(columns or {})}
    for ours, theirs in names.items():
        if ours not in COLUMNS:
            hint = nearest(ours, COLUMNS) or f"one of {', '.join(COLUMNS)}"
            raise UsageError(f"--columns {ours}=: no such column\n  {hint}")
        if theirs not in table:
            raise UsageError(
                f"{source} has no column {theirs!r}, only {listed(list(table), 12)}\n"
                f"  name the one that holds it: --columns {ours}=NAME"
            )
    # A column that another one replaces would be there twice.
    replaced = [ours for ours, theirs in names.items() if ours in table and theirs != ours]
    table = table.drop(columns=replaced).rename(columns={names[ours]: ours for ours in names})
    table = with_numbers(table, source)
    has_seeds = "seed" in table
    if "run" not in table:
        numbers = table.seed if has_seeds else table.index
        table["run"] = table.arm.astype(str) + "-seed" + numbers.astype(str)
    if not has_seeds:
        table["seed"] = pd.factorize(table.run)[0]
    check_rows(table, source)
    runs = [run_of(name, rows) for name, rows in table.groupby("run", sort=False)]
    longest: dict[str, float] = {}
    for run in runs:
        longest[run.arm] = np.fmax(run.spent("step"), longest.get(run.arm, math.nan))
    return [with_status(run, longest[run.arm]) for run in runs]


def with_numbers(table: pd.DataFrame, source: str) -> pd.DataFrame:
    """Return a table whose columns of numbers are numbers, and whose seeds are whole ones.

    Raises:
        UsageError: one holds something else.
    """
    table = table.copy()
    for column in (*CURVE, "seed"):
        if column in table:
            try:
                table[column] = pd.to_numeric(table[column])
            except (ValueError, TypeError) as error:
                raise UsageError(f"{source}: column {column!r} holds no numbers: {error}") from None
    if "seed" in table and not (table.seed % 1 == 0).all():
        raise UsageError(
            f"{source}: column 'seed' holds something else than whole numbers\n"
            "  leave the column out to compare runs without pairs"
        )
    return table


def check_rows(table: pd.DataFrame, source: str) -> None:
    """Check that each run has one arm and seed, and at most one row a step.

    Raises:
        UsageError: it has not.
    """
    identities = table.groupby("run", sort=False)[["arm", "seed"]].nunique().max(axis=1)
    several = identities.index[identities > 1]
    if len(several):
        raise UsageError(
            f"{source}: run {several[0]!r} has several arms or seeds\n"
            "  give each run a name of its own"
        )
    keys = ["run", "step"] if "step" in table else ["run"]
    evaluated = table[table.val_loss.notna()]
    repeated = evaluated[evaluated.duplicated(keys)]
    if len(repeated):
        which = ", ".join(f"{key} {repeated.iloc[0][key]}" for key in keys)
        raise UsageError(
            f"{source} has two rows of {which}\n  give one row per evaluation, with its step"
        )


def with_status(run: Run, longest: float) -> Run:
    """Return a run as stopped if it ended before the `longest` of its arm."""
    if run.status == "finished" and run.spent("step") * SAME < longest:
        return replace(run, status="stopped")
    return run


def run_of(name: object, rows: pd.DataFrame) -> Run:
    """Return a run from its rows in a table."""
    curve = rows[rows.val_loss.notna()].reindex(columns=CURVE).astype(float)
    curve = curve.sort_values("step", kind="stable")
    has_failed = bool(np.any(rows.get("failed", False)))
    is_finite = len(curve) > 0 and math.isfinite(curve.val_loss.iloc[-1])
    first = rows.iloc[0]
    settings: dict[str, Any] = {
        "size": first.get("size", 0),
        "train.tokens": first.get("budget", 0),
    }
    if "schedule" in first:
        settings["optim.schedule"] = first.schedule
    return Run(
        name=str(name),
        arm=str(first.arm),
        seed=int(first.seed),
        status="finished" if is_finite and not has_failed else "diverged",
        curve=curve,
        settings=settings,
        notes=(UNKNOWN,),
    )
