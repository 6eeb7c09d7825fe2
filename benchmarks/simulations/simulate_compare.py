"""How often compare's verdicts are wrong: simulated studies, judged by compare itself. Writes
compare.csv beside this file, whose rates docs/compare.md and docs/studies.md show.

    python benchmarks/simulations/simulate_compare.py [--repetitions 2000] [--only PART] [--csv
    FILE]

Every study is of made runs: a validation loss that falls as a power of the tokens and with the
learning rate's decay, a shift per seed that both recipes share, one of each run's own, and noise of
every evaluation.
"""

from __future__ import annotations

import argparse
import csv
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
from scipy import special

from efftrain_cli.compare import inference
from efftrain_cli.compare.comparison import Comparison, compare
from efftrain_cli.compare.engine import Looks, Verdict, answer_by_t, correct, judge_question
from efftrain_cli.compare.groups import Group
from efftrain_cli.compare.measures import (
    FINAL_LOSS,
    NOT_REACHED,
    Question,
    cost_question,
    cost_to_reach,
    final_loss,
    match,
    read_end,
)
from efftrain_cli.compare.planning import assured_sd, seeds_needed
from efftrain_cli.compare.reading import RunNumbers, ZeroShot
from efftrain_cli.compare.sensitivity import Curve, sensitivity, why_not_judged, windows
from efftrain_cli.compare.sequential import schedule
from efftrain_cli.foundation.why import Why
from efftrain_cli.run.stability import measure

TOKENS = 1e6
EVALUATIONS = 60
SEED_SD, RUN_SD = 0.02, 0.012
QUIET, NOISY = 0.003, 0.02
Random = np.random.Generator


def match_ratio(baseline: RunNumbers, method: RunNumbers, axis: str) -> float:
    """As compare matches two runs."""
    return match(read_end(baseline, axis), read_end(method, axis))


def true_loss(share: np.ndarray | float) -> np.ndarray:
    """Nats per token at a share of the budget."""
    share = np.asarray(share, float)
    return 2.6 + 0.5 * (share + 0.01) ** -0.3 + 0.25 * (1 - share)


def run_of(
    recipe: str, seed: int, losses: np.ndarray, status: str = "finished", **changes: object
) -> RunNumbers:
    """A run as compare reads it, of these validation losses at equal distances."""
    shares = np.linspace(0, 1, len(losses))
    data = {"valid_hash": "v", "tokenizer_hash": "t", "valid_windows": 8, "seq_len": 8}
    values: dict[str, object] = {
        "name": f"{recipe}-seed{seed}",
        "recipe_name": recipe,
        "seed": seed,
        "recipe": {"seed": seed, "train.tokens": TOKENS, "name": recipe},
        "origin": {"data": data},
        "status": status,
        "marks": (),
        "evaluated": {
            "step": np.arange(len(losses)) * 10.0,
            "val_loss": losses,
            "tokens": TOKENS * shares,
            "flops": 6e5 * TOKENS * shares,
            "seconds": 100 * shares,
        },
        "step": 10 * (len(losses) - 1),
        "tokens": TOKENS,
        "flops": 6e5 * TOKENS,
        "seconds": 100.0,
        "stability": measure({name: np.empty(0) for name in ("step", "loss_ratio", "nonfinite")}),
        "nonfinite_stops": 0,
        "mfu": None,
        "spent": {},
        "series": {},
        "zero_shot": (),
    }
    return RunNumbers(**{**values, **changes})  # type: ignore[arg-type]


def arm(
    random: Random,
    recipe: str,
    shifts: np.ndarray,
    noise: float,
    worse: float = 0.0,
    first: int = 0,
) -> list[RunNumbers]:
    """One recipe over the seeds that `shifts` belong to; `worse` nats above the others."""
    curve = true_loss(np.linspace(0, 1, EVALUATIONS + 1)) + worse
    return [
        run_of(
            recipe,
            seed,
            curve + shift + random.normal(0, RUN_SD) + random.normal(0, noise, len(curve)),
        )
        for seed, shift in enumerate(shifts, first)
    ]


def pair(
    random: Random, n: int, noises: tuple[float, float] = (QUIET, NOISY), worse: float = 0.0
) -> list[list[RunNumbers]]:
    """Two recipes over the same n seeds."""
    shifts = random.normal(0, SEED_SD, n)
    return [arm(random, "a", shifts, noises[0]), arm(random, "b", shifts, noises[1], worse)]


def share(repetitions: int, found: Callable[[], bool]) -> float:
    """How often something is found."""
    return sum(found() for _ in range(repetitions)) / repetitions


def significant(values: list[float] | np.ndarray) -> bool:
    """By the paired t test."""
    p = inference.paired_t(values).p
    return p is not None and p < inference.ALPHA


