"""When to grow, and what it saves, by the four pairs of loss curves that the authors of Staged
Training published."""

from __future__ import annotations

import csv
import itertools
from typing import Any
from unittest import SkipTest

import numpy as np

from efftrain_cli.grow.planner import THRESHOLDS, Curve, equal_marginal_cost, saving, smooth
from tests.conftest import SHARED

CURVES = SHARED / "data" / "staged_curves"
SHAPES = {"base": (12, 768), "large": (24, 1536)}
"""Layers and width of the targets; the small models have half of one of the two."""


def record() -> dict[str, Any]:
    """Return the switch by the slope and by the marginal costs, for each pair."""
    if not CURVES.is_dir():
        raise SkipTest("the authors' curves are not beside the repository")
    found = {}
    for size, kind in itertools.product(SHAPES, ("depth", "width")):
        layers, width = SHAPES[size]
        half = (layers // 2, width) if kind == "depth" else (layers, width // 2)
        for logits in (False, True):
            small = _curve(f"{size}_half_{kind}", *half, logits)
            target = _curve(size, layers, width, logits)
            found[f"{size} {kind}{' with logits' if logits else ''}"] = {
                "by slope": _shown(small, target, small.switch(THRESHOLDS[(kind,)])),
                "by cost": _shown(small, target, equal_marginal_cost(small, target)),
            }
    return found


def _curve(name: str, layers: int, width: int, logits: bool) -> Curve:
    with (CURVES / f"{name}.csv").open(newline="") as file:
        points = [(float(row["step"]), float(row["val_loss"])) for row in csv.DictReader(file)]
    steps, losses = np.array([point for point in points if point[0] > 0]).T
    return smooth(steps, losses, 12 * layers * width**2 + logits * 50257 * width)


def _shown(small: Curve, target: Curve, step: float | None) -> dict[str, float] | None:
    if step is None:
        return None
    start = float(target.steps_to(small.loss_at(step)))
    return {"small_steps": step, "target_steps": start, "saving": saving(small, target, step)}
