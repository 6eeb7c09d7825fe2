"""Searches of tune-warmup over fake probes: what each policy probes, pays and finds."""

from __future__ import annotations

import itertools
import math
from typing import Any

from efftrain_cli.tune_warmup.search import Search
from tests.tune_warmup.answers import BUDGET, KINDS, Fails, answered, hashed, options, ordered


def record() -> dict[str, Any]:
    """Return each policy's setting, whether it was verified, its probes and their tokens."""
    found = {}
    for kind, search in KINDS.items():
        for name, fails in policies(search).items():
            for seeds in ((), (0, 1, 2)):
                if seeds and not name.startswith("drawn"):
                    continue
                key = ", ".join((kind, name, *(["three seeds"] if seeds else [])))
                found[key] = searched(options(search, seeds=seeds), fails)
        small = options(search, budget=BUDGET // 10)
        start, durations = search.starts[0], search.durations(search.starts[0])
        found[f"{kind}, a tenth of the budget"] = searched(
            small, ordered(search, start, durations[len(durations) // 2])
        )
    return found


def policies(search: Search) -> dict[str, Fails]:
    """Return which probes fail, by name: ordered by start and duration, or drawn."""
    found = {}
    starts = dict.fromkeys((search.starts[0], search.starts[-1]))
    for start, place in itertools.product(starts, (0, 1, 2)):
        durations = search.durations(start)
        furthest = durations[place * (len(durations) - 1) // 2]
        found[f"from start {start}, to {furthest}"] = ordered(search, start, furthest)
    found["all stable"] = lambda probe: None
    nothing_holds = math.inf if search.kind == "lr" else 0
    found["none stable"] = ordered(search, math.inf, nothing_holds)
    for seed, share in ((1, 0.2), (2, 0.5), (3, 0.8)):
        found[f"drawn {seed}, {share:.0%} fail"] = hashed(seed, share)
    return found


def searched(search: Search, fails: Fails) -> dict[str, Any]:
    """Search; return what it came to. A probe is named with the step that it ended at."""
    outcome, receipts = answered(search, fails)
    return {
        "start": outcome.start,
        "steps": outcome.steps,
        "verified": outcome.verified,
        "needed": outcome.needed,
        "tokens": sum(receipt.tokens for receipt in receipts.values()),
        "probes": [
            f"start {each.probe.start}, {each.probe.steps} steps, seed {each.probe.seed}:"
            f" {each.stopped_at_step}"
            for each in receipts.values()
        ],
    }
