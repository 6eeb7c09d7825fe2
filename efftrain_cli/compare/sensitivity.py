"""How much a recipe's final loss depends on its learning rate, from runs over a grid of learning
rates.

Learning-rate sensitivity (Wortsman et al. 2023, arXiv 2309.14322, section 2.2) is the mean over a
logarithmic grid of min(loss, loss before training) less the best loss: 0 for a recipe that does not
care, and the more it fails, the larger. A run that diverged counts with the loss before training.
It is computed per seed, so that seeds give it a spread.

The lowest of a seed's losses is too low by its noise, so a noisier recipe looks more sensitive. A
verdict takes every seed's loss at the rate whose mean over the seeds is the lowest, and as many
rates around it for every recipe.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat

import numpy as np

from efftrain_cli.compare.measures import Question
from efftrain_cli.compare.reading import RunNumbers

BESIDE = 2
"""Learning rates on either side of the best one without which nothing is judged."""


@dataclass(frozen=True)
class Curve:
    """One recipe's final losses over learning rates and seeds."""

    label: str
    rates: tuple[float, ...]
    """Learning rates, increasing."""
    losses: tuple[tuple[float | None, ...], ...]
    """Final validation loss by rate and seed, nats per token; None if the run did not finish."""
    initial: tuple[float, ...]
    """Validation loss before step 1, by seed."""
    seeds: tuple[int, ...]
    pending: int = 0
    """Number of runs that have neither finished nor diverged."""

    @property
    def means(self) -> tuple[float | None, ...]:
        """Return the mean loss by rate; None if a seed has no loss."""
        return tuple(None if None in row else sum(row) / len(row) for row in self.losses)  # type: ignore[arg-type]

    @property
    def best(self) -> int | None:
        """Return the index of the rate with the lowest mean loss; None if every rate lacks one."""
        means = [(mean, i) for i, mean in enumerate(self.means) if mean is not None]
        _, best = min(means, default=(math.nan, None))
        return best

    @property
    def sensitivities(self) -> tuple[float, ...]:
        """Return the sensitivity by seed, nats per token; empty while runs are pending."""
        if self.pending:
            return ()
        by_seed = zip(*self.losses, strict=True)
        return tuple(map(sensitivity, repeat(self.rates), by_seed, self.initial))


def sensitivity(
    rates: Sequence[float],
    losses: Sequence[float | None],
    initial: float,
    best: int | None = None,
) -> float:
    """Return the learning-rate sensitivity, nats per token.

    Mean of min(loss, initial) over log learning rate, minus the loss at the best rate. A rate has
    the weight of the log rates that are nearest to it, so an even grid gives the plain mean.

    Args:
        rates: learning rates, rising, (n,), n >= 2.
        losses: final validation losses, (n,); None, NaN and inf count as `initial`.
        initial: validation loss before step 1.
        best: index of the best rate; None: the one with the lowest loss.

    Raises:
        ValueError: fewer than two rates, or rates that do not rise.
    """
    if len(rates) < 2 or min(np.diff(rates)) <= 0:
        raise ValueError("sensitivity needs two or more learning rates, in rising order")
    # None becomes NaN, for which fmin takes the initial loss.
    capped = np.fmin(np.array(losses, float), initial)
    gaps = np.diff([math.log(rate) for rate in rates])
    # An end has as much weight outwards as inwards.
    widths = (np.append(gaps[0], gaps) + np.append(gaps, gaps[-1])) / 2
    mean = sum(widths * capped) / sum(widths)
    lowest = capped.min() if best is None else capped[best]
    return float(mean - lowest)


def read_sensitivity(*runs: RunNumbers) -> float:
    """Return the sensitivity of one seed from its runs, of which the middle one has the best rate.

    A diverged run counts with its loss before training, so every seed has a number.
    """
    rates = [run.recipe["optim.lr"] for run in runs]
    losses = [run.final_loss for run in runs]
    initial = float(runs[0].evaluated["val_loss"][0])
    return sensitivity(rates, losses, initial, len(runs) // 2)


LR_SENSITIVITY = Question(
    "lr_sensitivity",
    "learning-rate sensitivity",
    "nats/token",
    "",
    read_sensitivity,
    tested="difference",
    over_rates=True,
)


def edge_warning(curve: Curve) -> str | None:
    """Return a warning that the best rate is at an edge of the grid; None if it is inside."""
    if curve.best is None:
        return (
            f"{curve.label}: there is no learning rate at which every seed finished: try lower ones"
        )
    if len(curve.rates) < 2 or 0 < curve.best < len(curve.rates) - 1:
        return None
    return f"{curve.label}: the best learning rate, {at_edge(curve.rates[curve.best], curve.rates)}"


def why_not_judged(curves: Sequence[Curve]) -> str:
    """Return why sensitivities are not judged, with the learning rates to add; "" if they are.

    The mean of a curve that ends near its optimum depends on the grid more than on the recipe.
    """
    for curve in curves:
        if curve.best is None:
            return edge_warning(curve) or ""
    rates = curves[0].rates
    last = len(curves[0].rates) - 1
    best = [curve.best or 0 for curve in curves]
    below = BESIDE - min(best)
    above = BESIDE - last + max(best)
    added = [rates[0] * (rates[0] / rates[1]) ** i for i in range(below, 0, -1)]
    added += [rates[-1] * (rates[-1] / rates[-2]) ** i for i in range(1, above + 1)]
    if not added:
        return ""
    places = ", ".join(f"{curve.label} {rates[i]:g}" for curve, i in zip(curves, best, strict=True))
    more = ", ".join(f"{rate:.3g}" for rate in added)
    return f"the best rate needs {BESIDE} rates on either side ({places}); rates to add: {more}"


def windows(curves: Sequence[Curve]) -> list[slice]:
    """Return for each curve the rates around its best one, equally many on either side.

    All curves have as many. Over the whole grid a recipe would seem the more sensitive, the farther
    its best rate is from the middle.
    """
    best = [curve.best or 0 for curve in curves]
    reach = min(min(i, len(curve.rates) - 1 - i) for curve, i in zip(curves, best, strict=True))
    return [slice(i - reach, i + reach + 1) for i in best]


def at_edge(value: float, tried: Sequence[float]) -> str:
    """Return a warning about a best value at an edge of the values tried; "" if it is inside."""
    if min(tried) < value < max(tried):
        return ""
    side = "highest"
    way = "higher"
    if value == min(tried):
        side = "lowest"
        way = "lower"
    return f"{value:g}, is the {side} tried; a {way} one may be better: widen the grid"


def band(curve: Curve, i: int) -> tuple[float, float] | None:
    """Return the lowest and highest loss of the seeds at rate `i`; None if no run finished."""
    losses = [loss for loss in curve.losses[i] if loss is not None]
    if not losses:
        return None
    return min(losses), max(losses)


def as_json(curves: Sequence[Curve]) -> list[Mapping[str, object]]:
    """Return the curves as plain values; None for a missing number."""
    return [
        {
            "recipe": curve.label,
            "rates": list(curve.rates),
            "seeds": list(curve.seeds),
            "losses": [list(row) for row in curve.losses],
            "initial": list(curve.initial),
            "best_rate": None if curve.best is None else curve.rates[curve.best],
            "sensitivity": list(curve.sensitivities),
            "pending": curve.pending,
        }
        for curve in curves
    ]
