"""How often "fades", "grows" and "holds" are wrong, simulated on the functions that judge runs.

    python benchmarks/simulations/ladder.py                       10,000 repetitions a row
    python benchmarks/simulations/ladder.py --repetitions 100     a rehearsal

Writes ladder.csv beside it. Losses follow power laws of cost, exponent 0.15, with the slope s at
the middle budget of every size; budgets are 0.5, 1 and 2; a run's noise is normal with standard
deviation sigma; each size's ln M has an error of tuning that its seeds share.
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections import Counter
from pathlib import Path

import numpy as np
import pandas as pd

from efftrain_cli.compare.ladder import shift_of, trend_of

TABLE = Path(__file__).with_name("ladder.csv")
EXPONENT = 0.15
S = 0.2
COSTS = np.log([0.5, 1.0, 2.0])
LADDERS = ((4, 8), (5, 16), (6, 32))
"""Number of sizes, and the factor between the first and the last."""
SLOPES = (0.0, 0.05)
"""True change of ln M per doubling; at 0.05 "holds" is wrong, and so is "fades" or "grows" at 0."""
NOISES = ((0.01, 0.05), (0.02, 0.0))
"""sigma, nats per token, and the sd of tuning in ln M."""
SEEDS = 3
AT_LARGEST = 0.5
"""True ln M at the largest size."""


def losses(shift: float, sigma: float, draw: np.random.Generator) -> np.ndarray:
    """Draw final losses (seeds, budgets) of an arm that is `shift` in ln C ahead."""
    curve = S / EXPONENT * np.exp(-EXPONENT * (COSTS + shift))
    return 3.0 + curve + sigma * draw.normal(size=(SEEDS, len(COSTS)))


def study(
    sizes: np.ndarray,
    slope: float,
    sigma: float,
    tuning: float,
    draw: np.random.Generator,
) -> tuple[str, list[bool]]:
    """Simulate a study; return its verdict, and whether each size's interval holds the truth."""
    doublings = np.log2(sizes / sizes[-1])
    truth = AT_LARGEST + slope * doublings
    costs = np.tile(COSTS, (SEEDS, 1))
    logs = []
    covered = []
    for shift in truth:
        tuned = shift + tuning * draw.normal()
        base = losses(0.0, sigma, draw)
        found = shift_of(base, losses(tuned, sigma, draw), costs, costs)
        if found.why:
            continue
        _, low, high = found.interval
        covered.append(low <= math.exp(shift) <= high)
        logs.append(found.logs.mean())
    if len(logs) < len(sizes):
        return "not identified", covered
    return trend_of(sizes, np.array(logs)).verdict, covered


def simulate(repetitions: int) -> list[dict[str, object]]:
    """Return a row per ladder, true slope and noise: percent of each verdict, and of coverage."""
    rows = []
    cells = itertools.product(LADDERS, SLOPES, NOISES)
    for number, ((count, factor), slope, (sigma, tuning)) in enumerate(cells):
        draw = np.random.default_rng(number)
        sizes = np.geomspace(1e5, 1e5 * factor, count)
        verdicts: Counter[str] = Counter()
        covered = []
        for _ in range(repetitions):
            verdict, inside = study(sizes, slope, sigma, tuning, draw)
            verdicts[verdict] += 1
            covered += inside
        row: dict[str, object] = {
            "sizes": count,
            "factor": factor,
            "slope": slope,
            "sigma/s": round(sigma / S, 3),
            "tuning sd": tuning,
        }
        for verdict in ("fades", "grows", "holds", "cannot tell", "not identified"):
            row[verdict] = f"{100 * verdicts[verdict] / repetitions:.1f}"
        row["coverage"] = f"{100 * np.mean(covered):.1f}"
        row["repetitions"] = repetitions
        rows.append(row)
        print(*row.values(), sep="\t", flush=True)
    return rows


def main() -> None:
    """Simulate, print and write the table."""
    parser = argparse.ArgumentParser(description="Error rates of verdicts over sizes.")
    parser.add_argument("--repetitions", type=int, default=10_000)
    rows = simulate(parser.parse_args().repetitions)
    pd.DataFrame(rows).to_csv(TABLE, index=False)


if __name__ == "__main__":
    main()
