"""`efftrain runs show`: one run in full, as tables or as values for other programs."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from efftrain_cli.compare.comparison import compare
from efftrain_cli.compare.formats import format_number, format_value
from efftrain_cli.compare.frames import rows_of
from efftrain_cli.compare.reading import SITE, RunNumbers, read_numbers
from efftrain_cli.compare.tables import Table, tables_of
from efftrain_cli.recipe.toml import flatten
from efftrain_cli.run.directory import checkpoints_of
from efftrain_cli.run.small_files import read_run
from efftrain_cli.run_list import COLUMNS, format_columns, read_runs

SITE_POINTS = 6
"""Points of training at which the divergence of each site is shown."""


def tables_of_run(path: Path) -> list[Table]:
    """Return the run's row of the frame of runs, its measures, time, events, recipe and origin as tables.

    Raises:
        DataError: a file is missing or damaged.
    """
    run, files = read_numbers(path), read_run(path)
    row = format_columns(read_runs([path.name])).iloc[0]
    head = {name: row[name] for name in COLUMNS[1:] if row[name] != "-"}
    if run.marks:
        head["marks"] = "; ".join(mark.text for mark in run.marks)
    head["folder"] = str(path)
    measured = tables_of(compare([run], allow=True))
    events = []
    for event in files.events:
        if event.get("event") != "checkpoint":
            rest = {key: value for key, value in event.items() if key not in ("time", "event")}
            what = ", ".join(f"{key} {_text(value)}" for key, value in rest.items())
            events.append((str(event.get("time", "-")), str(event.get("event")), what))
    kept = ", ".join(checkpoint.name for checkpoint in checkpoints_of(path))
    tables = [
        _pairs(path.name, head),
        *(table for table in measured if table.title not in ("", "Runs")),
        _time(run),
        *_sites(run),
        Table("Events", ("time", "event", "what"), tuple(events)),
        _pairs("Checkpoints", {"kept": kept or "none"}),
        _pairs("Recipe", run.recipe),
        _pairs("Origin", origin_values(run.origin)),
    ]
    return [table for table in tables if table.rows]


def values_of_run(path: Path) -> dict[str, Any]:
    """Return one run as values: seconds, tokens, nats per token and shares in percent, not rounded.

    A measure that does not exist is left out.

    Raises:
        DataError: a file is missing or damaged.
    """
    run, files = read_numbers(path), read_run(path)
    scores: dict[tuple[str, ...], dict[str, float]] = {}
    for result in run.zero_shot:
        scores.setdefault((*result.key[:3], result.checkpoint), {})[result.key[3]] = result.score
    names = ("task", "protocol", "limit", "checkpoint")
    rows = rows_of(compare([run], allow=True))
    return {
        "name": path.name,
        "folder": str(path),
        "status": run.status,
        "marks": [mark.text for mark in run.marks],
        "recipe_name": run.recipe_name,
        "seed": run.seed,
        "steps": run.step,
        "tokens": run.tokens,
        "measures": {row["measure"]: row["mean"] for row in rows if row["mean"] is not None},
        "seconds": run.all_seconds,
        "zero_shot": [
            dict(zip(names, key, strict=True)) | {"metrics": metrics}
            for key, metrics in scores.items()
        ],
        "events": files.events,
        "checkpoints": [checkpoint.name for checkpoint in checkpoints_of(path)],
        "recipe": files.recipe,
        "origin": run.origin,
    }


def origin_values(origin: Mapping[str, Any]) -> dict[str, Any]:
    """Return an origin by dotted keys, the command as one line."""
    command = origin.get("command")
    if isinstance(command, list):
        command = shlex.join(map(str, command))
    return {"command": command} | flatten({**origin, "command": command})


def _pairs(title: str, values: Mapping[str, Any]) -> Table:
    return Table(
        title, ("", ""), tuple((key, format_value(value)) for key, value in values.items())
    )


def _time(run: RunNumbers) -> Table:
    parts = {"training": run.seconds}
    parts |= {name.removesuffix("_seconds"): value for name, value in run.other_seconds.items()}
    named = sum(parts.values())
    total = max(named, run.wall_seconds or 0.0)
    rows = []
    for name, value in (parts | {"other": total - named, "wall": total}).items():
        share = f"{100 * value / total:.1f} %" if total else "-"
        rows.append((name, format_number(value, axis="seconds"), share))
    return Table("Time", ("", "time", "share"), tuple(rows))


def _sites(run: RunNumbers) -> list[Table]:
    """The standardization loss of each site at a few points of training, nats per channel."""
    sites = {name: pd.Series(each.values, each.tokens) for name, each in run.parts(SITE).items()}
    if not sites:
        return []
    frame = pd.DataFrame(sites)
    points = np.linspace(0, len(frame) - 1, SITE_POINTS).round().astype(int)
    frame = frame.iloc[np.unique(points)].T
    rows = []
    for site, values in zip(frame.index, frame.to_numpy(), strict=True):
        rows.append((site, *("-" if np.isnan(value) else f"{value:.3g}" for value in values)))
    head = ("after tokens", *(format_number(tokens, axis="tokens") for tokens in frame.columns))
    return [Table("Divergence from N(0, 1) by site, nats per channel", head, tuple(rows))]


def _text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    return value if isinstance(value, str) else json.dumps(value, default=str)
