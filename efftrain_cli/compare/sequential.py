"""Looking at a study more than once: what every look costs, and the interval that holds at all of
them together.

Who trains a few seeds, looks, and trains more where nothing shows yet, tests several times: at a
nominal 5 % a look, 20 looks find a difference between equal recipes in a quarter of all studies.
Here the looks are planned. A study names its largest number of seeds and how often it is looked at;
the boundary that every look must pass is the t test's at a stricter level, calibrated so that the
chance to pass at any look is alpha where nothing differs.

The boundary is group-sequential with the shape of Wang and Tsiatis (1987, Biometrics 43): at `n` of
`N` seeds a t test's p, expressed as a normal deviate, must exceed C (N / n)^(1/2 - SHAPE).
Textbooks take C from known variances, which is wrong at three to twenty seeds; here C comes from
simulated t tests at exactly the planned numbers of seeds. The distribution is free of mean and
variance, so the level is exact for normal differences, up to the error of the simulation, which is
added.

The anytime-valid t test with a Gaussian mixture over effects was compared and not taken: it decided
no more studies than the planned looks at any effect. docs/studies.md holds the table of both, made
by `benchmarks/simulations/sequential_looks.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

import numpy as np
from scipy import special

SHAPE = 0.25
"""0: O'Brien and Fleming's boundary, strict early and nearly free at the end; 0.5: Pocock's, the
same at every look."""
FIRST_LOOK = 3
"""Seeds at the first look, at least: with two, a t test's boundary is beyond what any study
reaches."""
_DRAWS = 200_000
_CHUNK = 20_000


def schedule(seeds: int, looks: int) -> tuple[int, ...]:
    """Return the numbers of seeds at a study's looks: evenly spread, the last at all `seeds`.

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
    """Return the p-value of the looks so far: small only if one of them passes its boundary.

    It never grows with further looks, and where nothing differs it is below `a` in at most a share
    `a` of studies, however early the study ends.

    Args:
        p_values: the t test's p at each look so far, one- or two-sided as `sides` says.
        plan: seeds at every planned look, as `schedule` gives them.
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
    # Two standard errors of the simulation are added, so that the level holds in spite of it.
    return min(1.0, (exceeding + 2 * math.sqrt(exceeding) + 2) / len(null))


def weighted_deviate(
    p: float,
    n: int,
    plan: Sequence[int],
    sides: int,
    shape: float = SHAPE,
) -> float:
    """Return a look's p-value as a normal deviate, weighted as its boundary is."""
    # Below 1e-300 all are the same: far beyond every boundary.
    deviate = float(-special.ndtri(max(p, 1e-300) / sides))
    return deviate * _weight(n, plan, shape)


def nominal_levels(
    alpha: float,
    plan: Sequence[int],
    sides: int,
    shape: float = SHAPE,
) -> tuple[float, ...]:
    """Return the level that each look's own t test must pass, so that all looks together err with
    `alpha`."""
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
    """Return, sorted, the largest weighted deviate over all looks of studies in which nothing
    differs."""
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
