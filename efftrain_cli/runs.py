"""`efftrain runs`: what runs there are, one in full, and removing some."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal

from efftrain_cli.foundation.console import counted, printable
from efftrain_cli.foundation.errors import DataError, EfftrainError, UsageError
from efftrain_cli.foundation.files import is_locked
from efftrain_cli.run.directory import existing_run, run_names, run_path, runs_root
from efftrain_cli.run.lines import split_lines
from efftrain_cli.run.metrics import valid_rows


@dataclass(frozen=True)
class RunSummary:
    """A line of `runs list`."""

    name: str
    status: str = "unreadable"
    """As `compare.reading.status_of` says it, if the run can be read."""
    recipe: str = "-"
    seed: int | None = None
    tokens: float = 0.0
    budget: float | None = None
    """train.tokens of its recipe."""
    best_val_loss: float | None = None
    """Nats per token."""
    age_seconds: float = 0.0
    """Since its last row was written."""
    problem: str = ""
    """Why it is unreadable."""


def list_runs(
    names: Sequence[str] = (), sort: Literal["age", "name", "loss", "tokens"] = "age"
) -> list[RunSummary]:
    """The runs called `names`, or matching them as globs; all without names. Sorted by age (the one written to last
    comes first), name, best validation loss (lowest first; runs without one last) or tokens (most first)."""
    chosen = [
        name
        for name in run_names()
        if not names or any(fnmatchcase(name, pattern) for pattern in names)
    ]
    with ThreadPoolExecutor(2) as pool:
        found = sorted(pool.map(summarize, chosen), key=lambda run: run.name)
    if sort == "loss":
        return sorted(
            found, key=lambda run: math.inf if run.best_val_loss is None else run.best_val_loss
        )
    if sort == "tokens":
        return sorted(found, key=lambda run: -run.tokens)
    return found if sort == "name" else sorted(found, key=lambda run: run.age_seconds)


def summarize(name: str) -> RunSummary:
    """Reads what a line of the list says; a run that cannot be read is listed with the reason."""
    import numpy as np

    from efftrain_cli.compare.reading import recipe_name_of, status_of
    from efftrain_cli.run.metrics import read_metrics
    from efftrain_cli.run.rows import read_run

    path = runs_root() / name
    metrics = path / "metrics.jsonl"
    summary = RunSummary(printable(name))
    try:
        written = metrics if metrics.exists() else path / "recipe.toml"
        summary = replace(summary, age_seconds=max(0.0, time.time() - written.stat().st_mtime))
        run = read_run(path)
        recipe, seed, budget = (
            recipe_name_of(run),
            run.recipe.get("seed"),
            run.recipe.get("train", {}).get("tokens"),
        )
        if not metrics.exists():
            status = "running" if run.locked else "not started"
            return replace(summary, status=status, recipe=recipe, seed=seed, budget=budget)
        rows = read_metrics(path, ("tokens", "val_loss", "nonfinite"))
        losses = rows.columns["val_loss"][np.isfinite(rows.columns["val_loss"])]
        return replace(
            summary,
            status=status_of(run, rows),
            recipe=recipe,
            seed=seed,
            tokens=float(np.nanmax(rows.columns["tokens"], initial=0.0)),
            budget=float(budget) if budget else None,
            best_val_loss=float(losses.min()) if len(losses) else None,
        )
    except Exception as error:  # one run that nobody can read must not hide the others
        reason = (
            str(error)
            if isinstance(error, EfftrainError)
            else f"{path}: {type(error).__name__}: {error}"
        )
        return replace(summary, problem=printable(reason))


def verify_run(path: Path) -> str:
    """Compares every line of a run's rows and events with its check value; returns what was found sound, in words. A
    `DataError` names each line that is damaged."""
    if problems := verify_rows(path):
        raise DataError("\n".join(problems))
    counts, unchecked = [], 0
    for name, noun in (("metrics.jsonl", "row"), ("events.jsonl", "event")):
        lines = split_lines((path / name).read_bytes() if (path / name).exists() else b"")
        counts.append(counted(len(lines.texts), noun))
        unchecked += lines.checked.count(False)
    text = f"{path.name}: {' and '.join(counts)}, no damage"
    return f"{text}; {counted(unchecked, 'line')} without a check value" if unchecked else text


def verify_rows(path: Path) -> list[str]:
    """What is damaged in metrics.jsonl and events.jsonl of a run, line by line."""
    problems = []
    for name in ("metrics.jsonl", "events.jsonl"):
        file = path / name
        try:
            lines = split_lines(file.read_bytes())
        except FileNotFoundError:
            continue
        except OSError as error:
            problems.append(f"{file} cannot be read: {error.strerror}")
            continue
        damaged = valid_rows(lines)[1] if name == "metrics.jsonl" else lines.damaged
        problems += [f"{file}, line {number}: {wrong}" for number, wrong in damaged]
        if lines.torn:
            problems.append(
                f"{file} ends inside a line, which is left out: the run was killed, or is writing now"
            )
    return problems


def remove_runs(names: Sequence[str]) -> list[Path]:
    """Paths of the runs called `names` or matching them as globs, safe to remove. A run that is not there, or that a
    process is writing to, is refused."""
    existing = run_names()
    paths: dict[Path, None] = {}
    for name in names:
        if any(character in name for character in "*?["):
            matches = [run_path(run) for run in existing if fnmatchcase(run, name)]
            if not matches:
                raise UsageError(f"no run in {runs_root()} matches {name!r}")
        else:
            # A folder that is not yet a run, because its start was killed, may be removed by its name.
            matches = [run_path(name) if run_path(name).is_dir() else existing_run(name)]
        paths.update(dict.fromkeys(matches))
    running = [path.name for path in paths if is_locked(path / "lock")]
    if running:
        raise UsageError(f"{', '.join(running)} is running; stop it with Ctrl-C first")
    return list(paths)


def remove(path: Path) -> None:
    """Removes a run directory. The recipe goes first: from then on nothing takes the rest for a run."""
    (path / "recipe.toml").unlink(missing_ok=True)
    shutil.rmtree(path)


def size_of(path: Path) -> int:
    """Bytes of the files of a run."""
    return sum(
        file.lstat().st_size for file in path.rglob("*") if file.is_file() and not file.is_symlink()
    )
