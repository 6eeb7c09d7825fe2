"""Runs to compare: directories with their zero-shot scores, tables, and projects of wandb."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from efftrain_cli.foundation.console import human, listed
from efftrain_cli.foundation.errors import DataError, UsageError, nearest
from efftrain_cli.recipe.toml import flatten
from efftrain_cli.run.names import select_runs
from efftrain_cli.run.reading import CURVE, Run, load_run
from efftrain_cli.zeroshot.results import read_results

READERS = {
    ".csv": pd.read_csv,
    ".parquet": pd.read_parquet,
    ".jsonl": lambda path: pd.read_json(path, lines=True),
}
SETTINGS = {
    "schedule": "optim.schedule",
    "size": "size",
    "budget": "train.tokens",
}
"""Column of a table -> the setting that it holds."""
COLUMNS = (
    "run",
    "arm",
    "seed",
    "failed",
    *CURVE,
    *SETTINGS,
)
"""Columns that a table may have."""
SAME = 1.02
"""Largest ratio of the steps of runs that ended at the same step."""
UNKNOWN = "nothing here says on which text a loss was measured, or how learning rates decayed"
"""Caveat of runs that are read from a table."""
FAILED = ("failed", "crashed")
"""States of a wandb run that did not end by itself."""


# --- directories ----------------------------------------------------------------------------------


def load_named_runs(names: Sequence[str]) -> tuple[list[Run], list[str]]:
    """Read the runs that names stand for; return them, and a caveat for each that is left out.

    Raises:
        UsageError: a name stands for nothing.
        DataError: no run can be read.
    """
    runs = []
    caveats = []
    for path in select_runs(names):
        try:
            run = load_run(path)
            runs.append(replace(run, facts={**run.facts, **read_scores(path)}))
        except (DataError, OSError) as error:
            caveats.append(f"left out: {error}")
    if not runs:
        raise DataError("\n".join(caveats))
    return runs, caveats


def read_scores(path: Path) -> dict[str, float]:
    """Return the scores in the zeroshot.json of a run, by title.

    Protocol, limit and the tokens of the checkpoint are part of a title: only scores that agree in
    all of them are compared.

    Raises:
        DataError: the file is damaged.
    """
    scores = {}
    for entry in read_results(path):
        terms = [str(entry["protocol"])]
        if entry["limit"] is not None:
            terms.append(f"limit {entry['limit']:g}")
        if entry.get("tokens") is not None:
            terms.append(f"{human(entry['tokens'])} tokens")
        for name, metric in (entry.get("metrics") or {}).items():
            if metric["value"] is not None:
                title = f"{entry['task']} {name} ({', '.join(terms)})"
                scores[title] = float(metric["value"])
    return scores


# --- tables ---------------------------------------------------------------------------------------


def read_table(path: Path, columns: Mapping[str, str] | None = None) -> list[Run]:
    """Read the runs of a table: CSV, Parquet or JSON lines; otherwise as `runs_of`.

    Raises:
        UsageError: the format is unknown, or the table does not hold runs.
        DataError: the file cannot be read.
    """
    if path.suffix not in READERS:
        raise UsageError(f"{path} is not a table\n  give a file that ends in {', '.join(READERS)}")
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
    """Return the runs of a table with a row per evaluation, or per run.

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
    table = table.assign(**{name: math.nan for name in CURVE if name not in table})
    for column in {*CURVE, "seed"} & {*table}:
        try:
            table[column] = pd.to_numeric(table[column])
        except (ValueError, TypeError) as error:
            raise UsageError(f"{source}: column {column!r} holds no numbers: {error}") from None
    has_seeds = "seed" in table
    if "run" not in table:
        numbers = table.seed if has_seeds else table.index
        table["run"] = table.arm.astype(str) + "-seed" + numbers.astype(str)
    if not has_seeds:
        table["seed"] = pd.factorize(table.run)[0]
    check_rows(table, source)
    longest = table.dropna(subset="val_loss").groupby("arm").step.max()
    return [run_of(rows, longest) for _, rows in table.groupby("run", sort=False)]


def check_rows(table: pd.DataFrame, source: str) -> None:
    """Check that each run has one arm and whole seed, and at most one row a step.

    Raises:
        UsageError: it has not.
    """
    if not (table.seed % 1 == 0).all():
        raise UsageError(
            f"{source}: column 'seed' holds values that are not whole numbers\n"
            "  leave the column out to compare runs without pairs"
        )
    identities = table.groupby("run", sort=False)[["arm", "seed"]].nunique().max(axis=1)
    several = identities.index[identities > 1]
    if len(several):
        raise UsageError(
            f"{source}: run {several[0]!r} has several arms or seeds\n"
            "  give each run a name of its own"
        )
    evaluated = table.dropna(subset="val_loss")
    repeated = evaluated[evaluated.duplicated(["run", "step"])]
    if len(repeated):
        raise UsageError(
            f"{source} has two rows of run {repeated.run.iloc[0]}, step {repeated.step.iloc[0]:g}\n"
            "  give one row per evaluation, with its step"
        )


def run_of(rows: pd.DataFrame, longest: pd.Series) -> Run:
    """Return a run from its rows in a table.

    Args:
        longest: last step that any run of an arm evaluated, by arm.
    """
    first = rows.iloc[0]
    curve = rows.dropna(subset="val_loss")[CURVE].astype(float).sort_values("step", kind="stable")
    last = curve.iloc[-1:]
    status = "finished"
    if np.any(rows.get("failed", False)) or not np.isfinite(last.val_loss).any():
        status = "diverged"
    elif (last.step * SAME < longest[first.arm]).any():
        status = "stopped"
    return Run(
        name=str(first.run),
        arm=str(first.arm),
        seed=int(first.seed),
        status=status,
        curve=curve,
        settings={key: first[column] for column, key in SETTINGS.items() if column in first},
        notes=(UNKNOWN,),
    )


# --- wandb ----------------------------------------------------------------------------------------


def read_wandb(project: str, columns: Mapping[str, str] | None = None) -> list[Run]:
    """Read the runs of a project as `runs_of`, through wandb's API.

    Keys of a run's config are columns; without one for it, the arm is the name of the run.

    Args:
        project: ENTITY/PROJECT.
        columns: see `runs_of`.

    Raises:
        UsageError: wandb is not installed, or the project does not hold runs.
        DataError: wandb does not answer.
    """
    try:
        import wandb
    except ImportError:
        raise UsageError("wandb is not installed\n  pip install wandb") from None
    rows: list[dict[str, Any]] = []
    try:
        for run in wandb.Api().runs(project):
            config = flatten(dict(run.config))
            fixed = {"arm": run.name, **config, "run": run.id, "failed": run.state in FAILED}
            # All rows: `history` would return a sample.
            rows += [{**fixed, **row} for row in run.scan_history()]
    except (wandb.errors.Error, ValueError, OSError) as error:
        raise DataError(f"wandb:{project} cannot be read: {error}") from None
    if not rows:
        raise UsageError(f"wandb:{project} has no rows\n  give ENTITY/PROJECT of finished runs")
    names = {"step": "_step", **(columns or {})}
    return runs_of(pd.DataFrame(rows), f"wandb:{project}", names)
