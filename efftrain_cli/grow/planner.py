"""Plan when to grow from validation losses of two runs: a small one and one of the target's size.

Staged training (Shen et al. 2022, arXiv 2203.06211) looks at the slope d log L / d log C of the
validation loss and grows when it rises above a threshold. Released code takes the slope between
neighbouring evaluations; here it is a regression over a window of them, because one noisy
evaluation must not decide. With both curves at hand no threshold is needed: grow where most FLOPs
are saved, which is where the marginal costs dC/dL of the two sizes are equal.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from efftrain_cli.foundation.errors import UsageError

PAPER_THRESHOLD: dict[tuple[str, ...], float] = {
    ("depth",): -0.0575,
    ("width",): -0.0475,
    ("depth", "width"): -0.03,
}
"""Slopes d log L / d log C at which the released code grows, by kinds of operators."""
PAPER_OPTIMALITY = -0.052
"""Slope at which it ends a run; -1 / (1/alpha_N + 1/alpha_S + 1/alpha_B) = -0.05199 with Kaplan's
exponents."""
FEWEST_POINTS = 5


@dataclass(frozen=True)
class Curve:
    """Validation loss of one run from scratch."""

    name: str
    steps: np.ndarray
    """(n,), ascending, positive; gaps are allowed."""
    losses: np.ndarray
    """(n,), nats per token."""
    step_flops: float
    """Logits included; only ratios between curves matter."""
    step_flops_without_logits: float
    window: int
    """Evaluations that one regression takes, odd."""


def make_curve(
    name: str,
    points: dict[float, float],
    step_flops: float,
    step_flops_without_logits: float,
    window: int = 31,
) -> Curve:
    """Make a curve from step -> loss; step 0 is left out, for it has no logarithm.

    Args:
        window: evaluations that one regression takes, odd; fewer if the curve would have less than
            three.

    Raises:
        UsageError: there are fewer than `FEWEST_POINTS`, or a loss is not positive and finite.
    """
    steps = sorted(step for step in points if step > 0)
    losses = [points[step] for step in steps]
    if len(steps) < FEWEST_POINTS:
        raise UsageError(
            f"{name}: {len(steps)} validation losses are too few to fit a slope to;"
            f" at least {FEWEST_POINTS} are needed\n"
            "  train longer, or evaluate more often (eval.every)"
        )
    if not all(math.isfinite(loss) and loss > 0 for loss in losses):
        raise UsageError(f"{name}: a validation loss is not a positive finite number")
    fits = len(steps) - 2
    return Curve(
        name=name,
        steps=np.array(steps),
        losses=np.array(losses),
        step_flops=step_flops,
        step_flops_without_logits=step_flops_without_logits,
        window=min(window, fits - 1 + fits % 2),
    )


class Fit(NamedTuple):
    """A curve without its noise, at the steps with whole windows around them; each (points,)."""

    steps: np.ndarray
    slopes: np.ndarray
    """d log loss / d log step."""
    losses: np.ndarray


def fitted(curve: Curve) -> Fit:
    """Fit a curve by regression of log loss on log step over the evaluations around each step.

    Regression on steps, not on rows: the curves have gaps. At a constant batch the slope on log
    step is that on log C.
    """
    window = curve.window
    half = window // 2
    steps = curve.steps[half : len(curve.steps) - half]
    # (points, window), x relative to the point in the middle
    x = sliding_window_view(np.log(curve.steps), window) - np.log(steps)[:, None]
    y = sliding_window_view(np.log(curve.losses), window)

    mean_x = x.mean(axis=1)
    mean_y = y.mean(axis=1)
    spread = x - mean_x[:, None]
    covariance = np.sum(spread * (y - mean_y[:, None]), axis=1)
    slopes = covariance / np.sum(spread**2, axis=1)
    return Fit(steps, slopes, losses=np.exp(mean_y - slopes * mean_x))


def fitted_switch(curve: Curve, threshold: float) -> float | None:
    """Return the first step after the steepest one whose fitted slope exceeds the threshold; None
    if there is none."""
    fit = fitted(curve)
    steepest = int(np.argmin(fit.slopes))
    above = np.flatnonzero(fit.slopes[steepest:] > threshold)
    if not len(above):
        return None
    return float(fit.steps[steepest + above[0]])


def target_step(small: Curve, target: Curve, step: float) -> float | None:
    """Return the step where the target's fitted curve has the small model's loss at `step`; None if
    it never has."""
    fit = fitted(small)
    loss = np.interp(math.log(step), np.log(fit.steps), fit.losses)
    reached = float(_steps_to(target, loss))
    if math.isnan(reached):
        return None
    return reached


def _steps_to(curve: Curve, losses: np.ndarray) -> np.ndarray:
    """Return the steps at which the fitted curve has these losses; NaN if it never has."""
    fit = fitted(curve)
    falling = np.minimum.accumulate(fit.losses)
    reached = np.exp(np.interp(-losses, -falling, np.log(fit.steps)))
    is_reached = (losses >= falling[-1]) & (losses <= falling[0])
    return np.where(is_reached, reached, np.nan)


def equal_marginal_cost(small: Curve, target: Curve) -> float | None:
    """Return the step of the small run at which growing saves most FLOPs, without logits, at a
    constant batch.

    The FLOPs that the target needs for the same loss then exceed the small run's by most, and both
    sizes lower the loss at the same marginal cost dC/dL. None if the saving still rises where one
    of the curves ends.
    """
    fit = fitted(small)
    target_flops = _steps_to(target, fit.losses) * target.step_flops_without_logits
    saved = target_flops - fit.steps * small.step_flops_without_logits
    saved[: np.argmin(fit.slopes)] = np.nan
    covered = np.flatnonzero(~np.isnan(saved))
    if not len(covered):
        return None
    best = np.nanargmax(saved)
    if best == covered[-1]:
        return None
    return float(fit.steps[best])


@dataclass(frozen=True)
class Projection:
    """Saving of a grown run, projected from two runs from scratch; no grown run is measured."""

    small: Curve
    target: Curve
    small_steps: float
    """S_pre: steps of the small model before growth."""
    target_steps: float
    """S_target: steps the target model needs for the same loss."""
    final_steps: float
    """Steps of the target from scratch at which both runs end."""

    @property
    def saving(self) -> float:
        """(C_target(L) - C_small(L)) / C_scratch, without logits."""
        return self._saving(
            self.small.step_flops_without_logits, self.target.step_flops_without_logits
        )

    @property
    def saving_with_logits(self) -> float:
        return self._saving(self.small.step_flops, self.target.step_flops)

    def _saving(self, small: float, target: float) -> float:
        saved = self.target_steps * target - self.small_steps * small
        return saved / (self.final_steps * target)

    @property
    def ratio(self) -> float:
        """S_pre / S_target."""
        return self.small_steps / self.target_steps


def project(small: Curve, target: Curve, step: float | None) -> Projection | None:
    """Project a growth of the small run at `step`, until the target's fitted slope passes the
    paper's optimality.

    None if `step` is None, or if the target never has the small run's loss there.
    """
    if step is None:
        return None
    reached = target_step(small, target, step)
    if reached is None:
        return None
    return Projection(
        small=small,
        target=target,
        small_steps=step,
        target_steps=reached,
        final_steps=fitted_switch(target, PAPER_OPTIMALITY) or float(target.steps[-1]),
    )
