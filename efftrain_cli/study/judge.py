"""The verdicts of a study, from its runs: every primary measure of every arm against the baseline, at the looks so far.

Values, never a terminal: `screen.py` shows them. A diverged run is the worst result there is; a run that has not ended
is pending, and the look that needs it waits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from scipy import special

from efftrain_cli.compare import inference
from efftrain_cli.compare.comparison import at_common_evaluations
from efftrain_cli.compare.differences import PRIMARY, other_schedule
from efftrain_cli.compare.fairness import Label, why_cost_not_judged
from efftrain_cli.compare.groups import Group
from efftrain_cli.compare.inference import Estimate
from efftrain_cli.compare.measures import (
    Measure,
    match_ratio,
    needed_for,
    other_budgets,
    why_not_matched,
)
from efftrain_cli.compare.reading import RunNumbers
from efftrain_cli.compare.sensitivity import sensitivity
from efftrain_cli.compare.sequential import SHAPE, nominal_levels, sequential_p
from efftrain_cli.study.file import COSTS, LOSSES, Primary, StudyFile
from efftrain_cli.study.phases import Tuned
from efftrain_cli.sweep.trials import ENDED

FAILED = math.inf
Runs = Mapping[int, RunNumbers]
"""Seed -> run, of one arm."""


@dataclass(frozen=True)
class Verdict:
    """One primary measure of one arm against the baseline, at the last look that is complete."""

    primary: Primary
    arm: str
    seeds: tuple[int, ...]
    """Those that were judged."""
    estimate: Estimate
    """Arm less baseline, or baseline / arm for a cost; its interval holds at all looks together."""
    p: float
    """Of the direction asked for, all looks so far paid for."""
    p_holm: float
    """Corrected for the number of primaries and arms besides."""
    outcome: str
    """The direction where it is shown; for "different" what it is: better or worse; else "undecided"."""
    opposite: bool
    """Undecided, and the interval or the rank test says the opposite of what was asked: worse, or beyond the margin."""
    could_see: float | None
    """Smallest true difference that a study like this one shows with power 0.8; None where the spread says nothing."""
    note: str = ""
    """Why there is no interval, or by which test the verdict was reached."""


@dataclass(frozen=True)
class Judgement:
    """A study at its last complete look."""

    look: int
    """Looks taken; 0 before the first."""
    looks: tuple[int, ...]
    """Numbers of seeds at each planned look."""
    levels: tuple[float, ...]
    """Two-sided nominal level of each look's own t test, at the study's alpha."""
    verdicts: tuple[Verdict, ...]
    pending: tuple[str, ...]
    """Runs that the next look waits for."""
    labels: tuple[Label, ...] = ()
    """What a reader of the runs must know; "allowed" makes the study exploratory."""
    tuned: tuple[Tuned, ...] = ()
    """What each arm was trained with; empty until tuning has ended."""

    @property
    def decided(self) -> bool:
        """Every primary of every arm has been shown; further seeds would change nothing."""
        return bool(self.verdicts) and all(
            verdict.outcome != "undecided" for verdict in self.verdicts
        )

    @property
    def complete(self) -> bool:
        """No look is left, or none is needed."""
        return self.decided or self.look == len(self.looks)


def judge(
    file: StudyFile,
    runs: Mapping[str, Runs],
    withheld: str = "",
    rated: Mapping[float, Mapping[str, Runs]] | None = None,
) -> Judgement:
    """Judges a study.

    Args:
        runs: arm -> seed -> run, of those runs that exist.
        withheld: why nothing may be judged at all; empty where it may.
        rated: learning rate -> the same of the runs that lr_sensitivity is judged by.
    """
    runs, notes = _evaluated_alike(runs)
    rated = rated or {}
    # No confirmation runs exist where the only primary is lr_sensitivity.
    kinds = list(rated.values())
    if any(primary.measure != "lr_sensitivity" for primary in file.study.primary):
        kinds.append(runs)
    ended = {}
    for arm in file.study.arms:
        sides = (
            {seed for seed, run in kind.get(arm.name, {}).items() if run.status in ENDED}
            for kind in kinds
        )
        ended[arm.name] = set.intersection(*sides)
    looks, taken = file.looks, 0
    verdicts: tuple[Verdict, ...] = ()
    levels = nominal_levels(file.study.alpha, looks, 2)
    for number, seeds in enumerate(looks, 1):
        wanted = file.seeds[:seeds]
        missing = tuple(
            f"{arm.name} seed {seed}"
            for seed in wanted
            for arm in file.study.arms
            if seed not in ended[arm.name]
        )
        if missing:
            return Judgement(taken, looks, levels, verdicts, missing, notes)
        taken = number
        verdicts = _verdicts(file, runs, rated, taken, withheld)
        judgement = Judgement(taken, looks, levels, verdicts, (), notes)
        if judgement.decided:
            return judgement
    return judgement


def _evaluated_alike(
    runs: Mapping[str, Runs],
) -> tuple[dict[str, dict[int, RunNumbers]], tuple[Label, ...]]:
    """The runs, the finished ones reduced to the evaluations that all of them made, as `compare` reduces them."""
    finished = [
        (arm, seed)
        for arm, side in runs.items()
        for seed, run in side.items()
        if run.status == "finished"
    ]
    reduced, notes = at_common_evaluations([runs[arm][seed] for arm, seed in finished])
    found = {arm: dict(side) for arm, side in runs.items()}
    for (arm, seed), run in zip(finished, reduced, strict=True):
        found[arm][seed] = run
    return found, tuple(notes)


def _verdicts(
    file: StudyFile,
    runs: Mapping[str, Runs],
    rated: Mapping[float, Mapping[str, Runs]],
    taken: int,
    withheld: str,
) -> tuple[Verdict, ...]:
    base = file.study.baseline
    found = []
    for primary in file.study.primary:
        for arm in (arm.name for arm in file.study.arms if arm.name != base):
            if withheld:
                found.append(
                    _undecided(primary, arm, file.seeds[: file.looks[taken - 1]], withheld)
                )
            elif primary.measure == "lr_sensitivity":
                sides = [{rate: kind[name] for rate, kind in rated.items()} for name in (base, arm)]
                found.append(_sensitivity_verdict(file, primary, arm, sides[0], sides[1], taken))
            else:
                found.append(_verdict(file, primary, arm, runs[base], runs[arm], taken))
    decided = []
    for verdict, p in zip(found, inference.holm([verdict.p for verdict in found]), strict=True):
        outcome = verdict.outcome if p <= file.study.alpha else "undecided"
        opposite = verdict.opposite and outcome == "undecided"
        decided.append(replace(verdict, p_holm=p, outcome=outcome, opposite=opposite))
    return tuple(decided)


def _verdict(
    file: StudyFile, primary: Primary, arm: str, baseline: Runs, method: Runs, taken: int
) -> Verdict:
    seeds = file.seeds[: file.looks[taken - 1]]
    before, after = (
        Group(name, tuple(side[seed] for seed in seeds))
        for name, side in ((file.study.baseline, baseline), (arm, method))
    )
    if why := _why_not_judged(primary, before, after):
        return _undecided(primary, arm, seeds, why)
    scores = [score(primary, baseline[seed], method[seed]) for seed in seeds]
    if not all(map(math.isfinite, scores)):
        return _ranked(file, primary, arm, baseline, method, taken)
    return _by_t(file, primary, arm, scores, taken)


def _why_not_judged(primary: Primary, before: Group, after: Group) -> str:
    """Why the measure cannot be compared between these runs; empty where it can."""
    both = [*before.runs, *after.runs]
    axis = primary.measure.removesuffix("_to_target")
    if reason := why_cost_not_judged(axis, both):
        return f"{axis} are not judged: {reason}"
    if primary.target is not None:
        reason = other_budgets(both)
    else:
        reason = why_not_matched(both, axis) if primary.measure in COSTS else ""
        reason = reason or other_schedule(Measure(PRIMARY, "", "", ""), before, after, {})
    return reason and f"not judged: {reason}"


def _sensitivity_verdict(
    file: StudyFile,
    primary: Primary,
    arm: str,
    baseline: Mapping[float, Runs],
    method: Mapping[float, Runs],
    taken: int,
) -> Verdict:
    """lr_sensitivity, from rate -> seed -> run: a diverged run counts with its loss before training, so every seed has
    a number."""
    seeds = file.seeds[: file.looks[taken - 1]]
    before, after = (
        Group(name, tuple(by_seed[seed] for by_seed in side.values() for seed in seeds))
        for name, side in ((file.study.baseline, baseline), (arm, method))
    )
    why = _why_not_judged(primary, before, after)
    best = [[_best_of(side, seed) for seed in seeds] for side in (baseline, method)]
    for group, losses in zip((before, after), best, strict=True):
        if (
            not why and None in losses
        ):  # every loss would be that before training: as if nothing depended on the rate
            why = f"not judged: with seed {seeds[losses.index(None)]} no run of {group.label} finished, at any learning rate"
    if why:
        return _undecided(primary, arm, seeds, why)
    scores = [_sensitivity_of(method, seed) - _sensitivity_of(baseline, seed) for seed in seeds]
    verdict = _by_t(file, primary, arm, scores, taken)
    # A recipe that learns little at every rate is not sensitive either: its best loss stands beside.
    means = [sum(loss for loss in losses if loss is not None) / len(losses) for losses in best]
    failed = sum(run.status != "finished" for run in after.runs)
    note = f"its best loss is {means[1]:.3f} on average, {file.study.baseline}'s {means[0]:.3f}"
    note += f"; {failed} of its {len(after.runs)} runs diverged" if failed else ""
    return replace(verdict, note="; ".join(filter(None, (verdict.note, note))))


def _undecided(
    primary: Primary, arm: str, seeds: tuple[int, ...], why: str, estimate: Estimate | None = None
) -> Verdict:
    estimate = estimate or Estimate(math.nan, reason=why)
    return Verdict(primary, arm, seeds, estimate, 1.0, 1.0, "undecided", False, None, why)


def _sensitivity_of(side: Mapping[float, Runs], seed: int) -> float:
    runs = [side[rate][seed] for rate in sorted(side)]
    losses = [run.final_loss for run in runs]
    return sensitivity(sorted(side), losses, float(runs[0].evaluated["val_loss"][0]))


def _best_of(side: Mapping[float, Runs], seed: int) -> float | None:
    return min(
        (loss for by_seed in side.values() if (loss := by_seed[seed].final_loss) is not None),
        default=None,
    )


def _by_t(
    file: StudyFile, primary: Primary, arm: str, scores: Sequence[float], taken: int
) -> Verdict:
    """The verdict of a paired t test of `scores`, one number per seed, at the looks so far."""
    alpha, looks = file.study.alpha, file.looks
    seeds = file.seeds[: looks[taken - 1]]
    levels = nominal_levels(alpha, looks, 2)
    estimates = [
        _paired(primary, scores[:n], level) for n, level in zip(looks[:taken], levels, strict=False)
    ]
    estimate = estimates[-1]
    if estimate.se is None:
        return _undecided(primary, arm, seeds, estimate.reason, estimate)
    p = _over_looks(primary, estimates, looks)
    last = nominal_levels(alpha / file.comparisons, looks, sides_of(primary))[taken - 1]
    # Of two one-sided tests that must both pass, each may miss half of what the two together may.
    power = (1 + inference.POWER) / 2 if primary.direction == "equivalent" else inference.POWER
    seen = inference.detectable(estimate, last, power, one_sided=sides_of(primary) == 1)
    outcome, note = _outcome(primary, _clearest(estimates, looks)), ""
    if p <= alpha and outcome != _outcome(primary, estimate):
        outcome, p, note = (
            "undecided",
            1.0,
            f"an earlier look said {outcome}, the last one points the other way",
        )
    return Verdict(
        primary, arm, seeds, estimate, p, p, outcome, _opposite(primary, estimate), seen, note
    )


def _clearest(estimates: Sequence[Estimate], looks: Sequence[int]) -> Estimate:
    """The look that decides `sequential_p`: the largest deviate, weighted as its boundary is."""

    def weighted(look: tuple[int, Estimate]) -> float:
        seeds, estimate = look
        p = max(estimate.p or 0.0, 1e-300)
        return float(-special.ndtri(p / 2)) * (seeds / looks[-1]) ** (0.5 - SHAPE)

    return max(
        ((n, each) for n, each in zip(looks, estimates, strict=False) if each.p is not None),
        key=weighted,
    )[1]


def sides_of(primary: Primary) -> int:
    """2 where the primary is tested two-sided, else 1."""
    return 2 if primary.direction == "different" else 1


def _paired(primary: Primary, scores: Sequence[float], level: float) -> Estimate:
    estimate = inference.paired_t(scores, level)
    is_ratio = primary.measure not in LOSSES and math.isfinite(estimate.mean)
    return inference.exponentiated(estimate) if is_ratio else estimate


def _over_looks(primary: Primary, estimates: Sequence[Estimate], looks: Sequence[int]) -> float:
    """The direction's p-value, all looks so far paid for. Of two one-sided tests that must both pass each pays for its
    own looks."""
    p_values = [
        inference.claim_p(estimate, primary.direction, primary.margin) for estimate in estimates
    ]
    return sequential_p(p_values, looks, sides_of(primary))


def _gain(estimate: Estimate) -> tuple[float, float, float]:
    """(mean, low, high) of how much better the arm is: nats less, or the logarithm of the ratio."""
    low, high = estimate.low or 0.0, estimate.high or 0.0
    if estimate.log:
        return math.log(estimate.mean), math.log(low), math.log(high)
    return -estimate.mean, -high, -low


def _outcome(primary: Primary, estimate: Estimate) -> str:
    if primary.direction != "different":
        return primary.direction
    return "better" if _gain(estimate)[0] > 0 else "worse"


def _opposite(primary: Primary, estimate: Estimate) -> bool:
    _, low, high = _gain(estimate)
    margin = primary.margin or 0.0
    size = math.log1p(margin) if estimate.log else margin
    if primary.direction == "better":
        return high < 0
    if primary.direction == "noninferior":
        return high < -size
    return primary.direction == "equivalent" and (high < -size or low > size)


def score(primary: Primary, baseline: RunNumbers, method: RunNumbers) -> float:
    """One pair of runs: the method's loss less the baseline's, or the logarithm of baseline's cost / method's. Not
    finite where a run failed or did not reach the target."""
    if baseline.final_loss is None or method.final_loss is None:
        return math.nan
    if primary.measure == "final_loss":
        return method.final_loss - baseline.final_loss
    axis = primary.measure.removesuffix("_to_target")
    if primary.target is None:
        return match_ratio(baseline, method, axis)
    costs = [needed_for(run, axis, primary.target) for run in (baseline, method)]
    return math.log(costs[0] / costs[1]) if costs[0] and costs[1] else math.nan


def rank_value(primary: Primary, run: RunNumbers) -> tuple[float, bool]:
    """What a run is ranked by, lower is better, and whether it needs more than that: infinite where it failed. Without
    a target a cost is ranked by the final loss: at equal cost, the lower of two reaches the other's with less
    (`why_not_matched`)."""
    if run.final_loss is None:
        return FAILED, False
    if primary.target is None:
        return run.final_loss, False
    axis = primary.measure.removesuffix("_to_target")
    cost = needed_for(run, axis, primary.target)
    return (float(run.evaluated[axis][-1]), True) if cost is None else (cost, False)


def _ranked(
    file: StudyFile, primary: Primary, arm: str, baseline: Runs, method: Runs, taken: int
) -> Verdict:
    """Where runs failed or did not reach the target: the exact rank-sum test, failed runs last. It can show a
    difference, and no margin."""
    seeds = file.seeds[: file.looks[taken - 1]]
    before, after = (
        [rank_value(primary, side[seed]) for seed in seeds] for side in (baseline, method)
    )
    values = [[value for value, _ in side] for side in (before, after)]
    beyond = [[more for _, more in side] for side in (before, after)]
    test = inference.rank_sum(values[0], values[1], beyond[0], beyond[1])
    # Every look of this test is paid for in full: its p-values jump, and no boundary is calibrated for them.
    p = min(1.0, test.p * len(file.looks))
    wins = test.wins > 0.5
    opposite = primary.direction != "different" and test.wins < 0.5 and p <= file.study.alpha
    if primary.direction == "different":
        outcome = "better" if wins else "worse"
    elif primary.direction == "better":
        outcome, p = "better", p / 2 if wins else 1.0
    else:
        outcome, p = "undecided", 1.0
    diverged, short = (
        [sum(map(math.isinf, side)) for side in values],
        [sum(side) for side in beyond],
    )
    parts = [
        f"{count[0]} of {len(seeds)} baseline runs and {count[1]} of this arm's {what}"
        for what, count in (("diverged", diverged), ("did not reach the target", short))
        if sum(count)
    ]
    smallest = test.smallest_p * len(file.looks)
    if primary.direction in ("noninferior", "equivalent"):
        parts.append("a margin cannot be tested then")
    elif smallest > file.study.alpha:
        parts.append(f"exact rank-sum test, whose smallest p with so many runs is {smallest:.2g}")
    else:
        parts.append("exact rank-sum test")
    words = "; ".join(parts)
    estimate = Estimate(math.nan, n=len(seeds), reason=words)
    return Verdict(primary, arm, seeds, estimate, p, p, outcome, opposite, None, words)
