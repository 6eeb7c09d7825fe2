"""The search of `efftrain tune-warmup`, without its training: which probe comes next, and what the search can cost.

Li, Zhang, He (NeurIPS 2022, arXiv 2108.06084) tune a warmup by short probes instead of full runs. A probe is unstable when
its validation perplexity fluctuates significantly, that is, rises above `threshold` times the best before it.

 1. Raise `start` until the perplexity does not fluctuate at the very beginning: while the learning rate warms up.
 2. Binary-search the largest `steps` without fluctuation in the first few multiples of the learning-rate warmup.

Both take for granted that a longer start is no less stable, and a longer warmup no more. The search is a function of the
receipts so far, so a search that was killed goes on where it stopped, and its worst case can be counted before it begins.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple

from efftrain_cli.foundation.errors import UsageError
from efftrain_cli.methods.batch_size_warmup import BatchSizeWarmup
from efftrain_cli.methods.seq_len_warmup import SeqLenWarmup
from efftrain_cli.recipe.recipe import Recipe


@dataclass(frozen=True, kw_only=True)
class Probe:
    """One short run of the search."""

    phase: Literal["start", "steps"]
    """What it is asked for: whether its start, or its duration, is stable."""
    start: int
    """Where the warmup begins: tokens per sequence, or sequences per step."""
    steps: int
    """How long the warmup is set to last, in optimizer steps."""
    horizon: int
    """Steps after which the probe ends, if nothing happened."""

    @property
    def name(self) -> str:
        """Name of the probe and of its run directory."""
        return f"{self.phase}-start{self.start}-steps{self.steps}"


@dataclass(frozen=True, kw_only=True)
class Receipt:
    """What a finished probe found, and what it cost."""

    probe: Probe
    stable: bool
    max_fluctuation: float
    """Largest of perplexity / best perplexity before it; infinite where the loss was not finite."""
    fluctuation_step: int
    """The step it was measured at."""
    stopped_at_step: int
    tokens: int
    seconds: float
    """Wall time, validation included."""
    curve: tuple[tuple[int, float], ...]
    """(step, validation loss in nats per token)."""

    @property
    def verdict(self) -> str:
        return "stable" if self.stable else "unstable"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The end of a search."""

    start: int | None
    steps: int | None
    """The setting found, or None twice: no setting is stable."""
    statement: str
    """What the search has and has not shown, in a sentence or two."""


# --- searching an ordered list for the place where the verdict changes -----------------------------------------------


@dataclass(frozen=True)
class Found:
    """The index searched for; -1 where there is none."""

    index: int


Verdicts = Mapping[int, bool]
"""Index -> stable, for those probed."""


def first_stable(values: Sequence[int], verdicts: Verdicts) -> int | Found:
    """The index to probe next, in search of the first stable value: doubling the value until one is stable, then bisecting
    between it and the last unstable one."""
    low, high = -1, len(values)
    for index, stable in verdicts.items():
        if stable:
            high = min(high, index)
        else:
            low = max(low, index)
    if high < len(values):
        return Found(high) if high - low == 1 else (low + high) // 2
    if low == -1:
        return 0
    if low == len(values) - 1:
        return Found(-1)
    doubled = next((index for index, value in enumerate(values) if value >= 2 * values[low]), len(values) - 1)
    return max(doubled, low + 1)


def last_stable(values: Sequence[int], verdicts: Verdicts) -> int | Found:
    """The index to probe next, in search of the last stable value: the very last first, then bisecting; the first value is
    taken for stable until nothing else is left."""
    low, high = 0, len(values)
    for index, stable in verdicts.items():
        if stable:
            low = max(low, index)
        else:
            high = min(high, index)
    if high == len(values):
        return Found(low) if low == len(values) - 1 and low in verdicts else len(values) - 1
    if high == 0:
        return Found(-1)
    if high - low > 1:
        return (low + high) // 2
    return Found(low) if low in verdicts else low


Step = Callable[[Sequence[int], Verdicts], "int | Found"]


