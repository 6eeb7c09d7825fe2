"""The judge: an estimate of every measure of an arm, and a test of what was claimed beforehand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from pydantic import Field
from pydantic.dataclasses import dataclass as checked

from efftrain_cli.compare.arms import Pairs
from efftrain_cli.compare.inference import (
    TWO_SIDED,
    Direction,
    Estimate,
    correct,
    detectable,
    failures_p,
    outcome_of,
)
from efftrain_cli.compare.measures import Measure, budget_terms
from efftrain_cli.foundation.console import listed
from efftrain_cli.foundation.section import SECTION

Judged = Literal[
    "final_loss",
    "tokens_to_match",
    "flops_to_match",
    "tokens_to_target",
    "flops_to_target",
    "compute_multiplier",
]
WITHIN = ("equivalent", "noninferior")
"""Outcomes whose interval is one-sided at the level on each side."""
FEWEST_PAIRS = 3
"""Pairs without a failed or stuck run that an estimate needs if others failed."""


@checked(frozen=True, kw_only=True, config=SECTION)
class Claim:
    """What an arm must be shown to be, against the baseline."""

    measure: Judged = "final_loss"
    """Key of a measure; to match: the worse run's final loss, to target: `target`."""
    direction: Direction = "different"
    """different: better or worse. either: better, worse, or equivalent within the margin."""
    margin: float = Field(default=0.0, ge=0)
    """Difference that does not matter: nats per token, or for a cost a share (0.05 is 5 %)."""
    target: float | None = Field(default=None, gt=0)
    """Loss to reach, for a cost to target."""


def claim_of(margin: float) -> Claim:
    """Return the claim of `compare` and `race`: better or worse; equivalent within a margin."""
    return Claim(direction="either" if margin else "different", margin=margin)


@dataclass(frozen=True)
class Result:
    """A row of the results: a measure of an arm, against the baseline."""

    measure: str
    title: str
    unit: str
    """Of losses nats/token, of ratios x, else ""."""
    arm: str
    n: int
    """Pairs of runs; 0 if no seed is shared."""
    baseline: float
    """Mean of the baseline's runs that are compared."""
    mean: float
    """Mean of the arm's."""
    estimate: float
    """Arm less baseline; of costs, baseline / arm."""
    low: float
    high: float
    confidence: float
    """Of the interval; over all looks it is larger at each."""
    why: str
    """Why a number is missing, or what else decides."""
    inner_low: float = math.nan
    """Interval with twice the error, for a margin: it lies within it if the test passes."""
    inner_high: float = math.nan
    terms: str = ""
    """What was equal where not all was: "at equal FLOPs and 0.8x the tokens"."""
    direction: str = ""
    """What was claimed; "" for a measure that is shown and never tested."""
    margin: float = math.nan
    """Difference that does not matter, as claimed."""
    could_see: float = math.nan
    """Smallest true difference, or ratio, that such a study shows in 80 % of cases."""
    outcome: str = ""
    """Verdict if the corrected p passes; "" if nothing can be judged."""
    p: float = math.nan
    p_look: float = math.nan
    """`p` over the share of alpha that the look may spend."""
    p_corrected: float = math.nan
    """`p_look` corrected for the number of claims."""
    race: int = 1
    """Number of races against this baseline so far, with this one."""
    p_race: float = math.nan
    """`p_corrected` times `race`."""
    verdict: str = ""
    closed: bool = False
    """Whether an earlier look decided the claim or gave it up."""
    given_up: bool = False
    """Whether a look gave the claim up as hopeless."""
    remark: str = ""
    """What a reader must know of how the verdict came about."""

    @property
    def key(self) -> tuple[str, str]:
        """What names the row."""
        return self.measure, self.arm


