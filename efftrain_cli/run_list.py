"""`efftrain runs`: a frame of the runs there are, what is damaged in one, and removing some."""

from __future__ import annotations

import fnmatch
import math
import shutil
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from glob import has_magic
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from efftrain_cli.foundation.console import counted, printable
from efftrain_cli.foundation.errors import DataError, EfftrainError, UsageError
from efftrain_cli.foundation.files import is_locked
from efftrain_cli.foundation.records import read_record
from efftrain_cli.run.directory import existing_run, run_names, run_path, runs_root
from efftrain_cli.run.glance import Glance, fault_of, glance, glance_at_group, written_at
from efftrain_cli.run.lines import read_file
from efftrain_cli.run.names import run_groups, runs_named
from efftrain_cli.run.origin import read_origin
from efftrain_cli.run.small_files import read_recipe_values
from efftrain_cli.run_checkpoints import verify_checkpoints

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
_SORTED_BY = {"age": "age_seconds", "name": "name", "loss": "best_val_loss", "tokens": "tokens"}


def read_runs(names: Sequence[str] = (), sort: Order = "age") -> pd.DataFrame:
    """Return a row per run: COLUMNS, then each setting in which the runs differ, by
    its dotted key.

    A run that cannot be read has the status "unreadable" and the reason as its `problem`.

    Args:
        names: names of runs or their beginnings, globs over them, or recipes; empty: all.
        sort: age (the run written to last first), name, loss (lowest validation loss first, runs
            without one last) or tokens (most first).
    """
    import pandas as pd

    chosen = chosen_names(names)
    with ThreadPoolExecutor(2) as pool:
        described = list(pool.map(_describe, chosen))
    frame = pd.DataFrame([row for row, _ in described], columns=list(COLUMNS))
    frame = frame.astype({"seed": "Int64", "updates": "Int64"})
    settings = pd.DataFrame([values for _, values in described], frame.index, dtype=object)
    readable = settings[[bool(values) for _, values in described]]
    distinct = readable.astype(str).nunique(dropna=False)
    frame = frame.join(settings[distinct.index[distinct > 1]])
    column = _SORTED_BY[sort]
    return frame.sort_values(column, ascending=sort != "tokens", kind="stable", ignore_index=True)


def chosen_names(names: Sequence[str]) -> list[str]:
    """Return the runs that names mean, each once; without names all."""
    if not names:
        return run_names()
    return list(dict.fromkeys(chain(*runs_named(names).values())))


def glance_at_runs(
    names: Sequence[str], sort: Order = "age", most: int | None = None
) -> tuple[list[Glance], int]:
    """Return the first lines of a list, and how many are left out. Without names, the runs of a
    study, race, sweep or search are one line.

    Args:
        names, sort: as for `read_runs`; but the loss is the last one.
        most: lines to return; None: all.
    """
    groups = [] if names else run_groups()
    owned = {run for group in groups for run in group.runs}
    root = runs_root()
    entries = []
    for name in chosen_names(names):
        if name not in owned:
            entries.append((written_at(root / name), name, partial(glance, root / name)))
    for group in groups:
        times = [written_at(root / run) for run in group.runs]
        written = max(times, default=time.time())
        entries.append((written, group.name, partial(glance_at_group, root, group, written)))
    if sort == "age":
        entries.sort(key=lambda entry: -entry[0])
    if sort == "name":
        entries.sort(key=lambda entry: entry[1])
    shown = entries[:most] if sort in ("age", "name") else entries
    lines = [look() for _, _, look in shown]
    if sort == "tokens":
        lines.sort(key=lambda line: -line.tokens)
    if sort == "loss":
        lines.sort(key=lambda line: math.inf if line.val_loss is None else line.val_loss)
    lines = lines[:most]
    return lines, len(entries) - len(lines)


def _age(path: Path) -> float:
    """Return the seconds since a run was written to; 0 if it has gone."""
    written = written_at(path)
    if not written:
        return 0.0
    return max(0.0, time.time() - written)


def _describe(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return one run's values by COLUMNS, and its settings by dotted key; no settings if the run
    cannot be read."""
    from efftrain_cli.run.reading import load_run

    path = runs_root() / name
    row = {"name": printable(name), "age_seconds": _age(path), "problem": ""}
    try:
        run = load_run(path)
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
    except Exception as error:  # one run that nobody can read must not hide the others
        fault = fault_of(path, error)
        row |= {"status": "unreadable", "recipe": "-", "tokens": 0.0, "problem": fault}
        return row, {}


def verify_run(path: Path) -> str:
    """Read the small files of a run, and compare rows, events and checkpoints with their check
    values; return the counts of valid ones in words.

    Raises:
        DataError: a line or file is damaged; the message names each.
    """
    problems = verify_small_files(path)
    checkpoints, damage = verify_checkpoints(path)
    problems += damage
    counts = []
    for name, noun in (("metrics.jsonl", "row"), ("events.jsonl", "event")):
        file = path / name
        try:
            lines = read_file(file)
        except OSError as error:
            problems.append(f"{file} cannot be read: {error.strerror}")
            continue
        for number in lines.corrupt:
            problems.append(f"{file}, line {number}: it does not match its check value")
        if lines.torn:
            problems.append(
                f"{file} ends inside a line, which is left out:"
                " the run was killed, or is writing now"
            )
        counts.append(counted(len(lines.texts), noun))
    if problems:
        raise DataError("\n".join(problems))
    counts.append(counted(checkpoints, "checkpoint"))
    return f"{path.name}: {', '.join(counts)}: no damage"


def verify_small_files(path: Path) -> list[str]:
    """Return the faults of the small files of a run or a study."""
    from efftrain_cli.study.registration import Registration
    from efftrain_cli.zeroshot.results import read_results

    readers: dict[str, Callable[[], object]] = {
        "recipe.toml": lambda: read_recipe_values(path),
        "origin.json": lambda: read_origin(path),
        "plan.json": lambda: read_record(path / "plan.json", Registration),
        "zeroshot.json": lambda: read_results(path),
    }
    problems = []
    for name, read in readers.items():
        try:
            if (path / name).exists():
                read()
        except EfftrainError as error:
            problems.append(str(error))
    return problems


def remove_runs(names: Sequence[str]) -> list[Path]:
    """Return the paths of the runs called `names` or matching them as globs, safe to remove.

    Raises:
        UsageError: a run is not there, or a process is writing to it.
    """
    runs: list[Path] = []
    races: list[Path] = []
    for name in names:
        if has_magic(name):
            matches = [run_path(run) for run in fnmatch.filter(run_names(), name)]
            if not matches:
                raise UsageError(
                    f"no run in {runs_root()} matches {name!r}\n  `efftrain runs list` shows all"
                )
        elif (run_path(name) / "study.toml").is_file():
            races.append(run_path(name))
            matches = runs_of_race(name)
        else:
            # A folder that is not yet a run, because its start was killed, may be removed by its
            # name.
            matches = [run_path(name) if run_path(name).is_dir() else existing_run(name)]
        runs += matches
    registered = [path.name for path in dict.fromkeys(runs) if (path / "plan.json").is_file()]
    if registered:
        raise UsageError(
            f"{', '.join(registered)}: the registration of a study is not removed\n  name its runs"
        )
    paths = list(dict.fromkeys([*runs, *races]))
    running = [path.name for path in paths if is_locked(path / "lock")]
    if running:
        raise UsageError(f"still running: {', '.join(running)}\n  stop with Ctrl-C first")
    return paths


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
    files = [file for file in path.rglob("*") if file.is_file() and not file.is_symlink()]
    return sum(file.lstat().st_size for file in files)
