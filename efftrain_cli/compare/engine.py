"""The engine of every verdict: a question, the runs of a baseline and of a method, and the looks
that are paid for.

`compare` asks at one look that nobody registered, a study at its registered looks; sensitivity and
zero-shot scores are questions like the others. A reason that decides something is a `Why`: its
words decide nothing.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from efftrain_cli.compare import inference
from efftrain_cli.compare.calibrated import (
    calibration_sd,
    describe_seconds,
    why_seconds_not_judged,
)
from efftrain_cli.compare.comparability import (
    describe_differences,
    not_judged,
    why_flops_not_judged,
)
from efftrain_cli.compare.failures import (
    FEWEST_FINISHED,
    Side,
    failed_seeds,
    shares_text,
    stuck_loss,
)
from efftrain_cli.compare.groups import Group, finished_runs, runs_of
from efftrain_cli.compare.inference import ALPHA, POWER, Direction, Estimate, ExactTest
from efftrain_cli.compare.measures import (
    AXIS_WORDS,
    SAME_SCHEDULE,
    Question,
    budget_ratio,
    evaluated_every,
    is_same_budget,
    match,
    match_error,
    numbers,
    other_budgets,
    other_shapes,
    schedule_position,
)
from efftrain_cli.compare.planning import conditional_power, sd_interval
from efftrain_cli.compare.reading import RunNumbers
from efftrain_cli.compare.sequential import nominal_levels, sequential_p, weighted_deviate
from efftrain_cli.compare.zero_shot import compare_items, find_results, why_no_score
from efftrain_cli.foundation.why import Why

Outcome = Literal["better", "worse", "noninferior", "equivalent", "undecided"]
CROSSING = 0.25
"""Share of its interval by which a cost to match may change with denser evaluations."""
NOTHING = Why("nothing", "none")
"""There was no failure or jump to ask about."""


@dataclass(frozen=True)
class Looks:
    """At which numbers of seeds a question is judged, and at which error rate."""

    plan: tuple[int, ...] = (sys.maxsize,)
    """Seeds at every planned look; the largest number there is means one look at whatever is
    there."""
    taken: int = 1
    alpha: float = ALPHA
    registered: bool = False
    """Planned before the runs: what cannot be judged stays in the family that Holm's correction
    goes over."""

    def passed_by(self, p: float) -> bool:
        """Return whether a corrected p-value shows a claim; a registered level is inclusive."""
        if self.registered:
            return p <= self.alpha
        return p < self.alpha

    @property
    def levels(self) -> tuple[float, ...]:
        """Return the two-sided nominal level of each planned look's own t test."""
        return nominal_levels(self.alpha, self.plan, 2)

    def level(self, alpha: float, sides: int) -> float:
        """Return the nominal level of the last look's own test, if all looks together err with
        `alpha`."""
        return nominal_levels(alpha, self.plan, sides)[self.taken - 1]


ONE_LOOK = Looks()


@dataclass(frozen=True)
class Verdict:
    """The answer to a question about a recipe and its baseline."""

    question: Question
    arm: str
    """Label of the recipe."""
    seeds: tuple[int, ...]
    """Seeds that both recipes have."""
    estimate: Estimate
    """Method less baseline, or baseline / method of a cost; NaN without one. The interval holds at
    all looks."""
    exact: ExactTest | None = None
    """The test that decides in the place of t: of failures alone, or of ranks where a run missed
    the target."""
    p: float | None = None
    """p-value of the direction's claim, adjusted for all looks so far; None where nothing was
    tested."""
    p_holm: float | None = None
    """The same corrected over the family's questions and recipes."""
    p_equivalent: float | None = None
    """Corrected p-value of the two one-sided tests against a margin that was asked for beside a
    difference."""
    outcome: Outcome = "undecided"
    opposite: bool = False
    """Undecided, and the test, corrected for all comparisons, says the opposite of what was asked:
    worse, or beyond the margin."""
    min_detectable_effect: float | None = None
    """The smallest true difference that such a study shows with power 0.8; for ratios the factor
    less 1."""
    why: Why | None = None
    """Why nothing is judged; None where it is."""
    note: str = ""
    """How the verdict was reached, where that is not by the estimate."""
    items: Estimate | None = None
    """Mean difference per item of two single checkpoints' scores."""
    items_p: float | None = None
    """Uncorrected p-value over these items."""
    differed: str = ""
    """What else than its name and its losses sets the recipe apart; of final losses."""
    shared_sd: float = 0.0
    """Standard deviation of an error in the estimate that all seeds share: the calibration's."""

    @property
    def min_detectable_range(self) -> tuple[float, float] | None:
        """Return the 95 % interval of `min_detectable_effect`, as so few seeds know the spread."""
        size = self.min_detectable_effect
        df = self.estimate.df
        if size is None or df is None:
            return None
        low, high = sd_interval(1.0, df + 1)
        if not self.estimate.log:
            return size * low, size * high
        log = math.log1p(size)
        return inference.excess_ratio(log * low), inference.excess_ratio(log * high)

    @property
    def test(self) -> Estimate | ExactTest:
        """Return the test that decides."""
        return self.exact or self.estimate

    @property
    def text(self) -> str:
        """Return the outcome, or why there is none."""
        return self.why.text if self.why else self.outcome


