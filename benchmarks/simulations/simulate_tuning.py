"""How far a search of `efftrain tune-warmup` can be trusted: simulated probes, judged by the search
itself. Its table is tuning.csv beside this file, of which docs/tune-warmup.md shows some rows.

    python benchmarks/simulations/simulate_tuning.py [--repetitions 60] > tuning.csv

Whether a setting is unstable is drawn for each seed, more likely the longer its warmup: half of the
seeds at a critical duration, which lies anywhere on the list. Training without a warmup always is.
The table says how often the setting that is returned is unstable on a new seed, and what the search
cost, in full runs.
"""

from __future__ import annotations

import argparse
import math

import numpy as np
import pandas as pd

from efftrain_cli.recipe.recipe import load_recipe
from efftrain_cli.tune_warmup.candidates import TuneConfig, find_candidates, tokens_of
from efftrain_cli.tune_warmup.search import Candidates, Probe, Receipt, find_best, search

Random = np.random.Generator


def steps_of(setting: tuple[str, ...]) -> int:
    """Return the duration of a setting; 0 without a warmup."""
    value = setting[-1].rpartition("=")[2]
    return int(value) if value.isdigit() else 0


def share_unstable(steps: int, critical: float) -> float:
    """Return the share of seeds on which a duration is unstable."""
    return 1 / (1 + (critical / steps) ** 8) if steps else 1.0


def searched(
    candidates: Candidates,
    tokens: dict[Probe, int],
    config: TuneConfig,
    critical: float,
    random: Random,
) -> tuple[int | None, int]:
    """Return the duration that a search finds, and its tokens; a probe is unstable at a step drawn
    between the learning rate's peak and the horizon."""
    failures: dict[tuple[int, int], float] = {}
    spent: dict[tuple[int, int], int] = {}

    def see(probe: Probe) -> Receipt:
        steps = steps_of(probe.setting)
        key = (steps, probe.seed)
        if key not in failures:
            is_unstable = random.random() < share_unstable(steps, critical)
            end = candidates.horizons[0]
            step = random.uniform(candidates.climb + 1, end) if is_unstable else math.inf
            failures[key] = step
        stopped = int(min(probe.horizon, failures[key]))
        ended = Probe(probe.setting, 0, stopped)
        if ended not in tokens:
            tokens[ended] = tokens_of(config, ended)
        spent[key] = tokens[ended]
        unstable_at = stopped if stopped < probe.horizon else None
        curve = ((0, 6.0), (tokens[ended], 4.0))
        return Receipt(1.0, unstable_at, stopped, math.inf, curve)

    best = find_best(candidates, list(search(candidates, see)))
    duration = None if best is None else steps_of(best.setting)
    return duration, sum(spent.values())


def search_rates(name: str, seeds: int, repetitions: int, random: Random) -> dict[str, float]:
    """Return shares over critical durations spread evenly (in the logarithm) over the list."""
    config = TuneConfig(recipe=name, seeds=tuple(range(seeds)), threshold=1.3)
    recipe = load_recipe(name)
    candidates = find_candidates(config, recipe)
    durations = [steps_of(setting) for setting in candidates.durations]
    low, high = math.log(durations[-1]), math.log(durations[0])
    tokens: dict[Probe, int] = {}
    near = 0
    unstable = []
    costs = []
    for _ in range(repetitions):
        critical = math.exp(random.uniform(low, high))
        found, spent = searched(candidates, tokens, config, critical, random)
        costs.append(spent / recipe.train.tokens)
        if found is not None:
            unstable.append(share_unstable(found, critical))
            near += abs(math.log(found / critical)) / math.log(2) * 2 <= 1.1
    return {
        "found": len(unstable) / repetitions,
        "within one": near / max(1, len(unstable)),
        "unstable": float(np.mean(unstable)),
        "mean": float(np.mean(costs)),
        "95 %": float(np.quantile(costs, 0.95)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=60)
    repetitions = parser.parse_args().repetitions
    random = np.random.default_rng(1)
    rows = []
    for name in ("gpt2-117m-slw", "gpt2-1.5b-slw", "gpt3-125m-slw"):
        for seeds in (1, 2, 3):
            rates = search_rates(name, seeds, repetitions, random)
            rows.append({"recipe": name, "seeds": seeds, **rates})
    print(pd.DataFrame(rows).to_csv(index=False, float_format="%.3f"), end="")


if __name__ == "__main__":
    main()
