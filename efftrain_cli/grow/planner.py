"""Plan when to grow from the validation losses of two runs from scratch: a small one, and one of
the target's size.

Staged training (Shen et al. 2022, arXiv 2203.06211) grows where the slope d log L / d log C of the
loss rises above a threshold; at a constant batch that is the slope over log steps. With both curves
no threshold is needed: grow where most FLOPs are saved, which is at equal marginal costs dC/dL.
Losses are smoothed first, as slopes between neighbouring evaluations are mostly noise.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.interpolate import make_smoothing_spline

from efftrain_cli.foundation.errors import UsageError

THRESHOLDS = {("depth",): -0.0575, ("width",): -0.0475, ("depth", "width"): -0.03}
"""Slopes d log L / d log C at which the released code grows, by kinds of operators."""
OPTIMALITY = -0.052
"""Slope at which it ends a run."""
SMOOTHING = 2e-5
"""Penalty on the squared second derivative for each evaluation. On the authors' curves the switches
are those of a regression over 31 evaluations."""
FEWEST_POINTS = 5
GRID = 2000
"""Points at which a smoothed curve is kept."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Curve:
    """A smoothed validation loss from its steepest descent on; each array is (points,)."""

    steps: np.ndarray
    losses: np.ndarray
    """Falling; nats per token."""
    slopes: np.ndarray
    """d log loss / d log step."""
    step_flops: float

    def switch(self, slope: float) -> float | None:
        """Return the first step with a slope above `slope`; None if there is none."""
        above = np.flatnonzero(self.slopes > slope)
        if not len(above):
            return None
        return float(self.steps[above[0]])

    def loss_at(self, step: float) -> float:
        """Return the loss at a step of the curve."""
        return float(np.interp(step, self.steps, self.losses))

    def steps_to(self, losses: np.ndarray | float) -> np.ndarray:
        """Return the steps at which the curve has these losses; NaN if it never has."""
        falling = -np.asarray(losses)
        return np.interp(
            falling,
            -self.losses,
            self.steps,
            left=np.nan,
            right=np.nan,
        )


def smooth(
    steps: np.ndarray,
    losses: np.ndarray,
    step_flops: float,
) -> Curve:
    """Smooth the losses of a run, (evaluations,), over log steps.

    Args:
        steps: positive and ascending; gaps are allowed.
        step_flops: FLOPs of a step; only ratios between curves matter.

    Raises:
        UsageError: there are too few evaluations, or one has no logarithm.
    """
    if len(steps) < FEWEST_POINTS:
        raise UsageError(
            f"{len(steps)} validation losses are too few to fit a slope to;"
            f" at least {FEWEST_POINTS} are needed\n"
            "  train longer, or evaluate more often (eval.every)"
        )
    if not np.all(np.isfinite(losses) & (losses > 0)):
        raise UsageError("a validation loss is not a positive finite number\n  name another run")
    x = np.log(steps)
    spline = make_smoothing_spline(
        x,
        np.log(losses),
        lam=SMOOTHING * len(x),
    )
    grid = np.linspace(x[0], x[-1], GRID)
    slopes = spline.derivative()(grid)
    steepest = int(np.argmin(slopes))
    falling = np.minimum.accumulate(np.exp(spline(grid[steepest:])))
    return Curve(
        steps=np.exp(grid[steepest:]),
        losses=falling,
        slopes=slopes[steepest:],
        step_flops=step_flops,
    )


def saved_flops(small: Curve, target: Curve) -> np.ndarray:
    """Return what the target needs more than the small run for each of its losses, in FLOPs; NaN
    where the target never has the loss."""
    needed = target.steps_to(small.losses) * target.step_flops
    return needed - small.steps * small.step_flops


def equal_marginal_cost(small: Curve, target: Curve) -> float | None:
    """Return the step of the small run at which growing saves most FLOPs; None if the saving still
    rises where one of the curves ends."""
    saved = saved_flops(small, target)
    known = np.flatnonzero(~np.isnan(saved))
    if not len(known):
        return None
    best = int(np.nanargmax(saved))
    if best == known[-1]:
        return None
    return float(small.steps[best])


def saving(
    small: Curve,
    target: Curve,
    step: float,
) -> float:
    """Return the share of the target's FLOPs that growing at `step` saves, projected to the step
    where the target's slope passes `OPTIMALITY`, or its end."""
    end = target.switch(OPTIMALITY) or float(target.steps[-1])
    saved = np.interp(step, small.steps, saved_flops(small, target))
    return float(saved) / (end * target.step_flops)