def verdict(
    question: Question,
    baseline: Group,
    method: Group,
    looks: Looks = ONE_LOOK,
    withheld: Why | None = None,
) -> Verdict:
    """Judge a question; `correct` then corrects the verdicts of a family together.

    Args:
        baseline: runs in the order in which the looks take their seeds.
        withheld: why nothing may be judged; None where it may.
    """
    theirs = set(method.seeds)
    shared = tuple(seed for seed in baseline.seeds if seed in theirs)
    found = Verdict(question, method.label, shared, Estimate(math.nan))
    if question.tested == "score":
        return _judge_scores(found, baseline, method, looks, withheld)
    waiting = _why_pending(baseline, method)
    if waiting:
        return _unjudged(found, withheld or waiting, looks)
    sides = [Side(group, question.values(group)) for group in (baseline, method)]
    counted = question.tested in ("rank", "failures")
    if counted and not any(any(numbers(side.values.values())) for side in sides):
        return replace(found, why=NOTHING)
    if question.tested == "difference" and question.point is None:
        found = replace(found, differed=describe_differences(baseline, method))
    unequal, budgets = _check_budgets(question, baseline, method, looks)
    why = withheld or unequal or _why_incomparable(question, baseline, method)
    if why and looks.registered:
        return _unjudged(found, why, looks)
    found = _test(found, sides, looks)
    found = _noted(found, budgets, found.note)
    why = why or found.why
    if why:
        return _unjudged(found, why, looks)
    if question.axis == "seconds":
        found = _noted(found, found.note, describe_seconds(baseline, method))
    return found


def _noted(found: Verdict, *notes: str) -> Verdict:
    """Return the verdict with these notes, of which some may be empty."""
    return replace(found, note="; ".join(filter(None, notes)))


def correct(verdicts: Sequence[Verdict], looks: Looks = ONE_LOOK) -> list[Verdict]:
    """Correct the verdicts of one family by Holm, each kind of claim for itself; an outcome stays
    if its p passes."""
    p = _holm(verdicts, [each.p for each in verdicts])
    equal = _holm(verdicts, [each.p_equivalent for each in verdicts])
    of_items = _holm(verdicts, [each.items_p for each in verdicts])
    members = count_members(verdicts)
    found = []
    for i, each in enumerate(verdicts):
        if i in of_items:
            each = replace(each, why=_items_only(of_items[i]))
        if i in p:
            outcome: Outcome = "equivalent" if looks.passed_by(equal.get(i, 1.0)) else "undecided"
            if looks.passed_by(p[i]):
                outcome = each.outcome
            each = replace(
                each,
                p_holm=p[i],
                p_equivalent=equal.get(i),
                outcome=outcome,
                opposite=outcome == "undecided" and _is_opposite(each, looks, members),
                min_detectable_effect=min_detectable_effect(each, looks, members),
            )
        found.append(each)
    return found


def sides_of(direction: Direction) -> int:
    """Return 2 if a direction is tested two-sided, else 1."""
    return 2 if direction == "different" else 1


def count_members(verdicts: Sequence[Verdict]) -> int:
    """Count the claims under a family's Holm correction: an arm's tested costs are one."""
    members = set()
    for i, each in enumerate(verdicts):
        if each.p is not None:
            members.add((each.arm, each.question.member(i)))
    return len(members)


