"""Judge a question by the runs of a baseline and of a method, at the looks taken so far.

`compare` has one unregistered look, a study its registered ones. Learning-rate sensitivity and
zero-shot scores are questions like any other. Code decides by the kind of a `Why`, never by its
text.
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
"""Error of a cost to match from sparse evaluations, at most, as a share of its interval."""
NOTHING = Why("nothing", "none")
"""No run of either side had a failure or a jump."""


@dataclass(frozen=True)
class Looks:
    """The numbers of seeds at which a question is judged, and the error rate of all of them."""

    plan: tuple[int, ...] = (sys.maxsize,)
    """Number of seeds at each planned look; sys.maxsize means one look at all seeds."""
    taken: int = 1
    """Number of looks taken so far, this one included."""
    alpha: float = ALPHA
    registered: bool = False
    """Whether the looks were planned before the runs.

    A registered question counts in Holm's correction even if it cannot be judged.
    """

    def passed_by(self, p: float) -> bool:
        """Return whether a corrected p-value shows a claim: p <= alpha if registered, else <."""
        if self.registered:
            return p <= self.alpha
        return p < self.alpha

    @property
    def levels(self) -> tuple[float, ...]:
        """Return the two-sided nominal level of each planned look's own t test."""
        return nominal_levels(self.alpha, self.plan, 2)

    def level(self, alpha: float, sides: int) -> float:
        """Return the nominal level of the last look's own test.

        Args:
            alpha: error rate of all looks together.
            sides: 2 for a two-sided test, else 1.
        """
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
    """Method less baseline, or for a cost baseline / method; NaN if there is no estimate.

    Its interval holds at all looks.
    """
    exact: ExactTest | None = None
    """Exact test that decides instead of the t test.

    It counts failures, or ranks runs if one of them missed the target.
    """
    p: float | None = None
    """p-value of the direction's claim, adjusted for all looks so far; None if untested."""
    p_holm: float | None = None
    """`p` corrected by Holm over the family's questions and recipes."""
    p_equivalent: float | None = None
    """Corrected p-value of equivalence, by two one-sided tests.

    None unless the question asks for a difference and has a margin.
    """
    outcome: Outcome = "undecided"
    opposite: bool = False
    """Whether the corrected test shows the opposite of the claim: worse, or beyond the margin."""
    min_detectable_effect: float | None = None
    """Smallest true difference that is shown with power 0.8; for ratios the factor less 1."""
    why: Why | None = None
    """Why nothing is judged; None if something is."""
    note: str = ""
    """How the verdict was reached, if not by the estimate."""
    items: Estimate | None = None
    """Mean difference per item of two single checkpoints' scores."""
    items_p: float | None = None
    """Uncorrected p-value over these items."""
    differed: str = ""
    """Differences of the recipes beside the question, as text; only for final losses."""

    @property
    def min_detectable_range(self) -> tuple[float, float] | None:
        """Return the 95 % interval of `min_detectable_effect`, given the seeds' unsure spread."""
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


