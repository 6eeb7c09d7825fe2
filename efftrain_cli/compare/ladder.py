"""Compute the compute-equivalent gain of a method from runs over a ladder of budgets.

Each point is a finished run whose learning rate has decayed over its own budget. A loss in the
middle of a longer run would not do: its learning rate is still high, and a method that is ahead
there may be behind at the end. The gain at a rung is the cost (FLOPs or tokens) at which the
baseline reaches the method's loss, over the method's cost. 1.2 means that the baseline needs 20 %
more.

Between two rungs of the baseline the logarithm of the cost is interpolated linearly in the loss.
Beyond the ladder's ends nothing is extrapolated: there the gain is a bound. If noise makes the
baseline's loss rise with its budget, isotonic regression first makes it monotone, by seed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from scipy.optimize import isotonic_regression

from efftrain_cli.compare import inference
from efftrain_cli.compare.inference import Estimate
from efftrain_cli.foundation.why import Why
from efftrain_cli.recipe.schedules import has_end


@dataclass(frozen=True)
class Rung:
    """A finished run."""

    cost: float
    """Tokens, FLOPs or seconds that it took."""
    loss: float
    """Its final validation loss, nats per token."""


Ladder = Mapping[int, Mapping[int, Rung]]
"""Seed -> train.tokens -> finished run of that budget."""


@dataclass(frozen=True)
class Gain:
    """The compute-equivalent gain at one rung of the method's ladder."""

    budget: int
    """train.tokens of the rung."""
    loss: float
    """Mean final loss of the method at this rung."""
    estimate: Estimate
    """Geometric mean over the seeds of the cost ratio, baseline over method, with a t interval.

    NaN, with the reason, if the loss is beyond the ends of the baseline's ladder in a seed.
    """


def gains(baseline: Ladder, method: Ladder) -> list[Gain]:
    """Return the gain at every budget of the method.

    A seed counts if the method finished with this budget and the baseline has two rungs or more.
    """
    shared = sorted(baseline.keys() & method.keys())
    seeds = [seed for seed in shared if len(baseline[seed]) >= 2]
    budgets = set().union(*(method[seed] for seed in seeds))
    points = []
    for budget in sorted(budgets):
        rungs = {seed: method[seed][budget] for seed in seeds if budget in method[seed]}
        ladders = [baseline[seed] for seed in rungs]
        points.append(_gain(budget, ladders, list(rungs.values())))
    return points


def _gain(budget: int, ladders: Sequence[Mapping[int, Rung]], rungs: Sequence[Rung]) -> Gain:
    """Return the gain at one budget.

    Args:
        ladders: ladders of the baseline, by seed.
        rungs: rungs of the method, in the same order.
    """
    n = len(rungs)
    log_ratios = []
    for ladder, rung in zip(ladders, rungs, strict=True):
        log_ratios.append(log_cost_of(ladder, rung.loss) - math.log(rung.cost))
    loss = sum(rung.loss for rung in rungs) / n
    above = log_ratios.count(math.inf)
    below = log_ratios.count(-math.inf)
    reasons = []
    if above:
        reasons.append(f"the baseline's largest budget misses this loss in {above} of {n} seeds")
    if below:
        reasons.append(f"the baseline's smallest budget reaches it in {below} of {n} seeds")
    if reasons:
        why = Why("beyond", "; ".join(reasons))
        return Gain(budget, loss, Estimate(math.nan, n=n, why=why, log=True))
    estimate = inference.paired_t(log_ratios)
    return Gain(budget, loss, inference.exponentiated(estimate))


def log_cost_of(rungs: Mapping[int, Rung], loss: float) -> float:
    """Return the logarithm of the cost at which a ladder reaches `loss`, by interpolation.

    inf if the loss is below the ladder's lowest, -inf if it is above its highest.
    """
    ordered = [rungs[budget] for budget in sorted(rungs)]
    losses = falling([rung.loss for rung in ordered])
    logs = [math.log(rung.cost) for rung in ordered]
    if loss < losses[-1]:
        return math.inf
    if loss > losses[0]:
        return -math.inf
    flat = [log for log, value in zip(logs, losses, strict=True) if value == loss]
    if flat:
        # The regression made several rungs equal: take their middle.
        return sum(flat) / len(flat)
    i = next(i for i, value in enumerate(losses) if value < loss)
    share = (losses[i - 1] - loss) / (losses[i - 1] - losses[i])
    return logs[i - 1] + share * (logs[i] - logs[i - 1])


def not_decayed(
    schedule: str, decay_tokens: int | None, decay_steps: int | None, tokens: int
) -> str | None:
    """Return why a recipe's learning rate does not decay over its own budget; None if it does.

    A decay by steps cannot be checked without the batch sizes, and passes.
    """
    if not has_end(schedule):
        return f'optim.schedule = "{schedule}" has no end'
    if decay_steps is None and decay_tokens is not None and decay_tokens != tokens:
        return (
            f"optim.decay_tokens = {decay_tokens:,} is another budget"
            f" than train.tokens = {tokens:,}"
        )
    return None


def falling(losses: Sequence[float]) -> list[float]:
    """Return the nearest sequence that never rises, by isotonic regression."""
    return isotonic_regression(losses, increasing=False).x.tolist()
