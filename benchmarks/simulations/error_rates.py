"""How often `compare`, `race` and `study` err, simulated on their own code.

    python benchmarks/simulations/error_rates.py                       10,000 repetitions a cell
    python benchmarks/simulations/error_rates.py --repetitions 100     a rehearsal

Writes error-rates.csv beside it after every batch of all cells, and goes on from one that is there:
cell, pairs, what is counted, percent, mean number of runs, repetitions. Final losses are normal;
effects are in standard deviations of a pair's difference. A standard error at 5 % is 0.22 with
10,000 repetitions; power, and tuning over five rates, take 1,000.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd

from efftrain_cli.compare.arms import Arm, best_of_each, group_runs, pair_up, stuck_level
from efftrain_cli.compare.inference import shares
from efftrain_cli.compare.judge import Claim, Result, decide, judge
from efftrain_cli.compare.measures import Measure, measures_of
from efftrain_cli.run.reading import CURVE, Run
from efftrain_cli.study.conduct import close
from efftrain_cli.study.file import Study, StudyArm
from efftrain_cli.study.plans import Plan, PlannedArm

TABLE = Path(__file__).with_name("error-rates.csv")
BATCH = 1000
"""Repetitions of every cell between two writes of the table."""
SD = 0.02
"""Standard deviation of a pair's difference of final losses, nats per token."""
RATE_COST = 0.47
"""What a learning rate costs, in SD, times its squared distance in grid steps from the best one."""
TUNING_SEEDS = 3
PAIRS = (3, 5, 10)
LOOKS = (3, 5, 8)
COLUMNS = pd.Index(CURVE, dtype=object)
KNOWN = {"data.seq_len": 128}
START = np.array([[0, 0, 0, 0, 6.5], [10, 100, 600, 1, 5.0], [50, 500, 3000, 5, math.nan]])
"""Three evaluations whose last loss is drawn."""
Draw = np.random.Generator
Outcome = tuple[bool, int]
"""Whether what is counted was claimed, and the number of runs."""


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


def made_run(
    arm: str,
    seed: int,
    values: np.ndarray,
    status: str = "finished",
    rate: int = 0,
) -> Run:
    """Return a run with a curve of these values."""
    settings = {"label": arm, "train.tokens": 500.0, "optim.lr": rate}
    curve = pd.DataFrame(values, columns=COLUMNS)
    return Run(f"{arm}-{rate}-{seed}", arm, seed, status, curve, settings, KNOWN)


def draw_runs(
    arm: str,
    seeds: Iterable[int],
    truth: Truth,
    draw: Draw,
    rate: int = 0,
) -> list[Run]:
    """Draw runs of three evaluations."""
    runs = []
    for seed in seeds:
        values = START.copy()
        values[-1, -1] = 4.0 + SD * (truth.effect + draw.normal() / math.sqrt(2))
        if draw.random() < truth.stuck:
            values[-1, -1] = 5.9 + 0.001 * draw.random()
        has_diverged = draw.random() < truth.diverged
        status = "diverged" if has_diverged else "finished"
        runs.append(made_run(arm, seed, values, status, rate))
    return runs


FINAL_LOSS, *OTHERS = measures_of(draw_runs("arm0", [0], NULL, np.random.default_rng(0)))
(TOKENS_TO_MATCH,) = (measure for measure in OTHERS if measure.key == "tokens_to_match")


def arms_of_runs(runs: Sequence[Run]) -> list[Arm]:
    """Group runs into arms with the baseline's stuck level."""
    groups = group_runs(runs)
    level = stuck_level(groups[0])
    return [Arm(group.label, group.runs, level) for group in groups]


def look(
    runs: Sequence[Run],
    claim: Claim,
    measure: Measure = FINAL_LOSS,
    share: float = 1.0,
    closed: Sequence[Result] = (),
) -> list[Result]:
    """Judge arms by one measure as `compare` does."""
    base, *others = arms_of_runs(runs)
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
    wrong: Sequence[str],
    draw: Draw,
) -> Outcome:
    """Simulate a comparison or a study of so many pairs."""
    runs = []
    for number, truth in enumerate(truths):
        runs += draw_runs(f"arm{number}", range(pairs), truth, draw)
    rows = look(runs, claim)
    return any(row.verdict in wrong for row in rows), len(runs)


def race(
    truths: Sequence[Truth],
    looks: tuple[int, ...],
    draw: Draw,
) -> Outcome:
    """Simulate a race."""
    claim = Claim()
    names = [f"arm{n}" for n in range(len(truths))]
    study = Study(
        baseline="arm0",
        arms=tuple(StudyArm(name=name, recipe="r") for name in names),
        primary=(claim,),
        seeds=f"0..{looks[-1] - 1}",
        looks=looks,
        give_up=0.5,
    )
    arms = tuple(PlannedArm(name=name, recipe="r", prefix="", seeds=()) for name in names)
    plan = Plan("p", study, arms, {}, is_race=True)
    runs: list[Run] = []
    rows: list[Result] = []
    open_arms = set(range(len(truths)))
    before = 0
    for number, share in enumerate(shares(looks)):
        for arm in sorted(open_arms):
            runs += draw_runs(f"arm{arm}", range(before, looks[number]), truths[arm], draw)
        before = looks[number]
        closed = [row for row in rows if row.closed]
        rows = look(runs, claim, share=share, closed=closed)
        rows = [close(row, plan, number + 1 == len(looks)) for row in rows]
        open_arms = {0} | {int(row.arm[3:]) for row in rows if not row.closed}
        if open_arms == {0}:
            break
    return any(row.verdict in DECIDED for row in rows), len(runs)


def tuned(
    rates: int,
    judged: Callable[[Sequence[Truth], Draw], Outcome],
    draw: Draw,
) -> Outcome:
    """Simulate identical arms, each tuned over so many rates on seeds of its own, then judged.

    The best rate lies anywhere within the middle step of the grid.
    """
    distances = np.arange(rates) - (rates - 1) / 2 - draw.uniform(-0.5, 0.5)
    costs = RATE_COST * distances**2
    runs = []
    for arm in ("arm0", "arm1"):
        for rate, cost in enumerate(costs):
            truth = Truth(float(cost))
            runs += draw_runs(arm, range(TUNING_SEEDS), truth, draw, rate)
    chosen = {
        best.label: best.first.settings["optim.lr"] for best in best_of_each(group_runs(runs))
    }
    truths = [Truth(float(costs[chosen[arm]])) for arm in ("arm0", "arm1")]
    is_claimed, count = judged(truths, draw)
    return is_claimed, len(runs) + count


def cost(
    multiplier: float,
    noise: float,
    pairs: int,
    draw: Draw,
) -> Outcome:
    """Simulate tokens to match of an arm that learns `multiplier` times as fast.

    Args:
        noise: standard deviation of an evaluation's error, nats per token.
    """
    runs = []
    steps = np.arange(21.0)
    for arm, speed in (("arm0", 1.0), ("arm1", multiplier)):
        for seed in range(pairs):
            shift = SD * draw.normal() / math.sqrt(2)
            losses = 3.5 + 2.5 * (1 + speed * steps) ** -0.5 + shift
            losses = losses + noise * draw.normal(size=21)
            values = np.stack([steps, steps * 25, steps * 150, steps, losses], axis=1)
            runs.append(made_run(arm, seed, values))
    (row,) = look(runs, Claim(measure="tokens_to_match"), TOKENS_TO_MATCH)
    return row.verdict in DECIDED, len(runs)


# --- cells ----------------------------------------------------------------------------------------

DECIDED = ("better", "worse", "equivalent", "noninferior")
WITHIN = ("better", "equivalent", "noninferior")
"""Verdicts that are wrong of an arm that is worse by the margin."""