def judge_question(
    question: Question,
    baseline: Group,
    method: Group,
    looks: Looks = ONE_LOOK,
    withheld: Why | None = None,
) -> Verdict:
    """Judge a question; `correct` then corrects the verdicts of a family together.

    Args:
        baseline: runs in the order in which the looks take their seeds.
        withheld: why nothing may be judged; None if the question may be.
    """
    method_seeds = set(method.seeds)
    shared = tuple(seed for seed in baseline.seeds if seed in method_seeds)
    verdict = Verdict(question, method.label, shared, Estimate(math.nan))
    if question.tested == "score":
        return _judge_scores(verdict, baseline, method, looks, withheld)
    waiting = _why_pending(baseline, method)
    if waiting:
        return _unjudged(verdict, withheld or waiting, looks)

    sides = [Side(group, question.values(group)) for group in (baseline, method)]
    if question.tested in ("rank", "failures"):
        has_any = [any(numbers(side.values.values())) for side in sides]
        if not any(has_any):
            return replace(verdict, why=NOTHING)
    if question.tested == "difference" and question.point is None:
        verdict = replace(verdict, differed=describe_differences(baseline, method))

    why_unequal, budget_note = _check_budgets(question, baseline, method, looks)
    why = withheld or why_unequal or _why_incomparable(question, baseline, method)
    if why and looks.registered:
        return _unjudged(verdict, why, looks)
    if why and budget_ratio(baseline, method, "tokens") < 1 - SAME_SCHEDULE:
        # Fewer tokens keep a loss high: only a run that diverged has failed then.
        verdict = replace(verdict, question=replace(question, stuck_at=math.inf))

    # An unregistered question is tested even if it is not judged: the estimate is shown.
    verdict = _test(verdict, sides, looks)
    verdict = _with_notes(verdict, budget_note, verdict.note)
    why = why or verdict.why
    if why:
        return _unjudged(verdict, why, looks)
    return verdict


def _with_notes(verdict: Verdict, *notes: str) -> Verdict:
    """Return the verdict with the notes that are not empty."""
    return replace(verdict, note="; ".join(filter(None, notes)))


def correct(verdicts: Sequence[Verdict], looks: Looks = ONE_LOOK) -> list[Verdict]:
    """Correct the verdicts of one family by Holm; an outcome stays if its corrected p-value passes.

    Claims of the direction, of equivalence and of items are three families of their own.
    """
    corrected_p = _holm(verdicts, [each.p for each in verdicts])
    equivalent_p = _holm(verdicts, [each.p_equivalent for each in verdicts])
    items_p = _holm(verdicts, [each.items_p for each in verdicts])
    members = count_members(verdicts)
    corrected = []
    for i, each in enumerate(verdicts):
        if i in items_p:
            differ = "differ" if items_p[i] < ALPHA else "do not differ clearly"
            text = f"on its items these two checkpoints {differ} (p = {items_p[i]:.2g})"
            each = replace(each, why=Why("one_seed", f"one seed: no claim; {text}"))
        if i in corrected_p:
            outcome: Outcome = "undecided"
            if looks.passed_by(corrected_p[i]):
                outcome = each.outcome
            elif looks.passed_by(equivalent_p.get(i, 1.0)):
                outcome = "equivalent"
            is_opposite = outcome == "undecided" and _is_opposite(each, looks, members)
            each = replace(
                each,
                p_holm=corrected_p[i],
                p_equivalent=equivalent_p.get(i),
                outcome=outcome,
                opposite=is_opposite,
                min_detectable_effect=min_detectable_effect(each, looks, members),
            )
        corrected.append(each)
    return corrected


def sides_of(direction: Direction) -> int:
    """Return 2 if a direction is tested two-sided, else 1."""
    return 2 if direction == "different" else 1


def count_members(verdicts: Sequence[Verdict]) -> int:
    """Return the number of claims that Holm's correction of a family counts.

    The tested costs of an arm are one claim.
    """
    members = set()
    for i, each in enumerate(verdicts):
        if each.p is not None:
            members.add((each.arm, each.question.member(i)))
    return len(members)


def _holm(verdicts: Sequence[Verdict], p_values: Sequence[float | None]) -> dict[int, float]:
    """Return place in `verdicts` -> corrected p-value, for each p-value that is not None."""
    members: dict[tuple[object, ...], dict[int, float]] = {}
    for i, (each, p) in enumerate(zip(verdicts, p_values, strict=True)):
        if p is not None:
            member = (each.arm, each.question.member(i))
            members.setdefault(member, {})
            members[member][i] = p

    # A member has the smallest p-value of its costs; its correction is a factor for all of them.
    smallest_p = [min(places.values()) for places in members.values()]
    adjusted_p = inference.holm(smallest_p)
    corrected = {}
    for places, smallest, adjusted in zip(members.values(), smallest_p, adjusted_p, strict=True):
        for i, p in places.items():
            if smallest:
                corrected[i] = min(1.0, adjusted * p / smallest)
            else:
                # A p-value of 0 leaves no factor for the member's other costs: use Bonferroni's.
                corrected[i] = min(1.0, len(members) * p)
    return corrected


