"""`efftrain runs show`: one run in full, as tables or as values for other programs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from efftrain_cli.compare.comparison import compare
from efftrain_cli.compare.formats import format_number, format_value, origin_values
from efftrain_cli.compare.frames import rows_of
from efftrain_cli.compare.reading import RunNumbers, read_numbers
from efftrain_cli.compare.tables import Table, tables_of
from efftrain_cli.run.directory import checkpoints_of
from efftrain_cli.run.small_files import read_run
from efftrain_cli.run_list import TITLES, format_cell, row_of


def tables_of_run(path: Path) -> list[Table]:
    """Return the run's row of the frame of runs, measures, time, events, recipe, origin as tables.

    Raises:
        DataError: a file is missing or damaged.
    """
    run = read_numbers(path)
    files = read_run(path)
    row = row_of(path, run)
    head = {}
    for name, title in TITLES.items():
        text = format_cell(name, row[name])
        if name != "name" and text != "-":
            head[title] = text
    if run.marks:
        head["marks"] = "; ".join(mark.text for mark in run.marks)
    head["folder"] = str(path)
    measured = tables_of(compare([run], allow=True))
    events = []
    for event in files.events:
        if event.get("event") != "checkpoint":
            fields = [_field(key, event[key]) for key in event if key not in ("time", "event")]
            time = str(event.get("time", "-"))
            kind = str(event.get("event"))
            events.append((time, kind, ", ".join(fields)))
    kept = ", ".join(checkpoint.name for checkpoint in checkpoints_of(path))
    tables = [
        _pairs(path.name, head),
        *(table for table in measured if table.title not in ("", "Runs")),
        _pairs("Time", _times(run)),
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
        "seconds": run.spent,
        "zero_shot": [
            dict(zip(names, key, strict=True)) | {"metrics": metrics}
            for key, metrics in scores.items()
        ],
        "events": files.events,
        "checkpoints": [checkpoint.name for checkpoint in checkpoints_of(path)],
        "recipe": files.recipe,
        "origin": run.origin,
    }


def _pairs(title: str, values: Mapping[str, Any]) -> Table:
    rows = [(key, format_value(value)) for key, value in values.items() if value is not None]
    return Table(title, ("", ""), tuple(rows))


def _field(key: str, value: object) -> str:
    """Write a field of an event: bytes, tokens, FLOPs and seconds as elsewhere on the screen."""
    for axis in ("bytes", "tokens", "flops", "seconds"):
        # A file from elsewhere may hold any number.
        if axis in key and isinstance(value, int | float) and abs(value) < 1e30:
            return f"{key} {format_number(value, axis=axis)}"
    return f"{key} {format_value(value)}"


def _times(run: RunNumbers) -> dict[str, str]:
    """Return what the wall time of a run went into."""
    parts = {name.removesuffix("_seconds"): seconds for name, seconds in run.spent.items()}
    parts.pop("cpu", None)
    wall = parts.pop("wall", 0.0)
    named = sum(parts.values())
    wall = max(named, wall)
    parts |= {"other": wall - named, "wall": wall}
    return {name: format_number(seconds, axis="seconds") for name, seconds in parts.items()}
