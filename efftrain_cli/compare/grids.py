"""Grids of settings: the loss at each, the best of each recipe, and whether it is at an edge."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from efftrain_cli.compare.arms import Arm, best_of_each
from efftrain_cli.run.reading import differing_keys


def settings_of(arms: Sequence[Arm], recipe: str) -> list[Mapping[str, Any]]:
    """Return the settings of the arms of a recipe."""
    return [arm.first.settings for arm in arms if arm.first.arm == recipe]


def varied_keys(arms: Sequence[Arm]) -> list[str]:
    """Return the keys that differ between settings of one recipe."""
    keys: dict[str, None] = {}
    recipes = dict.fromkeys(arm.first.arm for arm in arms)
    for recipe in recipes:
        settings = settings_of(arms, recipe)
        differing = differing_keys(settings)
        keys |= dict.fromkeys(differing)
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
        recipe = arm.first.arm
        settings = arm.first.settings
        edge = ""
        if arm in best:
            edge = beyond(settings, settings_of(arms, recipe), keys)
        losses = [run.final_loss for run in arm.runs]
        row = [
            recipe,
            *map(settings.get, keys),
            np.mean(losses),
            len(losses),
            arm in best,
            edge,
        ]
        rows.append(row)
    columns = ["arm", *keys, "loss", "seeds", "best", "edge"]
    frame = pd.DataFrame(rows, columns=columns)
    return frame.sort_values(list(keys), kind="stable")


def keys_of(grid: pd.DataFrame) -> list[str]:
    """Return the varied keys of a grid's frame."""
    return list(grid.columns[1:-4])


def beyond(
    best: Mapping[str, Any],
    tried: Sequence[Mapping[str, Any]],
    keys: Sequence[str],
) -> str:
    """Return the values that would widen a grid at the best setting; "" if it is at no edge.

    Each continues the grid by the ratio of its last two values; none if one of them is 0.
    """
    texts = []
    for key in keys:
        values = [settings.get(key) for settings in tried]
        numbers = sorted({value for value in values if isinstance(value, int | float)})
        at = best.get(key)
        if len(numbers) < 2:
            continue
        if at == numbers[0]:
            neighbour = numbers[1]
        elif at == numbers[-1]:
            neighbour = numbers[-2]
        else:
            continue
        if at * neighbour > 0:
            wider = at * at / neighbour
            texts.append(f"{key}={wider:g}")
    return ", ".join(texts)


def edge_notes(grid: pd.DataFrame) -> list[str]:
    """Return a note per recipe whose best setting is at an edge, with what would widen the grid."""
    notes = []
    for row in grid.itertuples():
        if row.edge:
            notes.append(f"{row.arm}: best at the edge of its grid; add {row.edge}")
    return notes


def choice_notes(grid: pd.DataFrame) -> list[str]:
    """Return a caveat per recipe that is the best of several settings by the judged seeds."""
    notes = []
    for arm, tried in Counter(grid.arm).items():
        if tried > 1:
            notes.append(f"{arm}: the best of {tried} settings by these seeds: looks too good")
    return notes
