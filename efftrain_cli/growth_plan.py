"""When to grow: from the constants of a scaling law, or from measured curves of small runs. Trains nothing.

The law is Kaplan et al. 2020 (arXiv 2001.08361), as the authors of staged training use it (Shen et al. 2022, arXiv
2203.06211, released notebook and `compute_optimal_schedule.py`); constants are Kaplan's, not fitted to anybody's runs
since. Sizes N are parameters without embeddings, 12 n_layer n_embd^2; steps S are optimizer steps at the critical batch.

A stage should end when the next one's model lowers the loss more cheaply: where the marginal costs dC/dL are equal. The
paper looks at the slope d log L / d log C of the validation loss instead and grows when it rises above a threshold.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal

import numpy as np

from efftrain_cli.errors import UsageError

PAPER_THRESHOLD = {"depth": -0.0575, "width": -0.0475, "both": -0.03}
"""Slopes d log L / d log C at which the released code grows, per operator."""
PAPER_OPTIMALITY = -0.052
"""Slope at which it ends a run; -1 / (1/alpha_N + 1/alpha_S + 1/alpha_B) = -0.05199 with Kaplan's exponents."""
FEWEST_POINTS = 5


@dataclass(frozen=True, kw_only=True)
class ScalingLaw:
    """L(N, S) = (n_c / N)^alpha_n + (2 s_c / S)^alpha_s, nats per token, at the critical batch size."""

    n_c: float = 8.8e13
    alpha_n: float = 0.076
    s_c: float = 2.1e3
    alpha_s: float = 0.76
    b_star: float = 2.1e8
    """Critical batch of a loss of 1, tokens."""
    alpha_b: float = 0.21

    def floor(self, size: float) -> float:
        """Loss of `size` parameters after infinitely many steps."""
        return float((self.n_c / size) ** self.alpha_n)

    def loss(self, size: float, steps: float) -> float:
        """Loss of `size` parameters after `steps` steps."""
        return float(self.floor(size) + (2 * self.s_c / steps) ** self.alpha_s)

    def steps(self, size: float, loss: float) -> float:
        """Steps that `size` parameters need for `loss`; infinite at and below their floor."""
        above = loss - self.floor(size)
        return float(2 * self.s_c / above ** (1 / self.alpha_s)) if above > 0 else math.inf

    def critical_batch(self, loss: float) -> float:
        """Tokens per step at which halving the steps begins to cost tokens."""
        return float(self.b_star / loss ** (1 / self.alpha_b))

    def optimal_slope(self) -> float:
        """d log L / d log C where a model of any size is the cheapest for its loss (C = 6 N B_crit(L) S)."""
        return -1 / (1 / self.alpha_n + 1 / self.alpha_s + 1 / self.alpha_b)

    def optimal_loss(self, size: float) -> float:
        """The loss for which `size` is the cheapest size: (1 + alpha_n / alpha_s) times its floor."""
        return (1 + self.alpha_n / self.alpha_s) * self.floor(size)

    def optimal_size(self, loss: float) -> float:
        """The size that reaches `loss` cheapest in one stage."""
        return float(self.n_c / (loss / (1 + self.alpha_n / self.alpha_s)) ** (1 / self.alpha_n))

    def switch_loss(self, size: float, factor: float) -> float:
        """Loss at which growing `size` by `factor` pays, where both sizes' marginal costs are equal (one batch size)."""
        q = factor ** (self.alpha_s / (1 + self.alpha_s))
        return self.floor(size) * (q - factor**-self.alpha_n) / (q - 1)

    def same_loss_steps(self, factor: float) -> float:
        """S_small / S_target at that loss: independent of the size."""
        return float(factor ** (1 / (1 + self.alpha_s)))


KAPLAN = ScalingLaw()


@dataclass(frozen=True, kw_only=True)
class PlannedStage:
    """One stage of a planned schedule."""

    size: float
    """Parameters without embeddings."""
    loss: float
    """Nats per token at its end."""
    steps: float
    """Steps of this stage."""
    batch_tokens: float
    """Tokens per step."""
    flops: float
    """6 N tokens, without attention and logits."""


def cost(law: ScalingLaw, stages: Sequence[tuple[float, float]], batch: float | None) -> list[PlannedStage]:
    """The stages of (size, loss at its end), costed. `batch` in tokens; None: the critical batch of each stage's end."""
    planned = []
    before = math.inf
    for size, loss in stages:
        start = law.steps(size, before) if before < math.inf else 0.0
        steps = law.steps(size, loss) - start
        tokens = law.critical_batch(loss) if batch is None else batch
        planned.append(
            PlannedStage(size=size, loss=loss, steps=steps, batch_tokens=tokens, flops=6 * size * tokens * steps)
        )
        before = loss
    return planned


def plan_schedule(
    law: ScalingLaw,
    stages: int,
    *,
    target_loss: float | None = None,
    target_size: float | None = None,
    batch: Literal["fixed", "varying"] = "fixed",
) -> list[PlannedStage]:
    """The cheapest schedule of that many stages to a loss, all sizes free, by SLSQP over log sizes and log losses.

    With `target_size` the last stage has that size; without `target_loss` the loss is then the one for which that size
    is the cheapest single stage. A "fixed" batch is the critical one of the target loss.

    Raises:
        UsageError: neither target is given, or the loss cannot be reached with that size.
    """
    from scipy.optimize import minimize

    if target_loss is None:
        if target_size is None:
            raise UsageError("give a target: --target-loss (nats per token) or --target-size (parameters without embeddings)")
        target_loss = law.optimal_loss(target_size)
    largest = target_size or law.optimal_size(target_loss)
    if target_loss <= law.floor(largest):
        raise UsageError(
            f"a loss of {target_loss:g} cannot be reached with {largest:.3g} parameters: their floor is {law.floor(largest):.4g}"
        )
    tokens = law.critical_batch(target_loss) if batch == "fixed" else None
    free_sizes = stages - 1 if target_size else stages

    def unpack(x: np.ndarray) -> list[tuple[float, float]]:
        # growth factors and losses above the target, as logarithms of positive numbers
        steps_up = np.exp(x[:free_sizes])
        if target_size:
            sizes = target_size / np.cumprod(np.append(1.0, 1 + steps_up[::-1]))[::-1]
        else:
            sizes = math.exp(20.0) * steps_up[0] * np.cumprod(np.append(1.0, 1 + steps_up[1:]))
        losses = target_loss + np.append(np.cumsum(np.exp(x[free_sizes:])[::-1])[::-1], 0.0)
        return list(zip(sizes.tolist(), losses.tolist(), strict=True))

    def objective(x: np.ndarray) -> float:
        planned = cost(law, unpack(x), tokens)
        total = sum(stage.flops for stage in planned)
        if not math.isfinite(total) or any(stage.steps <= 0 for stage in planned):
            return 200.0
        return math.log(total)

    # start: sizes 4 apart below the best single one, each stage up to where growth pays
    sizes = [largest / 3 ** (stages - 1 - k) * (1 if target_size else 2) for k in range(stages)]
    losses = [max(law.switch_loss(size, 3), target_loss + 1e-3 * (stages - k)) for k, size in enumerate(sizes[:-1])]
    drops = [max(a - b, 1e-4) for a, b in pairwise([*losses, target_loss])]
    grow = [math.log(2.0)] * (stages - 1)
    x0 = np.array([*([] if target_size else [math.log(sizes[0]) - 20.0]), *grow, *np.log(drops)])
    best = None
    for shift in (0.0, -0.7, 0.7):
        found = minimize(objective, x0 + shift * (np.arange(len(x0)) >= free_sizes), method="SLSQP", options={"ftol": 1e-12, "maxiter": 2000})
        if best is None or found.fun < best.fun:
            best = found
    assert best is not None
    return cost(law, unpack(best.x), tokens)


def relative_cost(law: ScalingLaw, planned: Sequence[PlannedStage]) -> float:
    """FLOPs of a schedule over those of the best single stage to the same loss, at that loss's critical batch."""
    loss = planned[-1].loss
    size = law.optimal_size(loss)
    single = cost(law, [(size, loss)], law.critical_batch(loss))
    return sum(stage.flops for stage in planned) / single[0].flops


# --- measured curves ---


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Validation loss of one run from scratch."""

    name: str
    steps: np.ndarray
    """(n,), ascending, positive; gaps are allowed."""
    losses: np.ndarray
    """(n,), nats per token."""
    flops_per_step: float
    """Logits included; only ratios between curves matter."""
    flops_per_step_without_logits: float


def read_curve(path: Path, flops_per_step: float, flops_per_step_without_logits: float) -> Curve:
    """A curve from a CSV file with the columns step and val_loss.

    Raises:
        UsageError: the file has not these columns, a value is no number, or there are fewer than 5 points.
    """
    points = {}
    try:
        with path.open(newline="") as file:
            for number, row in enumerate(csv.DictReader(file), 2):
                if "step" not in row or "val_loss" not in row:
                    raise UsageError(f"{path}: needs the columns step and val_loss, has {', '.join(row)}")
                try:
                    points[float(row["step"])] = float(row["val_loss"])
                except (TypeError, ValueError):
                    raise UsageError(f"{path}:{number}: {row['step']!r}, {row['val_loss']!r} are not two numbers") from None
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None
    return make_curve(path.stem, points, flops_per_step, flops_per_step_without_logits)


def make_curve(
    name: str, points: dict[float, float], flops_per_step: float, flops_per_step_without_logits: float
) -> Curve:
    """A curve from step -> loss; step 0 is left out, for it has no logarithm.

    Raises:
        UsageError: fewer than 5 points, or a loss that is not positive and finite.
    """
    steps = sorted(step for step in points if step > 0)
    losses = [points[step] for step in steps]
    if len(steps) < FEWEST_POINTS:
        raise UsageError(
            f"{name}: {len(steps)} validation losses are too few to fit a slope to; at least {FEWEST_POINTS} are needed: "
            "train longer, or evaluate more often (eval.every)"
        )
    if not all(math.isfinite(loss) and loss > 0 for loss in losses):
        raise UsageError(f"{name}: a validation loss is not a positive finite number")
    return Curve(
        name=name,
        steps=np.array(steps),
        losses=np.array(losses),
        flops_per_step=flops_per_step,
        flops_per_step_without_logits=flops_per_step_without_logits,
    )


def window_for(curve: Curve, window: int = 31) -> int:
    """Evaluations that one regression takes: `window` (odd), or as many as leave a short curve three of them."""
    fits = len(curve.steps) - 2
    return min(window, fits - 1 + fits % 2)


def fitted(curve: Curve, window: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(steps, slopes, losses) by regression of log loss on log step over `window` (odd) evaluations around each step.

    Regression on steps, not on rows: the curves have gaps. At a constant batch the slope on log step is that on log C.
    """
    half = window // 2
    inner = slice(half, len(curve.steps) - half)
    # (points, window), x relative to the point in the middle
    x = np.lib.stride_tricks.sliding_window_view(np.log(curve.steps), window) - np.log(curve.steps[inner])[:, None]
    y = np.lib.stride_tricks.sliding_window_view(np.log(curve.losses), window)
    mean_x, mean_y = x.mean(axis=1), y.mean(axis=1)
    spread = x - mean_x[:, None]
    slopes = np.sum(spread * (y - mean_y[:, None]), axis=1) / np.sum(spread**2, axis=1)
    return curve.steps[inner], slopes, np.exp(mean_y - slopes * mean_x)


def fitted_switch(curve: Curve, threshold: float, window: int = 31) -> float | None:
    """The first step after the steepest one at which the fitted slope exceeds the threshold; None if it never does."""
    steps, slopes, _ = fitted(curve, window_for(curve, window))
    return _first_above(steps, slopes, threshold)


def released_switch(curve: Curve, threshold: float) -> float | None:
    """The released notebook's rule: losses averaged over 5 evaluations, slope between neighbours, the first step after the
    steepest one at which it exceeds the threshold. One noisy evaluation is enough to set it off."""
    means = np.convolve(curve.losses, np.full(5, 0.2), "valid")
    steps = curve.steps[2 : len(curve.steps) - 2]
    slopes = np.diff(np.log(means)) / np.diff(np.log(steps))
    return _first_above(steps[:-1], slopes, threshold)


def _first_above(steps: np.ndarray, slopes: np.ndarray, threshold: float) -> float | None:
    for i in range(int(np.argmin(slopes)), len(slopes)):
        if slopes[i] > threshold:
            return float(steps[i])
    return None


def released_target_step(small: Curve, target: Curve, step: float) -> float:
    """The target's evaluation whose loss is nearest to the small model's at `step`, as the released notebook pairs them."""
    loss = small.losses[np.argmin(np.abs(small.steps - step))]
    return float(target.steps[np.argmin(np.abs(target.losses - loss))])


def target_step(small: Curve, target: Curve, step: float, window: int = 31) -> float | None:
    """The step at which the target's fitted curve has the loss of the small model's at `step`; None if it never has."""
    steps, _, losses = fitted(small, window_for(small, window))
    loss = float(np.interp(math.log(step), np.log(steps), losses))
    steps, _, losses = fitted(target, window_for(target, window))
    falling = np.minimum.accumulate(losses)
    if not falling[-1] <= loss <= falling[0]:
        return None
    return float(np.exp(np.interp(-loss, -falling, np.log(steps))))


def equal_marginal_cost(small: Curve, target: Curve, window: int = 31) -> float | None:
    """The first step of the small run at which the target, at the same loss, lowers the loss at no more FLOPs (logits left
    out): the true optimum at a constant batch. None where the curves do not show it."""
    steps, slopes, losses = fitted(small, window_for(small, window))
    t_steps, t_slopes, t_losses = fitted(target, window_for(target, window))
    falling = np.minimum.accumulate(t_losses)
    # dL/dC = slope * L / C
    small_gain = -slopes * losses / (steps * small.flops_per_step_without_logits)
    start = int(np.argmin(slopes))
    for i in range(start, len(steps)):
        if not falling[-1] <= losses[i] <= falling[0]:
            continue
        at = float(np.interp(-losses[i], -falling, np.arange(len(falling))))
        slope = float(np.interp(at, np.arange(len(falling)), t_slopes))
        step = float(np.interp(at, np.arange(len(falling)), t_steps))
        if small_gain[i] <= -slope * losses[i] / (step * target.flops_per_step_without_logits):
            return float(steps[i])
    return None


@dataclass(frozen=True, kw_only=True)
class Projection:
    """What a grown run would save, projected from two runs from scratch. No grown run has been measured for it."""

    rule: str
    small_steps: float
    """S_pre: steps of the small model before growth."""
    target_steps: float
    """S_target: steps the target model needs for the same loss."""
    final_steps: float
    """Steps of the target from scratch at which both runs end."""
    saving: float
    """(C_target(L) - C_small(L)) / C_scratch, without logits."""
    saving_with_logits: float

    @property
    def ratio(self) -> float:
        """S_pre / S_target."""
        return self.small_steps / self.target_steps


def project(rule: str, small: Curve, target: Curve, small_steps: float, target_steps: float, final: float) -> Projection:
    """The saving of growing at `small_steps` into the target's `target_steps` and ending at its `final` step."""

    def saving(small_cost: float, target_cost: float) -> float:
        return (target_steps * target_cost - small_steps * small_cost) / (final * target_cost)

    return Projection(
        rule=rule,
        small_steps=small_steps,
        target_steps=target_steps,
        final_steps=final,
        saving=saving(small.flops_per_step_without_logits, target.flops_per_step_without_logits),
        saving_with_logits=saving(small.flops_per_step, target.flops_per_step),
    )


def released_projection(small: Curve, target: Curve, threshold: float) -> Projection | None:
    """The projection by the released notebook's rule."""
    step, final = released_switch(small, threshold), released_switch(target, PAPER_OPTIMALITY)
    if step is None or final is None:
        return None
    return project("released rule", small, target, step, released_target_step(small, target, step), final)


def fitted_projection(small: Curve, target: Curve, threshold: float, window: int = 31) -> Projection | None:
    """The projection with fitted slopes and losses. Ends where the target's slope passes the paper's optimality, or with its
    curve."""
    step = fitted_switch(small, threshold, window)
    return None if step is None else _fitted_at("fitted slope", small, target, step, window)


def marginal_projection(small: Curve, target: Curve, window: int = 31) -> Projection | None:
    """The projection that grows where the marginal costs are equal."""
    step = equal_marginal_cost(small, target, window)
    return None if step is None else _fitted_at("equal marginal cost", small, target, step, window)


def _fitted_at(rule: str, small: Curve, target: Curve, step: float, window: int) -> Projection | None:
    at = target_step(small, target, step, window)
    final = fitted_switch(target, PAPER_OPTIMALITY, window) or float(target.steps[-1])
    return None if at is None else project(rule, small, target, step, at, final)


def saving_interval(
    small: Curve, target: Curve, step: float, final: float, window: int = 31, draws: int = 400, block: int = 10
) -> tuple[float, float]:
    """95 % interval of the saving (without logits) of growing at `step`, by a block bootstrap of the curves' noise.

    Log losses are redrawn around their fitted values in blocks of `block` evaluations, because noise of neighbours is
    alike. It covers the noise of evaluation, not that of other seeds: one run of each size cannot tell that.
    """
    generator = np.random.Generator(np.random.Philox(0))
    savings = []
    for _ in range(draws):
        at = target_step(_redrawn(small, window, block, generator), _redrawn(target, window, block, generator), step, window)
        if at is not None:
            savings.append(project("", small, target, step, at, final).saving)
    if len(savings) < draws / 2:
        return math.nan, math.nan
    low, high = np.quantile(savings, [0.025, 0.975])
    return float(low), float(high)


def _redrawn(curve: Curve, window: int, block: int, generator: np.random.Generator) -> Curve:
    width = window_for(curve, window)
    half = width // 2
    _, _, losses = fitted(curve, width)
    residuals = np.log(curve.losses[half : len(curve.losses) - half]) - np.log(losses)
    count = -(-len(residuals) // block)
    starts = generator.integers(0, max(1, len(residuals) - block + 1), count)
    drawn = np.concatenate([residuals[s : s + block] for s in starts])[: len(residuals)]
    drawn = np.pad(drawn, (0, len(residuals) - len(drawn)), mode="wrap")
    values = curve.losses.copy()
    values[half : len(values) - half] = losses * np.exp(drawn)
    return Curve(
        name=curve.name,
        steps=curve.steps,
        losses=values,
        flops_per_step=curve.flops_per_step,
        flops_per_step_without_logits=curve.flops_per_step_without_logits,
    )
