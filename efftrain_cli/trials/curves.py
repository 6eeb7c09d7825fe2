"""Collect the runs of a sweep or of a study's tuning: curves over learning rates, ladders over
budgets."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from efftrain_cli.compare.groups import rank
from efftrain_cli.compare.ladder import Gain, Ladder, Rung, gains, not_decayed
from efftrain_cli.compare.reading import RunNumbers
from efftrain_cli.compare.sensitivity import Curve
from efftrain_cli.trials.trial import ENDED, Trial, read_trial, recipe_of

Named = tuple[str, Trial]
"""(label, trial): trials of one recipe have one label, whatever their learning rate and budget."""


def name_trials(trials: Sequence[Trial], keys: Sequence[str]) -> list[Named]:
    """Name each trial by its recipe and the settings that not all trials have, except those of
    `keys`, which differ along its curve."""
    from efftrain_cli.recipe.draft import recipe_name

    shared = set(trials[0].settings).intersection(*(trial.settings for trial in trials))
    named = []
    for trial in trials:
        words = [recipe_name(trial.recipe)]
        for setting in trial.settings:
            if setting not in shared and setting.partition("=")[0] not in keys:
                words.append(setting)
        named.append((" ".join(words), trial))
    return named


def _final_loss(run: RunNumbers | None) -> float | None:
    return None if run is None else run.final_loss


def sensitivity_curves(trials: Sequence[Named]) -> list[Curve]:
    """Collect final losses over learning rates: a curve for each label with two rates or more."""
    by_label: dict[str, dict[float, dict[int, RunNumbers | None]]] = {}
    for label, trial in trials:
        rate = recipe_of(trial).optim.lr
        by_rate = by_label.setdefault(label, {})
        by_seed = by_rate.setdefault(rate, {})
        by_seed[trial.seed] = read_trial(trial)

    curves = [curve_of(label, by_rate) for label, by_rate in by_label.items()]
    return [curve for curve in curves if len(curve.rates) > 1]


def curve_of(label: str, by_rate: Mapping[float, Mapping[int, RunNumbers | None]]) -> Curve:
    """Collect final losses by learning rate and seed.

    A rate that lacks a seed is left out: a block of a study may have a grid of its own.

    Args:
        by_rate: learning rate -> seed -> run; None for a run that does not exist yet.
    """
    seeds = sorted(set[int]().union(*by_rate.values()))
    rates = []
    losses = []
    initial = dict.fromkeys(seeds, math.inf)
    pending = 0
    for rate, runs in sorted(by_rate.items()):
        if len(runs) < len(seeds):
            continue
        rates.append(rate)
        losses.append(tuple(_final_loss(runs[seed]) for seed in seeds))
        for seed, run in runs.items():
            if run is None or run.status not in ENDED:
                pending += 1
            if run is not None and math.isinf(initial[seed]):
                first = run.evaluated["val_loss"][:1].tolist()
                initial[seed] = next(iter(first), math.inf)
    return Curve(
        label,
        tuple(rates),
        losses=tuple(losses),
        initial=tuple(initial.values()),
        seeds=tuple(seeds),
        pending=pending,
    )


def optimum(curve: Curve) -> float | None:
    """Return the learning rate at the lowest point of a parabola through the best three.

    The parabola goes over log rates, through the best learning rate and its two neighbours.

    None if the best rate is at the edge of the grid, a neighbour lacks a seed's loss, or the losses
    are equal.
    """
    best = curve.best
    means = curve.means
    if best is None or not 0 < best < len(means) - 1:
        return None
    below, lowest, above = means[best - 1 : best + 2]
    if below is None or lowest is None or above is None:
        return None

    x0, x1, x2 = (math.log(rate) for rate in curve.rates[best - 1 : best + 2])
    # Newton's form of the parabola: slopes of the two chords, and their divided difference.
    left = (lowest - below) / (x1 - x0)
    right = (above - lowest) / (x2 - x1)
    curvature = (right - left) / (x2 - x0)
    if curvature <= 0:
        return None
    optimal = (x0 + x1 - left / curvature) / 2
    return math.exp(optimal)


@dataclass(frozen=True)
class LadderOf:
    """One recipe's ladder of budgets, each at the best learning rate that was tried for it."""

    label: str
    by_cost: Mapping[str, Ladder]
    """"FLOPs" and "tokens" -> the ladder."""
    problem: str | None
    """Why these runs are not a ladder; None if they are."""


def ladders(trials: Sequence[Named]) -> list[LadderOf]:
    """Collect a ladder for each label with two budgets or more.

    A rung is the budget's best learning rate by BEST_RULE; it is left out unless every seed
    finished with that rate.
    """
    by_label: dict[str, dict[int, dict[float, list[Trial]]]] = {}
    for label, trial in trials:
        recipe = recipe_of(trial)
        by_budget = by_label.setdefault(label, {})
        by_rate = by_budget.setdefault(recipe.train.tokens, {})
        by_rate.setdefault(recipe.optim.lr, []).append(trial)

    several = {label: budgets for label, budgets in by_label.items() if len(budgets) > 1}
    return [_ladder_of(label, by_budget) for label, by_budget in several.items()]


def _ladder_of(label: str, by_budget: Mapping[int, Mapping[float, Sequence[Trial]]]) -> LadderOf:
    """Collect one recipe's ladder from its runs by budget and learning rate."""
    flops: dict[int, dict[int, Rung]] = {}
    tokens: dict[int, dict[int, Rung]] = {}
    problem = None
    for budget, by_rate in sorted(by_budget.items()):
        first, *_ = by_rate.values()
        optim = recipe_of(first[0]).optim
        problem = problem or not_decayed(
            optim.schedule, optim.decay_tokens, optim.decay_steps, budget
        )
        settings = [[read_trial(trial) for trial in trials] for trials in by_rate.values()]
        best = min(settings, key=lambda runs: rank([_final_loss(run) for run in runs]))
        if None in map(_final_loss, best):
            continue
        for run in best:
            assert run is not None and run.final_loss is not None
            rungs = tokens.setdefault(run.seed, {})
            rungs[budget] = Rung(run.tokens, run.final_loss)
            if not run.flops_lack_optimizer:
                rungs = flops.setdefault(run.seed, {})
                rungs[budget] = Rung(run.flops, run.final_loss)
    return LadderOf(label, {"FLOPs": flops, "tokens": tokens}, problem)


def gains_of(baseline: LadderOf, method: LadderOf) -> dict[str, list[Gain]]:
    """Return "FLOPs" and "tokens" -> the gain at every rung."""
    by_cost = {}
    for unit, ladder in method.by_cost.items():
        by_cost[unit] = gains(baseline.by_cost[unit], ladder)
    return by_cost
