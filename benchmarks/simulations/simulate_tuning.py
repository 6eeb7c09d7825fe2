"""How far a search of `efftrain tune-warmup` can be trusted: simulated probes, judged by the search itself. Writes the
tables of docs/methods/sequence-length-warmup.md.

    python benchmarks/simulations/simulate_tuning.py [--repetitions 400] [--only calm|search]

calm: validation losses that fall and scatter, thirty to a probe; how many probes end early, and how many of all would
have fluctuated after that. search: whether a setting is unstable is drawn, more likely the longer its warmup; what the
search then returns, and costs.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import replace

import numpy as np

from efftrain_cli.recipe.recipe import load_recipe
from efftrain_cli.tune_warmup.inquiry import Outcome
from efftrain_cli.tune_warmup.search import Probe, Receipt, Search
from efftrain_cli.tune_warmup.verdict import chance_of_fluctuation, fluctuation

Random = np.random.Generator
THRESHOLD, CALM = 1.3, 0.01
WINDOW, EVERY = 100, 10
HORIZON = 3 * WINDOW
SD = 0.02
SCATTERS = {
    "normal": "normal",
    "correlated (0.8 from one validation to the next)": "correlated",
    "heavy tails (Student's t, 3 degrees of freedom)": "heavy",
    "twice as large in the last third": "growing",
    "normal, and a jump by half in the last third of every second probe": "jump",
    "normal, on a loss that rises evenly from the peak of the learning rate on, by 1.2 nats": "rise",
    "the same, at first slowly: the rise doubles with every third of a learning-rate warmup": "faster",
    "normal, on a loss that rises by 0.6 nats in the last third": "late rise",
}


def losses(kind: str, sd: float, random: Random) -> np.ndarray:
    """Validation losses of a probe at steps 0, 10, ..., 300: a fall, and scatter of standard deviation `sd`."""
    steps = np.arange(0, HORIZON + 1, EVERY)
    noise = random.standard_normal(len(steps))
    if kind == "correlated":
        for i in range(1, len(noise)):
            noise[i] = 0.8 * noise[i - 1] + 0.6 * noise[i]
    elif kind == "heavy":
        noise = random.standard_t(3, len(steps)) / math.sqrt(3)
    late = steps > 2 * WINDOW
    if kind == "growing":
        noise[late] *= 2
    made = 5 + 4 * np.exp(-steps / 60) - 0.0005 * steps + sd * noise
    if kind == "rise":
        made += 1.2 * np.clip((steps - WINDOW) / (2 * WINDOW), 0, 1)
    elif kind == "faster":
        made += np.where(steps > WINDOW, 1.2 * 2 ** (-(HORIZON - steps) / (WINDOW / 3)), 0)
    elif kind == "late rise":
        made += 0.6 * np.clip((steps - 2 * WINDOW) / WINDOW, 0, 1)
    if kind == "jump" and random.random() < 0.5:
        made[random.choice(np.flatnonzero(late))] += math.log(1.5)
    return made


def calm_end(kind: str, sd: float, random: Random) -> tuple[int | None, bool]:
    """The step at which a probe ends as calm, None for never, and whether it would have fluctuated after it."""
    curve = list(zip(range(0, HORIZON + 1, EVERY), losses(kind, sd, random).tolist(), strict=True))
    for end in range(1, len(curve)):
        if fluctuation(curve[:end])[0] > THRESHOLD:
            break
        if chance_of_fluctuation(curve[:end], WINDOW, 2 * WINDOW, HORIZON, THRESHOLD) < CALM:
            return curve[end - 1][0], fluctuation(curve)[0] > THRESHOLD
    return None, False


def calm_rates(kind: str, sd: float, repetitions: int, random: Random) -> tuple[float, float]:
    """Shares of all probes: those that end as calm, and those of them that would have fluctuated afterwards."""
    ends = [calm_end(kind, sd, random) for _ in range(repetitions)]
    return sum(end is not None for end, _ in ends) / repetitions, sum(
        wrong for _, wrong in ends
    ) / repetitions


def searched(
    search: Search, critical: float, steepness: float, calm: bool, random: Random
) -> tuple[Outcome, int]:
    """The outcome of a search and its tokens, where a warmup of `critical` steps is unstable on every second seed, a
    longer one on more, at a step drawn between the learning rate's peak and the horizon. `calm`: stable probes end as
    they do with normal scatter of `SD`."""
    grid = search.grid
    receipts: dict[str, Receipt] = {}
    failures: dict[tuple[int, int], float] = {}
    while isinstance(probe := search.next(list(receipts.values())), Probe):
        horizon = grid.horizon(probe.start, probe.steps)
        if (probe.steps, probe.seed) not in failures:
            unstable = random.random() < 1 / (1 + (critical / probe.steps) ** steepness)
            failures[probe.steps, probe.seed] = (
                random.uniform(grid.window + 1, horizon) if unstable else math.inf
            )
        failure = failures[probe.steps, probe.seed]
        stable = failure > probe.horizon
        end = (
            calm_end("normal", SD, random)[0]
            if stable and calm and probe.horizon == horizon
            else None
        )
        stopped = (
            int(failure)
            if not stable
            else probe.horizon
            if end is None
            else end * grid.window // WINDOW
        )
        receipts[probe.name] = Receipt(
            probe=probe,
            stable=stable,
            max_fluctuation=1.0,
            fluctuation_step=stopped,
            stopped_at_step=stopped,
            tokens=grid.tokens(probe.start, probe.steps, stopped),
            seconds=0.0,
            curve=(),
            calm=None if end is None else 0.0,
        )
    return probe, sum(receipt.tokens for receipt in receipts.values())


def search_rates(
    search: Search, steepness: float, calm: bool, repetitions: int, random: Random
) -> dict[str, float]:
    """Shares over critical durations spread evenly (in the logarithm) over the grid: of searches that return a setting
    which was verified, of those within one neighbour of the critical duration, and within two; cost in shares of a full
    run."""
    durations = search.grid.durations(search.grid.starts[0])
    low, high = math.log(durations[0]), math.log(durations[-1])
    verified = near = nearer = 0
    costs = []
    for _ in range(repetitions):
        critical = math.exp(random.uniform(low, high))
        outcome, tokens = searched(search, critical, steepness, calm, random)
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
    parser.add_argument("--only", choices=("calm", "search"))
    arguments = parser.parse_args()
    random = np.random.default_rng(1)
    if arguments.only != "search":
        sds = (0.02, 0.04, 0.06, 0.08)
        print(
            "| scatter | "
            + " | ".join(f"sd {sd:g}: calm, wrong" for sd in sds)
            + " |\n|---|"
            + "---|" * len(sds)
        )
        for name, kind in SCATTERS.items():
            rates = [calm_rates(kind, sd, arguments.repetitions, random) for sd in sds]
            print(
                f"| {name} | "
                + " | ".join(f"{calm:.0%}, {wrong:.1%}" for calm, wrong in rates)
                + " |"
            )
    if arguments.only != "calm":
        print(
            "\n| recipe | seeds | budget | calm ends | verified | within one | within two | mean cost | 95 % | most |\n|"
            + "---|" * 10
        )
        for name in ("gpt2-117m-slw", "gpt2-1.5b-slw", "gpt3-125m-slw"):
            plain = Search(recipe=load_recipe(name))
            for seeds, share, calm in (
                ((1,), None, False),
                ((1,), None, True),
                ((0, 1, 2), None, True),
                ((1,), 0.1, False),
                ((1,), 0.1, True),
            ):
                budget = None if share is None else int(share * plain.recipe.train.tokens)
                search = replace(plain, seeds=seeds, budget=budget)
                found = search_rates(search, 8.0, calm, arguments.repetitions, random)
                row = [
                    name,
                    str(len(seeds)),
                    "none" if share is None else f"{share:.0%}",
                    "yes" if calm else "no",
                ]
                print(
                    "| "
                    + " | ".join(
                        row
                        + [
                            f"{value:.0%}" if value >= 0.1 else f"{value:.1%}"
                            for value in found.values()
                        ]
                    )
                    + " |"
                )


if __name__ == "__main__":
    main()