def min_detectable_effect(each: Verdict, looks: Looks, comparisons: int) -> float | None:
    """Return the smallest true difference that such a study shows with power POWER.

    The level is that of Holm's strictest step. None after an exact test.
    """
    if each.exact is not None:
        return None
    direction = each.question.direction
    power = POWER
    if direction == "equivalent":
        # Two one-sided tests must both pass: each may miss half as often as the two together.
        power = (1 + POWER) / 2
    sides = sides_of(direction)
    level = looks.level(looks.alpha / comparisons, sides)
    return inference.detectable(each.estimate, level, power, sides=sides)


def chance_of_claim(each: Verdict, looks: Looks, comparisons: int) -> float | None:
    """Return the chance that a later look shows the claim if the true effect equals the estimate.

    This is the conditional power given the pairs so far and their spread, at Holm's strictest step.
    It helps a reader to decide whether to stop, and decides nothing itself.

    Args:
        comparisons: `count_members` of the verdict's family.

    Returns:
        None if no look is left, or the verdict is not by the paired t test.
    """
    estimate = each.estimate
    direction = each.question.direction
    seeds = looks.plan[looks.taken - 1]
    later = looks.plan[looks.taken :]
    is_paired_t = each.why is None and each.exact is None and estimate.paired
    if not later or not is_paired_t or not estimate.sd:
        return None
    alpha = looks.alpha / comparisons
    levels = nominal_levels(alpha, looks.plan, sides_of(direction))
    return conditional_power(
        estimate.gain,
        estimate.sd,
        estimate.n,
        more=[look - seeds for look in later],
        levels=levels[looks.taken :],
        direction=direction,
        margin=estimate.scaled(each.question.margin or 0.0),
    )


# --- why nothing may be judged --------------------------------------------------------------------


def _unjudged(verdict: Verdict, why: Why, looks: Looks) -> Verdict:
    p = 1.0 if looks.registered else None
    return replace(verdict, why=why, p=p, p_equivalent=None, outcome="undecided", opposite=False)


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
    """Return why a cost of two recipes must not be judged; "" if it may.

    Args:
        axis: "tokens", "flops" or "seconds".
    """
    if axis == "seconds":
        return "by these machines' clocks"
    if axis == "flops":
        return why_flops_not_judged([*baseline.runs, *method.runs])
    return ""


def _check_budgets(
    question: Question, baseline: Group, method: Group, looks: Looks
) -> tuple[Why | None, str]:
    """Return why final losses must not be judged, and a note on the cost at which they are.

    The cost is the one that question or command names, else tokens, or FLOPs if only these are
    equal. The note is "" if the tokens are equal.
    """
    if question.tested != "difference" or question.point is not None:
        return None, ""
    tokens = budget_ratio(baseline, method, "tokens")
    spent = ""
    if not is_same_budget(tokens):
        spent = f"{tokens:.2f}x the tokens"
    cost = question.equal
    if cost is None and looks.registered:
        # Studies registered before `equal` existed are judged as they were.
        note = f"{method.label} spent {spent}" if spent else ""
        return None, note
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
            reason += "; --equal flops judges at equal FLOPs"
    if spent and cost != "tokens" and not reason:
        return None, f"at equal {words}, and {spent}"
    return not_judged(reason), ""


def _mean_position(question: Question, runs: Sequence[RunNumbers]) -> float | None:
    """Return the mean share of the learning-rate decay that the runs have done.

    It is taken at the question's point, else at the end of each run. None if no learning rate
    decays, NaN if the position of a run is unknown.
    """
    positions = []
    for run in runs:
        axis = question.axis
        value = question.point
        if value is None:
            axis = "tokens"
            value = float(run.evaluated[axis][-1])
        position = schedule_position(run, axis, value)
        if position is not None:
            positions.append(position)
    if not positions:
        return None
    return sum(positions) / len(positions)


def _why_other_schedule(question: Question, baseline: Group, method: Group) -> str:
    """Return why the positions of the two in their learning-rate decay differ; "" if they agree."""
    ended = finished_runs(baseline.runs)
    method_ended = finished_runs(method.runs)
    if not ended or not method_ended:
        return ""
    of_baseline = _mean_position(question, ended)
    of_method = _mean_position(question, method_ended)

    unknown = []
    for group, position in ((baseline, of_baseline), (method, of_method)):
        if position is not None and math.isnan(position):
            unknown.append(group.label)
    if unknown:
        return (
            f"where {' and '.join(unknown)} stood"
            " on the learning-rate schedule is known only at the run's end"
        )
    if of_baseline is not None and of_method is not None:
        if abs(of_baseline - of_method) <= SAME_SCHEDULE:
            return ""
        return (
            f"{baseline.label} is at {100 * of_baseline:.0f} % of its decay, {method.label} at"
            f" {100 * of_method:.0f} %"
        )

    # At most one of the two decays. It is comparable with the other once its decay is done.
    decaying = method
    constant = baseline
    position = of_method
    if of_method is None:
        decaying = baseline
        constant = method
        position = of_baseline
    if position is None or position >= 1 - SAME_SCHEDULE:
        return ""
    return (
        f"{decaying.label} is at {100 * position:.0f} % of its decay, that of {constant.label} has"
        " no end"
    )


# --- the tests ------------------------------------------------------------------------------------

Sides = Sequence[Side]
"""Two sides: the baseline's, then the method's."""


def _test(verdict: Verdict, sides: Sides, looks: Looks) -> Verdict:
    """Pick the test that fits the question and its runs.

    Losses have a t test, and failures an exact one. Costs have a t test if every run reached the
    target, else a test of ranks.
    """
    question = verdict.question
    if question.tested == "failures":
        failed = [{seed: bool(value) for seed, value in side.values.items()} for side in sides]
        return _answer_by_failures(verdict, failed, sides, looks)
    if question.tested in ("difference", "match"):
        return _judge_losses(verdict, sides, looks)

    # A run that missed the target counts by what it spent: its cost lies beyond that.
    costs = []
    beyond = []
    for side in sides:
        side_costs = []
        side_beyond = []
        for value, runs in zip(side.values.values(), side.group.by_seed.values(), strict=True):
            cost = value
            is_beyond = False
            if all(run.failed for run in runs):
                cost = math.inf
            elif isinstance(value, Why):
                if value.kind != "not_reached":
                    return _without_values(verdict, [value])
                cost = float(runs[0].evaluated[question.axis][-1])
                is_beyond = True
            side_costs.append(cost)
            side_beyond.append(is_beyond)
        costs.append(side_costs)
        beyond.append(side_beyond)

    a, b = costs
    a_beyond, b_beyond = beyond
    every_cost = (*a, *b)
    all_reached = math.inf not in every_cost and not any((*a_beyond, *b_beyond))
    if all_reached and question.tested != "rank":
        return _by_t(verdict, sides, looks)

    # If only one side missed the target, the ratio of what was spent bounds the ratio of costs.
    one_missed = any(a_beyond) != any(b_beyond)
    is_bounded = one_missed and all(0 < cost < math.inf for cost in every_cost)
    if is_bounded and not looks.registered:
        log_ratio = np.mean(np.log(a)) - np.mean(np.log(b))
        bound = 1 if any(a_beyond) else -1
        estimate = Estimate(math.exp(float(log_ratio)), log=True, bound=bound)
        verdict = replace(verdict, estimate=estimate)

    counts = {
        "diverged": (a.count(math.inf), b.count(math.inf)),
        "did not reach the target": (sum(a_beyond), sum(b_beyond)),
    }
    notes = []
    for what, (of_baseline, of_method) in counts.items():
        if of_baseline or of_method:
            text = f"{of_baseline} of {len(a)} baseline runs and {of_method} of this arm's {what}"
            notes.append(text)
    ranks = inference.rank_sum(a, b, a_beyond, b_beyond)
    verdict = answer_by_count(verdict, ranks, looks, *notes)
    return _unless_too_few(verdict, sides, looks)


def _without_values(verdict: Verdict, missing: Sequence[Why]) -> Verdict:
    """Judge nothing: for the given reasons, finished runs have no value."""
    reasons = dict.fromkeys(why.text for why in missing)
    estimate = inference.no_estimate(f"{', '.join(reasons)}: no claim")
    return replace(verdict, estimate=estimate, why=estimate.why)


def _judge_losses(verdict: Verdict, sides: Sides, looks: Looks) -> Verdict:
    """Judge losses by the runs that finished and are not stuck.

    No claim is made in favour of a side that fails more often.
    """
    level = stuck_loss(sides[0].group, verdict.question.stuck_at)
    sides = [replace(side, failed=failed_seeds(side.group, level)) for side in sides]
    base, arm = sides
    failed_seeds_of_both = base.failed | arm.failed
    kept = [base.without(base.failed), arm.without(arm.failed)]
    # If every seed is shared, a pair counts as a whole or not at all.
    if base.values.keys() == arm.values.keys():
        kept = [side.without(failed_seeds_of_both) for side in sides]

    missing = []
    for side in kept:
        missing += [value for value in side.values.values() if isinstance(value, Why)]
    if missing:
        return _without_values(verdict, missing)
    if not failed_seeds_of_both:
        return _by_t(verdict, sides, looks)

    shares = shares_text(sides)
    if min(len(side.values) for side in kept) < FEWEST_FINISHED:
        failed = [{seed: seed in side.failed for seed in side.values} for side in sides]
        return _answer_by_failures(verdict, failed, sides, looks, shares)
    verdict = _by_t(verdict, kept, looks)
    verdict = _with_notes(verdict, shares, "the losses are those of the other runs", verdict.note)
    return _unless_it_fails_more(verdict, sides, looks)


def _answer_by_failures(
    verdict: Verdict,
    failed: Sequence[Mapping[int, bool]],
    sides: Sides,
    looks: Looks,
    *notes: str,
) -> Verdict:
    """Judge by how many runs of each side failed."""
    test = inference.failure_test(*failed)
    verdict = answer_by_count(verdict, test, looks, *notes)
    return _unless_too_few(verdict, sides, looks)


def _unless_it_fails_more(verdict: Verdict, sides: Sides, looks: Looks) -> Verdict:
    """Take back a claim in favour of the side that failed or got stuck more often."""
    base_share, arm_share = (len(side.failed) / len(side.group.seeds) for side in sides)
    arm_fails_more = arm_share > base_share
    base_fails_more = base_share > arm_share
    is_contradicted = {
        "better": arm_fails_more,
        "noninferior": arm_fails_more,
        "worse": base_fails_more,
        "equivalent": arm_fails_more or base_fails_more,
        "undecided": False,
    }
    if is_contradicted["equivalent"] and verdict.p_equivalent is not None:
        verdict = replace(verdict, p_equivalent=1.0)
    verdict = replace(verdict, opposite=verdict.opposite and not base_fails_more)
    if not is_contradicted[verdict.outcome] or verdict.p is None or not looks.passed_by(verdict.p):
        return verdict

    loss_words = {"better": "lower", "worse": "higher"}
    loss_word = loss_words.get(verdict.outcome, "close")
    failures_word = "more" if arm_fails_more else "fewer"
    verdict = _with_notes(verdict, f"{loss_word} loss, {failures_word} failures", verdict.note)
    return replace(verdict, outcome="undecided", p=1.0)


