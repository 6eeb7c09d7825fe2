"""Grids of settings: the loss at each, the best of each recipe, and whether it is at an edge."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd

from efftrain_cli.compare.arms import Arm, best_of_each
from efftrain_cli.foundation.console import counted, table_lines

NOTE = "*: best, compared; !: at the edge of the grid"


def grid_frame(
    groups: Sequence[Arm],
    keys: Sequence[str],
) -> pd.DataFrame:
    """Return a row per recipe and setting, in the order of the values.

    Columns: `arm`, each of `keys`, `loss` (mean over seeds, NaN if a run has none), `seeds`, `best`
    and `edge` (the keys whose best value is the least or the most that was tried).

    Args:
        groups: arms of all settings.
        keys: what was varied, dotted.
    """
    best = best_of_each(groups)
    rows = []
    for group in groups:
        values = {key: group.first.settings.get(key) for key in keys}
        losses = pd.Series([run.final_loss for run in group.runs])
        arm = group.first.arm
        is_best = group in best
        edges = []
        if is_best:
            of_arm = [each for each in groups if each.first.arm == arm]
            edges = edges_of(group, of_arm, keys)
        row = {
            "arm": arm,
            **values,
            "loss": losses.mean(skipna=False),
            "seeds": len(losses),
            "best": is_best,
            "edge": edges,
        }
        rows.append(row)
    return pd.DataFrame(rows).sort_values(list(keys), kind="stable")


def edges_of(
    best: Arm,
    groups: Sequence[Arm],
    keys: Sequence[str],
) -> list[str]:
    """Return the keys whose best value is the least or the most of the recipe's groups."""
    edges = []
    for key in keys:
        values = numbers_of(groups, key)
        value = best.first.settings.get(key)
        if len(values) > 1 and value in (values[0], values[-1]):
            edges.append(key)
    return edges


def numbers_of(
    groups: Sequence[Arm],
    key: str,
) -> list[float]:
    """Return the numbers that a key has, in order."""
    values: set[float] = set()
    for group in groups:
        value = group.first.settings.get(key)
        if isinstance(value, int | float) and not isinstance(value, bool):
            values.add(value)
    return sorted(values)


def wider(
    groups: Sequence[Arm],
    key: str,
    at: Any,
) -> float:
    """Return the next value beyond an edge, as far away as the last step of the grid."""
    values = numbers_of(groups, key)
    if at == values[0]:
        return float(at * values[0] / values[1])
    return float(at * values[-1] / values[-2])


def grid_lines(
    frame: pd.DataFrame,
    keys: Sequence[str],
    title: str = "",
) -> list[str]:
    """Return the losses as a table: values x recipes of one key, a line per setting of several.

    Args:
        title: what the grid was for, first in the head.
    """
    seeds = counted(int(frame.seeds.max()), "seed")
    cells = []
    for _, row in frame.iterrows():
        cell = "failed"
        if row.loss == row.loss:
            cell = f"{row.loss:.4f}"
        if row.best:
            cell += "*"
        if row.edge:
            cell += "!"
        cells.append(cell)
    frame = frame.assign(cell=cells)
    mean = f"nats/token, mean of {seeds}"
    if len(keys) > 1:
        # An arm that was not tuned over a key has no value of it.
        texts = frame[["arm", *keys, "cell"]].astype(object)
        texts = texts.fillna("-").astype(str)
        rows = [tuple(row) for row in texts.to_numpy()]
        head = (title or "arm", *keys, mean)
        return ["", *table_lines(head, rows), NOTE]
    (key,) = keys
    frame = frame.dropna(subset=[key])
    values = list(dict.fromkeys(frame[key]))
    rows = []
    for arm, group in frame.groupby("arm", sort=False):
        by_value = dict(zip(group[key], group.cell, strict=True))
        of_arm = [by_value.get(value, "") for value in values]
        rows.append((f"  {arm}", *of_arm))
    head = (f"{title} {key}".strip(), *map(str, values))
    first, *rest = table_lines(head, rows)
    return ["", f"{first}    {mean}", *rest, NOTE]