# --- the old rules, for comparison ----------------------------------------------------------------


def first_crossing(run: RunNumbers, target: float) -> float:
    """Tokens at the first evaluation at or below the target, on the straight line from the one
    before."""
    x, loss = run.evaluated["tokens"], run.evaluated["val_loss"]
    i = int(np.flatnonzero(loss <= target)[0])
    return float(np.interp(-target, -loss[i - 1 : i + 1], x[i - 1 : i + 1]))


def old_cost(a: list[RunNumbers], b: list[RunNumbers]) -> bool:
    """Log ratios of first crossings of the best loss that every baseline reached."""
    target = max(run.evaluated["val_loss"].min() for run in a)
    if any(run.evaluated["val_loss"].min() > target for run in b):
        return False
    return significant(
        [
            math.log(first_crossing(x, target) / first_crossing(y, target))
            for x, y in zip(a, b, strict=True)
        ]
    )


# --- the parts of the table -----------------------------------------------------------------------

Row = tuple[str, str, str]


def jitter(repetitions: int, random: Random, sizes: tuple[int, ...] = (3, 5, 10)) -> list[Row]:
    """Two equal methods, evaluation noise 0.003 and 0.02: how often each measure declares one
    better."""
    rows = []
    level = float(true_loss(0.9))
    for n in sizes:
        studies = [pair(random, n) for _ in range(repetitions)]
        rates = {
            "final loss": [
                significant(
                    [
                        y.evaluated["val_loss"][-1] - x.evaluated["val_loss"][-1]
                        for x, y in zip(a, b, strict=True)
                    ]
                )
                for a, b in studies
            ],
            "cost to match": [
                significant([match_ratio(x, y, "tokens") for x, y in zip(a, b, strict=True)])
                for a, b in studies
            ],
            "cost to a fixed target": [_fixed(a, b, level) for a, b in studies],
            "best loss (not tested)": [
                significant(
                    [
                        y.evaluated["val_loss"].min() - x.evaluated["val_loss"].min()
                        for x, y in zip(a, b, strict=True)
                    ]
                )
                for a, b in studies
            ],
            "first crossing (deleted)": [old_cost(a, b) for a, b in studies],
        }
        rows += [
            (
                "equal methods, evaluation noise 0.003 and 0.02",
                f"{name}, n = {n}",
                _percent(np.mean(v)),
            )
            for name, v in rates.items()
        ]
    return rows


def _fixed(a: list[RunNumbers], b: list[RunNumbers], level: float) -> bool:
    """As compare does with --target-loss: t where all reached it, else ranks with bounds."""
    costs = [[cost_to_reach(run, "tokens", level) for run in side] for side in (a, b)]
    if NOT_REACHED not in (*costs[0], *costs[1]):
        return significant([math.log(x / y) for x, y in zip(*costs, strict=True)])  # type: ignore[operator]
    values = [[TOKENS if isinstance(cost, Why) else cost for cost in side] for side in costs]
    beyond = [[isinstance(cost, Why) for cost in side] for side in costs]
    return inference.rank_sum(*values, *beyond).p < inference.ALPHA


def bias(repetitions: int, random: Random) -> list[Row]:
    """The mean cost to reach a loss at 95 % of the budget against the true one."""
    rows = []
    target = float(true_loss(0.95))
    for noise in (0.003, 0.01, 0.02):
        for name, read in (
            ("isotonic fit", lambda run: cost_to_reach(run, "tokens", target)),
            ("first crossing (deleted)", lambda run: _or_none(run, target)),
        ):
            found = []
            for _ in range(repetitions):
                losses = true_loss(np.linspace(0, 1, EVALUATIONS + 1)) + random.normal(
                    0, noise, EVALUATIONS + 1
                )
                # The crossing lies inside the run; what is not reached by its end is read at the
                # end.
                cost = read(run_of("a", 0, losses))
                found.append(cost if isinstance(cost, float) else TOKENS)
            rows.append(
                (
                    "bias of a single run's cost",
                    f"{name}, evaluation noise {noise}",
                    f"{100 * (np.mean(found) / (0.95 * TOKENS) - 1):+.2f} %",
                )
            )
    return rows


def _or_none(run: RunNumbers, target: float) -> float | None:
    return first_crossing(run, target) if (run.evaluated["val_loss"] <= target).any() else None