def _unless_too_few(verdict: Verdict, sides: Sides, looks: Looks) -> Verdict:
    """Withhold a verdict if so few runs cannot pass the test, whatever their results."""
    assert verdict.exact is not None
    smallest = verdict.exact.smallest_p
    if looks.registered:
        return verdict
    if min(len(side.group.runs) for side in sides) == 1:
        return replace(verdict, why=inference.ONE_SEED)
    if smallest < looks.alpha:
        return verdict
    text = f"undecided: so few runs cannot give p below {smallest:.2g}"
    return replace(verdict, why=Why("too_few", text))


def answer_by_count(verdict: Verdict, test: ExactTest, looks: Looks, *notes: str) -> Verdict:
    """Complete a verdict by an exact test, which shows differences but cannot test a margin."""
    question = verdict.question
    n_looks = len(looks.plan)
    # Bonferroni over the looks: no boundary is calibrated for p-values that jump.
    corrected = replace(test, p=min(1.0, test.p * n_looks))
    smallest = test.smallest_p * n_looks
    note = test.method.replace("rank sum", "rank-sum test")
    if question.direction in ("noninferior", "equivalent"):
        note = "a margin cannot be tested then"
    elif looks.registered and smallest > looks.alpha:
        note += f", whose smallest p with so many runs is {smallest:.2g}"
    verdict = replace(
        verdict,
        exact=test,
        p=inference.claim_p(corrected, question.direction, question.margin),
        p_equivalent=_equivalent_p(question, test),
        outcome=_outcome(question, test),
        opposite=question.direction != "different" and test.wins < 0.5,
    )
    return _with_notes(verdict, *notes, note)


def _by_t(verdict: Verdict, sides: Sides, looks: Looks) -> Verdict:
    """Judge by a t test at each look so far: paired if the two sides have the same seeds."""
    question = verdict.question
    groups = [side.group for side in sides]
    estimates = []
    for seeds, level in zip(looks.plan[: looks.taken], looks.levels, strict=False):
        before, after = (side.first(seeds) for side in sides)
        estimate = _estimate(question, before, after, level, groups)
        estimates.append(estimate)
    return answer_by_t(verdict, estimates, looks)