def _holm(verdicts: Sequence[Verdict], p_values: Sequence[float | None]) -> dict[int, float]:
    """Return corrected p-values by place, of those that were tested."""
    members: dict[tuple[object, ...], dict[int, float]] = {}
    for i, (each, p) in enumerate(zip(verdicts, p_values, strict=True)):
        if p is not None:
            members.setdefault((each.arm, each.question.member(i)), {})[i] = p
    adjusted = inference.holm([min(places.values()) for places in members.values()])
    found = {}
    for places, of_member in zip(members.values(), adjusted, strict=True):
        smallest = min(places.values())
        for i, p in places.items():
            if smallest:
                found[i] = min(1.0, of_member * p / smallest)
            else:
                # A p-value of 0 leaves no factor to apply to the member's other costs:
                # Bonferroni's.
                found[i] = min(1.0, len(members) * p)
    return found


def min_detectable_effect(each: Verdict, looks: Looks, comparisons: int) -> float | None:
    """Return the smallest true difference that such a study shows with power POWER, at the
    strictest of Holm's steps; None after an exact test."""
    if each.exact is not None:
        return None
    direction = each.question.direction
    # Of two one-sided tests that must both pass, each may miss half of what the two together may.
    power = (1 + POWER) / 2 if direction == "equivalent" else POWER
    sides = sides_of(direction)
    level = looks.level(looks.alpha / comparisons, sides)
    return inference.detectable(each.estimate, level, power, sides=sides)


def chance_of_claim(each: Verdict, looks: Looks, comparisons: int) -> float | None:
    """Return the chance that a later look shows the claim, if the true effect is the one estimated
    so far.

    This is the conditional power given the pairs so far and their spread, at Holm's strictest step.
    A reader who wants to stop sees it; it decides nothing.

    Args:
        comparisons: `count_members` of the verdict's family.

    Returns:
        None if no look is left, or the verdict is not by the paired t test.
    """
    estimate = each.estimate
    direction = each.question.direction
    seeds = looks.plan[looks.taken - 1]
    later = looks.plan[looks.taken :]
    by_t = each.why is None and each.exact is None and estimate.paired
    if not later or not by_t or not estimate.sd:
        return None
    sides = sides_of(direction)
    return conditional_power(
        estimate.gain,
        estimate.sd,
        estimate.n,
        more=[look - seeds for look in later],
        levels=nominal_levels(looks.alpha / comparisons, looks.plan, sides)[looks.taken :],
        direction=direction,
        margin=estimate.scaled(each.question.margin or 0.0),
        shared=each.shared_sd,
    )


# --- why nothing may be judged --------------------------------------------------------------------


def _unjudged(found: Verdict, why: Why, looks: Looks) -> Verdict:
    p = 1.0 if looks.registered else None
    return replace(found, why=why, p=p, p_equivalent=None, outcome="undecided", opposite=False)


def _why_pending(baseline: Group, method: Group) -> Why | None:
    runs = (*baseline.runs, *method.runs)
    pending = sum(run.pending for run in runs)
    if not pending:
        return None
    return Why("pending", f"pending: {pending} of {len(runs)} runs not finished")


def _why_incomparable(question: Question, baseline: Group, method: Group) -> Why | None:
    runs = [*baseline.runs, *method.runs]
    reason = _why_cost_not_judged(question.axis, baseline, method)
    if not reason and question.tested in ("ratio", "match"):
        reason = other_shapes(runs) or other_budgets(runs)
    if not reason and question.tested in ("difference", "match"):
        reason = _why_other_schedule(question, baseline, method)
    return not_judged(reason)


def _why_cost_not_judged(axis: str, baseline: Group, method: Group) -> str:
    """Return why "tokens", "flops" or "seconds" of two recipes are not judged, "" if they are."""
    if axis == "seconds":
        return why_seconds_not_judged(baseline, method)
    if axis == "flops":
        return why_flops_not_judged([*baseline.runs, *method.runs])
    return ""


