"""The search of `efftrain tune-warmup`, without its training: which probes it asks for, and what they amount to.

Li, Zhang, He (NeurIPS 2022, arXiv 2108.06084) tune a warmup by short probes instead of full runs. A probe is unstable
when its validation perplexity rises above a threshold times the best before it.

 1. Raise `start` until the perplexity does not fluctuate at the very beginning: while the learning rate warms up.
 2. Search the largest `steps` without fluctuation in the first few multiples of the learning-rate warmup.

Both begin with the recipe's own setting, and take for granted that a longer start is no less stable and a longer warmup
no more. A probe that has a receipt is not asked for again, so a search that was killed goes on where it stopped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, Any, ClassVar, NamedTuple

from pydantic import BeforeValidator, Field, PlainSerializer

from efftrain_cli.foundation.errors import UsageError
from efftrain_cli.foundation.records import Part, Record
from efftrain_cli.recipe.recipe import Recipe
from efftrain_cli.run.lines import finite
from efftrain_cli.tune_warmup.grid import Grid, Kind, kind_of

Extended = Annotated[
    float,
    BeforeValidator(lambda value: math.inf if value is None else value),
    PlainSerializer(finite),
]
"""A float that may be infinite, which JSON has as null."""
Point = Annotated[tuple[int, Extended], Field(strict=False)]
"""(step, validation loss in nats per token); JSON has a list."""


class Probe(Part):
    """One short run of the search. Asked for a longer horizon, it goes on from where it stands."""

    start: int
    """Where the warmup begins: tokens per sequence, or sequences per step; 0 if it has no start."""
    steps: int
    """How long the warmup is set to last, in optimizer steps; 0: training without it."""
    seed: int
    horizon: int
    """Steps after which the probe ends, if nothing happened."""

    @property
    def name(self) -> str:
        """Name of the probe's run directory: the same for every horizon."""
        return f"start{self.start}-steps{self.steps}-seed{self.seed}"


class Receipt(Record):
    """Result and cost of a probe since its first step; probe.json in its run directory."""

    restore: ClassVar[str] = "restore it, or remove its folder: the probe is then trained again"

    probe: Probe
    stable: bool
    max_fluctuation: Extended
    """Largest of perplexity / best perplexity before it; infinite if the loss was not finite."""
    fluctuation_step: int
    """The step it was measured at."""
    stopped_at_step: int
    tokens: int
    seconds: float
    """Wall time, validation included."""
    curve: Annotated[tuple[Point, ...], Field(strict=False)]
    max_grad_norm: float | None = None
    """Largest gradient norm before clipping, over the steps. This field and the next two do not enter the verdict."""
    max_adam_sqrt_v: float | None = None
    """Largest of Adam's sqrt(v), over the steps."""
    max_loss_ratio: float | None = None
    """Largest training loss over the best before it."""

    @property
    def verdict(self) -> str:
        return "stable" if self.stable else "unstable"

    def is_stable_until(self, horizon: int) -> bool | None:
        """Return whether the probe is stable up to step `horizon`; None if it was not seen that long."""
        if not self.stable:
            return self.fluctuation_step > horizon
        return self.stopped_at_step >= horizon or None


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The end of a search."""

    start: int | None = None
    steps: int | None = None
    """The setting to take, (full, 0) for training without a warmup, or None twice: no setting probed is stable."""
    verified: bool = False
    """The setting was probed for its duration, and stable."""
    statement: str
    """What the search has and has not shown."""
    needed: int | None = None
    """Tokens of the smallest budget that goes on from here; None if nothing was left out."""


class SettingVerdict(NamedTuple):
    """The verdict of a setting's seeds."""

    stable: bool | None
    """None: it does not fit into the budget."""
    stable_seeds: int = 0
    seeds: int = 0
    """Seeds that were probed, until the majority was decided."""
    of: int = 0
    """Seeds that were given."""
    failed_at: int | None = None
    """Earliest step at which the perplexity of any seed fluctuated too far."""

    def __str__(self) -> str:
        if self.stable is None:
            return "not judged for want of budget"
        verdict = "unstable"
        where = ""
        if self.stable:
            verdict = "stable"
        if self.failed_at is not None:
            where = f" at step {self.failed_at:,}"
        if self.of == 1:
            return f"{verdict}{where}"
        # The seeds that were not probed once the majority stood may be either: the interval covers what all would have
        # given.
        low = _share_interval(self.stable_seeds, self.of).low
        high = _share_interval(self.stable_seeds + self.of - self.seeds, self.of).high
        probed = f"{self.seeds} seeds"
        if self.seeds < self.of:
            probed += f" probed, {self.of} given"
        on = "on" if self.stable else "stable on"
        text = (
            f"{verdict} by majority, {on} {self.stable_seeds} of {probed} "
            f"(95 % interval of the share {low:.0%} to {high:.0%})"
        )
        if where:
            text += f", unstable first{where}"
        return text