def answer_by_t(verdict: Verdict, estimates: Sequence[Estimate], looks: Looks) -> Verdict:
    """Complete a verdict by the estimates of the looks so far."""
    question = verdict.question
    estimate = estimates[-1]
    if estimate.p is None:
        return replace(verdict, estimate=estimate, why=estimate.why)
    claims = [inference.claim_p(look, question.direction, question.margin) for look in estimates]
    p = sequential_p(claims, looks.plan, sides_of(question.direction))
    outcome = _outcome(question, _clearest(estimates, looks.plan))
    note = ""
    has_turned = outcome != _outcome(question, estimate) or not _supports_claim(question, estimate)
    if has_turned and looks.passed_by(p):
        note = f"an earlier look said {outcome}, the last one points the other way"
        outcome = "undecided"
        p = 1.0
    return replace(
        verdict,
        estimate=estimate,
        p=p,
        p_equivalent=_equivalent_p(question, estimate),
        outcome=outcome,
        # `correct` decides by the estimate whether it shows the opposite.
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
    """Estimate a difference of losses or a ratio of costs.

    Args:
        before: seed -> value of the baseline; for a cost to match, the end of its run.
        after: the same of the method.
        level: two-sided level of the interval.
    """
    if question.tested == "match":
        if before.keys() == after.keys():
            pairs = [(before[seed], after[seed]) for seed in before]
            estimate = inference.paired_t([match(a, b) for a, b in pairs], level)
        else:
            pairs = list(itertools.product(before.values(), after.values()))
            table = [[match(a, b) for a in before.values()] for b in after.values()]
            estimate = inference.all_pairs(table)
        if math.isnan(estimate.mean):
            return inference.no_estimate("matched before the first step: no claim")
        error = sum(match_error(a, b) for a, b in pairs) / len(pairs)
        return _unless_too_sparse(inference.exponentiated(estimate), error, groups)

    if question.tested == "ratio":
        if min(*before.values(), *after.values()) <= 0:
            return inference.no_estimate("reached before the first step: no claim")
        return inference.ratio_of_means(before, after, level)
    return inference.difference_of_means(before, after, level)


def _unless_too_sparse(estimate: Estimate, error: float, groups: Sequence[Group]) -> Estimate:
    """Withhold a cost to match if sparse evaluations make its error too large.

    The error may be `CROSSING` of the interval, and never matters below SAME_SCHEDULE.

    Args:
        error: of the logarithm of the ratio.
    """
    if estimate.low is None or estimate.high is None:
        return estimate
    largest = CROSSING * math.log(estimate.high / estimate.low)
    largest = max(largest, SAME_SCHEDULE)
    # Errors that are infinite in both directions have a mean of NaN.
    error = math.inf if math.isnan(error) else abs(error)
    if error <= largest:
        return estimate
    every = evaluated_every(runs_of(groups))
    # The error grows with the square of the steps between two evaluations.
    enough = every * math.sqrt(largest / error)
    enough = max(1, math.floor(enough))
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
    has_lower_value = inference.is_better(test)
    return "better" if has_lower_value != question.higher else "worse"


def _clearest(estimates: Sequence[Estimate], plan: Sequence[int]) -> Estimate:
    """Return the look that decides `sequential_p`: the one with the largest weighted deviate."""
    clearest = estimates[-1]
    largest = -math.inf
    for n, each in zip(plan, estimates, strict=False):
        if each.p is not None:
            deviate = weighted_deviate(each.p, n, plan, 2)
            if deviate > largest:
                largest = deviate
                clearest = each
    return clearest


def _supports_claim(question: Question, estimate: Estimate) -> bool:
    """Return whether the direction's claim is true of the estimate, its interval aside."""
    gain = estimate.gain
    size = estimate.scaled(question.margin or 0.0)
    if question.direction == "better":
        return gain > 0
    if question.direction == "equivalent":
        return abs(gain) < size
    return question.direction == "different" or gain > -size


def _is_opposite(each: Verdict, looks: Looks, comparisons: int) -> bool:
    """Return whether the result shows, corrected for all comparisons, that the claim is false."""
    question = each.question
    if not each.opposite:
        return False
    if each.exact is not None:
        p = comparisons * len(looks.plan) * each.exact.p
        return looks.passed_by(min(1.0, p))
    size = each.estimate.scaled(question.margin or 0.0)
    level = looks.level(looks.alpha / comparisons, sides=2)
    half = inference.half_width(each.estimate, level)
    low = each.estimate.gain - half
    high = each.estimate.gain + half
    if question.direction == "better":
        return high < 0
    if question.direction == "noninferior":
        return high < -size
    return question.direction == "equivalent" and (high < -size or low > size)


# --- zero-shot scores -----------------------------------------------------------------------------


def _judge_scores(
    verdict: Verdict, baseline: Group, method: Group, looks: Looks, withheld: Why | None
) -> Verdict:
    """Judge the scores of the runs that have one, by seed; two single checkpoints by item."""
    groups = (baseline, method)
    sides = [find_results(verdict.question.key, group) for group in groups]
    base_results, method_results = sides
    before = {seed: result.score for seed, result in base_results.items()}
    after = {seed: result.score for seed, result in method_results.items()}
    estimate = inference.difference_of_means(before, after)
    why = withheld or why_no_score(groups, sides)
    if not before or not after:
        why = Why("missing", "missing: no claim")
    if why:
        return replace(verdict, estimate=Estimate(estimate.mean, why=why), why=why)
    judged = answer_by_t(verdict, [estimate], looks)
    if judged.why:
        items, p = compare_items(sides)
        judged = replace(judged, items=items, items_p=p)
    return judged
