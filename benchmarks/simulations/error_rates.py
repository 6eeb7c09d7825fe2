"""How often `compare`, `race` and `study` err, simulated on their own code.

    python benchmarks/simulations/error_rates.py                       10,000 repetitions a cell
    python benchmarks/simulations/error_rates.py --repetitions 100     a rehearsal

Writes error-rates.csv beside it: cell, pairs, what is counted, percent, mean number of runs
of a race, repetitions. Final losses are normal; effects are in standard deviations of a pair's
difference. A standard error at 5 % is 0.22 with 10,000 repetitions.
"""

from __future__ import annotations

import argparse
import csv
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from efftrain_cli.compare.arms import Arm, group_runs, pair_up, stuck_level
from efftrain_cli.compare.inference import shares
from efftrain_cli.compare.judge import Claim, Result, decide, judge
from efftrain_cli.compare.measures import measures_of
from efftrain_cli.run.reading import CURVE, Run
from efftrain_cli.study.conduct import close
from efftrain_cli.study.plans import Plan, PlannedArm

TABLE = Path(__file__).with_name("error-rates.csv")
SD = 0.02
"""Standard deviation of a pair's difference of final losses, nats per token."""
KNOWN = {"data.seq_len": 128}
PAIRS = (3, 5, 10)


@dataclass(frozen=True)
class Truth:
    """What is true of an arm."""

    effect: float = 0.0
    """Mean difference from the baseline, in SD; below 0 is better."""
    stuck: float = 0.0
    """Share of runs that stay at 5.9 nats."""
    diverged: float = 0.0
    """Share of runs that diverge."""


NULL = Truth()
START = np.array([[0, 0, 0, 0, 6.5], [10, 100, 600, 1, 5.0], [50, 500, 3000, 5, math.nan]])
"""Three evaluations whose last loss is drawn."""


def simulate_run(arm: str, seed: int, truth: Truth, draw: np.random.Generator) -> Run:
    """Draw a run of three evaluations."""
    final = 4.0 + SD * (truth.effect + draw.normal() / math.sqrt(2))
    status = "finished"
    if draw.random() < truth.stuck:
        final = 5.9 + 0.001 * draw.random()
    if draw.random() < truth.diverged:
        status = "diverged"
    values = START.copy()
    values[-1, -1] = final
    curve = pd.DataFrame(values, columns=CURVE)
    settings = {"label": arm, "train.tokens": 500.0}
    return Run(arm + str(seed), arm, seed, status, curve, settings, KNOWN)


def arms_of_runs(runs: Sequence[Run]) -> list[Arm]:
    """Group runs into arms with the baseline's stuck level."""
    groups = group_runs(runs)
    level = stuck_level(groups[0])
    return [Arm(group.label, group.runs, level) for group in groups]


def look(
    arms: Sequence[Arm],
    claim: Claim,
    share: float = 1.0,
    closed: Sequence[Result] = (),
) -> list[Result]:
    """Judge the final losses of arms as `compare` does."""
    base, *others = arms
    measure = measures_of(base.runs)[0]
    rows = []
    for arm in others:
        rows.append(
            judge(
                pair_up(base, arm),
                measure,
                level=0.05 * share,
                claim=claim,
                claims=len(others),
            )
        )
    return decide(rows, 0.05, share, closed)


def one_look(
    truths: Sequence[Truth],
    pairs: int,
    claim: Claim,
    draw: np.random.Generator,
) -> list[Result]:
    """Simulate a comparison of so many pairs."""
    runs = []
    for number, truth in enumerate(truths):
        runs += [simulate_run(f"arm{number}", seed, truth, draw) for seed in range(pairs)]
    return look(arms_of_runs(runs), claim)


def race(
    truths: Sequence[Truth],
    looks: tuple[int, ...],
    claim: Claim,
    draw: np.random.Generator,
) -> tuple[list[Result], int]:
    """Simulate a race; return its claims and the number of its runs."""
    arms = tuple(PlannedArm(f"arm{n}", "", "") for n in range(len(truths)))
    plan = Plan(
        "p",
        Path(),
        "",
        arms,
        (claim,),
        tuple(range(looks[-1])),
        looks,
        {},
        give_up=0.5,
        is_race=True,
    )
    runs: list[Run] = []
    rows: list[Result] = []
    open_arms = set(range(len(truths)))
    before = 0
    for number, share in enumerate(shares(looks)):
        for arm in sorted(open_arms):
            for seed in range(before, looks[number]):
                runs.append(simulate_run(f"arm{arm}", seed, truths[arm], draw))
        before = looks[number]
        closed = [row for row in rows if row.closed]
        rows = look(arms_of_runs(runs), claim, share, closed)
        rows = [close(row, plan, number + 1 == len(looks)) for row in rows]
        open_arms = {0} | {int(row.arm[3:]) for row in rows if not row.closed}
        if open_arms == {0}:
            break
    return rows, len(runs)


