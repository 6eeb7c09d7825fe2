"""Looking more than once: what planned looks and the anytime-valid t test find and err. Its table
is looks.csv beside this file, of which docs/studies.md shows some rows.

    python benchmarks/simulations/sequential_looks.py > looks.csv    about two minutes on one core
    python benchmarks/simulations/sequential_looks.py --draws 2000   a rehearsal of seconds

Paired differences are normal with standard deviation 1, so an effect of 1.2 is a difference of 1.2
standard deviations of the differences between pairs of runs. "Unpaid" is a t test at 5 % at every
look, as if it were the only one.
"""

from __future__ import annotations

import argparse
import csv
import math
import sys
from collections.abc import Callable, Sequence

import numpy as np
from scipy import special

from efftrain_cli.compare.sequential import nominal_levels, schedule, t_statistic

PLANS = ((5, 2), (10, 3), (12, 4), (20, 5), (22, 20))
"""(seeds, looks)."""
EFFECTS = (0.0, 0.8, 1.2, 2.0)
SHAPES = {"planned, shape 0.25": 0.25, "O'Brien-Fleming": 0.0, "Pocock": 0.5}
MIXTURE = 1.0
"""Variance of the mixture over effects; 1 was the narrowest at ten seeds of 0.5, 1, 2, 4 and 8."""
ALPHA = 0.05


def half_width(sd: float, n: int, level: float, sides: int = 2) -> float:
    """Half the width of the t interval of a mean of `n` values with standard deviation `sd` at a
    nominal level."""
    return sd / math.sqrt(n) * float(-special.stdtrit(n - 1, level / sides))


# The alternative: the anytime-valid t test with a Gaussian mixture over effects (Lai 1976; Wang and
# Ramdas 2024). It needs no plan and errs in 0.1 to 2 % of studies instead of 5 %; its intervals are
# wider from eight seeds on.


def mixture_log_e(t: np.ndarray | float, n: int, variance: float) -> np.ndarray | float:
    """Logarithm of the e-value of "the mean is 0" after `n` values, against effects (mean / sd)
    drawn from N(0, `variance`).

    The Bayes factor with the right Haar prior on the scale (Gönen et al. 2005; Wang and Ramdas
    2024, section 4). Over n = 2, 3, ... it is a nonnegative martingale where nothing differs, so it
    exceeds 1 / alpha at any time with probability at most alpha.
    """
    nu, grown = n - 1, 1 + n * variance
    t2 = np.square(t)
    return -0.5 * np.log(grown) + 0.5 * n * (np.log1p(t2 / nu) - np.log1p(t2 / (nu * grown)))


def mixture_half_width(sd: float, n: int, alpha: float, variance: float) -> float:
    """Half the width of the anytime-valid interval; infinite where `n` values cannot exclude
    anything yet."""
    grown = 1 + n * variance
    if n < 2:
        return math.inf
    # e = 1/alpha solved for t: (1 + t2/nu) / (1 + t2/(nu grown)) = k
    log_k = 2 / n * (-math.log(alpha) + 0.5 * math.log(grown))
    if log_k >= math.log(grown):
        return math.inf
    k = math.exp(log_k)
    t2 = (n - 1) * (k - 1) / (1 - k / grown)
    return sd / math.sqrt(n) * math.sqrt(t2)


def normal(random: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    return random.standard_normal(shape)


def skewed(random: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    """Lognormal with sigma 1, mean 0, as differences never are: two equal recipes' are
    symmetric."""
    return np.exp(random.standard_normal(shape)) - math.exp(0.5)


def outliers(random: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    """One seed of ten is eight times as noisy."""
    return random.standard_normal(shape) * np.where(random.random(shape) < 0.1, 8.0, 1.0)


def by_levels(
    values: np.ndarray, plan: Sequence[int], levels: Sequence[float]
) -> tuple[float, float]:
    """(share of studies that decide, mean number of seeds they took)."""
    found, seeds = np.zeros(len(values), bool), np.full(len(values), plan[-1])
    for n, level in zip(plan, levels, strict=True):
        now = ~found & (2 * special.stdtr(n - 1, -np.abs(t_statistic(values, n))) <= level)
        seeds[now] = n
        found |= now
    return float(found.mean()), float(seeds.mean())


def by_mixture(values: np.ndarray, plan: Sequence[int]) -> tuple[float, float]:
    """As `by_levels`, by the anytime-valid t test at the same numbers of seeds."""
    found, seeds = np.zeros(len(values), bool), np.full(len(values), plan[-1])
    for n in plan:
        now = ~found & (mixture_log_e(t_statistic(values, n), n, MIXTURE) >= -math.log(ALPHA))
        seeds[now] = n
        found |= now
    return float(found.mean()), float(seeds.mean())


def rules(plan: Sequence[int]) -> dict[str, Callable[[np.ndarray], tuple[float, float]]]:
    found: dict[str, Callable[[np.ndarray], tuple[float, float]]] = {
        "unpaid": lambda values: by_levels(values, plan, [ALPHA] * len(plan))
    }
    for name, shape in SHAPES.items():
        levels = nominal_levels(ALPHA, plan, 2, shape)
        found[name] = lambda values, levels=levels: by_levels(values, plan, levels)
    found["anytime-valid t"] = lambda values: by_mixture(values, plan)
    return found


def main() -> None:
    """Print the table as CSV."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--draws", type=int, default=40_000, help="studies per cell")
    draws = parser.parse_args().draws
    table = csv.writer(sys.stdout, lineterminator="\n")
    table.writerow(("measure", "seeds", "looks", "rule", "differences", "value", "mean seeds"))
    for seeds, looks in PLANS:
        plan = schedule(seeds, looks)
        random = np.random.default_rng(7)
        samples = [normal(random, (draws, seeds)) + effect for effect in EFFECTS]
        for name, rule in rules(plan).items():
            for effect, sample in zip(EFFECTS, samples, strict=True):
                share, taken = rule(sample)
                values = (f"{share:.4f}", f"{taken:.1f}")
                table.writerow(("decided", seeds, looks, name, f"effect {effect:g}", *values))
    for seeds, looks in PLANS:
        plan = schedule(seeds, looks)
        levels = nominal_levels(ALPHA, plan, 2)
        for kind in (normal, outliers, skewed):
            sample = kind(np.random.default_rng(8), (draws, seeds))
            share, _ = by_levels(sample, plan, levels)
            what = (seeds, looks, "planned, shape 0.25", f"no effect, {kind.__name__}")
            table.writerow(("decided", *what, f"{share:.4f}", ""))
    plan = schedule(20, 18)
    levels = {name: nominal_levels(ALPHA, plan, 2, shape) for name, shape in SHAPES.items()}
    for i, n in enumerate(plan):
        if n in (3, 4, 5, 6, 8, 10, 12, 16, 20):
            widths = {"one look, here": half_width(1.0, n, ALPHA)}
            widths |= {name: half_width(1.0, n, level[i]) for name, level in levels.items()}
            widths["anytime-valid t"] = mixture_half_width(1.0, n, ALPHA, MIXTURE)
            for name, width in widths.items():
                table.writerow(("half width of 95 %", n, 18, name, "sd 1", f"{width:.2f}", ""))


if __name__ == "__main__":
    main()
