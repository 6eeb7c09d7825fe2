"""What a run needs to reach a loss.

The first crossing of a noisy curve comes too early. Therefore a cost is read from the best-fitting
curve that never rises, and the end of a run from a line through its last evaluations.
"""

from __future__ import annotations

import math

import numpy as np
from scipy.optimize import isotonic_regression

from efftrain_cli.run.reading import Run

FIFTH = 5
"""The end of a curve is its last 1 / FIFTH evaluations, if these are three or more."""


def isotonic_fit(costs: np.ndarray, losses: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the knots (costs, losses) of the best-fitting curve that never rises.

    Losses that rise and fall around one level become one knot at their mean.

    Source: isotonic least squares, Robertson, Wright and Dykstra 1988.
    """
    fitted = isotonic_regression(losses, increasing=False)
    starts = fitted.blocks[:-1]
    sizes = np.diff(fitted.blocks)
    centres = np.add.reduceat(costs, starts) / sizes
    return centres, fitted.x[starts]


def cost_to_reach(
    run: Run,
    cost: str,
    loss: float,
) -> float:
    """Return the cost at which a run comes down to `loss`; NaN if it does not."""
    costs = run.curve[cost].to_numpy()
    losses = run.curve.val_loss.to_numpy()
    costs, losses = isotonic_fit(costs, losses)
    return float(
        np.interp(
            -loss,
            -losses,
            costs,
            right=math.nan,
        )
    )


def smooth_end(run: Run) -> float:
    """Return the loss at the end of a line through the last fifth of the evaluations.

    It is the last loss itself if these are fewer than three.
    """
    last = len(run.curve) // FIFTH
    if last < 3:
        return run.spent("val_loss")
    steps = run.curve.step.to_numpy()[-last:]
    losses = run.curve.val_loss.to_numpy()[-last:]
    _, loss = np.polyfit(steps - steps[-1], losses, 1)
    return float(loss)


def log_saving(
    base: Run,
    arm: Run,
    cost: str,
) -> float:
    """Return the log ratio of what two runs need to reach the worse one's final loss, or NaN.

    Above 0 the arm is better: it needs exp(-value) of the baseline's cost. Below 0 the sides are
    swapped, so two equal recipes are as often above as below.
    """
    base_end = smooth_end(base)
    arm_end = smooth_end(arm)
    if arm_end >= base_end:
        return -ratio_to_end(
            base,
            arm,
            cost,
            arm_end,
        )
    return ratio_to_end(
        arm,
        base,
        cost,
        base_end,
    )


def ratio_to_end(
    better: Run,
    worse: Run,
    cost: str,
    loss: float,
) -> float:
    """Return the log ratio of costs, worse / better run, to the worse run's final loss."""
    needed = cost_to_reach(better, cost, loss)
    # If its fit ends above the loss, the better run needs its whole cost.
    needed = np.fmin(needed, better.spent(cost))
    if not needed > 0:
        return math.nan
    return math.log(worse.spent(cost) / needed)
