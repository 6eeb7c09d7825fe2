"""Grids of settings: the loss at each, the best of each recipe, and whether it is at an edge."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from efftrain_cli.compare.arms import Arm, best_of_each, differing_keys
from efftrain_cli.foundation.console import counted, table_lines

NOTE = "*: best, compared; !: at the edge of the grid"


def varied_keys(groups: Sequence[Arm]) -> list[str]:
    """Return the keys that differ between settings of one recipe."""
    by_recipe: dict[str, list[Arm]] = {}
    for group in groups:
        by_recipe.setdefault(group.first.arm, []).append(group)
    keys: dict[str, None] = {}
    for settings in by_recipe.values():
        keys |= dict.fromkeys(differing_keys(settings))
    return list(keys)


def grid_frame(
    groups: Sequence[Arm],
    keys: Sequence[str],
    title: str = "arm",
) -> pd.DataFrame:
    """Return a row per recipe and setting, in the order of the values; none without keys.

    Columns: `title`, each of `keys`, `loss` (mean over seeds, NaN if a run has none), `seeds`,
    `best` and `edge` (what would widen the grid: "optim.lr=0.008"; "" unless it is best there).

    Args:
        groups: arms of all settings.
        keys: what was varied, dotted.
        title: name of the column of the recipes.
    """
    if not keys:
        return pd.DataFrame()
    best = best_of_each(groups)
    rows = []
    for group in groups:
        rivals = [each for each in groups if each.first.arm == group.first.arm]
        row = {
            title: group.first.arm,
            **{key: group.first.settings.get(key) for key in keys},
            "loss": np.mean([run.final_loss for run in group.runs]),
            "seeds": len(group.runs),
            "best": group in best,
            "edge": beyond(group, rivals, keys) if group in best else "",
        }
        rows.append(row)
    return pd.DataFrame(rows).sort_values(list(keys), kind="stable")


def beyond(
    best: Arm,
    groups: Sequence[Arm],
    keys: Sequence[str],
) -> str:
    """Return the values next to those of the best setting that are the least or the most tried.

    Each is as far away as the last step of the grid; "" if there is none.
    """
    texts = []
    for key in keys:
        tried = [group.first.settings.get(key) for group in groups]
        values = sorted({value for value in tried if isinstance(value, int | float)})
        at = best.first.settings.get(key)
        if len(values) < 2 or at not in (values[0], values[-1]):
            continue
        neighbour = values[1] if at == values[0] else values[-2]
        texts.append(f"{key}={at * at / neighbour:g}")
    return ", ".join(texts)


def edge_notes(frame: pd.DataFrame) -> list[str]:
    """Return a note per recipe whose best setting is at an edge, with what would widen the grid."""
    notes = []
    for _, row in frame.iterrows():
        if row.edge:
            notes.append(f"{row.iloc[0]}: best at the edge of its grid; add {row.edge}")
    return notes


def grid_lines(frame: pd.DataFrame) -> list[str]:
    """Return the losses as a table: values x recipes of one key, a line per setting of several."""
    if frame.empty:
        return []
    title, *keys = frame.columns[:-4]
    cells = []
    for _, row in frame.iterrows():
        loss = "failed" if np.isnan(row.loss) else f"{row.loss:.4f}"
        cells.append(loss + "*" * row.best + "!" * bool(row.edge))
    frame = frame.assign(cell=cells)
    mean = f"nats/token, mean of {counted(int(frame.seeds.max()), 'seed')}"
    # An arm that was not tuned over a key has no value of it.
    texts = frame[[title, *keys, "cell"]].astype(object).fillna("-").astype(str)
    if len(keys) > 1:
        rows = [tuple(row) for row in texts.to_numpy()]
        return ["", *table_lines((title, *keys, mean), rows), NOTE]
    (key,) = keys
    texts = texts[texts[key] != "-"]
    table = texts.pivot_table(
        index=title,
        columns=key,
        values="cell",
        aggfunc="first",
        sort=False,
    )
    table = table.fillna("")
    rows = [(f"  {arm}", *row) for arm, row in zip(table.index, table.to_numpy(), strict=True)]
    first, *rest = table_lines((f"{title} {key}".removeprefix("arm "), *table.columns), rows)
    return ["", f"{first}    {mean}", *rest, NOTE]
