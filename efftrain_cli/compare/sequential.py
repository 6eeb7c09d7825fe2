"""Correct t tests for several planned looks at a study (group-sequential tests).

To train a few seeds, test, and train more if nothing shows is to test several times. With a nominal
level of 5 % at each of 20 looks, a quarter of all studies find a difference between equal recipes.
Here a study plans its number of seeds and of looks. At each look the t test has a stricter level,
such that the probability of passing at any look is alpha if nothing differs.

The boundary has the shape of Wang and Tsiatis (1987, Biometrics 43): at `n` of `N` seeds the t
test's p-value, expressed as a normal deviate, must exceed C (N / n)^(1/2 - SHAPE). Textbooks derive
C from known variances, which is wrong for three to twenty seeds. Here it comes from simulated t
tests at exactly the planned numbers of seeds. Their distribution does not depend on mean and
variance, so the level is exact for normal differences. The error of the simulation is added.

An anytime-valid t test with a Gaussian mixture over effects was compared: it decided no more
studies at any effect. docs/studies.md has the table of both, made by
`benchmarks/simulations/sequential_looks.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

import numpy as np
from scipy import special

SHAPE = 0.25
"""Shape of the boundary. 0 is O'Brien and Fleming's, strict at early looks; 0.5 is Pocock's, equal
at all looks."""
FIRST_LOOK = 3
"""Fewest seeds at the first look: with two no study could pass the boundary of a t test."""
_DRAWS = 200_000
_CHUNK = 20_000


def schedule(seeds: int, looks: int) -> tuple[int, ...]:
    """Return the number of seeds at each look: evenly spread, and all `seeds` at the last.

    Raises:
        ValueError: there are too few seeds for so many looks.
    """
    most = max(1, seeds - FIRST_LOOK + 1)
    if looks > most:
        raise ValueError(
            f"{looks} looks need at least {looks + FIRST_LOOK - 1} seeds:"
            f" the first is at {FIRST_LOOK}"
        )
    if looks == 1:
        return (seeds,)
    plan = []
    for i in range(looks):
        even = math.ceil((i + 1) * seeds / looks)
        plan.append(max(FIRST_LOOK + i, even))
    return tuple(plan)


def sequential_p(
    p_values: Sequence[float],
    plan: Sequence[int],
    sides: int,
    shape: float = SHAPE,
) -> float:
    """Return one p-value for all looks so far.

    Further looks never raise it. If nothing differs it is below `a` in at most a share `a` of
    studies, whenever the study ends.

    Args:
        p_values: p-value of the t test at each look so far.
        plan: number of seeds at each planned look; see `schedule`.
        sides: 2 if the t tests are two-sided, else 1.
    """
    if len(p_values) > len(plan):
        raise ValueError(f"{len(p_values)} looks were taken, {len(plan)} were planned")
    if not p_values:
        return 1.0
    if len(plan) == 1:
        return min(1.0, p_values[0])
    looks = zip(p_values, plan, strict=False)
    passed = max(weighted_deviate(p, n, plan, sides, shape) for p, n in looks)
    null = _null_maxima(tuple(plan), sides, shape)
    exceeding = len(null) - int(np.searchsorted(null, passed, side="left"))
    # Plus two standard errors of the simulation, so that its error does not raise the level.
    return min(1.0, (exceeding + 2 * math.sqrt(exceeding) + 2) / len(null))


def weighted_deviate(
    p: float,
    n: int,
    plan: Sequence[int],
    sides: int,
    shape: float = SHAPE,
) -> float:
    """Return a look's p-value as a normal deviate, divided by its boundary up to the factor C."""
    # A p-value below 1e-300 would underflow, and passes every boundary anyway.
    deviate = float(-special.ndtri(max(p, 1e-300) / sides))
    return deviate * _weight(n, plan, shape)


def nominal_levels(
    alpha: float,
    plan: Sequence[int],
    sides: int,
    shape: float = SHAPE,
) -> tuple[float, ...]:
    """Return the level of each look's own t test, for which all looks together have `alpha`."""
    if len(plan) == 1:
        return (alpha,)
    null = _null_maxima(tuple(plan), sides, shape)
    # The largest count k with k + 2 sqrt(k) + 2 <= alpha len(null): the inverse of what
    # `sequential_p` adds.
    count = math.floor((math.sqrt(max(0.0, alpha * len(null) - 1)) - 1) ** 2)
    boundary = float(null[len(null) - count - 1])
    levels = []
    for n in plan:
        deviate = boundary / _weight(n, plan, shape)
        levels.append(sides * float(special.ndtr(-deviate)))
    return tuple(levels)


def _weight(n: int, plan: Sequence[int], shape: float) -> float:
    return (n / plan[-1]) ** (0.5 - shape)


@cache
def _null_maxima(plan: tuple[int, ...], sides: int, shape: float) -> np.ndarray:
    """Return the largest weighted deviate of each simulated study without a difference, sorted."""
    random = np.random.default_rng(20260217)
    maxima = []
    for _ in range(_DRAWS // _CHUNK):
        values = random.standard_normal((_CHUNK, plan[-1]))
        maxima.append(_maxima(values, plan, sides, shape))
    return np.sort(np.concatenate(maxima))


def _maxima(values: np.ndarray, plan: Sequence[int], sides: int, shape: float) -> np.ndarray:
    best = np.full(len(values), -np.inf)
    for n in plan:
        t = t_statistic(values, n)
        lead = np.abs(t) if sides == 2 else t
        tail = special.stdtr(n - 1, -lead)
        deviates = -special.ndtri(np.clip(tail, 1e-300, 1 - 1e-16))
        best = np.maximum(best, deviates * _weight(n, plan, shape))
    return best


def t_statistic(values: np.ndarray, n: int) -> np.ndarray:
    """Return the one-sample t of the first `n` values of every row."""
    first = values[:, :n]
    return first.mean(1) / (first.std(1, ddof=1) / math.sqrt(n))