Verdicts = dict[int, SettingVerdict]
"""By start or by duration."""


def _share_interval(successes: int, number: int) -> Any:
    """Return the 95 % interval of a share by Wilson's score (Wilson 1927), as `low` and `high`."""
    from scipy.stats import binomtest

    return binomtest(successes, number).proportion_ci(method="wilson")


@dataclass(frozen=True, kw_only=True)
class Search:
    """A search over one recipe.

    Raises:
        UsageError: the options make no sense, or the recipe leaves nothing to search for.
    """

    recipe: Recipe
    tune: Kind | None = None
    """What is tuned; None: the warmup that the recipe has."""
    multiples: int = 3
    """A duration is seen for its critical step and `multiples` - 1 learning-rate warmups after it; see
    `Grid.horizon`."""
    threshold: float = 1.3
    """Perplexity over best perplexity so far above which a fluctuation is significant."""
    max_share: float = 0.66
    """Share of the token budget that the longest warmup tried may take. The longest of the paper's authors took 63
    %."""
    eval_every: int | None = None
    """Steps between validations in a probe; None: a tenth of the learning-rate warmup, or eval.every if that is
    less."""
    seeds: tuple[int, ...] = ()
    """Seeds that every setting is probed with; a setting is stable if more than half are. Empty: the recipe's."""
    budget: int | None = None
    """Tokens that all probes together may train; None: no limit."""

    def __post_init__(self) -> None:
        if self.multiples < 1 or self.threshold <= 1 or not 0 < self.max_share <= 1:
            raise UsageError(
                f"--multiples {self.multiples} must be at least 1, --threshold {self.threshold:g} above 1, and --max-share "
                f"{self.max_share:g} above 0 and at most 1"
            )
        _ = self.grid

    @cached_property
    def kind(self) -> Kind:
        return self.tune or kind_of(self.recipe)

    @cached_property
    def grid(self) -> Grid:
        return Grid(
            recipe=self.recipe, kind=self.kind, multiples=self.multiples, max_share=self.max_share
        )

    @cached_property
    def all_seeds(self) -> tuple[int, ...]:
        return self.seeds or (self.recipe.seed,)

    def recipe_of(self, probe: Probe) -> Recipe:
        """Return the recipe that a probe trains: the searched one with its setting and seed,
        validated more often, with one checkpoint kept."""
        recipe = self.grid.recipe_with(probe.start, probe.steps)
        every = self.eval_every or max(1, min(recipe.eval.every, self.grid.lr_warmup_steps // 10))
        return replace(
            recipe,
            seed=probe.seed,
            eval=replace(recipe.eval, every=every),
            checkpoint=replace(recipe.checkpoint, keep=1),
        )

    def tokens_of(self, probe: Probe) -> int:
        """Count the tokens that a probe has trained when it reaches its horizon."""
        return self.grid.tokens(probe.start, probe.steps, probe.horizon)

    def most_probes(self) -> tuple[int, int]:
        """Return upper bounds on the number of probes: (search for a start, search for a duration).

        The second includes the probe of training without a warmup, for each seed.
        """
        grid = self.grid
        seeds = len(self.all_seeds)
        durations = grid.durations(grid.starts[0])
        nearest = durations.index(grid.nearest_duration(grid.starts[0]))
        after = max(_most_left(-1, nearest), 1 + _most_left(nearest + 1, len(durations)))
        if self.kind == "lr":
            return 0, seeds * (1 + after)
        # Every second start, the last one, and one step back; then the recipe's own duration and no warmup.
        return seeds * (len(grid.starts) // 2 + 2), seeds * (2 + after)

    def most_tokens(self) -> int:
        """Bound the tokens that a search trains: its probes times the dearest of their kind on the grid."""
        grid = self.grid
        of_starts, of_durations = self.most_probes()
        settings = list(grid.settings())
        if self.kind != "lr":
            settings.append((grid.full, 0))
        climbing = max(grid.tokens(*setting, grid.climb(*setting)) for setting in settings)
        seen = max(grid.tokens(*setting, grid.horizon(*setting)) for setting in settings)
        return of_starts * climbing + of_durations * seen

    def smallest_budget(self) -> int:
        """Count the tokens with which the recipe's own setting can be verified at all: the least
        that is worth a --budget."""
        start = self.grid.starts[0]
        steps = self.grid.nearest_duration(start)
        return (len(self.all_seeds) // 2 + 1) * self.grid.tokens(
            start, steps, self.grid.horizon(start, steps)
        )


def _next_duration(low: int, high: int) -> int:
    """Return the index in `Grid.durations` to probe next: three quarters of the way from `low` to `high`.

    Later durations have cheaper probes.
    """
    return (low + 3 * high) // 4


def _most_left(low: int, high: int) -> int:
    """Bound the probes that find the last stable duration between `low` and `high`."""
    if high - low < 2:
        return 0
    at = _next_duration(low, high)
    return 1 + max(_most_left(low, at), _most_left(at, high))


class Finder:
    """Finds the setting to take, asking for one probe after another."""

    def __init__(
        self, search: Search, receipts: Sequence[Receipt], run: Callable[[Probe], Receipt]
    ) -> None:
        """
        Args:
            receipts: of the probes that were run before.
            run: trains a probe, or what is left of it.
        """
        self.search = search
        self.receipts = {receipt.probe.name: receipt for receipt in receipts}
        self.run = run
        self.needed: int | None = None

    def find(self) -> Outcome:
        """Return what is found for the start, then from there for the duration."""
        grid = self.search.grid
        verdicts: Verdicts = {}
        start = self.find_start(verdicts)
        below = "; ".join(f"{s} {verdict}" for s, verdict in sorted(verdicts.items()) if s < start)
        if below:
            below = f" Starts below it: {below}."
        verdict = verdicts.get(start, SettingVerdict(True))
        if verdict.stable is None:
            return self._unverified(start, grid.nearest_duration(start), below)
        if not verdict.stable:
            each = "; ".join(f"{s} {verdict}" for s, verdict in sorted(verdicts.items()))
            return Outcome(
                statement=f"No {grid.start_name} that was probed is stable for the {grid.lr_warmup_steps:,} steps of the "
                f"learning-rate warmup: {each}. Lower optim.lr or lengthen optim.warmup_steps."
            )
        outcome = self.find_duration(start)
        return replace(outcome, statement=outcome.statement + below, needed=self.needed)

    def find_start(self, verdicts: Verdicts) -> int:
        """Search the smallest start that is stable during the learning-rate warmup.

        Try every second start; at the first stable one, try the start below it too. If no start is stable, return the
        last. If the budget ends first, return the start that it did not cover.

        Args:
            verdicts: filled with the verdict of every start that was tried.
        """
        grid = self.search.grid
        starts = grid.starts
        if grid.kind == "lr":
            return 0

        def judge_start(index: int) -> bool | None:
            start = starts[index]
            steps = grid.nearest_duration(start)
            verdicts[start] = self.judge(start, steps, grid.climb(start, steps))
            return verdicts[start].stable

        index = 0
        stable = judge_start(index)
        while stable is False and index < len(starts) - 1:
            index = min(index + 2, len(starts) - 1)
            stable = judge_start(index)
        if not stable or index == 0:
            return starts[index]

        below = starts[index - 1]
        if below not in verdicts and judge_start(index - 1):
            return below
        return starts[index]

    def find_duration(self, start: int) -> Outcome:
        """Return the furthest stable duration from `start`, the recipe's own first, then its neighbour if that is
        stable."""
        grid = self.search.grid
        durations = grid.durations(start)
        low = -1
        high = len(durations)
        at = durations.index(grid.nearest_duration(start))
        verdicts: Verdicts = {}
        while high - low > 1:
            verdict = self.judge(start, durations[at], grid.horizon(start, durations[at]))
            verdicts[durations[at]] = verdict
            if verdict.stable is None:
                return self._out_of_budget(start, low, verdicts)
            if verdict.stable:
                low = at
            else:
                high = at
            at = _next_duration(low, high)
            if verdict.stable and len(verdicts) == 1:
                at = low + 1  # the neighbour first
        tried = "; ".join(f"{steps:,} steps: {verdicts[steps]}" for steps in sorted(verdicts))
        if low < 0:
            statement = f"No duration that was probed{self._from(start)} is stable: {tried}."
            if start != grid.starts[-1]:
                statement += " Longer starts were not probed with them."
            statement += " Lower optim.lr"
            if grid.kind != "lr":
                statement += " or lengthen optim.warmup_steps"
            return Outcome(statement=f"{statement}.")
        if low == len(durations) - 1:
            return self._all_stable(start, verdicts)
        return Outcome(
            start=start,
            steps=durations[low],
            verified=True,
            statement=self._verified(start, durations[low], verdicts),
        )

    def judge(self, start: int, steps: int, horizon: int) -> SettingVerdict:
        """Probe a setting up to step `horizon` with one seed after another, until the majority stands or the budget
        ends."""
        stable = 0
        failed = list[int]()
        seeds = len(self.search.all_seeds)
        for seed in self.search.all_seeds:
            if 2 * stable > seeds or 2 * len(failed) >= seeds:
                break
            receipt = self._probe(Probe(start=start, steps=steps, seed=seed, horizon=horizon))
            if receipt is None:
                return SettingVerdict(None)
            if receipt.is_stable_until(horizon):
                stable += 1
            else:
                failed.append(receipt.fluctuation_step)
        return SettingVerdict(
            2 * stable > seeds, stable, stable + len(failed), seeds, min(failed, default=None)
        )

    def _probe(self, probe: Probe) -> Receipt | None:
        """Return the probe's receipt, after running it if it is not known; None if that could exceed the budget."""
        known = self.receipts.get(probe.name)
        if known is not None and known.is_stable_until(probe.horizon) is not None:
            return known
        others = sum(r.tokens for name, r in self.receipts.items() if name != probe.name)
        needed = others + self.search.tokens_of(probe)
        if self.search.budget is not None and needed > self.search.budget:
            self.needed = self.needed or needed
            return None
        receipt = self.run(probe)
        # In the order in which they ended, as `read_receipts` has them.
        self.receipts.pop(probe.name, None)
        self.receipts[probe.name] = receipt
        return receipt

    # --- in words ----------------------------------------------------------------------------------------------------

    def _all_stable(self, start: int, verdicts: Verdicts) -> Outcome:
        """Describe a search in which no duration is unstable, after probing training without the warmup."""
        grid = self.search.grid
        steps = max(verdicts)
        limit = f"longest allowed (--max-share {grid.max_share:g} of the budget)"
        if grid.kind == "lr":
            steps = min(verdicts)
            limit = "shortest allowed (an eighth of the recipe's)"
        statement = f"{self._verified(start, steps, verdicts)} It is the {limit}. No duration that was probed is unstable"
        if grid.kind == "lr":
            statement += ", so the probes do not tell durations apart."
        else:
            horizon = grid.horizon(grid.full, 0)
            plain = self.judge(grid.full, 0, horizon)
            if plain.stable:
                start = grid.full
                steps = 0
                needless = f"training without it is {plain}, seen for {horizon:,} steps"
                statement = f"No warmup is needed for stability: {needless}. {statement} either."
            else:
                statement += f"; training without a warmup: {plain}."
        return Outcome(start=start, steps=steps, verified=True, statement=statement)

    def _verified(self, start: int, steps: int, verdicts: Verdicts) -> str:
        """State what the probes show of the setting to take, and of those that are not stable."""
        grid = self.search.grid
        statement = f"{self._named(start, steps)}: {verdicts[steps]}, seen for {grid.horizon(start, steps):,} steps."
        for tried, verdict in sorted(verdicts.items()):
            if verdict.stable is False:
                statement += f" {tried:,} steps: {verdict}."
                climb = grid.climb(start, tried)
                if grid.start_name and verdict.failed_at is not None and verdict.failed_at <= climb:
                    statement += " It failed while the learning rate climbed; no longer start was probed with it."
        if len(self.search.all_seeds) == 1:
            statement += " This is one seed's verdict, another seed may say otherwise: --seeds 0..2 asks three."
        return statement

    def _out_of_budget(self, start: int, low: int, verdicts: Verdicts) -> Outcome:
        """Describe the best verified setting if the budget does not reach the last duration of `verdicts`."""
        grid = self.search.grid
        durations = grid.durations(start)
        left_out = next(steps for steps, verdict in verdicts.items() if verdict.stable is None)
        if low >= 0:
            statement = (
                f"{self._verified(start, durations[low], verdicts)} The budget ended before {left_out:,} steps could be "
                "judged: whether that is stable is not known."
            )
            return Outcome(start=start, steps=durations[low], verified=True, statement=statement)
        known = "".join(
            f" {steps:,} steps: {verdict}." for steps, verdict in verdicts.items() if verdict.seeds
        )
        if grid.start_name:
            climb = grid.climb(start, left_out)
            known += f" The start was stable while the learning rate climbed, {climb:,} steps."
        return self._unverified(start, left_out, known)

    def _unverified(self, start: int, steps: int, known: str) -> Outcome:
        grid = self.search.grid
        label = f"a rule of thumb, {grid.rule_of_thumb}"
        rule = ""
        if (start, steps) != grid.own:
            label = "only the next to be probed"
            rule = "its stability is not known. "
        probe = "the probes"
        if len(self.search.all_seeds) == 1:
            probe = "a probe"
        return Outcome(
            start=start,
            steps=steps,
            needed=self.needed,
            statement=f"NOT VERIFIED, {label}. {self._named(start, steps)}: {rule}The budget does not reach to the "
            f"end of {probe} of it, {grid.horizon(start, steps):,} steps.{known}",
        )

    def _named(self, start: int, steps: int) -> str:
        kind = "learning-rate " * (self.search.kind == "lr")
        return f"A {kind}warmup of {steps:,} steps{self._from(start)}"

    def _from(self, start: int) -> str:
        if self.search.kind == "lr":
            return ""
        return f" from a start of {start}"