def paths(step: Step, values: Sequence[int], verdicts: Verdicts) -> Iterator[tuple[list[int], int]]:
    """Every way that a search can still take, as (indices probed, index found or -1). Verdicts change at most once along
    the values, so a search is decided by where."""
    rising = step is first_stable
    for boundary in range(len(values) + 1):
        # Stable from `boundary` on, or below it.
        stable = [(index >= boundary) == rising for index in range(len(values))]
        if any(stable[index] != verdict for index, verdict in verdicts.items()):
            continue
        known, asked = dict(verdicts), []
        while not isinstance(answer := step(values, known), Found):
            asked.append(answer)
            known[answer] = stable[answer]
        yield asked, answer.index


# --- what is searched ------------------------------------------------------------------------------------------------


class Cost(NamedTuple):
    """What probes cost at most."""

    probes: int
    tokens: int


@dataclass(frozen=True, kw_only=True)
class Search:
    """A search over the warmup of one recipe. A recipe without a warmup is searched for a sequence length warmup.

    Raises:
        UsageError: the recipe leaves nothing to search for.
    """

    recipe: Recipe
    multiples: int = 3
    """Learning-rate warmups that a probe of the duration lasts."""
    threshold: float = 1.3
    """Perplexity over best perplexity so far above which a fluctuation is significant."""
    max_share: float = 0.66
    """Share of the token budget that the longest warmup tried may take. The longest of the paper's authors took 63 %."""
    eval_every: int | None = None
    """Steps between validations in a probe; None: a tenth of the learning-rate warmup, or eval.every where that is less."""

    def __post_init__(self) -> None:
        if self.recipe.optim.warmup_steps < 1:
            raise UsageError(
                "tune-warmup measures its probes in multiples of the learning-rate warmup, and optim.warmup_steps is 0; "
                "set it, for example --set optim.warmup_steps=100"
            )
        if self.multiples < 1 or self.threshold <= 1 or not 0 < self.max_share <= 1:
            raise UsageError(
                f"--multiples {self.multiples} must be at least 1, --threshold {self.threshold:g} above 1, and --max-share "
                f"{self.max_share:g} above 0 and at most 1"
            )
        warmup = self.recipe.seq_len_warmup
        if warmup is not None and warmup.steps is None:
            raise UsageError(
                'tune-warmup searches start and steps, and pacing = "discrete" has neither; '
                'set --set seq_len_warmup.pacing=linear with a start and steps, or choose another recipe'
            )
        if self.recipe.stages:
            raise UsageError("tune-warmup searches recipes without stages; give it the recipe of one stage")
        if not self.starts:
            raise UsageError(
                f"there is no {self.start_name} to search between the recipe's and the full {self.full}; lower it"
            )
        for start in (self.starts[0], self.starts[-1]):
            if not self.durations(start):
                raise UsageError(
                    f"the budget of {self.recipe.train.tokens:,} tokens is too small to search: even a warmup of "
                    f"optim.warmup_steps = {self.window} steps takes more than --max-share {self.max_share:g} of it"
                )

    @property
    def window(self) -> int:
        """Steps of the learning-rate warmup: the resolution of the duration, and the length of the very beginning."""
        return self.recipe.optim.warmup_steps

    @property
    def horizon(self) -> int:
        """Steps that a probe of the duration lasts."""
        return self.multiples * self.window

    @property
    def searches_batch_size(self) -> bool:
        """Whether the batch size is warmed up, rather than the sequence length."""
        return self.recipe.batch_size_warmup is not None

    @property
    def start_name(self) -> str:
        return "batch_size_warmup.start" if self.searches_batch_size else "seq_len_warmup.start"

    @property
    def full(self) -> int:
        """Where the warmup leads: train.batch_size or model.seq_len."""
        return self.recipe.train.batch_size if self.searches_batch_size else self.recipe.model.seq_len

    @cached_property
    def _durations(self) -> dict[int, tuple[int, ...]]:
        return {}

    @cached_property
    def _warmup(self) -> SeqLenWarmup:
        return self.recipe.seq_len_warmup or SeqLenWarmup(start=min(8, self.recipe.model.seq_len), steps=1)

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """The starts to choose from, rising; full length or full batch is not a warmup and not among them."""
        if self.recipe.batch_size_warmup is not None:
            ramp = self.recipe.batch_size_warmup
            return tuple(range(ramp.start, self.full, ramp.increment))
        first, multiple = self._warmup.start, self._warmup.multiple
        return (first, *range(first - first % multiple + multiple, self.full, multiple)) if first < self.full else ()

    def durations(self, start: int) -> tuple[int, ...]:
        """The durations to choose from with `start`, in optimizer steps, rising: multiples of the learning-rate warmup as far
        as the share of the budget goes."""
        if start not in self._durations:
            budget = int(self.max_share * self.recipe.train.tokens)
            smallest = self._tokens_of_warmup(start, self.window)
            # A warmup of m windows takes no less than m / 2 times the tokens of one.
            candidates = range(self.window, self.window * (2 * budget // smallest + 2), self.window)
            fitting = bisect_right(candidates, budget, key=lambda steps: self._tokens_of_warmup(start, steps))
            self._durations[start] = tuple(candidates[:fitting])
        return self._durations[start]

    def _tokens_of_warmup(self, start: int, steps: int) -> int:
        """Tokens trained until a warmup ends."""
        warmup, recipe = self._warmup_with(start, steps), self.recipe
        if isinstance(warmup, BatchSizeWarmup):
            return warmup.sequences * recipe.model.seq_len
        return warmup.tokens_through(steps, recipe.model.seq_len, recipe.train.batch_size)

    def _warmup_with(self, start: int, steps: int) -> SeqLenWarmup | BatchSizeWarmup:
        """The warmup from `start` that lasts `steps` optimizer steps, whether or not it fits the budget."""
        if self.recipe.batch_size_warmup is not None:
            ramp = replace(self.recipe.batch_size_warmup, start=start)
            return replace(ramp, sequences=ramp.sequences_for(steps, self.full))
        return replace(self._warmup, start=start, steps=steps)

    def recipe_with(self, start: int, steps: int) -> Recipe:
        """The recipe with this warmup and nothing else changed."""
        warmup = self._warmup_with(start, steps)
        if isinstance(warmup, BatchSizeWarmup):
            return replace(self.recipe, batch_size_warmup=warmup)
        return replace(self.recipe, seq_len_warmup=warmup)

    def recipe_of(self, probe: Probe) -> Recipe:
        """What a probe runs: the recipe with its warmup, validated more often, with one checkpoint kept."""
        recipe = self.recipe_with(probe.start, probe.steps)
        every = self.eval_every or max(1, min(recipe.eval.every, self.window // 10))
        return replace(
            recipe, eval=replace(recipe.eval, every=every), checkpoint=replace(recipe.checkpoint, keep=1)
        )

    def tokens_of(self, probe: Probe) -> int:
        """Tokens that a probe trains if it runs to its horizon."""
        recipe = self.recipe_with(probe.start, probe.steps)
        if recipe.batch_size_warmup is None:
            assert recipe.seq_len_warmup is not None
            return recipe.seq_len_warmup.tokens_through(probe.horizon, recipe.model.seq_len, recipe.train.batch_size)
        sequences = 0
        for _ in range(probe.horizon):
            sequences += recipe.batch_size_warmup.batch_size_at(sequences, recipe.train.batch_size)
        return sequences * recipe.model.seq_len

    def probe_of_start(self, start: int) -> Probe:
        """The probe that tells whether `start` is stable at the very beginning."""
        longest = self.durations(start)[-1]
        return Probe(phase="start", start=start, steps=min(self.horizon, longest), horizon=self.window)

    def probe_of_steps(self, start: int, steps: int) -> Probe:
        """The probe that tells whether a warmup of `steps` from `start` is stable."""
        return Probe(phase="steps", start=start, steps=steps, horizon=self.horizon)

    def next(self, receipts: Sequence[Receipt]) -> Probe | Outcome:
        """The probe to run after those that `receipts` are of, or the outcome when nothing is left to ask."""
        starts = {
            self.starts.index(receipt.probe.start): receipt.stable
            for receipt in receipts
            if receipt.probe.phase == "start"
        }
        answer = first_stable(self.starts, starts)
        if not isinstance(answer, Found):
            return self.probe_of_start(self.starts[answer])
        if answer.index < 0:
            return Outcome(
                start=None,
                steps=None,
                statement=f"No start is stable: validation perplexity rose above {self.threshold:g} times its best within the "
                f"{self.window} steps of the learning-rate warmup, up to {self.start_name} = {self.starts[-1]}. "
                "Lower optim.lr or lengthen optim.warmup_steps.",
            )
        start = self.starts[answer.index]
        durations = self.durations(start)
        verdicts = {
            durations.index(receipt.probe.steps): receipt.stable
            for receipt in receipts
            if receipt.probe.phase == "steps" and receipt.probe.start == start
        }
        answer = last_stable(durations, verdicts)
        if not isinstance(answer, Found):
            return self.probe_of_steps(start, durations[answer])
        if answer.index < 0:
            return Outcome(
                start=None,
                steps=None,
                statement=f"No duration is stable: from a start of {start}, validation perplexity rose above "
                f"{self.threshold:g} times its best within {self.horizon} steps even with a warmup of {durations[0]} steps. "
                "Lower optim.lr or lengthen optim.warmup_steps.",
            )
        steps = durations[answer.index]
        if answer.index == len(durations) - 1 and all(receipt.stable for receipt in receipts):
            statement = (
                f"Every setting tried is stable, up to the longest allowed (--max-share {self.max_share:g} of the budget), so "
                "the probes do not tell settings apart; the paper's rule takes the longest. If plain training is stable as "
                "well, no warmup is needed for stability."
            )
        else:
            statement = (
                f"{steps} steps is the longest stable warmup from the shortest stable start, {start}, to within "
                f"{self.window} steps."
            )
        return Outcome(start=start, steps=steps, statement=statement)

    # --- cost --------------------------------------------------------------------------------------------------------

    def worst_case(self, receipts: Sequence[Receipt] = ()) -> Cost:
        """Bounds for what the search may still run after `receipts`: probes, and tokens if every one runs to its horizon (an
        unstable one stops earlier)."""
        starts = {
            self.starts.index(receipt.probe.start): receipt.stable
            for receipt in receipts
            if receipt.probe.phase == "start"
        }
        probes = tokens = 0
        for asked, found in paths(first_stable, self.starts, starts):
            first = sum(self._tokens(self.probe_of_start(self.starts[index])) for index in asked)
            second = Cost(0, 0) if found < 0 else self._worst_duration(self.starts[found], receipts)
            probes = max(probes, len(asked) + second.probes)
            tokens = max(tokens, first + second.tokens)
        return Cost(probes, tokens)

    def if_start_is_stable(self) -> Cost:
        """The most that the search costs if the recipe's own start turns out stable at once."""
        second = self._worst_duration(self.starts[0], ())
        return Cost(1 + second.probes, self._tokens(self.probe_of_start(self.starts[0])) + second.tokens)

    def _worst_duration(self, start: int, receipts: Sequence[Receipt]) -> Cost:
        durations = self.durations(start)
        verdicts = {
            durations.index(receipt.probe.steps): receipt.stable
            for receipt in receipts
            if receipt.probe.phase == "steps" and receipt.probe.start == start
        }
        # The first path, on which every probe is unstable as long as the receipts allow, has no fewer probes than any other
        # and the shortest warmups, which reach the longest sequences: no path costs more.
        asked, _ = next(paths(last_stable, durations, verdicts))
        return Cost(len(asked), sum(self._tokens(self.probe_of_steps(start, durations[index])) for index in asked))

    @cached_property
    def _costs(self) -> dict[Probe, int]:
        return {}

    def _tokens(self, probe: Probe) -> int:
        if probe not in self._costs:
            self._costs[probe] = self.tokens_of(probe)
        return self._costs[probe]


def fluctuation(curve: Sequence[tuple[int, float]]) -> tuple[float, int]:
    """The largest perplexity over the best perplexity before it, and the step of it, along (step, validation loss in nats).

    A loss that is not finite makes it infinite. 0.0 for a curve of one point.
    """
    best, worst, at = math.inf, 0.0, curve[0][0]
    for index, (step, loss) in enumerate(curve):
        if not math.isfinite(loss):
            return math.inf, step
        # exp(a) / exp(b) = exp(a - b), which does not overflow before the ratio does.
        ratio = math.exp(min(loss - best, 700.0)) if index else 0.0
        if ratio > worst:
            worst, at = ratio, step
        best = min(best, loss)
    return worst, at
