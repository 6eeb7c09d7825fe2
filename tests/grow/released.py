"""The released notebook of staged training: its filter, its slopes, its pairing; and the curves
that it was run on."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import numpy as np

from efftrain_cli.grow.planner import (
    FEWEST_POINTS,
    PAPER_OPTIMALITY,
    Curve,
    Projection,
    make_curve,
)


def read_curve(path: Path, step_flops: float, step_flops_without_logits: float) -> Curve:
    """The curve in a CSV file with the columns step and val_loss."""
    with path.open(newline="") as file:
        points = {float(row["step"]): float(row["val_loss"]) for row in csv.DictReader(file)}
    return make_curve(path.stem, points, step_flops, step_flops_without_logits)


def released_filter(curve: Curve) -> Curve:
    """The curve without evaluations more than 1 % above the last one kept, which the released
    notebook drops first."""
    kept: list[int] = []
    for index, loss in enumerate(curve.losses):
        if not kept or loss <= 1.01 * curve.losses[kept[-1]]:
            kept.append(index)
    return replace(curve, steps=curve.steps[kept], losses=curve.losses[kept])


def released_switch(curve: Curve, threshold: float) -> float | None:
    """The released notebook's rule, after its filter: losses averaged over 5 evaluations, slope
    between neighbours, the first step after the steepest one at which it exceeds the threshold. A
    little noise is enough to set it off."""
    curve = released_filter(curve)
    if len(curve.steps) <= FEWEST_POINTS:
        return None
    means = np.convolve(curve.losses, np.full(5, 0.2), "valid")
    steps = curve.steps[2 : len(curve.steps) - 2]
    slopes = np.diff(np.log(means)) / np.diff(np.log(steps))
    return _first_above(steps[:-1], slopes, threshold)


def _first_above(steps: np.ndarray, slopes: np.ndarray, threshold: float) -> float | None:
    steepest = int(np.argmin(slopes))
    above = np.flatnonzero(slopes[steepest:] > threshold)
    return float(steps[steepest + above[0]]) if len(above) else None


def released_target_step(small: Curve, target: Curve, step: float) -> float:
    """The target's evaluation whose loss is nearest to the small model's at `step`, as the released
    notebook pairs them."""
    small, target = released_filter(small), released_filter(target)
    loss = small.losses[np.argmin(np.abs(small.steps - step))]
    return float(target.steps[np.argmin(np.abs(target.losses - loss))])


def released_projection(small: Curve, target: Curve, threshold: float) -> Projection | None:
    """The projection by the released notebook's rule."""
    step, final = released_switch(small, threshold), released_switch(target, PAPER_OPTIMALITY)
    if step is None or final is None:
        return None
    return Projection(small, target, step, released_target_step(small, target, step), final)
