"""When to grow, and what it saves, by the four pairs of loss curves that the authors of Staged
Training published."""

from __future__ import annotations

import itertools
from typing import Any
from unittest import SkipTest

from efftrain_cli.grow.planner import (
    Projection,
    equal_marginal_cost,
    fitted_switch,
    project,
)
from tests.conftest import SHARED
from tests.grow.released import read_curve

CURVES = SHARED / "data" / "staged_curves"
SHAPES = {"base": (12, 768), "large": (24, 1536)}
"""Layers and width of the targets; the small models have half of one of the two."""
THRESHOLDS = {"depth": -0.0575, "width": -0.0475}


def record() -> dict[str, Any]:
    """Return the switch by the slope and by the marginal costs, for each pair."""
    if not CURVES.is_dir():
        raise SkipTest("the authors' curves are not beside the repository")
    found = {}
    for size, kind in itertools.product(SHAPES, THRESHOLDS):
        layers, width = SHAPES[size]
        half = (layers // 2, width) if kind == "depth" else (layers, width // 2)
        small = _curve(f"{size}_half_{kind}", *half)
        target = _curve(size, layers, width)
        found[f"{size} {kind}"] = {
            "by slope": _shown(project(small, target, fitted_switch(small, THRESHOLDS[kind]))),
            "by cost": _shown(project(small, target, equal_marginal_cost(small, target))),
        }
    return found


def _curve(name: str, layers: int, width: int) -> Any:
    blocks = 12 * layers * width**2
    return read_curve(CURVES / f"{name}.csv", blocks + 50257 * width, blocks)


def _shown(projection: Projection | None) -> dict[str, float] | None:
    if projection is None:
        return None
    steps = {
        name: value for name, value in vars(projection).items() if name not in ("small", "target")
    }
    savings = {"saving": projection.saving, "saving_with_logits": projection.saving_with_logits}
    return {**steps, **savings}