def cost_rows(
    multiplier: float,
    noise: float,
    pairs: int,
    draw: np.random.Generator,
) -> list[Result]:
    """Simulate tokens to match of an arm that learns `multiplier` times as fast."""
    runs = []
    for arm, speed in (("arm0", 1.0), ("arm1", multiplier)):
        for seed in range(pairs):
            steps = np.arange(21.0)
            shift = SD * draw.normal() / math.sqrt(2)
            losses = 3.5 + 2.5 * (1 + speed * steps) ** -0.5 + shift
            losses = losses + noise * draw.normal(size=21)
            values = [steps, steps * 25, steps * 150, steps, losses]
            curve = pd.DataFrame(dict(zip(CURVE, values, strict=True)))
            settings = {"label": arm, "train.tokens": 500.0}
            runs.append(Run(arm + str(seed), arm, seed, "finished", curve, settings, KNOWN))
    base, arm_ = arms_of_runs(runs)
    measure = next(each for each in measures_of(runs) if each.key == "tokens_to_match")
    claim = Claim(measure="tokens_to_match")
    return decide([judge(pair_up(base, arm_), measure, 0.05, claim)], 0.05)


def is_claimed(rows: Sequence[Result]) -> bool:
    """Return whether any claim was shown."""
    return any(row.verdict not in ("", "undecided") for row in rows)


# --- cells ----------------------------------------------------------------------------------------

Study = Callable[[np.random.Generator], tuple[float, float]]
"""Simulates one study; returns what is counted, and the number of its runs."""


def cells() -> Iterator[tuple[str, str, str, Study]]:
    """Yield cell, pairs, what is counted, and the study."""
    different = Claim()
    nulls = {
        "no failures": (NULL, NULL),
        "baseline stuck in 20 %": (Truth(stuck=0.2), NULL),
        "both stuck in 20 %": (Truth(stuck=0.2), Truth(stuck=0.2)),
        "both diverge in 20 %": (Truth(diverged=0.2), Truth(diverged=0.2)),
        "Holm over 4 arms": (NULL,) * 5,
    }
    for name, truths in nulls.items():
        for pairs in PAIRS:

            def study(draw, truths=truths, pairs=pairs):
                return is_claimed(one_look(truths, pairs, different, draw)), 0

            yield name, str(pairs), "false verdicts", study
    margin = 1.2 * SD
    borders = {"equivalent": (1.2, "equivalent"), "noninferior": (1.2, "noninferior")}
    borders |= {"either at the border": (1.2, "either"), "either at 0": (0.0, "either")}
    for name, (effect, direction) in borders.items():
        claim = Claim(direction=direction, margin=margin)
        wrong = ("better", "worse") if effect == 0 else ("equivalent", "noninferior", "better")
        for pairs in PAIRS:

            def study(draw, effect=effect, claim=claim, pairs=pairs, wrong=wrong):
                (row,) = one_look((NULL, Truth(effect)), pairs, claim, draw)
                return row.verdict in wrong, 0

            yield f"{name}, margin 1.2 sd", str(pairs), "false verdicts", study
    for effect in (0.0, 0.8, 1.2, 2.0):
        for looks in ((3, 5, 8), (3, 5)):

            def study(draw, effect=effect, looks=looks):
                rows, runs = race((NULL, Truth(-effect)), looks, different, draw)
                return is_claimed(rows), runs

            counted = "verdicts" if effect else "false verdicts"
            yield f"race, effect {effect:g} sd", ", ".join(map(str, looks)), counted, study

    def four(draw):
        rows, runs = race((NULL,) * 4, (3, 5, 8), different, draw)
        return is_claimed(rows), runs

    yield "race of four arms, no effect", "3, 5, 8", "false verdicts", four

    def both_stuck(draw):
        rows, runs = race((Truth(stuck=0.2),) * 2, (3, 5, 8), different, draw)
        return is_claimed(rows), runs

    yield "race, both stuck in 20 %", "3, 5, 8", "false verdicts", both_stuck
    for noise in (0.0, 0.01, 0.03):
        for pairs in PAIRS:

            def study(draw, noise=noise, pairs=pairs):
                return is_claimed(cost_rows(1.0, noise, pairs, draw)), 0

            yield f"tokens to match, evaluation noise {noise:g}", str(pairs), "false", study


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=10_000)
    parser.add_argument("--output", type=Path, default=TABLE)
    options = parser.parse_args()
    with options.output.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["cell", "pairs", "counted", "percent", "mean runs", "repetitions"])
        for number, (cell, pairs, counted, study) in enumerate(cells()):
            draw = np.random.default_rng(number)
            outcomes = [study(draw) for _ in range(options.repetitions)]
            share, runs = np.mean(outcomes, axis=0)
            writer.writerow(
                [cell, pairs, counted, f"{100 * share:.2f}", f"{runs:.1f}", options.repetitions]
            )
            file.flush()


if __name__ == "__main__":
    main()