def worse_method(repetitions: int, random: Random) -> list[Row]:
    """A method 0.03 nats worse than the baseline, or better: the default scale finds either as
    often."""
    rows = []
    for worse in (0.03, -0.03):
        outcomes = []
        for _ in range(repetitions):
            a, b = pair(random, 5, (QUIET, QUIET), worse)
            estimate = inference.exponentiated(
                inference.paired_t([match_ratio(x, y, "tokens") for x, y in zip(a, b, strict=True)])
            )
            better = "better" if inference.is_better(estimate) else "worse"
            outcomes.append(better if estimate.p < inference.ALPHA else "undecided")
        words = "worse" if worse > 0 else "better"
        rows.append(
            (
                f"a method 0.03 nats {words}, n = 5",
                f'cost to match says "{words}"',
                _percent(outcomes.count(words) / repetitions),
            )
        )
    return rows


def failures(repetitions: int, random: Random) -> list[Row]:
    """Runs that diverge or get stuck: how often the final loss is claimed, where the runs that
    finish are equal, and where they differ by two standard deviations."""
    kinds = (
        ("diverge", _dead, 0.1, 0.1),
        ("diverge", _dead, 0.3, 0.3),
        ("diverge", _dead, 0.3, 0.0),
        ("get stuck", _stuck, 0.2, 0.0),
        ("get stuck", _stuck, 0.2, 0.2),
    )
    rows = []
    for word, fail, of_a, of_b in kinds:
        for n in (3, 4, 5, 8, 10):
            rate = _claims(repetitions, random, n, fail, (of_a, of_b), 0.0)
            what = f"equal losses, {of_a:.0%} of A and {of_b:.0%} of B {word}"
            rows.append((what, f"final loss, n = {n}", _percent(rate)))
    shift = 2 * math.sqrt(2) * RUN_SD
    for n in (5, 8, 12):
        rate = _claims(repetitions, random, n, _dead, (0.1, 0.1), shift)
        what = "B two sd of a pair worse, 10% of A and of B diverge"
        rows.append((what, f'final loss says "worse", n = {n}', _percent(rate)))
    return rows


def _claims(
    repetitions: int,
    random: Random,
    n: int,
    fail: Callable[[RunNumbers], RunNumbers],
    shares: tuple[float, float],
    worse: float,
) -> float:
    """How often the final loss is claimed better or worse (`worse` only with a true difference)."""
    found = 0
    for _ in range(repetitions):
        sides = pair(random, n, (QUIET, QUIET), worse)
        groups = []
        for side, often in zip(sides, shares, strict=True):
            runs = [fail(run) if random.random() < often else run for run in side]
            groups.append(Group(runs[0].recipe_name, tuple(runs)))
        (judged,) = correct([judge_question(FINAL_LOSS, *groups)])
        claimed = () if judged.why else ("worse",) if worse else ("better", "worse")
        found += judged.outcome in claimed
    return found / repetitions