def cells() -> Iterator[tuple[str, str, str, Callable[[Draw], Outcome]]]:
    """Yield cell, pairs, what is counted, and what simulates one study."""
    different = Claim()
    stuck = Truth(stuck=0.2)
    diverged = Truth(diverged=0.2)
    nulls = {
        "no failures": (NULL, NULL),
        "baseline stuck in 20 %": (stuck, NULL),
        "both stuck in 20 %": (stuck, stuck),
        "both diverge in 20 %": (diverged, diverged),
        "Holm over 3 arms": (NULL,) * 4,
    }
    for name, truths in nulls.items():
        for pairs in PAIRS:
            study = partial(one_look, truths, pairs, different, DECIDED)
            yield name, str(pairs), "false verdicts", study
    for noise in (0.0, 0.01, 0.03):
        for pairs in PAIRS:
            study = partial(cost, 1.0, noise, pairs)
            yield (
                f"tokens to match, evaluation noise {noise:g}",
                str(pairs),
                "false verdicts",
                study,
            )
    for effect in (0.0, 0.8, 1.2, 2.0):
        counted = "verdicts" if effect else "false verdicts"
        study = partial(race, (NULL, Truth(-effect)), LOOKS)
        yield f"race, effect {effect:g} sd", "3, 5, 8", counted, study
    races = {
        "race of four arms": (NULL,) * 4,
        "race, both stuck in 20 %": (stuck, stuck),
    }
    for name, truths in races.items():
        yield name, "3, 5, 8", "false verdicts", partial(race, truths, LOOKS)
    for rates in (3, 5):

        def judge_often(truths: Sequence[Truth], draw: Draw) -> Outcome:
            return race(truths, LOOKS, draw)

        study = partial(tuned, rates, judge_often)
        counted = "false verdicts" if rates == 3 else "verdicts"
        yield f"race, tuned over {rates} rates", "3, 5, 8", counted, study
    for pairs in PAIRS:

        def judge_once(truths: Sequence[Truth], draw: Draw, pairs: int = pairs) -> Outcome:
            return one_look(truths, pairs, different, DECIDED, draw)

        yield (
            "study, tuned over 5 rates",
            str(pairs),
            "false verdicts",
            partial(tuned, 5, judge_once),
        )
    borders = {
        "equivalent": (1.2, WITHIN),
        "noninferior": (1.2, WITHIN),
        "either": (1.2, WITHIN),
        "either, no effect": (0.0, ("better", "worse")),
    }
    for name, (effect, wrong) in borders.items():
        direction = name.partition(",")[0]
        claim = Claim(direction=direction, margin=1.2 * SD)
        for pairs in PAIRS:
            study = partial(one_look, (NULL, Truth(effect)), pairs, claim, wrong)
            yield f"{name}, margin 1.2 sd", str(pairs), "false verdicts", study


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=10_000)
    parser.add_argument("--output", type=Path, default=TABLE)
    options = parser.parse_args()
    every = list(cells())
    totals, done = read_table(options.output, len(every))
    for _ in range(0, options.repetitions, BATCH):
        for number, (_, _, counted, study) in enumerate(every):
            # Power, and what tuning costs, need no more.
            most = BATCH if counted == "verdicts" else options.repetitions
            batch = min(BATCH, most - done[number])
            draw = np.random.default_rng([number, done[number]])
            for _ in range(batch):
                totals[number] += study(draw)
            done[number] += max(batch, 0)
        write_table(options.output, every, totals, done)


def read_table(path: Path, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Return how often each cell claimed with its number of runs in all, and its repetitions."""
    if not path.exists():
        return np.zeros((rows, 2)), np.zeros(rows, int)
    table = pd.read_csv(path)
    done = table.repetitions.to_numpy(copy=True)
    counts = (table.percent * done / 100).round()
    return np.stack([counts, table["mean runs"] * done], axis=1), done


def write_table(
    path: Path,
    every: Sequence[tuple[str, str, str, object]],
    totals: np.ndarray,
    done: np.ndarray,
) -> None:
    """Write a row per cell."""
    table = pd.DataFrame([cell[:3] for cell in every], columns=["cell", "pairs", "counted"])
    shares, runs = (totals / done[:, None]).T
    table["percent"] = (100 * shares).round(2)
    table["mean runs"] = runs.round(1)
    table["repetitions"] = done
    table.to_csv(path, index=False)


if __name__ == "__main__":
    main()
