"""The reading side of run directories: rows, events, recipe, origin and status, without owning the run.

Nothing here writes, locks or imports torch, so a run can be read while it trains, on another machine, or half copied.
"""

from __future__ import annotations

import fcntl
import json
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from efftrain_cli.foundation.errors import DataError
from efftrain_cli.run.directory import SCHEMA_VERSION

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd

NOT_COMPUTED = ("checkpoint.", "wandb.")
"""Recipe keys that change nothing of what a run computes: they may differ when it is continued, and between runs of one recipe."""
STATUSES = ("running", "finished", "stopped", "diverged", "crashed", "not started")
"""What a run can be. "crashed": it is not finished, nobody owns it, and its last event is no orderly end."""


@dataclass(frozen=True)
class Rows:
    """Columns of metrics.jsonl that count: after a resume, the rows from its first step on replace all older ones.

    Of a step written twice, the later value of each column counts.
    """

    columns: dict[str, np.ndarray]
    """float64, one value per step in increasing order, NaN where a row has null or lacks the key."""
    total: int
    """Rows in the file."""
    superseded: int
    """Rows that a later segment replaced."""
    segments: int
    """Starts and resumes that wrote rows."""
    nonfinite_segments: int
    """Segments with a step whose loss or gradient was not finite, replaced ones included."""
    torn: bool
    """The last line was torn, and dropped."""
    damaged: tuple[int, ...]
    """Numbers of the other lines that are no JSON, and were dropped."""


@dataclass(frozen=True)
class RunDirectory:
    """What a run's small files say."""

    name: str
    path: Path
    recipe: dict[str, Any]
    """The resolved recipe, as in recipe.toml."""
    origin: dict[str, Any]
    events: tuple[dict[str, Any], ...]
    locked: bool
    """A living process owns the run."""


