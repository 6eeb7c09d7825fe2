"""How far a search of `efftrain tune-warmup` can be trusted: simulated probes, judged by the search
itself. Its table is tuning.csv beside this file, of which docs/tune-warmup.md shows some rows.

    python benchmarks/simulations/simulate_tuning.py [--repetitions 400] > tuning.csv

Whether a setting is unstable is drawn, more likely the longer its warmup; training without a warmup
always is. The table says what the search then returns, and costs.
"""

from __future__ import annotations

import argparse
import csv
import math
import sys
from dataclasses import replace

import numpy as np

from efftrain_cli.recipe.recipe import load_recipe
from efftrain_cli.tune_warmup.probe import Probe, Receipt
from efftrain_cli.tune_warmup.search import Finder, Outcome, Search

Random = np.random.Generator


def searched(
    search: Search, critical: float, steepness: float, random: Random
) -> tuple[Outcome, int]:
    """The outcome of a search and its tokens, where a warmup of `critical` steps is unstable on
    every second seed, a longer one on more, at a step drawn between the learning rate's peak and
    the horizon."""
    failures: dict[tuple[int, int], float] = {}

    def run(probe: Probe) -> Receipt:
        if (probe.steps, probe.seed) not in failures:
            share = 1 / (1 + (critical / probe.steps) ** steepness) if probe.steps else 1.0
            end = search.horizon(probe.start, probe.steps)
            unstable = random.random() < share
            step = random.uniform(search.lr_warmup_steps + 1, end) if unstable else math.inf
            failures[probe.steps, probe.seed] = step
        failure = failures[probe.steps, probe.seed]
        stable = failure > probe.horizon
        stopped = probe.horizon if stable else int(failure)
        return Receipt(
            probe=probe,
            stable=stable,
            max_fluctuation=1.0,
            fluctuation_step=stopped,
            stopped_at_step=stopped,
            tokens=search.tokens(probe.start, probe.steps, stopped),
            seconds=0.0,
            curve=(),
        )

    finder = Finder(search, [], run)
    outcome = finder.find()
    return outcome, sum(receipt.tokens for receipt in finder.receipts.values())


def search_rates(
    search: Search, steepness: float, repetitions: int, random: Random
) -> dict[str, float]:
    """Shares over critical durations spread evenly (in the logarithm) over the grid: of searches
    that return a setting which was verified, of those within one neighbour of the critical
    duration, and within two; cost in shares of a full run."""
    durations = search.durations(search.starts[0])
    low, high = math.log(durations[0]), math.log(durations[-1])
    verified = near = nearer = 0
    costs = []
    for _ in range(repetitions):
        critical = math.exp(random.uniform(low, high))
        outcome, tokens = searched(search, critical, steepness, random)
        costs.append(tokens / search.recipe.train.tokens)
        if outcome.verified and outcome.steps is not None:
            verified += 1
            away = abs(math.log(outcome.steps / critical)) / math.log(2) * 2
            nearer += away <= 1.1
            near += away <= 2.1
    return {
        "verified": verified / repetitions,
        "within one": nearer / max(1, verified),
        "within two": near / max(1, verified),
        "mean": float(np.mean(costs)),
        "95 %": float(np.quantile(costs, 0.95)),
        "most": max(costs),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=400)
    repetitions = parser.parse_args().repetitions
    random = np.random.default_rng(1)
    table = csv.writer(sys.stdout, lineterminator="\n")
    table.writerow(
        (
            "recipe",
            "seeds",
            "budget",
            "verified",
            "within one",
            "within two",
            "mean",
            "95 %",
            "most",
        )
    )
    for name in ("gpt2-117m-slw", "gpt2-1.5b-slw", "gpt3-125m-slw"):
        plain = Search(recipe=load_recipe(name))
        for seeds, share in (((1,), None), ((0, 1, 2), None), ((1,), 0.1)):
            budget = None if share is None else int(share * plain.recipe.train.tokens)
            search = replace(plain, seeds=seeds, budget=budget)
            found = search_rates(search, 8.0, repetitions, random)
            values = [f"{value:.3f}" for value in found.values()]
            table.writerow((name, len(seeds), "" if share is None else share, *values))


if __name__ == "__main__":
    main()