def _check_budgets(
    question: Question, baseline: Group, method: Group, looks: Looks
) -> tuple[Why | None, str]:
    """Return why final losses are not judged, and at which equal cost they are if that is not
    tokens."""
    if question.tested != "difference" or question.point is not None:
        return None, ""
    tokens = budget_ratio(baseline, method, "tokens")
    spent = ""
    if not is_same_budget(tokens):
        spent = f"{tokens:.2f}x the tokens"
    cost = question.equal
    if cost is None and looks.registered:
        # Registered before a study had to say what its arms have in common.
        return None, f"{method.label} spent {spent}" if spent else ""
    if cost is None:
        cost = "tokens"
        if spent and is_same_budget(budget_ratio(baseline, method, "flops")):
            cost = "flops"

    words = AXIS_WORDS[cost]
    ratio = budget_ratio(baseline, method, cost)
    reason = _why_cost_not_judged(cost, baseline, method)
    if not reason and math.isnan(ratio):
        reason = f"the {words} of a run are unknown"
    if not reason and not is_same_budget(ratio):
        reason = f"{method.label} spent {ratio:.2f}x the {words} of {baseline.label}"
        if question.equal is None:
            reason += "; --equal flops or --equal seconds judges at another equal cost"
    if spent and cost != "tokens" and not reason:
        return None, f"at equal {words}, and {spent}"
    return not_judged(reason), ""


def _mean_position(question: Question, runs: Sequence[RunNumbers]) -> float | None:
    """Return where runs stand on their learning rates' decay at the question's point, or else at
    their ends.

    None if nothing decays, NaN if the place of a run is unknown.
    """
    positions = []
    for run in runs:
        axis = question.axis
        value = question.point
        if value is None:
            axis = "tokens"
            value = float(run.evaluated[axis][-1])
        place = schedule_position(run, axis, value)
        if place is not None:
            positions.append(place)
    return sum(positions) / len(positions) if positions else None


def _why_other_schedule(question: Question, baseline: Group, method: Group) -> str:
    """Return why the two are at different places of their decay; "" if they are not."""
    groups = (baseline, method)
    ended = [finished_runs(group.runs) for group in groups]
    if not all(ended):
        return ""
    a, b = (_mean_position(question, runs) for runs in ended)
    unknown = []
    for group, place in zip(groups, (a, b), strict=True):
        if place is not None and math.isnan(place):
            unknown.append(group.label)
    if unknown:
        return (
            f"where {' and '.join(unknown)} stood"
            " on the learning-rate schedule is known only at the run's end"
        )
    if a is not None and b is not None:
        if abs(a - b) <= SAME_SCHEDULE:
            return ""
        return (
            f"{baseline.label} is at {100 * a:.0f} %"
            f" of its decay, {method.label} at {100 * b:.0f} %"
        )
    known, decaying, endless = (a, baseline, method) if b is None else (b, method, baseline)
    # A learning rate that never comes down is where it always is; the other must have come to the
    # end of its own.
    if known is None or known >= 1 - SAME_SCHEDULE:
        return ""
    return (
        f"{decaying.label} is at {100 * known:.0f} % of its decay,"
        f" that of {endless.label} has no end"
    )


# --- the tests ------------------------------------------------------------------------------------

Sides = Sequence[Side]
"""The baseline's and the method's."""