def _stuck(run: RunNumbers) -> RunNumbers:
    """A run that learns nothing after a tenth of its budget."""
    losses = run.evaluated["val_loss"]
    stuck = losses + np.maximum(0, losses[EVALUATIONS // 10] - losses)
    return run_of(run.recipe_name, run.seed, stuck)


def _dead(run: RunNumbers) -> RunNumbers:
    return run_of(
        run.recipe_name, run.seed, run.evaluated["val_loss"][: EVALUATIONS // 2], "diverged"
    )


def _final(comparison: Comparison) -> str:
    return next(d.outcome for d in comparison.verdicts if d.question.key == "final_loss")


def partial_pairs(repetitions: int, random: Random) -> list[Row]:
    """10 + 10 runs of equal methods that share 2, 6 or 10 seeds."""
    rows = []
    for shared in (0, 2, 6, 10):
        found = 0
        for _ in range(repetitions):
            shifts = random.normal(0, SEED_SD, 20)
            a = arm(random, "a", shifts[:10], QUIET)
            b = arm(random, "b", shifts[10 - shared : 20 - shared], QUIET, first=10 - shared)
            found += _final(compare([*a, *b])) in ("better", "worse")
        rows.append(
            (
                "equal methods, 10 + 10 runs",
                f"final loss, {shared} seeds shared",
                _percent(found / repetitions),
            )
        )
    return rows


def many_lines(repetitions: int, random: Random) -> list[Row]:
    """Equal methods: how often any line of the table declares a difference."""
    found = [0, 0]
    for _ in range(repetitions):
        shifts = random.normal(0, SEED_SD, 5)
        runs = [run for name in "abcd" for run in arm(random, name, shifts, QUIET)]
        comparison = compare(runs)
        verdicts = [
            (d.question.key == "final_loss", d.outcome in ("better", "worse"))
            for d in comparison.verdicts
            if d.question.tested != "score"
        ]
        found[0] += any(shown for primary, shown in verdicts if primary)
        found[1] += any(shown for primary, shown in verdicts if not primary)
    what = "three methods equal to the baseline, n = 5"
    return [
        (what, "any verdict by final loss", _percent(found[0] / repetitions)),
        (what, "any verdict in any other line", _percent(found[1] / repetitions)),
    ]


def schedules(repetitions: int, random: Random) -> list[Row]:
    """WSD against cosine with equal final losses, and a true speed-up read from sparse and dense
    evaluations."""
    rows = []
    shares = np.linspace(0, 1, EVALUATIONS + 1)
    question = cost_question("tokens", None)
    for decay in (0.1, 0.2):
        for n in (3, 5, 10):
            old = judged = 0
            for _ in range(repetitions):
                shifts = random.normal(0, SEED_SD, n)
                a = arm(random, "a", shifts, QUIET)
                # As high as before the decay until its begin, then straight down to the same end.
                above = np.clip((1 - shares) / decay, 0, 1) - (1 - shares)
                b = [
                    run_of("b", run.seed, run.evaluated["val_loss"] + 0.25 * above)
                    for run in arm(random, "b", shifts, QUIET)
                ]
                wsd = {"optim.schedule": "wsd", "optim.decay_share": decay}
                b = [replace(run, recipe=run.recipe | wsd) for run in b]
                scores = [match_ratio(x, y, "tokens") for x, y in zip(a, b, strict=True)]
                old += significant(scores)
                judged += _is_claimed(question, a, b)
            what = f"equal finals, WSD (last {decay:.0%}) against cosine, n = {n}"
            rows += _claims_by_both_rules(what, old / repetitions, judged / repetitions)
    # B is 2.5 times as fast, on a curve without decay: tokens to match are 2.5 at every target.
    for evaluations in (4, 6, 8, 16, 60):
        inside = judged = 0
        at = np.linspace(0, 1, evaluations + 1)
        for _ in range(repetitions):
            shifts = random.normal(0, SEED_SD, 5)
            groups = []
            for name, speed in (("a", 1.0), ("b", 2.5)):
                curve = 2.6 + 0.5 * (speed * at + 0.01) ** -0.3
                runs = [
                    run_of(
                        name,
                        seed,
                        curve + shift + random.normal(0, RUN_SD) + random.normal(0, QUIET, len(at)),
                    )
                    for seed, shift in enumerate(shifts)
                ]
                groups.append(Group(name, tuple(runs)))
            (found,) = correct([judge_question(question, *groups)])
            if found.why is None:
                judged += 1
                inside += found.estimate.low <= 2.5 <= found.estimate.high
        what = f"true tokens to match 2.5x, {evaluations} evaluations, n = 5"
        rows.append((what, "judged", _percent(judged / repetitions)))
        covered = _percent(inside / judged) if judged else "-"
        rows.append((what, "of these, the interval holds 2.5x", covered))
    # Equal finals, and a cosine that falls only to a share of its peak: less of the loss falls with
    # the rate.
    for left in (0.1, 0.25, 0.5, 0.55, 0.75):
        old = judged = 0
        for _ in range(repetitions):
            shifts = random.normal(0, SEED_SD, 5)
            a = []
            for run in arm(random, "a", shifts, QUIET):
                a.append(replace(run, recipe=run.recipe | {"optim.lr": 1e-3, "optim.min_lr": 0.0}))
            b = []
            for run in arm(random, "b", shifts, QUIET):
                losses = run.evaluated["val_loss"] - left * 0.25 * (1 - shares)
                rates = {"optim.lr": 1e-3, "optim.min_lr": left * 1e-3}
                higher = run_of("b", run.seed, losses)
                b.append(replace(higher, recipe=higher.recipe | rates))
            scores = [match_ratio(x, y, "tokens") for x, y in zip(a, b, strict=True)]
            old += significant(scores)
            judged += _is_claimed(question, a, b)
        what = f"equal finals, cosine to {left:.0%} of its peak against cosine to 0, n = 5"
        rows += _claims_by_both_rules(what, old / repetitions, judged / repetitions)
    return rows


def _claims_by_both_rules(what: str, old: float, judged: float) -> list[Row]:
    """Rows of the shares claimed without and with a look at the learning rates' shapes."""
    return [
        (what, "cost to match whatever the shapes (deleted)", _percent(old)),
        (what, "cost to match", _percent(judged)),
    ]


def _is_claimed(question: Question, a: list[RunNumbers], b: list[RunNumbers]) -> bool:
    (found,) = correct([judge_question(question, Group("a", tuple(a)), Group("b", tuple(b)))])
    return found.why is None and found.outcome in ("better", "worse")


def multipliers(repetitions: int, random: Random) -> list[Row]:
    """B needs half the tokens for every loss; its learning rate's decay is worth nothing, or as
    much as A's."""
    rows = []
    at = np.linspace(0, 1, EVALUATIONS + 1)
    for decay in (0.0, 0.15, 0.3):
        logs = []
        for _ in range(repetitions):
            ends = []
            for name, speed in (("a", 1.0), ("b", 2.0)):
                curve = 2.6 + 0.5 * (speed * at + 0.01) ** -0.3 + decay * (1 - at)
                ends.append(run_of(name, 0, curve + random.normal(0, QUIET, len(at))))
            logs.append(match_ratio(ends[0], ends[1], "tokens"))
        what = f"B needs half the tokens at every budget, a decay worth {decay:g} nats"
        rows.append((what, "tokens to match, mean", f"{math.exp(np.mean(logs)):.2f}x"))
    return rows


def intervals(repetitions: int, random: Random) -> list[Row]:
    """B is 1.2 times as fast, on a curve without decay; A is evaluated every 130 steps, B every
    110."""
    rows = []
    for steps in (500, 1000, 2000, 5000, 10_000):
        judged = inside = better = worse = 0
        for _ in range(repetitions):
            shifts = random.normal(0, SEED_SD, 5)
            runs = []
            for name, speed, every in (("a", 1.0, 130), ("b", 1.2, 110)):
                runs += [
                    _run_every(name, seed, shift, random, (steps, every), speed)
                    for seed, shift in enumerate(shifts)
                ]
            found = compare(runs).verdict("tokens_to_match", "b")
            assert found is not None
            if found.why is None:
                judged += 1
                inside += found.estimate.low <= 1.2 <= found.estimate.high
                better += found.outcome == "better"
                worse += found.outcome == "worse"
        what = f"true tokens to match 1.2x, evaluated every 130 and 110 of {steps:,} steps, n = 5"
        rows.append((what, "judged", _percent(judged / repetitions)))
        if judged:
            rows.append((what, "of these, the interval holds 1.2x", _percent(inside / judged)))
            rows.append((what, '"better", "worse"', f"{better / judged:.1%}, {worse / judged:.1%}"))
    return rows


def _run_every(
    name: str, seed: int, shift: float, random: Random, evaluated: tuple[int, int], speed: float
) -> RunNumbers:
    """A run of so many steps, evaluated every so many and at its end."""
    steps, every = evaluated
    at = np.array([*range(0, steps, every), steps], float)
    curve = 2.6 + 0.5 * (speed * at / steps + 0.01) ** -0.3
    noise = random.normal(0, RUN_SD) + random.normal(0, QUIET, len(at))
    run = run_of(name, seed, curve + shift + noise, step=steps)
    tokens = TOKENS * at / steps
    costs = {"tokens": tokens, "flops": 6e5 * tokens}
    seen = run.evaluated | costs | {"step": at, "seconds": 100 * at / steps}
    return replace(run, evaluated=seen, recipe=run.recipe | {"eval.every": every})


def targets(repetitions: int, random: Random) -> list[Row]:
    """Equal methods, and the most favourable of 15 targets, between half and 95 % of the budget."""
    rows = []
    levels = [float(true_loss(share)) for share in np.linspace(0.5, 0.95, 15)]
    for n in (3, 5, 10):
        one = best = 0
        for _ in range(repetitions):
            a, b = pair(random, n, (QUIET, QUIET))
            claimed = [_is_claimed(cost_question("tokens", level), a, b) for level in levels]
            one += claimed[7]
            best += any(claimed)
        what = f"equal methods, tokens to a target, n = {n}"
        rows.append((what, "a target that was fixed before", _percent(one / repetitions)))
        rows.append((what, "the best of 15, chosen afterwards", _percent(best / repetitions)))
    return rows


def plans(repetitions: int, random: Random) -> list[Row]:
    """A true difference in one of the comparisons that a plan promises to show in 80 % of studies;
    how often it is."""
    rows = []
    for n, looks, members in (
        (3, 1, 1),
        (3, 1, 3),
        (5, 1, 1),
        (5, 1, 3),
        (5, 2, 1),
        (5, 2, 3),
        (10, 1, 1),
        (10, 1, 3),
        (10, 3, 1),
        (10, 3, 3),
    ):
        plan = Looks(schedule(n, looks), looks, registered=True)
        one_sd = inference.Estimate(0.0, se=1 / math.sqrt(n), df=n - 1)
        size = inference.detectable(one_sd, plan.level(inference.ALPHA / members, 2))
        shown = sum(_shows(size, members, plan, random) for _ in range(repetitions))
        what = f"study --plan, {n} seeds, {looks} looks, {members} comparisons: planned 80 %"
        rows.append((what, f"shown, {size:.1f} sd", _percent(shown / repetitions)))
    for n in (3, 5, 10):
        for members in (1, 3):
            seeds, shown, assured, ranges = [], 0, 0, 0
            level = inference.ALPHA / members
            for _ in range(repetitions):
                pilot = inference.paired_t(random.normal(0, 1, n))
                needed = seeds_needed(1.0, assured_sd(pilot.sd, n - 1), True, level)
                assert needed is not None
                seeds.append(needed)
                assured += power_of(needed, 1.0, level) >= 0.8
                looks = Looks((needed,), registered=True)
                shown += _shows(1.0, members, looks, random)
                size = inference.detectable(pilot, level)
                ranges += power_of(n, size, level)
            what = (
                f"compare --plan after {n} pairs, {members} comparisons, true difference 1 sd:"
                " planned 80 %"
            )
            rows.append(
                (what, f"shown, median {np.median(seeds):.0f} seeds", _percent(shown / repetitions))
            )
            rows.append((what, "plans that give 80 % or more", _percent(assured / repetitions)))
            rows.append(
                (what, '"could have seen" of the pairs, shown', _percent(ranges / repetitions))
            )
    return rows


def power_of(n: int, effect: float, alpha: float) -> float:
    """Chance that a two-sided paired t test of `n` seeds finds an effect of so many standard
    deviations."""
    critical = special.stdtrit(n - 1, 1 - alpha / 2)
    return float(1 - np.nan_to_num(special.nctdtr(n - 1, effect * math.sqrt(n), critical)))


def _shows(size: float, members: int, looks: Looks, random: Random) -> bool:
    """Whether a study shows the difference of the first of its comparisons, which is `size`
    standard deviations."""
    question = Question("final_loss", "", "", "", final_loss, "difference")
    none = Verdict(question, "", (), inference.Estimate(math.nan))
    family = []
    for place in range(members):
        values = random.normal(-size if place == 0 else 0.0, 1, looks.plan[-1])
        estimates = [inference.paired_t(values[:seeds]) for seeds in looks.plan]
        family.append(answer_by_t(none, estimates, looks))
    return correct(family, looks)[0].outcome == "better"


def zero_shot(repetitions: int, random: Random) -> list[Row]:
    """8 tasks, 3 recipes equal to the baseline, 5 seeds: how often any task shows a winner."""
    found = raw = 0
    losses = true_loss(np.linspace(0, 1, 3))
    for _ in range(repetitions):
        seeds = random.normal(0, 0.01, (8, 5))
        runs = []
        for name in "abcd":
            for seed in range(5):
                scores = 0.4 + seeds[:, seed] + random.normal(0, 0.01, 8)
                results = tuple(
                    ZeroShot((f"task{i}", "p", "", "acc"), float(score), "step-1", 1.0)
                    for i, score in enumerate(scores)
                )
                runs.append(
                    run_of(name, seed, losses + 0.001 * random.standard_normal(), zero_shot=results)
                )
        verdicts = [d for d in compare(runs).verdicts if d.question.tested == "score"]
        found += any(d.outcome in ("better", "worse") for d in verdicts)
        raw += any(d.estimate.p < inference.ALPHA for d in verdicts)
    what = "8 zero-shot tasks, three recipes equal to the baseline"
    return [
        (what, "any winner, corrected", _percent(found / repetitions)),
        (what, "any winner, uncorrected (deleted)", _percent(raw / repetitions)),
    ]


def margins(repetitions: int, random: Random) -> list[Row]:
    """Methods that differ by exactly the margin, and by nothing."""
    rows = []
    for n in (3, 5, 10):
        at = [inference.paired_t(random.normal(0.02, 0.0155, n)) for _ in range(repetitions)]
        none = [inference.paired_t(random.normal(0.0, 0.0155, n)) for _ in range(repetitions)]
        for direction in ("equivalent", "noninferior"):
            wrong = np.mean([inference.claim_p(e, direction, 0.02) < inference.ALPHA for e in at])
            right = np.mean([inference.claim_p(e, direction, 0.02) < inference.ALPHA for e in none])
            rows.append(
                (
                    f'"{direction}" within 0.02 at sd 0.0155',
                    f"truly 0.02 worse, n = {n}",
                    _percent(wrong),
                )
            )
            rows.append(
                (
                    f'"{direction}" within 0.02 at sd 0.0155',
                    f"truly equal, n = {n}",
                    _percent(right),
                )
            )
    asked = Question("final_loss", "", "", "", final_loss, "difference", direction="noninferior")
    asked = replace(asked, margin=0.02)
    looks = Looks(registered=True)
    said = 0
    for _ in range(repetitions):
        none = Verdict(asked, "", (), inference.Estimate(math.nan))
        arms = random.normal(0.02, 0.0155, (10, 5))
        family = [answer_by_t(none, [inference.paired_t(each)], looks) for each in arms]
        said += any(each.opposite for each in correct(family, looks))
    rows.append(
        (
            "ten arms truly 0.02 worse, n = 5",
            '"the interval says worse" than by 0.02, of any',
            _percent(said / repetitions),
        )
    )
    return rows


def tuning(repetitions: int, random: Random) -> list[Row]:
    """Equal methods, learning rates of equal worth, each recipe at its best of 5 on the runs that
    are compared; then only one."""
    rows = []
    for counts in ((5, 5), (1, 5), (1, 20)):
        found = 0
        for _ in range(repetitions):
            shifts = random.normal(0, SEED_SD, 5)
            runs = []
            for name, count in zip("ab", counts, strict=True):
                for i in range(count):
                    for run in arm(random, name, shifts, QUIET):
                        recipe = run.recipe | {"optim.lr": float(i)}
                        runs.append(replace(run, recipe=recipe, name=f"{name}{i}-{run.seed}"))
            found += _final(compare(runs)) in ("better", "worse")
        rows.append(
            (
                f"equal methods, best of {counts[0]} and {counts[1]} settings",
                "final loss, n = 5",
                _percent(found / repetitions),
            )
        )
    return rows


def tuned(repetitions: int, random: Random) -> list[Row]:
    """Identical methods, each at the best of five learning rates by its own tuning seeds, judged on
    fresh ones.

    A rate costs 0.008 nats times its squared distance in grid steps from the optimum, which lies
    anywhere within the middle step.
    """
    rows = []
    for seeds in (1, 3, 5):
        for n in (3, 5, 10):
            found = 0
            for _ in range(repetitions):
                worth = 0.008 * (np.arange(5) - 2 - random.uniform(-0.5, 0.5)) ** 2
                sides = []
                for _ in range(2):
                    tries = worth + random.normal(0, RUN_SD, (seeds, 5))
                    chosen = worth[tries.mean(0).argmin()]
                    sides.append(chosen + random.normal(0, RUN_SD, n))
                found += significant(sides[1] - sides[0])
            rows.append(
                (
                    f"identical methods, each tuned on {seeds} seeds of its own",
                    f"final loss, n = {n}",
                    _percent(found / repetitions),
                )
            )
    return rows


def blocks(repetitions: int, random: Random) -> list[Row]:
    """Methods that are tuned anew for every judged seed, beside one tuning for all at the same
    number of runs.

    The model is that of `tuned`, with the optimum anywhere within the grid; where a best rate is at
    the edge, the grids of both methods get one rate more there, twice at most, in each block by its
    own runs.
    """
    plans = {}
    for number in (4, 6, 10):
        for seeds in (1, 5):
            plans[f"{number} blocks, each tuned on {seeds}"] = ([seeds] * number, 1)
    for number in (6, 10):
        # Five rates a tuning seed, whether or not a grid grows.
        judged = number * (5 + 1) - 5 * 5
        plans[f"as many runs as {number} blocks of 1: tuned on 5, {judged} judged"] = ([5], judged)
    rows = []
    for plan, (tunings, judged) in plans.items():
        for apart in (0.0, 1.5):
            shift = apart * math.sqrt(2) * RUN_SD
            claimed = 0
            for _ in range(repetitions):
                claimed += significant(_tuned_differences(random, tunings, judged) + shift)
            true = f"methods {apart:g} sd of a pair apart" if apart else "identical methods"
            rows.append((plan, true, _percent(claimed / repetitions)))
    return rows


def _tuned_differences(random: Random, tunings: Sequence[int], judged: int) -> np.ndarray:
    """B less A by judged seed: so many after each tuning, which has so many seeds."""
    worth = 0.008 * (np.arange(9) - 4 - random.uniform(-2.5, 2.5)) ** 2
    differences = []
    for seeds in tunings:
        tries = worth + random.normal(0, RUN_SD / math.sqrt(seeds), (2, 9))
        low, high = 2, 7
        for _ in range(2):
            best = low + tries[:, low:high].argmin(1)
            # Both ends are decided before either grows.
            low, high = low - (best == low).any(), high + (best == high - 1).any()
        chosen = worth[low + tries[:, low:high].argmin(1)]
        losses = chosen[:, None] + random.normal(0, RUN_SD, (2, judged))
        differences.append(losses[1] - losses[0])
    return np.concatenate(differences)


def learning_rates(repetitions: int, random: Random) -> list[Row]:
    """Recipes of equal curves over the learning rate, whose optima lie at other rates or whose
    noise differs.

    A rate costs 0.03 nats times its squared distance in grid steps from the optimum, above it
    `steep` times as much. The old rule is the mean over one grid less each seed's lowest loss, over
    four rates and over seven.
    """
    rows = []
    cases = [(0.0, 0.05, 1), (0.0, 0.1, 1), (0.5, 0.01, 1), (1.0, 0.01, 1), (0.5, 0.01, 2)]
    for apart, noise, steep in cases:
        for n in (3, 5, 10):
            counts = {"4 rates": 0, "7 rates": 0, "now": 0, "judged": 0}
            for _ in range(repetitions):
                centre = random.uniform(-0.5, 0.5)
                noises = zip((centre, centre + apart), (0.01, noise), strict=True)
                sides = []
                for best, sd in noises:
                    away = np.arange(7) - 3 - best
                    worth = 0.03 * np.where(away > 0, steep, 1) * away**2
                    sides.append(worth + random.normal(0, sd, (n, 7)))
                for name, kept in (("4 rates", slice(2, 6)), ("7 rates", slice(0, 7))):
                    values = [_sensitivities(side[:, kept]) for side in sides]
                    counts[name] += significant(values[1] - values[0])
                curves = [_curve_of(side) for side in sides]
                if why_not_judged(curves):
                    continue
                counts["judged"] += 1
                around = zip(sides, windows(curves), strict=True)
                values = [_sensitivities(side[:, kept], best=True) for side, kept in around]
                counts["now"] += significant(values[1] - values[0])
            shares = {name: _percent(count / repetitions) for name, count in counts.items()}
            now = _percent(counts["now"] / max(1, counts["judged"]))
            rows.append(
                (
                    (
                        f"equal curves, {steep}x as steep above the optimum, optima {apart:g} steps"
                        f" apart, noise 1:{noise / 0.01:g}"
                    ),
                    f"lr_sensitivity, n = {n}",
                    (
                        f"{now}, in {shares['judged']} judged; over one grid of 4 rates"
                        f" {shares['4 rates']}, of 7 {shares['7 rates']}"
                    ),
                )
            )
    return rows


def _curve_of(losses: np.ndarray) -> Curve:
    """A curve over seven rates from losses by seed and rate."""
    seeds = tuple(range(len(losses)))
    rates = tuple(2.0**i for i in range(7))
    return Curve("", rates, tuple(map(tuple, losses.T)), (100.0,) * len(seeds), seeds)


def _sensitivities(losses: np.ndarray, best: bool = False) -> np.ndarray:
    """Sensitivity by seed, from losses by seed and rate; `best`: the best rate is in the middle."""
    rates = [2.0**i for i in range(losses.shape[1])]
    middle = losses.shape[1] // 2 if best else None
    return np.array([sensitivity(rates, row, 100.0, middle) for row in losses.tolist()])


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %"


PARTS = {
    "jitter": jitter,
    "bias": bias,
    "worse": worse_method,
    "failures": failures,
    "pairs": partial_pairs,
    "lines": many_lines,
    "schedules": schedules,
    "zeroshot": zero_shot,
    "margins": margins,
    "tuning": tuning,
    "tuned": tuned,
    "sensitivity": learning_rates,
    "multipliers": multipliers,
    "intervals": intervals,
    "targets": targets,
    "plans": plans,
    "blocks": blocks,
}


FIELDS = ("part", "what is true", "what is judged", "how often", "repetitions", "date")


def save(path: Path, part: str, rows: Sequence[Row], repetitions: int) -> None:
    """Write the rows of `part` into the table at `path`; rows of other parts stay."""
    saved: dict[str, list[list[str]]] = {}
    if path.exists():
        with path.open(newline="", encoding="utf-8") as file:
            for values in list(csv.reader(file))[1:]:
                saved.setdefault(values[0], []).append(values)
    now = f"{datetime.now(UTC):%Y-%m-%d}"
    saved[part] = [[part, *row, str(repetitions), now] for row in rows]
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(FIELDS)
        for name in PARTS:
            writer.writerows(saved.get(name, []))


def main() -> None:
    """Print the rows, and save them if `--csv` names a table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repetitions", type=int, default=2000)
    parser.add_argument("--only", choices=PARTS, action="append")
    parser.add_argument("--csv", type=Path, help="table whose rows of these parts are replaced")
    arguments = parser.parse_args()
    for place, (name, part) in enumerate(PARTS.items()):
        if not arguments.only or name in arguments.only:
            rows = part(arguments.repetitions, np.random.default_rng([20261121, place]))
            for row in rows:
                print("; ".join(row), flush=True)
            if arguments.csv is not None:
                save(arguments.csv, name, rows, arguments.repetitions)


if __name__ == "__main__":
    main()
