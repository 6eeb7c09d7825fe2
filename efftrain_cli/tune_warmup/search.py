"""Decide which probes find a warmup, and what they show. Nothing here trains or reads a file.

Li, Zhang, He (NeurIPS 2022, arXiv 2108.06084) tune a warmup by short probes instead of full runs. A
probe is unstable if its validation perplexity rises above a threshold times its best so far.

 1. Probe training without the warmup, the control: if it is stable, no setting can be told apart.
    Of a learning-rate warmup it is the shortest that is listed: without any, training is on the
    plateau of token frequencies after a few steps, where nothing fluctuates.
 2. Take the first start that is stable while the learning rate warms up.
 3. From it, bisect for the first duration that is stable for a few learning-rate warmups.

Both lists begin with what is wanted most: the shortest start, the longest duration. The bisection
takes for granted that what is wanted less is no less stable.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Literal, NamedTuple

import numpy as np

Setting = tuple[str, ...]
"""`key=value` overrides of the recipe."""
Word = Literal["stable", "unstable", "stuck"]


class Probe(NamedTuple):
    """A short run; for a longer horizon the same run continues."""

    setting: Setting
    seed: int
    horizon: int
    """Steps after which it ends, unless it becomes unstable before."""


class Receipt(NamedTuple):
    """What a probe has shown so far."""

    fluctuation: float
    """Largest perplexity over the best one before it; infinite if a loss was not finite."""
    unstable_at: int | None
    """First step with a fluctuation above the threshold; None if there was none."""
    steps: int
    stuck_above: float
    """Loss above which the end of a probe has learned no more than the tokens' frequencies."""
    curve: tuple[tuple[int, float], ...]
    """(tokens, validation loss in nats per token), from before step 1 on."""

    @property
    def tokens(self) -> int:
        return self.curve[-1][0]

    @property
    def loss(self) -> float:
        """Last validation loss, nats per token."""
        return self.curve[-1][1]

    def loss_at(self, tokens: int) -> float | None:
        """Return the loss after so many tokens, between evaluations on a line; None if the probe
        ended before."""
        for (start, first), (end, last) in itertools.pairwise(self.curve):
            if end >= tokens:
                return float(np.interp(tokens, (start, end), (first, last)))
        return None

    def judge(self, horizon: int, may_be_stuck: bool) -> Word | None:
        """Judge the probe up to a step; None if it ended before."""
        if self.unstable_at is not None and self.unstable_at <= horizon:
            return "unstable"
        if self.steps < horizon:
            return None
        if may_be_stuck and self.loss > self.stuck_above:
            return "stuck"
        return "stable"


class Verdict(NamedTuple):
    """What the seeds of a setting have shown."""

    setting: Setting
    horizon: int
    words: tuple[Word, ...]
    """By seed, up to the first one that is not stable."""
    receipts: tuple[Receipt, ...]
    """Likewise."""

    @property
    def is_stable(self) -> bool:
        """Whether the setting is stable on all seeds."""
        return all(word == "stable" for word in self.words)

    @property
    def loss(self) -> float:
        """Mean of the last validation losses."""
        return fmean(receipt.loss for receipt in self.receipts)

    def is_worse_than(self, control: Verdict) -> bool:
        """Return whether the losses are above the control's at equal tokens by more than the seeds'
        standard error.

        Seeds on which the control ended before count nothing; with fewer than two there is no
        standard error, and no setting is worse.
        """
        excess = []
        for receipt, other in zip(self.receipts, control.receipts, strict=False):
            loss = other.loss_at(receipt.tokens)
            if loss is not None:
                excess.append(receipt.loss - loss)
        if len(excess) < 2 or not all(map(math.isfinite, excess)):
            return False
        return fmean(excess) > stdev(excess) / math.sqrt(len(excess))


@dataclass(frozen=True, kw_only=True)
class Candidates:
    """What a search chooses from, the most wanted first."""

    starts: Sequence[Setting]
    durations: Sequence[Setting]
    first: int
    """Index of the duration that is probed first."""
    control: Setting
    """The recipe without the warmup; of a learning-rate warmup, the shortest listed."""
    climb: int
    """Steps of the learning-rate warmup: a start is seen for as long."""
    horizons: Sequence[int]
    """Steps that each duration is seen for."""
    seeds: Sequence[int]


See = Callable[[Probe], Receipt]
"""Returns a probe's receipt, after training what is missing."""


class BudgetError(Exception):
    """The next probe could exceed the budget."""

    def __init__(self, needed: int) -> None:
        super().__init__(needed)
        self.needed = needed
        """Tokens that all probes would then have trained."""


def search(candidates: Candidates, see: See) -> Iterator[Verdict]:
    """Yield the verdicts on the control, on starts, and on durations.

    Raises:
        BudgetError: by `see`; the verdicts so far have been yielded.
    """
    control = judge(candidates, see, candidates.control, candidates.horizons[0])
    yield control
    if control.is_stable:
        return
    first = candidates.durations[candidates.first]
    start = candidates.starts[0]
    if len(candidates.starts) > 1:
        for start in candidates.starts:
            verdict = judge(candidates, see, start + first, candidates.climb)
            yield verdict
            if verdict.is_stable:
                break
        else:
            return
    low = 0
    high = len(candidates.durations)
    index = candidates.first
    while low < high:
        setting = start + candidates.durations[index]
        verdict = judge(candidates, see, setting, candidates.horizons[index])
        yield verdict
        if verdict.is_stable:
            high = index
        else:
            low = index + 1
        # Near the most wanted ones: a long warmup's probes have few tokens.
        index = low + (high - low) // 4
        if high == candidates.first:
            index = high - 1


def judge(candidates: Candidates, see: See, setting: Setting, horizon: int) -> Verdict:
    """Probe a setting with one seed after another, until one is not stable.

    A start may be stuck: it is seen while the learning rate warms up only. The control is probed
    with every seed, for its losses.
    """
    words: list[Word] = []
    receipts = []
    for seed in candidates.seeds:
        receipt = see(Probe(setting, seed, horizon))
        word = receipt.judge(horizon, may_be_stuck=horizon > candidates.climb)
        # A probe that ended before its horizon lost a weight or a loss.
        words.append(word or "unstable")
        receipts.append(receipt)
        if words[-1] != "stable" and setting != candidates.control:
            break
    return Verdict(setting, horizon, tuple(words), tuple(receipts))


def find_best(candidates: Candidates, verdicts: Sequence[Verdict]) -> Verdict | None:
    """Return the most wanted setting that was stable for its whole horizon, and whose loss is not
    worse than the control's; None if there is none, or if the control is stable."""
    if not verdicts or verdicts[0].is_stable:
        return None
    control = verdicts[0]
    judged = {(verdict.setting, verdict.horizon): verdict for verdict in verdicts}
    for duration, horizon in zip(candidates.durations, candidates.horizons, strict=True):
        for start in candidates.starts:
            verdict = judged.get((start + duration, horizon))
            if verdict is not None and verdict.is_stable and not verdict.is_worse_than(control):
                return verdict
    return None
