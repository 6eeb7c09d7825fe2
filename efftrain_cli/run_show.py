"""`efftrain runs show`: one run in full, as tables or as values for other programs."""

from __future__ import annotations

import json
import re
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
from efftrain_cli.run_list import TITLES, format_columns, read_runs

_HASH = re.compile(r"[0-9a-f]{40,}")
SITE_POINTS = 6
"""Points of training at which the divergence of each site is shown."""


def tables_of_run(path: Path) -> list[Table]:
    """Return the run's row of the frame of runs, its measures, time, events, recipe and origin as tables.

    Raises:
        DataError: a file is missing or damaged.
    """
    run = read_numbers(path)
    files = read_run(path)
    row = format_columns(read_runs([path.name])).iloc[0]
    head = {title: row[name] for name, title in TITLES.items() if row[name] != "-"}
    del head["run"]
    if run.marks:
        head["marks"] = "; ".join(mark.text for mark in run.marks)
    head["folder"] = str(path)
    measured = tables_of(compare([run], allow=True))
    events = []
    for event in files.events:
        if event.get("event") != "checkpoint":
            fields = [f"{key} {_text(event[key])}" for key in event if key not in ("time", "event")]
            time = str(event.get("time", "-"))
            kind = str(event.get("event"))
            events.append((time, kind, ", ".join(fields)))
    kept = ", ".join(checkpoint.name for checkpoint in checkpoints_of(path))
    tables = [
        _pairs(path.name, head),
        *(table for table in measured if table.title not in ("", "Runs")),
        _time(run),
        *_sites(run),
        Table("Events", ("time", "event", "what"), tuple(events)),
        _pairs("Checkpoints", {"kept": kept or "none"}),
        _pairs("Recipe", run.recipe),
        _pairs("Origin", _origin_values(run.origin)),
    ]
    return [table for table in tables if table.rows]


def values_of_run(path: Path) -> dict[str, Any]:
    """Return one run as values: seconds, tokens, nats per token and shares in percent, not rounded.

    A measure that does not exist is left out.

    Raises:
        DataError: a file is missing or damaged.
    """
    run = read_numbers(path)
    files = read_run(path)
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


def _origin_values(origin: Mapping[str, Any]) -> dict[str, Any]:
    """Return an origin by dotted keys: the command first, as one line, and the first digits of hashes."""
    values = flatten({"command": None, **origin})
    if isinstance(values["command"], list):
        values["command"] = shlex.join(map(str, values["command"]))
    for key, value in values.items():
        if isinstance(value, str) and _HASH.fullmatch(value):
            values[key] = value[:16]
    return values


def _pairs(title: str, values: Mapping[str, Any]) -> Table:
    rows = [(key, format_value(value)) for key, value in values.items()]
    return Table(title, ("", ""), tuple(rows))


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
    """Return the standardization loss of each site at a few points of training, nats per channel."""
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
