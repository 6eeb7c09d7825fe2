"""Speed-up at matched loss, at all losses: from runs over a ladder of budgets, each decayed to its
own end.

A loss read in the middle of a schedule is not what a run of that length would reach: its learning
rate has not come down yet, and a method that is ahead there may be behind at the end. So every
point here is a finished run of its own budget. The compute-equivalent gain at a rung is the cost
(FLOPs or tokens) at which the baseline reaches the loss that the method has there, over the
method's cost: 1.2 means that the baseline needs 20 % more.

Between two rungs of the baseline the logarithm of the cost is taken to be linear in the loss.
Nothing is read beyond the ladder's ends: there the gain is a bound. A baseline whose loss rises
with its budget, which noise can do, is first made monotone by pooling neighbours (isotonic
regression), seed by seed.
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
"""seed -> train.tokens -> the finished run of that budget."""


@dataclass(frozen=True)
class Gain:
    """The compute-equivalent gain at one rung of the method's ladder."""

    budget: int
    """train.tokens of the rung."""
    loss: float
    """The method's mean final loss there."""
    estimate: Estimate
    """Geometric mean over seeds of the baseline's cost of that loss over the method's, with its t
    interval. NaN, with the reason, if the baseline's ladder ends above the loss or begins below it
    in a seed."""


def gains(baseline: Ladder, method: Ladder) -> list[Gain]:
    """Return the gain at every budget that the method was trained with, over the seeds of both.

    A seed counts at a rung where the method finished there and the baseline has two rungs or more.
    """
    seeds = [seed for seed in sorted(baseline.keys() & method.keys()) if len(baseline[seed]) >= 2]
    budgets = set().union(*(method[seed] for seed in seeds))
    points = []
    for budget in sorted(budgets):
        rungs = {seed: method[seed][budget] for seed in seeds if budget in method[seed]}
        ladders = [baseline[seed] for seed in rungs]
        points.append(_gain(budget, ladders, list(rungs.values())))
    return points


def _gain(budget: int, ladders: Sequence[Mapping[int, Rung]], rungs: Sequence[Rung]) -> Gain:
    """Return the gain at one budget from the baseline's ladders and the method's rungs, by seed."""
    n = len(rungs)
    logs = []
    for ladder, rung in zip(ladders, rungs, strict=True):
        logs.append(log_cost_of(ladder, rung.loss) - math.log(rung.cost))
    loss = sum(rung.loss for rung in rungs) / n
    above = logs.count(math.inf)
    below = logs.count(-math.inf)
    reasons = []
    if above:
        reasons.append(f"the baseline's largest budget misses this loss in {above} of {n} seeds")
    if below:
        reasons.append(f"the baseline's smallest budget reaches it in {below} of {n} seeds")
    if reasons:
        why = Why("beyond", "; ".join(reasons))
        return Gain(budget, loss, Estimate(math.nan, n=n, why=why, log=True))
    return Gain(budget, loss, inference.exponentiated(inference.paired_t(logs)))


def log_cost_of(rungs: Mapping[int, Rung], loss: float) -> float:
    """Return the log of the cost at which a ladder reaches `loss`; inf or -inf beyond its ends."""
    steps = [rungs[budget] for budget in sorted(rungs)]
    losses = falling([rung.loss for rung in steps])
    logs = [math.log(rung.cost) for rung in steps]
    if loss < losses[-1]:
        return math.inf
    if loss > losses[0]:
        return -math.inf
    flat = [log for log, value in zip(logs, losses, strict=True) if value == loss]
    if flat:
        # On a stretch that pooling has levelled, its middle.
        return sum(flat) / len(flat)
    i = next(i for i, value in enumerate(losses) if value < loss)
    share = (losses[i - 1] - loss) / (losses[i - 1] - losses[i])
    return logs[i - 1] + share * (logs[i] - logs[i - 1])


def not_decayed(
    schedule: str, decay_tokens: int | None, decay_steps: int | None, tokens: int
) -> str | None:
    """Say why runs of a recipe are not rungs, which decay to the end of their own budget; None if
    they are.

    Decaying by steps cannot be checked here and is taken at its word.
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
    """Return the nearest sequence that never rises: neighbours that do become their mean (pool
    adjacent violators)."""
    return isotonic_regression(losses, increasing=False).x.tolist()