def judge(
    pairs: Pairs,
    measure: Measure,
    level: float,
    claim: Claim | None = None,
    claims: int = 1,
) -> Result:
    """Compare an arm with the baseline by one measure, and test a claim if there is one.

    Args:
        level: level of the two-sided interval, and of the claim before it is corrected.
        claims: number of claims that are corrected together.
    """
    change = Estimate(math.nan, 0)
    base = arm = math.nan
    why = why_no_pairs(pairs)
    if not why:
        base, arm = map(measure.mean, pairs.kept)
        why = measure.why_blank(pairs)
    if not why:
        change = measure.estimate(pairs)
        why = measure.missing if math.isnan(change.mean) else ""
    half = change.half_width(level)
    result = Result(
        measure=measure.key,
        title=measure.title,
        unit=measure.unit,
        arm=pairs.arm,
        n=change.n if pairs.is_paired else 0,
        baseline=base,
        mean=arm,
        estimate=measure.shown(change.mean),
        low=measure.shown(change.mean - half),
        high=measure.shown(change.mean + half),
        confidence=1 - level,
        why=why or pairs.remarks,
        terms="" if why or measure.key != "final_loss" else budget_terms(pairs),
    )
    if claim is None:
        return result
    result = replace(result, direction=claim.direction, margin=claim.margin)
    if pairs.pending:
        return replace(result, why=f"waits for {listed(pairs.pending)}")
    if is_decimated(pairs):
        return judge_failures(result, pairs)
    why = why or why_no_claim(pairs, change)
    if why:
        return replace(result, why=why)
    return judge_change(
        result,
        pairs,
        measure,
        change,
        claim,
        level,
        claims,
    )


def judge_change(
    result: Result,
    pairs: Pairs,
    measure: Measure,
    change: Estimate,
    claim: Claim,
    level: float,
    claims: int,
) -> Result:
    """Test a claim by t. Nothing is claimed in favour of a side that failed more often."""
    gain = replace(change, mean=measure.better * change.mean)
    margin = measure.margin(claim.margin)
    outcome, p = outcome_of(gain, claim.direction, margin)
    if outcome in WITHIN:
        # The interval that lies within the margin when the test passes.
        half = change.half_width(2 * level)
        result = replace(
            result,
            inner_low=measure.shown(change.mean - half),
            inner_high=measure.shown(change.mean + half),
        )
    tail = level / claims
    if claim.direction in TWO_SIDED:
        tail /= 2
    result = replace(result, could_see=measure.shown(detectable(gain.se, gain.df, tail)))

    base, arm = pairs.shares
    favours_arm = outcome != "worse" and arm > base
    favours_base = outcome in ("worse", "equivalent") and base > arm
    if favours_arm or favours_base:
        why = f"{pairs.remarks}: no claim for the side that failed more"
        return replace(result, outcome="undecided", why=why)
    return replace(result, p=p, outcome=outcome)


def judge_failures(result: Result, pairs: Pairs) -> Result:
    """Judge by the numbers of failed runs alone: too few are left to judge their losses."""
    if result.direction not in TWO_SIDED:
        why = f"{pairs.remarks}: too few are left to test a margin"
        return replace(result, outcome="undecided", why=why)
    base, arm = pairs.shares
    return replace(
        result,
        p=failures_p(pairs.failed, pairs.total),
        outcome="worse" if arm > base else "better",
        why=f"{pairs.remarks}; by Fisher's exact test",
    )


def is_decimated(pairs: Pairs) -> bool:
    """Return whether runs failed and so few are left that their losses show nothing."""
    return any(pairs.failed) and pairs.fewest < FEWEST_PAIRS


def why_no_pairs(pairs: Pairs) -> str:
    """Return why no losses are compared; "" if some are."""
    if is_decimated(pairs):
        return pairs.remarks
    return "" if pairs.fewest else f"waits for {listed(pairs.pending)}"


def why_no_claim(pairs: Pairs, change: Estimate) -> str:
    """Return why an estimate is not tested; "" if it is."""
    if pairs.fewest < 2:
        return "one seed supports no claim"
    if math.isnan(change.se):
        return "no spread between seeds"
    return ""


def decide(
    results: Sequence[Result],
    alpha: float,
    share: float,
    closed: Sequence[Result] = (),
    races: int = 1,
) -> list[Result]:
    """Return the results with corrected p-values and verdicts.

    Args:
        share: share of alpha that this look may spend.
        races: number of races against this baseline, with this one.
        closed: claims that an earlier look closed: they count, and stay as they are.
    """
    decided = {row.key: row for row in closed}
    asked = []
    for row in results:
        if row.direction:
            at_look = replace(row, p_look=min(row.p / share, 1.0))
            asked.append(decided.get(row.key, at_look))
    can_step = all(row.direction != "either" for row in asked)
    corrected = correct([row.p_look for row in asked], can_step)
    for row, p in zip(asked, corrected, strict=True):
        p_race = min(races * float(p), 1.0)
        verdict = "undecided" if row.outcome else ""
        if p_race <= alpha:
            verdict = row.outcome
        judged = replace(
            row,
            p_corrected=float(p),
            race=races,
            p_race=p_race,
            verdict=verdict,
        )
        decided.setdefault(row.key, judged)
    return [decided.get(row.key, row) for row in results]
