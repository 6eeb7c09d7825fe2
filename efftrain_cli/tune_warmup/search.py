"""The search of `efftrain tune-warmup`, without its training: which probe comes next, and what the search can cost.

The questions are `inquiry.py`'s; here probes and their seeds answer them, within a budget. What comes next is a
function of the receipts so far, so a search that was killed goes on where it stopped, and its cost can be counted
before it begins.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from efftrain_cli.foundation.errors import UsageError
from efftrain_cli.recipe.recipe import Recipe
from efftrain_cli.tune_warmup.grid import Grid, Kind, kind_of
from efftrain_cli.tune_warmup.inquiry import Answer, Inquiry, Outcome, Question
from efftrain_cli.tune_warmup.verdict import Curve, chance_of_fluctuation


@dataclass(frozen=True, kw_only=True)
class Probe:
    """One short run of the search. Asked for a longer horizon, it goes on from where it stands."""

    start: int
    """Where the warmup begins: tokens per sequence, or sequences per step; 0 where there is none."""
    steps: int
    """How long the warmup is set to last, in optimizer steps."""
    seed: int
    horizon: int
    """Steps after which the probe ends, if nothing happened."""

    @property
    def name(self) -> str:
        """Name of the probe's run directory: the same for every horizon."""
        return f"start{self.start}-steps{self.steps}-seed{self.seed}"


@dataclass(frozen=True, kw_only=True)
class Receipt:
    """What a probe found, and what it cost, since its first step."""

    probe: Probe
    stable: bool
    max_fluctuation: float
    """Largest of perplexity / best perplexity before it; infinite where the loss was not finite."""
    fluctuation_step: int
    """The step it was measured at."""
    stopped_at_step: int
    tokens: int
    """Tokens trained for it, the lost ones included."""
    seconds: float
    """Wall time, validation and what was lost included."""
    curve: tuple[tuple[int, float], ...]
    """(step, validation loss in nats per token)."""
    calm: float | None = None
    """Where a probe ended early because the rest was unlikely to fluctuate: the bound of that chance, over all
    looks."""
    max_grad_norm: float | None = None
    """Largest gradient norm before clipping, over the steps. It and the next two are kept beside the verdict, which is
    the paper's."""
    max_adam_sqrt_v: float | None = None
    """Largest of Adam's sqrt(v), over the steps."""
    max_loss_ratio: float | None = None
    """Largest training loss over the best before it."""
    lost_tokens: int = 0
    """Tokens trained before the probe began anew, its checkpoint being gone: these were paid twice."""
    lost_seconds: float = 0.0

    @property
    def verdict(self) -> str:
        return "unstable" if not self.stable else "stable" if self.calm is None else "calm"

    def answers(self, horizon: int) -> bool | None:
        """Whether the probe is stable up to step `horizon`; None where it was not seen that long."""
        if not self.stable and self.fluctuation_step <= horizon:
            return False
        seen = self.probe.horizon if self.calm is not None else self.stopped_at_step
        return True if not self.stable or seen >= horizon else None


class Cost(NamedTuple):
    """What a search costs, and by which way; a mean of several has none."""

    probes: float
    tokens: float
    receipts: tuple[Receipt, ...] = ()


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
    """Steps between validations in a probe; None: a tenth of the learning-rate warmup, or eval.every where that is
    less."""
    calm: float = 0.01
    """A probe ends early, as calm, where the chance of a significant fluctuation after any of its looks is bounded by
    this, if it goes on as it did, and its loss ratio does not rise; see `chance_of_fluctuation`. 0: never."""
    seeds: tuple[int, ...] = ()
    """Seeds that every setting is probed with; a setting is stable where more than half are. Empty: the recipe's."""
    budget: int | None = None
    """Tokens that all probes together may train; None: no limit."""

    def __post_init__(self) -> None:
        if (
            self.multiples < 1
            or self.threshold <= 1
            or not 0 < self.max_share <= 1
            or not 0 <= self.calm < 1
        ):
            raise UsageError(
                f"--multiples {self.multiples} must be at least 1, --threshold {self.threshold:g} above 1, --max-share "
                f"{self.max_share:g} above 0 and at most 1, and --calm {self.calm:g} at least 0 and below 1"
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
    def inquiry(self) -> Inquiry:
        return Inquiry(grid=self.grid, seeds=len(self.all_seeds))

    @cached_property
    def all_seeds(self) -> tuple[int, ...]:
        return self.seeds or (self.recipe.seed,)

    # --- between the search and its probes ---------------------------------------------------------------------------

    def next(self, receipts: Sequence[Receipt]) -> Probe | Outcome:
        """The probe to run after those that `receipts` are of, or the outcome when nothing is left to ask."""
        left = (
            math.inf
            if self.budget is None
            else self.budget - sum(receipt.tokens for receipt in receipts)
        )
        known = {receipt.probe.name: receipt for receipt in receipts}
        conversation = self.inquiry.conversation()
        question = next(conversation)
        while True:
            answer = self._answer(question, known)
            if isinstance(answer, Probe):
                if self._tokens_to(answer, known) <= left:
                    return answer
                answer = Answer(None)
            try:
                question = conversation.send(answer)
            except StopIteration as end:
                return end.value

    def budget_to_go_on(self, receipts: Sequence[Receipt]) -> int:
        """Tokens of the smallest budget with which a search that ran out of it after `receipts` makes another probe."""
        probe = replace(self, budget=None).next(receipts)
        assert isinstance(probe, Probe)
        known = {receipt.probe.name: receipt for receipt in receipts}
        return sum(receipt.tokens for receipt in receipts) + self._tokens_to(probe, known)

    def _tokens_to(self, probe: Probe, known: Mapping[str, Receipt]) -> int:
        """Tokens that a probe has to train up to its horizon, from where it stands."""
        before = known.get(probe.name)
        return self.tokens_of(probe) - (before.tokens - before.lost_tokens if before else 0)

    def _answer(self, question: Question, known: Mapping[str, Receipt]) -> Answer | Probe:
        """The verdict of more than half of the seeds, or the probe that it needs."""
        stable, seen, seeds = 0, question.horizon, len(self.all_seeds)
        failed: list[int] = []
        for seed in self.all_seeds:
            if 2 * stable > seeds or 2 * len(failed) >= seeds:
                break
            probe = Probe(
                start=question.start, steps=question.steps, seed=seed, horizon=question.horizon
            )
            receipt = known.get(probe.name)
            found = None if receipt is None else receipt.answers(question.horizon)
            if receipt is None or found is None:
                return probe
            if found:
                stable += 1
                seen = min(seen, receipt.stopped_at_step)
            else:
                failed.append(receipt.fluctuation_step)
        return Answer(
            2 * stable > seeds, stable, stable + len(failed), seeds, min(failed, default=None), seen
        )

    def recipe_of(self, probe: Probe) -> Recipe:
        """What a probe runs: the recipe with its setting and seed, validated more often, with one checkpoint kept."""
        recipe = self.grid.recipe_with(probe.start, probe.steps)
        every = self.eval_every or max(1, min(recipe.eval.every, self.grid.window // 10))
        return replace(
            recipe,
            seed=probe.seed,
            eval=replace(recipe.eval, every=every),
            checkpoint=replace(recipe.checkpoint, keep=1),
        )

    def tokens_of(self, probe: Probe) -> int:
        """Tokens that a probe has trained when it reaches its horizon."""
        return self.grid.tokens(probe.start, probe.steps, probe.horizon)

    def calm_bound(self, probe: Probe, curve: Curve) -> float | None:
        """The bound for the chance of a fluctuation after any look of a probe with this curve; None where that is not
        small enough to end the probe as calm."""
        critical = self.grid.critical(probe.steps)
        first_look = critical + self.grid.window
        chance = (
            chance_of_fluctuation(curve, critical, first_look, probe.horizon, self.threshold)
            if self.calm
            else 1.0
        )
        return chance if chance < self.calm else None

    # --- cost --------------------------------------------------------------------------------------------------------

    def follow(
        self, fails: Callable[[int, int], float | None], receipts: Sequence[Receipt] = ()
    ) -> tuple[Outcome, Cost]:
        """The search, or its rest after `receipts`, where the setting (start, steps) is unstable at step fails(start,
        steps), or not at all: its outcome, and what it costs from here on."""
        found = {receipt.probe.name: receipt for receipt in receipts}
        spent = sum(receipt.tokens for receipt in receipts)
        asked: list[str] = []
        while isinstance(probe := self.next(list(found.values())), Probe):
            failure = fails(probe.start, probe.steps)
            stable = failure is None or failure > probe.horizon
            stopped = probe.horizon if failure is None or stable else max(1, int(failure))
            asked += [probe.name] * (probe.name not in asked)
            lost = found[probe.name].lost_tokens if probe.name in found else 0
            found[probe.name] = Receipt(
                probe=probe,
                stable=stable,
                max_fluctuation=1.0 if stable else 2 * self.threshold,
                fluctuation_step=stopped,
                stopped_at_step=stopped,
                tokens=lost + self.grid.tokens(probe.start, probe.steps, stopped),
                seconds=0.0,
                curve=(),
                lost_tokens=lost,
            )
        tokens = sum(receipt.tokens for receipt in found.values()) - spent
        return probe, Cost(len(asked), tokens, tuple(found[name] for name in asked))

    def fails_where(
        self, start: int, steps: float, late: bool
    ) -> Callable[[int, int], float | None]:
        """The answers under which (start, steps) is what is searched for: shorter starts are unstable while the
        learning rate climbs, further durations after that; `late`: at the last step possible, else half-way."""
        grid = self.grid

        def fails(a_start: int, a_duration: int) -> float | None:
            climb = grid.climb(a_start, a_duration)
            if a_start < start:
                return climb if late else climb / 2
            if (a_duration < steps) if self.kind == "lr" else (a_duration > steps):
                horizon = grid.horizon(a_start, a_duration)
                return horizon if late else (min(climb, horizon) + horizon) / 2
            return None

        return fails

    def own_cost(self, late: bool) -> Cost:
        """What the search costs if the recipe's own setting is the answer."""
        start = self.grid.starts[0]
        return self.follow(self.fails_where(start, self.grid.home(start), late))[1]

    def ends(self, late: bool, receipts: Sequence[Receipt] = ()) -> Iterator[tuple[Outcome, Cost]]:
        """How the search, or its rest after `receipts`, ends and what it costs for each answer that they leave: for
        every setting of the grid, and where no duration or no start is stable. Where they leave none, verdicts being
        out of order, for all."""
        grid = self.grid
        nothing = math.inf if self.kind == "lr" else 0
        settings = [
            (start, steps) for start in grid.starts for steps in (*grid.durations(start), nothing)
        ]
        settings += [(grid.full, 0)] * (self.kind != "lr")
        answers = [self.fails_where(start, steps, late) for start, steps in settings]
        left = [fails for fails in answers if all(_agrees(fails, receipt) for receipt in receipts)]
        return (self.follow(fails, receipts) for fails in left or answers)

    def worst_case(self, receipts: Sequence[Receipt] = ()) -> Cost:
        """The dearest rest of the search, if verdicts change once along the grid and every unstable probe is so at its
        last step."""
        return max((cost for _, cost in self.ends(True, receipts)), key=lambda cost: cost.tokens)

    def smallest_budget(self) -> int:
        """Tokens with which the recipe's own setting can be verified at all: the least that is worth a --budget."""
        start = self.grid.starts[0]
        steps = self.grid.home(start)
        return (len(self.all_seeds) // 2 + 1) * self.grid.tokens(
            start, steps, self.grid.horizon(start, steps)
        )


def _agrees(fails: Callable[[int, int], float | None], receipt: Receipt) -> bool:
    failure = fails(receipt.probe.start, receipt.probe.steps)
    if receipt.stable:
        return failure is None or failure > receipt.stopped_at_step
    return (
        failure is not None and failure >= receipt.fluctuation_step
    )  # an answer fails as late as it can