def read_run(path: Path) -> RunDirectory:
    """Reads a run's recipe, origin and events.

    Raises:
        DataError: a file is missing or damaged, or the directory has a format that this version does not read.
    """
    try:
        recipe = tomllib.loads((path / "recipe.toml").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DataError(f"{path} is no run directory: it has no recipe.toml") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise DataError(f"{path / 'recipe.toml'} is damaged: {error}") from None
    origin = _read_object(path / "origin.json")
    check_schema(origin, path / "origin.json")
    return RunDirectory(path.name, path, recipe, origin, read_events(path), is_locked(path / "lock"))


def check_schema(values: dict[str, Any], path: Path) -> None:
    """Accepts the current format and the one before it, to read.

    Raises:
        DataError: another format; the message says which and what to do.
    """
    version = values.get("schema_version")
    if not isinstance(version, int) or isinstance(version, bool):
        raise DataError(f"{path} has no schema_version; it was not written by efftrain, or is damaged")
    if version > SCHEMA_VERSION:
        raise DataError(
            f"{path} has format {version}; this efftrain reads formats up to {SCHEMA_VERSION}. Install a newer efftrain"
        )
    if version < SCHEMA_VERSION - 1:
        raise DataError(
            f"{path} has format {version}; this efftrain reads formats {SCHEMA_VERSION - 1} and {SCHEMA_VERSION}. "
            "Read it with the efftrain version named in its origin.json"
        )


def read_events(path: Path) -> tuple[dict[str, Any], ...]:
    """The events of a run, oldest first; torn and damaged lines are left out."""
    try:
        text = (path / "events.jsonl").read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return ()
    events = []
    for line in text.splitlines():
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if isinstance(event, dict):
            events.append(event)
    return tuple(events)


def read_metrics(path: Path) -> pd.DataFrame:
    """The rows of metrics.jsonl that count, one per step in increasing order, with every column; null is NaN.

    `path` is the file or its run directory. A torn last line is dropped. After a resume the new segment's rows replace
    all older rows from its first step on.

    Raises:
        DataError: the file is missing, has no `step`, or is damaged in more places than its kills explain.
    """
    import pandas as pd

    return pd.DataFrame(_read_current(_metrics_path(path), None)[0])


def read_rows(path: Path, columns: Sequence[str]) -> Rows:
    """The rows of metrics.jsonl that count, as float64 arrays of `columns`; what `read_metrics` reads, but faster.

    Raises:
        DataError: as `read_metrics`.
    """
    import numpy as np

    wanted = tuple(dict.fromkeys((*columns, "step", "segment", "nonfinite")))
    found, rows = _read_current(_metrics_path(path), wanted)
    n = len(found["step"])
    empty = np.full(n, np.nan)
    filled = {name: np.asarray(found.get(name, empty), float) for name in columns}
    return Rows(filled, **rows)


def _metrics_path(path: Path) -> Path:
    return path / "metrics.jsonl" if path.is_dir() else path


def _read_current(path: Path, wanted: Sequence[str] | None) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    import numpy as np
    import pyarrow as pa

    from efftrain_cli.run.jsonl_columns import read_columns

    try:
        read = read_columns(path, wanted)
    except FileNotFoundError:
        raise DataError(f"{path} is missing: the run has not logged a step yet") from None
    table = read.table
    if table.num_rows and "step" not in table.column_names:
        raise DataError(f"{path} is no file of steps: its rows have no `step`")
    arrays = {}
    for name in table.column_names:
        column = table.column(name)
        if pa.types.is_boolean(column.type):
            column = column.cast(pa.int8())
        arrays[name] = column.to_numpy()
    if not table.num_rows:
        arrays = {"step": np.empty(0)}
    step = arrays["step"].astype(float)
    if np.isnan(step).any():
        raise DataError(f"{path} is damaged: a row has no `step`")
    segment = arrays.get("segment", np.zeros(len(step))).astype(float)
    nonfinite = np.nan_to_num(arrays.get("nonfinite", np.zeros(len(step))).astype(float))
    # Each kill may tear one line, and the next start may glue its first row to it. More than that is damage.
    starts = len(np.unique(segment))
    if len(read.damaged) > starts:
        raise DataError(
            f"{path} is damaged: {len(read.damaged)} lines are no JSON (line {read.damaged[0]} is the first), but the run "
            f"was started {starts} times. Restore the file, or remove those lines by hand"
        )
    # A row counts unless a later segment began before its step.
    order = np.argsort(segment, kind="stable")
    following = np.append(np.minimum.accumulate(step[order][::-1])[::-1][1:], np.inf)
    current = order[step[order] <= following]
    kept = {name: values[current] for name, values in arrays.items() if name != "_line"}
    twice = np.flatnonzero(np.diff(step[current]) == 0)
    if len(twice):
        kept = {name: _last_there(values, twice) for name, values in kept.items()}
    return kept, {
        "total": len(step),
        "superseded": len(step) - len(kept["step"]),
        "segments": starts,
        "nonfinite_segments": len(np.unique(segment[nonfinite > 0])),
        "torn": read.torn,
        "damaged": read.damaged,
    }


def _last_there(values: np.ndarray, twice: np.ndarray) -> np.ndarray:
    """One value per step where row `twice[i]` and the next are of one step: the later one, or the earlier where that is null.

    A segment begins with a row of the step before it where only the evaluation of that step was still missing.
    """
    import numpy as np

    values = values.copy()
    for i in twice:
        if np.isnan(values[i + 1]):
            values[i + 1] = values[i]
    return np.delete(values, twice)


def _read_object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DataError(f"{path} is missing; without it nobody can say what the run was trained on") from None
    except ValueError as error:
        raise DataError(f"{path} is damaged: {error}") from None
    if not isinstance(value, dict):
        raise DataError(f"{path} is damaged: it holds no JSON object")
    return value


def is_locked(path: Path) -> bool:
    """Whether a living process on this machine holds the lock file; False where there is none."""
    try:
        with path.open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
            return False
    except OSError:
        return False


def flatten(recipe: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """A recipe as dotted keys: {"optim.lr": 6e-4, ...}. Lists of tables (stages) count from 0: "stages.0.n_layer"."""
    flat: dict[str, Any] = {}
    for key, value in recipe.items():
        if isinstance(value, dict):
            # A section that is present is on, even where it says nothing more.
            flat |= flatten(value, f"{prefix}{key}.") or {f"{prefix}{key}": {}}
        elif isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
            for i, item in enumerate(value):
                flat |= flatten(item, f"{prefix}{key}.{i}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat
