"""The search of `efftrain tune-warmup`, without its training: which probes it asks for, and what
they amount to.

Li, Zhang, He (NeurIPS 2022, arXiv 2108.06084) tune a warmup by short probes instead of full runs. A
probe is unstable when its validation perplexity rises above a threshold times the best before it.

 1. Raise `start` until the perplexity does not fluctuate at the very beginning: while the learning
   rate warms up.
 2. Search the largest `steps` without fluctuation in the first few multiples of the learning-rate
   warmup.

Both begin with the recipe's own setting, and take for granted that a longer start is no less stable
and a longer warmup no more. A probe that has a receipt is not asked for again, so a search that was
killed goes on where it stopped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

from efftrain_cli.foundation.errors import UsageError
from efftrain_cli.recipe.recipe import Recipe
from efftrain_cli.tune_warmup.grid import Grid
from efftrain_cli.tune_warmup.probe import Probe, Receipt


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The end of a search."""

    start: int | None = None
    steps: int | None = None
    """The setting to take, (full, 0) for training without a warmup, or None twice: no setting
    probed is stable."""
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
        # The seeds that were not probed once the majority stood may be either: the interval covers
        # what all would have given.
        low = _share_interval(self.stable_seeds, self.of).low
        high = _share_interval(self.stable_seeds + self.of - self.seeds, self.of).high
        probed = f"{self.seeds} seeds"
        if self.seeds < self.of:
            probed += f" probed, {self.of} given"
        on = "on" if self.stable else "stable on"
        text = (
            f"{verdict} by majority, {on} {self.stable_seeds}"
            f" of {probed} (95 % interval of the share {low:.0%} to {high:.0%})"
        )
        if where:
            text += f", unstable first{where}"
        return text


def _share_interval(successes: int, number: int) -> Any:
    """Return the 95 % interval of a share by Wilson's score (Wilson 1927), as `low` and `high`."""
    from scipy.stats import binomtest

    return binomtest(successes, number).proportion_ci(method="wilson")


@dataclass(frozen=True, kw_only=True, eq=False)
class Search(Grid):
    """A grid, and how it is searched.

    Raises:
        UsageError: the options make no sense, or the recipe leaves nothing to search for.
    """

    threshold: float = 1.3
    """Perplexity over best perplexity so far above which a fluctuation is significant."""
    seeds: tuple[int, ...] = ()
    """Seeds that every setting is probed with; a setting is stable if more than half are. Empty:
    the recipe's."""
    budget: int | None = None
    """Tokens that all probes together may train; None: no limit."""

    def __post_init__(self) -> None:
        if self.multiples < 1 or self.threshold <= 1 or not 0 < self.max_share <= 1:
            raise UsageError(
                f"--multiples {self.multiples}, --threshold {self.threshold:g}"
                f" and --max-share {self.max_share:g} give no search\n"
                "  give multiples of 1 or more, a threshold above 1, a share above 0 up to 1"
            )
        super().__post_init__()

    @cached_property
    def all_seeds(self) -> tuple[int, ...]:
        return self.seeds or (self.recipe.seed,)

    def recipe_of(self, probe: Probe) -> Recipe:
        """Return the recipe that a probe trains: the searched one with its setting and seed,
        validated in every tenth of the learning-rate warmup, with one checkpoint kept."""
        recipe = self.recipe_with(probe.start, probe.steps)
        every = max(1, min(recipe.eval.every, self.lr_warmup_steps // 10))
        return replace(
            recipe,
            seed=probe.seed,
            eval=replace(recipe.eval, every=every),
            checkpoint=replace(recipe.checkpoint, keep=1),
        )

    def tokens_of(self, probe: Probe) -> int:
        """Count the tokens that a probe has trained when it reaches its horizon."""
        return self.tokens(probe.start, probe.steps, probe.horizon)

    def most_probes(self) -> tuple[int, int]:
        """Return upper bounds on the number of probes: (search for a start, search for a duration).

        The second includes the probe of training without a warmup, for each seed.
        """
        seeds = len(self.all_seeds)
        durations = self.durations(self.starts[0])
        nearest = durations.index(self.nearest_duration(self.starts[0]))
        after = max(_most_left(-1, nearest), 1 + _most_left(nearest + 1, len(durations)))
        if self.kind == "lr":
            return 0, seeds * (1 + after)
        # Every second start, the last one, and one step back; then the recipe's own duration and no
        # warmup.
        return seeds * (len(self.starts) // 2 + 2), seeds * (2 + after)

    def most_tokens(self) -> int:
        """Bound the tokens that a search trains: its probes times the dearest of their kind on the
        grid."""
        of_starts, of_durations = self.most_probes()
        settings = list(self.settings())
        if self.kind != "lr":
            settings.append((self.full, 0))
        climbing = max(self.tokens(*setting, self.climb(*setting)) for setting in settings)
        seen = max(self.tokens(*setting, self.horizon(*setting)) for setting in settings)
        return of_starts * climbing + of_durations * seen

    def smallest_budget(self) -> int:
        """Count the tokens with which the recipe's own setting can be verified at all: the least
        that is worth a --budget."""
        start = self.starts[0]
        steps = self.nearest_duration(start)
        majority = len(self.all_seeds) // 2 + 1
        return majority * self.tokens(start, steps, self.horizon(start, steps))


def _next_duration(low: int, high: int) -> int:
    """Return the index in `Grid.durations` to probe next: three quarters from `low` to `high`.

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
        self.verdicts: dict[tuple[int, int, int], SettingVerdict] = {}
        """Verdicts by start, duration and horizon, in the order in which they were asked for."""
        self.needed: int | None = None

    def find(self) -> Outcome:
        """Return what is found for the start, then from it for the duration, with all verdicts."""
        outcome = self._find()
        statement = outcome.statement
        if outcome.verified and len(self.search.all_seeds) == 1:
            statement += (
                " This is one seed's verdict, another seed may say otherwise:"
                " --seeds 0..2 asks three."
            )
        verdicts = []
        for (start, steps, horizon), verdict in self.verdicts.items():
            setting = "without a warmup"
            if steps:
                setting = self.search.named(start, f"{steps:,}")
            verdicts.append(f"{setting}, seen for {horizon:,}: {verdict}")
        statement += f" Probed: {'; '.join(verdicts)}."
        return replace(outcome, statement=statement, needed=self.needed)

    def _find(self) -> Outcome:
        search = self.search
        start, is_stable = self.find_start()
        if is_stable:
            return self.find_duration(start)
        if is_stable is None:
            return self._unverified(start, search.nearest_duration(start))
        return Outcome(
            statement=(
                f"No {search.start_name} that was probed"
                f" is stable for the {search.lr_warmup_steps:,} steps of the learning-rate warmup."
                " Lower optim.lr or lengthen optim.warmup_steps."
            )
        )

    def find_start(self) -> tuple[int, bool | None]:
        """Find the smallest start that is stable in the learning-rate warmup; return it and True.

        Try every second start; at the first stable one, try the start below it too. If no start is
        stable, return the last and False. If the budget ends first, return the start that it did
        not cover and None.
        """
        search = self.search
        starts = search.starts
        if search.kind == "lr":
            return 0, True

        def judge_start(index: int) -> bool | None:
            start = starts[index]
            steps = search.nearest_duration(start)
            return self.judge(start, steps, search.climb(start, steps)).stable

        index = 0
        is_stable = judge_start(index)
        while is_stable is False and index < len(starts) - 1:
            index = min(index + 2, len(starts) - 1)
            is_stable = judge_start(index)
        if is_stable and index > 0 and judge_start(index - 1):
            index -= 1
        return starts[index], is_stable

    def find_duration(self, start: int) -> Outcome:
        """Return the furthest stable duration from `start`, the recipe's own first, then its
        neighbour if that is stable."""
        search = self.search
        durations = search.durations(start)
        first = durations.index(search.nearest_duration(start))
        low = -1
        high = len(durations)
        at = first
        while high - low > 1:
            steps = durations[at]
            is_stable = self.judge(start, steps, search.horizon(start, steps)).stable
            if is_stable is None and low < 0:
                return self._unverified(start, steps)
            if is_stable is None:
                limit = f"The budget ended before {steps:,} steps could be judged."
                return self._verified(start, durations[low], limit)
            if is_stable:
                low = at
            else:
                high = at
            at = _next_duration(low, high)
            if low == first:
                at = low + 1
        if low == len(durations) - 1:
            return self._all_stable(start, durations[low])
        if low >= 0:
            return self._verified(start, durations[low])
        statement = "No duration that was probed is stable."
        if start != search.starts[-1]:
            statement += " Longer starts were not probed with them."
        statement += " Lower optim.lr"
        if search.kind != "lr":
            statement += " or lengthen optim.warmup_steps"
        return Outcome(statement=f"{statement}.")

    def judge(self, start: int, steps: int, horizon: int) -> SettingVerdict:
        """Probe a setting up to step `horizon` with one seed after another, until the majority
        stands or the budget ends, and record its verdict."""
        verdict = self._judge(start, steps, horizon)
        self.verdicts[start, steps, horizon] = verdict
        return verdict

    def _judge(self, start: int, steps: int, horizon: int) -> SettingVerdict:
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
        """Return the probe's receipt, after running it if it is not known; None if that could
        exceed the budget."""
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

    # --- in words ---------------------------------------------------------------------------------

    def _all_stable(self, start: int, steps: int) -> Outcome:
        """Describe a search in which no duration is unstable, after probing training without the
        warmup."""
        search = self.search
        if search.kind == "lr":
            limit = (
                "It is the shortest allowed (an eighth of the recipe's)."
                " No duration that was probed is unstable, so the"
            )
            return self._verified(start, steps, f"{limit} probes do not tell durations apart.")
        longest = f"the longest allowed (--max-share {search.max_share:g} of the budget)"
        horizon = search.horizon(search.full, 0)
        if not self.judge(search.full, 0, horizon).stable:
            return self._verified(
                start, steps, f"It is {longest}. No duration that was probed is unstable."
            )
        return Outcome(
            start=search.full,
            steps=0,
            verified=True,
            statement="No warmup is needed for stability: training without it is stable, seen"
            f" for {horizon:,} steps, and so is every duration that was probed, up to {longest}.",
        )

    def _verified(self, start: int, steps: int, limit: str = "") -> Outcome:
        """Describe a setting that was probed for its duration and is stable; `limit` says why the
        search ended."""
        search = self.search
        setting = search.named(start, f"{steps:,}")
        statement = (
            f"A warmup of {setting} is stable, seen for {search.horizon(start, steps):,} steps."
        )
        if limit:
            statement += f" {limit}"
        return Outcome(start=start, steps=steps, verified=True, statement=statement)

    def _unverified(self, start: int, steps: int) -> Outcome:
        """Describe the setting whose probe does not fit into the budget."""
        search = self.search
        label = f"a rule of thumb, {search.rule_of_thumb}"
        if (start, steps) != search.own:
            label = "only the next to be probed"
        probe = "the probes"
        if len(search.all_seeds) == 1:
            probe = "a probe"
        setting = search.named(start, f"{steps:,}")
        return Outcome(
            start=start,
            steps=steps,
            statement=f"NOT VERIFIED, {label}. A warmup of {setting}: the budget"
            f" does not reach to the end of {probe} of it, {search.horizon(start, steps):,} steps.",
        )