def _test(found: Verdict, sides: Sides, looks: Looks) -> Verdict:
    """Pick the test: t of losses, exact where failures are counted, ranks where a run missed a
    cost's target."""
    question = found.question
    if question.tested == "failures":
        failed = [{seed: bool(value) for seed, value in side.values.items()} for side in sides]
        return _answer_by_failures(found, failed, sides, looks)
    if question.tested in ("difference", "match"):
        return _judge_losses(found, sides, looks)
    ranks: list[list[tuple[float, bool]]] = []
    for side in sides:
        ranks.append([])
        for value, runs in zip(side.values.values(), side.group.by_seed.values(), strict=True):
            if all(run.failed for run in runs):
                ranks[-1].append((math.inf, False))
            elif not isinstance(value, Why):
                ranks[-1].append((value, False))
            elif value.kind == "not_reached":
                ranks[-1].append((float(runs[0].evaluated[question.axis][-1]), True))
            else:
                return _without_values(found, [value])
    (a, a_beyond), (b, b_beyond) = (tuple(zip(*side, strict=True)) for side in ranks)
    if question.tested != "rank" and math.inf not in (*a, *b) and not any((*a_beyond, *b_beyond)):
        return _by_t(found, sides, looks)
    bounded = any(a_beyond) != any(b_beyond) and all(0 < value < math.inf for value in (*a, *b))
    if bounded and not looks.registered:
        mean = math.exp(float(np.mean(np.log(a)) - np.mean(np.log(b))))
        bound = Estimate(mean, log=True, bound=1 if any(a_beyond) else -1)
        found = replace(found, estimate=bound)
    counts = {
        "diverged": (a.count(math.inf), b.count(math.inf)),
        "did not reach the target": (sum(a_beyond), sum(b_beyond)),
    }
    notes = []
    for what, (of_baseline, of_method) in counts.items():
        if of_baseline or of_method:
            text = f"{of_baseline} of {len(a)} baseline runs and {of_method} of this arm's {what}"
            notes.append(text)
    found = answer_by_count(found, inference.rank_sum(a, b, a_beyond, b_beyond), looks, *notes)
    return _unless_too_few(found, sides, looks)


def _without_values(found: Verdict, odd: Sequence[Why]) -> Verdict:
    """Judge nothing: runs that finished have no value."""
    why = Why("no_values", f"{', '.join(dict.fromkeys(each.text for each in odd))}: no claim")
    return replace(found, estimate=Estimate(math.nan, why=why), why=why)


def _judge_losses(found: Verdict, sides: Sides, looks: Looks) -> Verdict:
    """Judge losses by the runs that finished and are not stuck; a side that fails more often is
    never claimed."""
    level = stuck_loss(sides[0].group, found.question.stuck_at)
    sides = [replace(side, failed=failed_seeds(side.group, level)) for side in sides]
    base, arm = sides
    together = base.failed | arm.failed
    # Where every seed is shared, a pair counts as a whole or not at all.
    is_paired = base.values.keys() == arm.values.keys()
    kept = [side.without(together if is_paired else side.failed) for side in sides]
    odd = []
    for side in kept:
        odd += [value for value in side.values.values() if isinstance(value, Why)]
    if odd:
        return _without_values(found, odd)
    if not together:
        return _by_t(found, sides, looks)
    shares = shares_text(sides)
    if min(len(side.values) for side in kept) < FEWEST_FINISHED:
        failed = [{seed: seed in side.failed for seed in side.values} for side in sides]
        return _answer_by_failures(found, failed, sides, looks, shares)
    found = _by_t(found, kept, looks)
    found = _noted(found, shares, "the losses are those of the other runs", found.note)
    return _unless_it_fails_more(found, sides, looks)


def _answer_by_failures(
    found: Verdict,
    failed: Sequence[Mapping[int, bool]],
    sides: Sides,
    looks: Looks,
    *notes: str,
) -> Verdict:
    """Judge by how many runs of each side failed."""
    found = answer_by_count(found, inference.failure_test(*failed), looks, *notes)
    return _unless_too_few(found, sides, looks)


def _unless_it_fails_more(found: Verdict, sides: Sides, looks: Looks) -> Verdict:
    """Take back a claim for the side that failed or got stuck more often."""
    a, b = (len(side.failed) / len(side.group.seeds) for side in sides)
    against = {
        "better": b > a,
        "noninferior": b > a,
        "worse": a > b,
        "equivalent": a != b,
        "undecided": False,
    }
    if a != b and found.p_equivalent is not None:
        found = replace(found, p_equivalent=1.0)
    found = replace(found, opposite=found.opposite and b >= a)
    if not against[found.outcome] or found.p is None or not looks.passed_by(found.p):
        return found
    losses = {"better": "lower", "worse": "higher"}.get(found.outcome, "close")
    often = "more" if b > a else "fewer"
    found = _noted(found, f"{losses} loss, {often} failures", found.note)
    return replace(found, outcome="undecided", p=1.0)


def _unless_too_few(found: Verdict, sides: Sides, looks: Looks) -> Verdict:
    """Withhold a verdict that no result of so many runs could have given."""
    assert found.exact is not None
    smallest = found.exact.smallest_p
    if looks.registered:
        return found
    if min(len(side.group.runs) for side in sides) == 1:
        return replace(found, why=inference.ONE_SEED)
    if smallest < looks.alpha:
        return found
    text = f"undecided: so few runs cannot give p below {smallest:.2g}"
    return replace(found, why=Why("too_few", text))


def answer_by_count(found: Verdict, test: ExactTest, looks: Looks, *notes: str) -> Verdict:
    """Complete a verdict by an exact test, which can show a difference and no margin."""
    question = found.question
    planned = len(looks.plan)
    # Every look of this test is paid for in full: its p-values jump, and no boundary is calibrated
    # for them.
    paid = replace(test, p=min(1.0, test.p * planned))
    smallest = test.smallest_p * planned
    how = test.method.replace("rank sum", "rank-sum test")
    if question.direction in ("noninferior", "equivalent"):
        how = "a margin cannot be tested then"
    elif smallest > looks.alpha:
        how += f", whose smallest p with so many runs is {smallest:.2g}"
    found = replace(
        found,
        exact=test,
        p=inference.claim_p(paid, question.direction, question.margin),
        p_equivalent=_equivalent_p(question, test),
        outcome=_outcome(question, test),
        opposite=question.direction != "different" and test.wins < 0.5,
    )
    return _noted(found, *notes, how)


def _by_t(found: Verdict, sides: Sides, looks: Looks) -> Verdict:
    """Judge by the t test that fits the seeds, at all looks so far."""
    question = found.question
    groups = [side.group for side in sides]
    if question.axis == "seconds" and question.tested in ("match", "ratio"):
        found = replace(found, shared_sd=calibration_sd(*groups))
    estimates = []
    for seeds, level in zip(looks.plan[: looks.taken], looks.levels, strict=False):
        before, after = (side.first(seeds) for side in sides)
        estimate = _estimate(question, before, after, level, groups)
        if found.shared_sd:
            estimate = inference.widen(estimate, found.shared_sd, level)
        estimates.append(estimate)
    return answer_by_t(found, estimates, looks)


def answer_by_t(found: Verdict, estimates: Sequence[Estimate], looks: Looks) -> Verdict:
    """Complete a verdict by the estimates of the looks so far."""
    question = found.question
    estimate = estimates[-1]
    if estimate.p is None:
        return replace(found, estimate=estimate, why=estimate.why)
    claims = [inference.claim_p(each, question.direction, question.margin) for each in estimates]
    p = sequential_p(claims, looks.plan, sides_of(question.direction))
    outcome = _outcome(question, _clearest(estimates, looks.plan))
    note = ""
    turned = outcome != _outcome(question, estimate) or not _points_at(question, estimate)
    if turned and looks.passed_by(p):
        note = f"an earlier look said {outcome}, the last one points the other way"
        outcome = "undecided"
        p = 1.0
    return replace(
        found,
        estimate=estimate,
        p=p,
        p_equivalent=_equivalent_p(question, estimate),
        outcome=outcome,
        opposite=True,
        note=note,
    )


def _estimate(
    question: Question,
    before: Mapping[int, Any],
    after: Mapping[int, Any],
    level: float,
    groups: Sequence[Group],
) -> Estimate:
    """Estimate a difference of losses, a ratio of costs, or of the ends of runs a ratio to match;
    all by seed."""
    if question.tested == "match":
        if before.keys() == after.keys():
            pairs = [(before[seed], after[seed]) for seed in before]
            estimate = inference.paired_t([match(a, b) for a, b in pairs], level)
        else:
            pairs = list(itertools.product(before.values(), after.values()))
            table = [[match(a, b) for a in before.values()] for b in after.values()]
            estimate = inference.all_pairs(table)
        if math.isnan(estimate.mean):
            why = Why("no_values", "matched before the first step: no claim")
            return Estimate(math.nan, why=why)
        error = sum(match_error(a, b) for a, b in pairs) / len(pairs)
        return _unless_too_sparse(inference.exponentiated(estimate), error, groups)
    if question.tested == "ratio":
        if min(*before.values(), *after.values()) <= 0:
            why = Why("no_values", "reached before the first step: no claim")
            return Estimate(math.nan, why=why)
        return inference.ratio_of_means(before, after, level)
    return inference.difference_of_means(before, after, level)


def _unless_too_sparse(estimate: Estimate, error: float, groups: Sequence[Group]) -> Estimate:
    """Withhold a cost to match if evaluations leave its crossing open by more than a quarter of its
    interval.

    Up to the share by which budgets may differ, it is judged all the same.
    """
    if estimate.low is None or estimate.high is None:
        return estimate
    most = max(CROSSING * math.log(estimate.high / estimate.low), SAME_SCHEDULE)
    # Unbounded in both directions, the mean of the errors is NaN.
    error = math.inf if math.isnan(error) else abs(error)
    if error <= most:
        return estimate
    every = evaluated_every(runs_of(groups))
    # The error grows with the square of the distance.
    enough = max(1, math.floor(every * math.sqrt(most / error)))
    size = f"by {math.exp(error):.2f}x, more than a quarter of its interval"
    if math.isinf(error):
        size = "altogether"
    text = (
        f"not judged: evaluations every {every:.0f} steps leave it open {size};"
        f" eval.every = {enough} would do"
    )
    return Estimate(estimate.mean, n=estimate.n, log=True, why=Why("not_judged", text))


def _equivalent_p(question: Question, test: Estimate | ExactTest) -> float | None:
    if question.direction != "different" or question.margin is None:
        return None
    return inference.claim_p(test, "equivalent", question.margin)


def _outcome(question: Question, test: Estimate | ExactTest) -> Outcome:
    """Return what is claimed if the test passes."""
    if question.direction != "different":
        return question.direction
    return "better" if inference.is_better(test) != question.higher else "worse"


def _clearest(estimates: Sequence[Estimate], plan: Sequence[int]) -> Estimate:
    """Return the look that decides `sequential_p`: the largest deviate, weighted as its bound."""
    clearest = estimates[-1]
    largest = -math.inf
    for n, each in zip(plan, estimates, strict=False):
        if each.p is not None:
            deviate = weighted_deviate(each.p, n, plan, 2)
            if deviate > largest:
                largest = deviate
                clearest = each
    return clearest


def _points_at(question: Question, estimate: Estimate) -> bool:
    """Return whether an estimate, without its interval, is where the direction's claim is true."""
    gain = estimate.gain
    size = estimate.scaled(question.margin or 0.0)
    if question.direction == "better":
        return gain > 0
    if question.direction == "equivalent":
        return abs(gain) < size
    return question.direction == "different" or gain > -size


def _is_opposite(each: Verdict, looks: Looks, comparisons: int) -> bool:
    """Return whether the result, corrected for all comparisons, says that the direction's claim is
    false."""
    question = each.question
    if not each.opposite:
        return False
    if each.exact is not None:
        return looks.passed_by(min(1.0, comparisons * len(looks.plan) * each.exact.p))
    size = each.estimate.scaled(question.margin or 0.0)
    half = inference.half_width(each.estimate, looks.level(looks.alpha / comparisons, 2))
    low = each.estimate.gain - half
    high = each.estimate.gain + half
    if question.direction == "better":
        return high < 0
    if question.direction == "noninferior":
        return high < -size
    return question.direction == "equivalent" and (high < -size or low > size)


# --- zero-shot scores -----------------------------------------------------------------------------


def _judge_scores(
    found: Verdict, baseline: Group, method: Group, looks: Looks, withheld: Why | None
) -> Verdict:
    """Judge scores by seed, of those runs that have one; of two single checkpoints, by item."""
    groups = (baseline, method)
    sides = [find_results(found.question.key, group) for group in groups]
    before, after = ({seed: result.score for seed, result in side.items()} for side in sides)
    estimate = inference.difference_of_means(before, after)
    why = withheld or why_no_score(groups, sides)
    if not before or not after:
        why = Why("missing", "missing: no claim")
    if why:
        return replace(found, estimate=Estimate(estimate.mean, why=why), why=why)
    judged = answer_by_t(found, [estimate], looks)
    if judged.why:
        items, p = compare_items(sides)
        judged = replace(judged, items=items, items_p=p)
    return judged


def _items_only(p: float) -> Why:
    differ = "differ" if p < ALPHA else "do not differ clearly"
    text = f"one seed: no claim; on its items these two checkpoints {differ} (p = {p:.2g})"
    return Why("one_seed", text)
