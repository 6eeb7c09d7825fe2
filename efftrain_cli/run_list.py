"""`efftrain runs list` and `rm`: a frame or a line of each run, and removing some."""

from __future__ import annotations

import fnmatch
import math
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from glob import has_magic
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from efftrain_cli.foundation.console import counted, printable
from efftrain_cli.foundation.errors import EfftrainError, UsageError
from efftrain_cli.foundation.files import is_locked
from efftrain_cli.foundation.records import damaged
from efftrain_cli.run.directory import (
    existing_run,
    missing_run,
    run_names,
    run_path,
    runs_root,
)
from efftrain_cli.run.lines import Values, newest_lines
from efftrain_cli.run.metrics import to_float
from efftrain_cli.run.names import RunGroup, run_groups, runs_named
from efftrain_cli.run.origin import RESTORE, read_origin
from efftrain_cli.run.status import ENDED, budget_of, status_of

if TYPE_CHECKING:
    import pandas as pd

COLUMNS = (
    "name",
    "status",
    "recipe",
    "seed",
    "tokens",
    "budget",
    "flops",
    "seconds",
    "updates",
    "final_loss",
    "best_val_loss",
    "age_seconds",
    "problem",
)
"""Columns of the frame of runs, which the settings that differ follow."""
Order = Literal["age", "name", "loss", "tokens"]


def read_runs(names: Sequence[str] = ()) -> pd.DataFrame:
    """Return a row per run, the one written to last first: COLUMNS, then each setting in which the
    runs differ, by its dotted key.

    A run that cannot be read has the status "unreadable" and the reason as its `problem`.

    Args:
        names: names of runs or their beginnings, globs over them, or recipes; empty: all.
    """
    import pandas as pd

    from efftrain_cli.run.reading import differing_keys

    described = [_describe(name) for name in chosen_names(names)]
    frame = pd.DataFrame([row for row, _ in described], columns=list(COLUMNS))
    frame = frame.astype({"seed": "Int64", "updates": "Int64"})
    keys = differing_keys([values for _, values in described if values])
    settings = pd.DataFrame([values for _, values in described], dtype=object)
    frame = frame.join(settings[keys])
    return frame.sort_values("age_seconds", kind="stable", ignore_index=True)


