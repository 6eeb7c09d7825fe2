"""Searches of tune-warmup over fake probes: what each policy probes and finds."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any
from zlib import crc32

from efftrain_cli.tune_warmup.search import Candidates, Probe, Receipt, find_best, search

STARTS = (8, 16, 32)
DURATIONS = (453, 320, 226, 160, 113, 80, 57, 40, 28, 20)
CLIMB, HORIZON = 20, 60
CONTROL = ("warmup=false",)
Fails = Callable[[int, int, int], float]
"""(start, steps, seed) -> step at which a probe is unstable; infinite if it never is."""


def record() -> dict[str, Any]:
    """Return each policy's setting and its probes, each with the step that it ended at."""
    return {
        f"{name}, {len(seeds)} seeds": searched(fails, seeds)
        for name, fails in policies().items()
        for seeds in ((1,), (0, 1, 2))
    }


def policies() -> dict[str, Fails]:
    """Return which probes fail, by name: ordered by start and duration, or drawn."""
    policies: dict[str, Fails] = {
        "all stable": lambda start, steps, seed: math.inf,
        "none stable": lambda start, steps, seed: 5,
    }
    for first, longest in itertools.product(STARTS, DURATIONS):
        policies[f"from start {first}, to {longest}"] = ordered(first, longest)
    for draw, share in ((1, 0.2), (2, 0.5), (3, 0.8)):
        policies[f"drawn {draw}, {share:.0%} fail"] = drawn(draw, share)
    return policies


def ordered(first: int, longest: int) -> Fails:
    """Shorter starts fail early, longer durations late."""

    def fails(start: int, steps: int, seed: int) -> float:
        if not steps:
            return 1
        if start < first:
            return 5
        return 40 if steps > longest else math.inf

    return fails


def drawn(draw: int, share: float) -> Fails:
    """Each setting and seed fails by chance, at a drawn step."""

    def fails(start: int, steps: int, seed: int) -> float:
        number = crc32(f"{draw} {start} {steps} {seed}".encode())
        is_failing = not steps or number % 1000 < 1000 * share
        return 1 + number % HORIZON if is_failing else math.inf

    return fails


def searched(fails: Fails, seeds: tuple[int, ...]) -> dict[str, Any]:
    candidates = Candidates(
        starts=[(f"start={start}",) for start in STARTS],
        durations=[(f"steps={steps}",) for steps in DURATIONS],
        first=5,
        control=CONTROL,
        climb=CLIMB,
        horizons=[HORIZON] * len(DURATIONS),
        seeds=seeds,
    )
    probes = []

    def see(probe: Probe) -> Receipt:
        start = steps = 0
        if probe.setting != CONTROL:
            start, steps = (int(text.split("=")[1]) for text in probe.setting)
        at = fails(start, steps, probe.seed)
        end = int(min(at, probe.horizon))
        probes.append(f"{' '.join(probe.setting)}, seed {probe.seed}: {end}")
        unstable_at = end if at <= probe.horizon else None
        return Receipt(1.0, unstable_at, end, 9.0, ((0, 6.0), (end, 4.0)))

    best = find_best(candidates, list(search(candidates, see)))
    return {"found": None if best is None else " ".join(best.setting), "probes": probes}
