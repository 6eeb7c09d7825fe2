"""Plan the cheapest schedule of growing sizes from a scaling law.

The law is Kaplan et al. 2020 (arXiv 2001.08361), as the authors of staged training use it (Shen et
al. 2022, arXiv 2203.06211, released notebook and `compute_optimal_schedule.py`): with Kaplan's
constants, or fitted to runs of one's own. Sizes N are parameters without embeddings, 12 n_layer
n_embd^2; steps S are optimizer steps, at the critical batch with Kaplan's constants, at the runs'
batch where the law is fitted.

A stage should end where the next one's model lowers the loss as cheaply: where the marginal costs
dC/dL are equal.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np

from efftrain_cli.foundation.errors import UsageError
from efftrain_cli.grow.planner import Curve


@dataclass(frozen=True, kw_only=True)
class ScalingLaw:
    """L(N, S) = (n_c / N)^alpha_n + (2 s_c / S)^alpha_s, nats per token, at the critical batch
    size."""

    n_c: float = 8.8e13
    alpha_n: float = 0.076
    s_c: float = 2.1e3
    alpha_s: float = 0.76
    b_star: float = 2.1e8
    """Critical batch of a loss of 1, tokens."""
    alpha_b: float = 0.21

    def floor(self, size: float) -> float:
        """Return the loss of `size` parameters after infinitely many steps."""
        return float((self.n_c / size) ** self.alpha_n)

    def loss(self, size: float, steps: float) -> float:
        """Return the loss of `size` parameters after `steps` steps."""
        return float(self.floor(size) + (2 * self.s_c / steps) ** self.alpha_s)

    def steps(self, size: float, loss: float) -> float:
        """Return the steps that `size` parameters need for `loss`; infinite up to their floor."""
        above = loss - self.floor(size)
        if above <= 0:
            return math.inf
        return float(2 * self.s_c / above ** (1 / self.alpha_s))

    def critical_batch(self, loss: float) -> float:
        """Return the tokens per step at which halving the steps begins to cost tokens."""
        return float(self.b_star / loss ** (1 / self.alpha_b))

    def optimal_slope(self) -> float:
        """Return d log L / d log C where a model of any size is the cheapest for its loss (C = 6 N
        B_crit(L) S)."""
        return -1 / (1 / self.alpha_n + 1 / self.alpha_s + 1 / self.alpha_b)

    def optimal_loss(self, size: float) -> float:
        """Return the loss for which `size` is the cheapest size: (1 + alpha_n / alpha_s) times its
        floor."""
        return (1 + self.alpha_n / self.alpha_s) * self.floor(size)

    def optimal_size(self, loss: float) -> float:
        """Return the size that reaches `loss` cheapest in one stage."""
        floor = loss / (1 + self.alpha_n / self.alpha_s)
        return float(self.n_c / floor ** (1 / self.alpha_n))

    def switch_loss(self, size: float, factor: float) -> float:
        """Return the loss at which growing `size` by `factor` pays: where both sizes' marginal
        costs are equal."""
        q = factor ** (self.alpha_s / (1 + self.alpha_s))
        return self.floor(size) * (q - factor**-self.alpha_n) / (q - 1)

    def same_loss_steps(self, factor: float) -> float:
        """Return S_small / S_target at that loss, which does not depend on the size."""
        return float(factor ** (1 / (1 + self.alpha_s)))


KAPLAN = ScalingLaw()

FITTED_FROM = 0.2
"""Share of each curve that a fit leaves out at its beginning: the law does not describe a learning
rate's warmup."""


@dataclass(frozen=True, kw_only=True)
class FittedLaw:
    """A law with its misfit to the curves that it was fitted to."""

    law: ScalingLaw
    rms: float
    """Root mean square of the residuals of log loss: 0.007 is 0.7 % of the loss."""
    sizes: tuple[float, ...]
    """Sizes of the curves' models, parameters without embeddings, ascending."""
    last_step: float
    """Last step of the longest curve."""


def fit_law(curves: Sequence[tuple[float, Curve]], batch_tokens: float) -> FittedLaw:
    """Fit a law to (size, curve) pairs of runs from scratch that all trained `batch_tokens` tokens
    a step.

    Least squares of log loss over the four constants; every curve counts alike, however many
    evaluations it has. At one batch size steps and tokens are one axis, so B_crit's constants are
    neither needed nor known. Curves of one size alone are refused.
    """
    from scipy.optimize import least_squares

    sizes = sorted({size for size, _ in curves})
    if len(sizes) < 2:
        raise UsageError(
            "a scaling law is fitted to curves of two sizes or more\n"
            "  give runs of another size too"
        )

    columns = []
    for size, curve in curves:
        late = curve.steps >= FITTED_FROM * curve.steps[-1]
        ones = np.ones(int(late.sum()))
        log_size = ones * math.log(size)
        log_steps = np.log(curve.steps[late])
        log_losses = np.log(curve.losses[late])
        # Every curve weighs the same, however many evaluations it has.
        weight = ones / math.sqrt(len(ones))
        columns.append((log_size, log_steps, log_losses, weight))
    log_n, log_s, log_loss, weights = map(np.concatenate, zip(*columns, strict=True))

    def residuals(constants: np.ndarray) -> np.ndarray:
        log_n_c, alpha_n, log_s_c, alpha_s = constants
        floor = np.exp(alpha_n * (log_n_c - log_n))
        above = np.exp(alpha_s * (log_s_c - log_s))
        return np.asarray(np.log(floor + above) - log_loss)

    # log n_c, alpha_n, log 2 s_c, alpha_s
    start = [math.log(KAPLAN.n_c), KAPLAN.alpha_n, math.log(2 * KAPLAN.s_c), KAPLAN.alpha_s]
    lowest = [0.0, 1e-3, -10.0, 1e-2]
    highest = [500.0, 2.0, 100.0, 5.0]
    fit = least_squares(
        lambda x: weights * residuals(x),
        start,
        bounds=(lowest, highest),
        x_scale=[1.0, 0.01, 1.0, 0.1],
    )
    log_n_c, alpha_n, log_s_c, alpha_s = map(float, fit.x)
    law = ScalingLaw(
        n_c=math.exp(log_n_c),
        alpha_n=alpha_n,
        s_c=math.exp(log_s_c) / 2,
        alpha_s=alpha_s,
        b_star=batch_tokens,
        alpha_b=math.inf,  # one batch size whatever the loss
    )
    mean_square = float(np.mean(residuals(fit.x) ** 2))
    return FittedLaw(
        law=law,
        rms=math.sqrt(mean_square),
        sizes=tuple(sizes),
        last_step=max(float(curve.steps[-1]) for _, curve in curves),
    )


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


def cost(
    law: ScalingLaw,
    stages: Sequence[tuple[float, float]],
    batch: float | None,
) -> list[PlannedStage]:
    """Cost stages of (size, loss at its end).

    Args:
        batch: tokens; None: the critical batch of each stage's end.
    """
    planned = []
    before = math.inf
    for size, loss in stages:
        steps = law.steps(size, loss) - law.steps(size, before)
        tokens = batch
        if tokens is None:
            tokens = law.critical_batch(loss)
        stage = PlannedStage(
            size=size,
            loss=loss,
            steps=steps,
            batch_tokens=tokens,
            flops=6 * size * tokens * steps,
        )
        planned.append(stage)
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
    """Find the cheapest schedule of that many stages to a loss, all sizes free, by SLSQP over log
    sizes and losses.

    With `target_size` the last stage has that size; without `target_loss` the loss is then the one
    for which that size is the cheapest single stage. A "fixed" batch is the critical one of the
    target loss. A loss that cannot be reached with that size is refused, and no target at all.
    """
    from scipy.optimize import minimize

    if target_loss is None:
        if target_size is None:
            raise UsageError(
                "no target\n  give --target-loss (nats per token)"
                " or --target-size (parameters without embeddings)"
            )
        target_loss = law.optimal_loss(target_size)
    largest = target_size or law.optimal_size(target_loss)
    if target_loss <= law.floor(largest):
        raise UsageError(
            f"a loss of {target_loss:g} cannot be reached with {largest:.3g} parameters:"
            f" their floor is {law.floor(largest):.4g}\n"
            "  raise --target-loss or --target-size"
        )
    tokens = None
    if batch == "fixed":
        tokens = law.critical_batch(target_loss)
    if stages == 1:
        return cost(law, [(largest, target_loss)], tokens)
    free_sizes = stages
    if target_size:
        free_sizes -= 1

    # The point x: logarithms of the first size / e^20, if it is free, of each growth factor - 1,
    # and of each drop of the loss from a stage's end to the next one's. So every x is a schedule
    # whose sizes grow and whose losses fall.
    def unpack(x: np.ndarray) -> list[tuple[float, float]]:
        positive = np.exp(x)
        if target_size:
            growth = 1 + positive[:free_sizes]
            below_target = np.cumprod(np.append(1.0, growth[::-1]))[::-1]
            sizes = target_size / below_target
        else:
            growth = 1 + positive[1:free_sizes]
            sizes = math.exp(20.0) * positive[0] * np.cumprod(np.append(1.0, growth))
        drops = positive[free_sizes:]
        above_target = np.cumsum(drops[::-1])[::-1]
        losses = target_loss + np.append(above_target, 0.0)
        return list(zip(sizes.tolist(), losses.tolist(), strict=True))

    def objective(x: np.ndarray) -> float:
        planned = cost(law, unpack(x), tokens)
        total = sum(stage.flops for stage in planned)
        if not math.isfinite(total) or any(stage.steps <= 0 for stage in planned):
            return 200.0
        return math.log(total)

    # Start with sizes a factor of 3 apart, the last one free at twice the best single one, each
    # stage up to where growth pays.
    last = largest
    if not target_size:
        last *= 2
    sizes = [last / 3**later for later in range(stages - 1, -1, -1)]
    losses = []
    for stage, size in enumerate(sizes[:-1]):
        lowest = target_loss + 1e-3 * (stages - stage)
        losses.append(max(law.switch_loss(size, 3), lowest))
    x = [math.log(2.0)] * (stages - 1)
    if not target_size:
        x.insert(0, math.log(sizes[0]) - 20.0)
    for before, after in pairwise([*losses, target_loss]):
        x.append(math.log(max(before - after, 1e-4)))

    optima = []
    for shift in (0.0, -0.7, 0.7):
        start = np.array(x)
        start[free_sizes:] += shift
        options = {"ftol": 1e-12, "maxiter": 2000}
        optima.append(minimize(objective, start, method="SLSQP", options=options))
    best = min(optima, key=lambda optimum: optimum.fun)
    return cost(law, unpack(best.x), tokens)


def relative_cost(law: ScalingLaw, planned: Sequence[PlannedStage]) -> float:
    """Return the FLOPs of a schedule over those of the best single stage to its loss, at the
    critical batch."""
    loss = planned[-1].loss
    size = law.optimal_size(loss)
    single = cost(law, [(size, loss)], law.critical_batch(loss))
    return sum(stage.flops for stage in planned) / single[0].flops