def _describe(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return one run's values by COLUMNS, and its settings by dotted key; no settings if the run
    cannot be read."""
    from efftrain_cli.run.reading import load_run

    path = runs_root() / name
    age = max(0.0, time.time() - written_at(path))
    row: dict[str, Any] = {"name": printable(name), "age_seconds": age, "problem": ""}
    try:
        run = load_run(path)
    except Exception as error:  # one run that nobody can read must not hide the others
        return {**row, "status": "unreadable", "problem": fault_of(path, error)}, {}
    row |= {
        "status": run.status,
        "recipe": run.arm,
        "seed": run.seed,
        "tokens": run.facts.get("tokens", 0.0),
        "budget": run.budget,
        "flops": run.facts.get("FLOPs"),
        "seconds": run.facts.get("training seconds"),
        "updates": run.facts.get("updates", 0),
        "final_loss": run.final_loss,
        "best_val_loss": run.facts.get("best loss"),
    }
    return row, dict(run.settings)


def chosen_names(names: Sequence[str]) -> list[str]:
    """Return the runs that names mean, each once; without names all."""
    if not names:
        return run_names()
    return list(dict.fromkeys(chain(*runs_named(names).values())))


def fault_of(path: Path, error: Exception) -> str:
    """Return why a run cannot be read, in printable lines."""
    fault = str(error) if isinstance(error, EfftrainError) else f"{path}: {error!r}"
    return "\n".join(map(printable, fault.split("\n")))


def written_at(path: Path) -> float:
    """Return when a run was last written to, seconds since the epoch; now if it has gone."""
    for name in ("metrics.jsonl", "recipe.toml"):
        try:
            return (path / name).stat().st_mtime
        except OSError:
            continue
    return time.time()


# --- lines ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Glance:
    """A line of a list: a run, or a study, race, sweep or search."""

    name: str
    status: str
    """Of a run as `status_of`, but "54 %" if it is running, and "unreadable"."""
    written: float
    """When a row was last written, seconds since the epoch."""
    tokens: float = math.nan
    val_loss: float = math.nan
    """Last validation loss among the last rows, nats per token."""
    problem: str = ""
    """Why the run cannot be read."""


def glance(path: Path) -> Glance:
    """Look at the run in a directory, of whose files only origin.json is read whole."""
    name = printable(path.name)
    written = written_at(path)
    try:
        read_origin(path)
        metrics = path / "metrics.jsonl"
        last: Values = {}
        val_loss = math.nan
        for row in newest_lines(metrics):
            last = last or row
            val_loss = to_float(row.get("val_loss"))
            if not math.isnan(val_loss):
                break
        if not last and metrics.exists() and metrics.stat().st_size:
            raise damaged(metrics, "none of its last lines is whole", RESTORE)
        tokens = to_float(last.get("tokens", 0))
        status = status_of(path, last)
        if status == "running":
            status = f"{100 * min(1.0, tokens / budget_of(path)):.0f} %"
    except Exception as error:  # one run that nobody can read must not hide the others
        return Glance(name, "unreadable", written, problem=fault_of(path, error))
    return Glance(name, status, written, tokens, val_loss)


def glance_at_group(group: RunGroup) -> Glance:
    """Look at a study, race, sweep or search: how many of its runs have ended."""
    runs = [glance(runs_root() / run) for run in group.runs]
    ended = sum(run.status in ENDED for run in runs)
    status = f"{group.kind}, {ended} of {counted(len(runs), 'run')}"
    return Glance(
        group.name,
        status,
        written=max((run.written for run in runs), default=time.time()),
    )


def glance_at_runs(names: Sequence[str], sort: Order) -> list[Glance]:
    """Return the lines of a list. Without names, the runs of a study, race, sweep or search are one
    line.

    Args:
        names: as for `read_runs`.
        sort: age (the run written to last first), name, loss (lowest last validation loss first,
            runs without one last) or tokens (most first).
    """
    groups = [] if names else run_groups()
    owned = {run for group in groups for run in group.runs}
    lines = [glance(runs_root() / name) for name in chosen_names(names) if name not in owned]
    lines += [glance_at_group(group) for group in groups]
    match sort:
        case "age":
            lines.sort(key=lambda line: -line.written)
        case "name":
            lines.sort(key=lambda line: line.name)
        case "loss":
            lines.sort(key=lambda line: (math.isnan(line.val_loss), line.val_loss))
        case "tokens":
            lines.sort(key=lambda line: (math.isnan(line.tokens), -line.tokens))
    return lines


# --- removing -------------------------------------------------------------------------------------


def remove_runs(names: Sequence[str]) -> list[Path]:
    """Return the paths of the runs called `names` or matching them as globs, safe to remove.

    Raises:
        UsageError: a run is not there, or a process is writing to it.
    """
    paths: dict[Path, None] = {}
    races: dict[Path, None] = {}
    for name in names:
        if has_magic(name):
            matches = [run_path(run) for run in fnmatch.filter(run_names(), name)]
            if not matches:
                raise missing_run(name)
        elif (run_path(name) / "study.toml").is_file():
            races[run_path(name)] = None
            matches = runs_of_race(name)
        else:
            # A folder that is not yet a run, because its start was killed, may be removed by its
            # name.
            matches = [run_path(name) if run_path(name).is_dir() else existing_run(name)]
        paths |= dict.fromkeys(matches)
    registered = [path.name for path in paths if (path / "plan.json").is_file()]
    if registered:
        raise UsageError(
            f"{', '.join(registered)}: the registration of a study is not removed\n  name its runs"
        )
    paths |= races
    running = [path.name for path in paths if is_locked(path / "lock")]
    if running:
        raise UsageError(f"still running: {', '.join(running)}\n  stop with Ctrl-C first")
    return list(paths)


def runs_of_race(name: str) -> list[Path]:
    """Return the runs to remove with a race: those of no other race that are no baseline."""
    own: list[str] = []
    others: set[str] = set()
    for group in run_groups():
        if group.name == name:
            own += group.runs
        else:
            others.update(group.runs)
    baselines = tuple(path.stem for path in runs_root().glob("*.races"))
    return [run_path(run) for run in own if run not in others and not run.startswith(baselines)]


def remove(path: Path) -> None:
    """Remove a run directory. The recipe goes first: from then on nothing takes it for a run."""
    (path / "recipe.toml").unlink(missing_ok=True)
    shutil.rmtree(path)


def size_of(path: Path) -> int:
    """Return the bytes of the files of a run."""
    return sum(file.lstat().st_size for file in path.rglob("*") if not file.is_dir())
