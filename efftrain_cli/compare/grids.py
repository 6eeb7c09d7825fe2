"""Grids of settings: the loss at each, the best of each recipe, and whether it is at an edge."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from efftrain_cli.compare.arms import Arm, best_of_each
from efftrain_cli.run.reading import differing_keys


def varied_keys(arms: Sequence[Arm]) -> list[str]:
    """Return the keys that differ between settings of one recipe."""
    keys: dict[str, None] = {}
    for recipe in {arm.first.arm: None for arm in arms}:
        settings = [arm.first.settings for arm in arms if arm.first.arm == recipe]
        keys |= dict.fromkeys(differing_keys(settings))
    return list(keys)


def grid_frame(arms: Sequence[Arm], keys: Sequence[str]) -> pd.DataFrame:
    """Return a row per recipe and setting, in the order of the values; none without keys.

    Columns: `arm`, each of `keys`, `loss` (mean over seeds, NaN if a run has none), `seeds`, `best`
    and `edge` (what would widen the grid: "optim.lr=0.008"; "" unless it is best there).

    Args:
        arms: of all settings.
        keys: what was varied, dotted.
    """
    best = best_of_each(arms)
    rows = []
    for arm in arms if keys else ():
        rivals = [each for each in arms if each.first.arm == arm.first.arm]
        row = {
            "arm": arm.first.arm,
            **{key: arm.first.settings.get(key) for key in keys},
            "loss": np.mean([run.final_loss for run in arm.runs]),
            "seeds": len(arm.runs),
            "best": arm in best,
            "edge": beyond(arm, rivals, keys) if arm in best else "",
        }
        rows.append(row)
    columns = ["arm", *keys, "loss", "seeds", "best", "edge"]
    return pd.DataFrame(rows, columns=columns).sort_values(list(keys), kind="stable")


def beyond(
    best: Arm,
    rivals: Sequence[Arm],
    keys: Sequence[str],
) -> str:
    """Return the values next to those of the best setting that are the least or the most tried.

    Each is as far away as the last step of the grid; "" if there is none.
    """
    texts = []
    for key in keys:
        tried = [arm.first.settings.get(key) for arm in rivals]
        values = sorted({value for value in tried if isinstance(value, int | float)})
        at = best.first.settings.get(key)
        if len(values) < 2 or at not in (values[0], values[-1]):
            continue
        neighbour = values[1] if at == values[0] else values[-2]
        texts.append(f"{key}={at * at / neighbour:g}")
    return ", ".join(texts)


def edge_notes(grid: pd.DataFrame) -> list[str]:
    """Return a note per recipe whose best setting is at an edge, with what would widen the grid."""
    edges = grid[grid.edge != ""]
    template = "{}: best at the edge of its grid; add {}".format
    return list(map(template, edges.arm, edges.edge))


def choice_notes(grid: pd.DataFrame) -> list[str]:
    """Return a caveat per recipe that is the best of several settings by the judged seeds."""
    tried = grid.groupby("arm", sort=False).size()
    template = "{}: the best of {} settings by these seeds: flattered".format
    return [template(arm, count) for arm, count in tried.items() if count > 1]
