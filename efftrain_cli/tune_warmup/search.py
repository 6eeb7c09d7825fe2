"""The search of `efftrain tune-warmup`, without its training: which probe comes next, and what the search can cost.

Li, Zhang, He (NeurIPS 2022, arXiv 2108.06084) tune a warmup by short probes instead of full runs. A probe is unstable when
its validation perplexity fluctuates significantly, that is, rises above `threshold` times the best before it.

 1. Raise `start` until the perplexity does not fluctuate at the very beginning: while the learning rate warms up.
 2. Search the largest `steps` without fluctuation in the first few multiples of the learning-rate warmup.

The search begins with the recipe's own setting, takes for granted that a longer start is no less stable and a longer warmup no
more, and says where the answers contradict that. `Search._conversation` is the whole of it. It is a function of the receipts so
far, so a search that was killed goes on where it stopped, and its cost can be counted before it begins.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from efftrain_cli.foundation.errors import UsageError
from efftrain_cli.recipe.recipe import Recipe
from efftrain_cli.tune_warmup.grid import Grid, Kind, kind_of
from efftrain_cli.tune_warmup.verdict import share_interval


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
    """Where a probe ended early because the rest was unlikely to fluctuate: the bound of that chance, over all looks."""
    max_grad_norm: float | None = None
    """Largest gradient norm before clipping, over the steps. It and the next two are kept beside the verdict, which is the paper's."""
    max_adam_sqrt_v: float | None = None
    """Largest of Adam's sqrt(v), over the steps."""
    max_loss_ratio: float | None = None
    """Largest training loss over the best before it."""
    lost_tokens: int = 0
    """Tokens trained before the probe's checkpoint was removed: asked for a longer horizon, it begins anew, and these were paid twice."""
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


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The end of a search."""

    start: int | None
    steps: int | None
    """The setting to take, or None twice: no setting probed is stable."""
    verified: bool
    """The setting was probed for its duration, and stable."""
    complete: bool
    """Nothing was left out for want of budget."""
    statement: str
    """What the search has and has not shown."""


class Question(NamedTuple):
    """Is the warmup of `steps` from `start` stable up to step `horizon`?"""

    start: int
    steps: int
    horizon: int


class Answer(NamedTuple):
    """The verdict of a setting's seeds."""

    stable: bool | None
    """None: it does not fit into the budget."""
    stable_seeds: int = 0
    seeds: int = 0
    """That were probed: as many as it took to decide."""
    of: int = 0
    """Seeds that were given."""
    failed_at: int | None = None
    """The first step at which an unstable seed was."""
    seen: int = 0
    """Steps that every stable seed was seen for; fewer than were asked where it was calm."""

    def __str__(self) -> str:
        if self.stable is None:
            return "not judged for want of budget"
        where = "" if self.failed_at is None else f" at step {self.failed_at:,}"
        if self.of == 1:
            return f"{'stable' if self.stable else 'unstable'}{where}"
        # The seeds that were not probed once the majority stood may be either: the interval covers what all would have given.
        low, high = share_interval(self.stable_seeds, self.of)[0], share_interval(self.stable_seeds + self.of - self.seeds, self.of)[1]
        probed = f"{self.seeds} seeds" if self.seeds == self.of else f"{self.seeds} seeds probed, {self.of} given"
        return (
            f"{'stable' if self.stable else 'unstable'} by majority: stable on {self.stable_seeds} of {probed} "
            f"(95 % interval of the share {low:.0%} to {high:.0%}){f', unstable first{where}' if where else ''}"
        )


class Cost(NamedTuple):
    """What a search costs, and by which way."""

    tokens: int
    receipts: tuple[Receipt, ...]

    @property
    def probes(self) -> int:
        return len(self.receipts)


Conversation = Generator[Question, Answer, "Outcome | None"]


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
    """A duration is seen for its critical step and `multiples` - 1 learning-rate warmups after it; see `Grid.horizon`."""
    threshold: float = 1.3
    """Perplexity over best perplexity so far above which a fluctuation is significant."""
    max_share: float = 0.66
    """Share of the token budget that the longest warmup tried may take. The longest of the paper's authors took 63 %."""
    eval_every: int | None = None
    """Steps between validations in a probe; None: a tenth of the learning-rate warmup, or eval.every where that is less."""
    calm: float = 0.01
    """A probe ends early, as calm, where the chance of a significant fluctuation after any of its looks is bounded by this, if it
    goes on as it did, and its loss ratio does not rise; see `chance_of_fluctuation`. 0: never."""
    seeds: tuple[int, ...] = ()
    """Seeds that every setting is probed with; a setting is stable where more than half are. Empty: the recipe's."""
    budget: int | None = None
    """Tokens that all probes together may train; None: no limit."""

    def __post_init__(self) -> None:
        if self.multiples < 1 or self.threshold <= 1 or not 0 < self.max_share <= 1 or not 0 <= self.calm < 1:
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
        return Grid(recipe=self.recipe, kind=self.kind, multiples=self.multiples, max_share=self.max_share)

    @cached_property
    def all_seeds(self) -> tuple[int, ...]:
        return self.seeds or (self.recipe.seed,)

    # --- the search --------------------------------------------------------------------------------------------------

    def _conversation(self) -> Generator[Question, Answer, Outcome]:
        """Asks one question after another, and ends with what the answers amount to."""
        grid, too_short = self.grid, -1
        starts: dict[int, Answer] = {}
        while True:
            at = yield from self._first_stable_start(too_short, starts)
            if at == len(grid.starts):
                return self._no_stable_start(starts)
            start = grid.starts[at]
            if self.kind != "lr" and not starts[start].stable:
                return self._unverified(start, grid.durations(start)[grid.home(start)], _listed(starts, below=start))
            outcome = yield from self._furthest_stable_duration(start, at == len(grid.starts) - 1, starts)
            if outcome is not None:
                left_out = any(answer.stable is None for answer in starts.values())
                statement = outcome.statement + _listed(starts, below=start)
                return replace(outcome, statement=statement, complete=outcome.complete and not left_out)
            too_short = at  # a duration failed while the learning rate was still climbing: that is a matter of the start

    def _first_stable_start(self, too_short: int, answers: dict[int, Answer]) -> Generator[Question, Answer, int]:
        """Index of the first start after `too_short` that is stable while the learning rate climbs, found by doubling and
        then bisecting; len(starts) where none is; the one in question where the budget ends before any is. `answers` by start."""
        grid, starts = self.grid, self.grid.starts
        low, high = too_short, len(starts)
        if self.kind == "lr":
            return 0
        while high - low > 1:
            at = (low + high) // 2
            if high == len(starts):
                double = (index for index, start in enumerate(starts) if index > low and start >= 2 * starts[low])
                at = 0 if low < 0 else next(double, len(starts) - 1)
            duration = grid.durations(starts[at])[grid.home(starts[at])]
            answer = answers[starts[at]] = yield Question(starts[at], duration, grid.climb(starts[at], duration))
            if answer.stable is None:
                return high if high < len(starts) else at
            low, high = (low, at) if answer.stable else (at, high)
        return high

    def _furthest_stable_duration(self, start: int, last: bool, starts: dict[int, Answer]) -> Conversation:
        """The longest stable duration from `start`: the recipe's own first, where it is stable the next longer one, then whichever
        makes the rest of the search cheapest. None where every one so far failed, the last while the learning rate climbed, and a
        longer start is left; that failure is then the answer about `start`."""
        grid, durations = self.grid, self.grid.durations(start)
        low, high, at = -1, len(durations), grid.home(start)
        answers: dict[int, Answer] = {}
        while high - low > 1:
            steps = durations[at]
            answer = answers[at] = yield Question(start, steps, grid.horizon(start, steps))
            if answer.stable is None:
                break
            low, high = (at, high) if answer.stable else (low, at)
            climbing = answer.failed_at is not None and answer.failed_at <= grid.climb(start, steps)
            if low < 0 and climbing and not last:
                starts[start] = answer
                return None
            # The setting to begin with is the likeliest answer, and its neighbour is what shows it.
            at = at + 1 if len(answers) == 1 and answer.stable else self._cheapest(start, low, high)[1]
        # Far beyond what is unstable: the furthest duration has the cheapest probe, and shows whether the verdicts turn again.
        end = len(durations) - 1
        if self.kind in ("length", "batch") and high < end not in answers and durations[end] >= 2 * durations[high]:
            answer = yield Question(start, durations[end], grid.horizon(start, durations[end]))
            answers |= {end: answer} if answer.stable is not None else {}
        return self._judge(start, answers, low, high)

    @cached_property
    def _rests(self) -> dict[tuple[int, int, int], tuple[float, int]]:
        return {}

    def _cheapest(self, start: int, low: int, high: int) -> tuple[float, int]:
        """Expected tokens of a search for the furthest stable duration from `start`, known to be `low` or between it and `high`,
        all equally likely, and the duration to probe first; each is an index among the durations. -1 where nothing is left to ask.

        Unlike plain bisection it weighs what the probes cost: a short duration reaches long sequences, and costs many times a long
        one."""
        if high - low < 2:
            return 0.0, -1
        if (start, low, high) not in self._rests:
            self._rests[start, low, high] = min(
                (self._expected(start, at, low, high), at) for at in range(low + 1, high)
            )
        return self._rests[start, low, high]

    def _expected(self, start: int, at: int, low: int, high: int) -> float:
        """Tokens of the search between `low` and `high` if it begins with the duration at `at`. An unstable probe ends half-way."""
        grid, steps = self.grid, self.grid.durations(start)[at]
        horizon = grid.horizon(start, steps)
        half_way = (min(grid.climb(start, steps), horizon) + horizon) // 2
        stable = (high - at) * (grid.tokens(start, steps, horizon) + self._cheapest(start, at, high)[0])
        unstable = (at - low) * (grid.tokens(start, steps, half_way) + self._cheapest(start, low, at)[0])
        return (stable + unstable) / (high - low)

    def _judge(self, start: int, answers: dict[int, Answer], low: int, high: int) -> Outcome:
        """What the answers about the durations from `start` amount to; `low` is the furthest that is stable before any unstable
        one, `high` the first unstable one."""
        durations = self.grid.durations(start)
        again = [at for at, answer in answers.items() if answer.stable and at > high]
        unasked = [at for at, answer in answers.items() if answer.stable is None]
        if low < 0 and unasked:
            known = f" {durations[high]:,} steps: {answers[high]}." if high in answers else ""
            if self.grid.start_name:
                climb = self.grid.climb(start, durations[unasked[0]])
                known += f" The start was stable while the learning rate climbed, {climb:,} steps."
            return self._unverified(start, durations[unasked[0]], known)
        if low < 0 and not again:
            tried = ", ".join(f"{durations[at]:,} {answers[at]}" for at in sorted(answers) if answers[at].stable is False)
            return Outcome(
                start=None,
                steps=None,
                verified=False,
                complete=True,
                statement=f"No duration that was probed{self._from(start)} is stable: {tried}. Lower optim.lr"
                f"{'' if self.kind == 'lr' else ' or lengthen optim.warmup_steps'}.",
            )
        at = low if low >= 0 else again[0]
        steps, word = durations[at], "shortest" if self.kind == "lr" else "longest"
        horizon, seen = self.grid.horizon(start, steps), answers[at].seen
        statement = f"{self._named(steps)}{self._from(start)}: {answers[at]}, seen for "
        statement += f"{horizon:,} steps." if seen >= horizon else f"{seen:,} of {horizon:,} steps, as it was calm."
        for index in sorted(answers):
            if answers[index].stable is False:
                statement += f" {durations[index]:,} steps: {answers[index]}."
        early = answers[high].failed_at if high in answers else None
        if early is not None and early <= self.grid.climb(start, durations[high]) and self.grid.start_name:
            statement += f" {durations[high]:,} steps failed while the learning rate climbed; no start above {start} was probed with them."
        if not unasked and at == len(durations) - 1 and low >= 0:
            limit = "an eighth of the recipe's" if self.kind == "lr" else f"--max-share {self.max_share:g} of the budget"
            statement += f" It is the {word} allowed ({limit})."
            if all(answer.stable for answer in answers.values()):
                statement += (
                    " No probe of a duration was unstable, so the probes do not tell durations apart, and the rule takes the "
                    f"{word}. If plain training is stable as well, no warmup is needed for stability."
                )
        if unasked:
            between = f"{durations[unasked[0]]:,}"
            statement += f" The budget ended before {between} steps could be judged: whether that is stable is not known."
        for index in again:
            statement += (
                f" The verdicts are not in order: stable again at {durations[index]:,} steps. One seed may have misled; "
                "probe more of them (--seeds)."
            )
        return Outcome(start=start, steps=steps, verified=True, complete=not unasked, statement=statement)

    def _no_stable_start(self, starts: dict[int, Answer]) -> Outcome:
        grid = self.grid
        each = "; ".join(f"{start} {starts[start]}" for start in sorted(starts))
        return Outcome(
            start=None,
            steps=None,
            verified=False,
            complete=True,
            statement=f"No {grid.start_name} that was probed is stable for the {grid.window:,} steps of the learning-rate warmup: {each}. "
            "Lower optim.lr or lengthen optim.warmup_steps.",
        )

    def _unverified(self, start: int, steps: int, known: str) -> Outcome:
        label, rule = f"a rule of thumb, {self.rule_of_thumb}", ""
        if (start, steps) != self.grid.own:
            label, rule = "only the next to be probed", "its stability is not known. "
        return Outcome(
            start=start,
            steps=steps,
            verified=False,
            complete=False,
            statement=f"NOT VERIFIED, {label}. {self._named(steps)}{self._from(start)}: {rule}The budget does not reach to the "
            f"end of {'a probe' if len(self.all_seeds) == 1 else 'the probes'} of it, {self.grid.horizon(start, steps):,} steps.{known}",
        )

    @property
    def rule_of_thumb(self) -> str:
        """What `Grid.own` is: the setting that the search begins with."""
        if self.recipe.seq_len_warmup is not None or self.kind in ("batch", "lr"):
            return "the recipe's own setting"
        third = self.grid.own[1] == self.grid.baseline_steps // 3
        return "a third of a run's full steps" if third else "as long as the learning-rate warmup"

    def _named(self, steps: int) -> str:
        return f"A learning-rate warmup of {steps:,} steps" if self.kind == "lr" else f"A warmup of {steps:,} steps"

    def _from(self, start: int) -> str:
        return "" if self.kind == "lr" else f" from a start of {start}"

    # --- between the search and its probes ---------------------------------------------------------------------------

    def next(self, receipts: Sequence[Receipt]) -> Probe | Outcome:
        """The probe to run after those that `receipts` are of, or the outcome when nothing is left to ask."""
        left = math.inf if self.budget is None else self.budget - sum(receipt.tokens for receipt in receipts)
        known = {(receipt.probe.start, receipt.probe.steps, receipt.probe.seed): receipt for receipt in receipts}
        conversation = self._conversation()
        question = next(conversation)
        while True:
            answer = self._answer(question, known)
            if isinstance(answer, Probe):
                before = known.get((answer.start, answer.steps, answer.seed))
                if self.tokens_of(answer) - (before.tokens - before.lost_tokens if before else 0) <= left:
                    return answer
                answer = Answer(None)
            try:
                question = conversation.send(answer)
            except StopIteration as end:
                return end.value

    def _answer(self, question: Question, known: dict[tuple[int, int, int], Receipt]) -> Answer | Probe:
        """The verdict of more than half of the seeds, or the probe that it needs."""
        stable, seen = 0, question.horizon
        failed: list[int] = []
        for seed in self.all_seeds:
            if 2 * stable > len(self.all_seeds) or 2 * len(failed) >= len(self.all_seeds):
                break
            receipt = known.get((question.start, question.steps, seed))
            found = None if receipt is None else receipt.answers(question.horizon)
            if receipt is None or found is None:
                return Probe(start=question.start, steps=question.steps, seed=seed, horizon=question.horizon)
            if found:
                stable += 1
                seen = min(seen, receipt.stopped_at_step)
            else:
                failed.append(receipt.fluctuation_step)
        return Answer(2 * stable > len(self.all_seeds), stable, stable + len(failed), len(self.all_seeds), min(failed, default=None), seen)

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

    def may_be_prolonged(self, probe: Probe) -> bool:
        """Whether the search may ask the probe for more where it is stable, for which its checkpoint is kept."""
        return probe.horizon < self.grid.horizon(probe.start, probe.steps)

    def tokens_of(self, probe: Probe) -> int:
        """Tokens that a probe has trained when it reaches its horizon."""
        return self.grid.tokens(probe.start, probe.steps, probe.horizon)

    # --- cost --------------------------------------------------------------------------------------------------------

    def follow(self, fails: Callable[[int, int], float | None], receipts: Sequence[Receipt] = ()) -> tuple[Outcome, Cost]:
        """The search, or its rest after `receipts`, where the setting (start, steps) is unstable at step fails(start, steps), or not
        at all: its outcome, and what it costs from here on."""
        found = {receipt.probe.name: receipt for receipt in receipts}
        spent = sum(receipt.tokens for receipt in receipts)
        asked: list[str] = []
        while isinstance(probe := self.next(list(found.values())), Probe):
            failure = fails(probe.start, probe.steps)
            stopped = probe.horizon if failure is None or failure > probe.horizon else max(1, int(failure))
            stable = failure is None or failure > probe.horizon
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
        return probe, Cost(tokens, tuple(found[name] for name in asked))

    def fails_where(self, start: int, steps: float, late: bool) -> Callable[[int, int], float | None]:
        """The answers under which (start, steps) is what is searched for: shorter starts are unstable while the learning rate
        climbs, further durations after that; `late`: at the last step possible, else half-way."""
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
        return self.follow(self.fails_where(self.grid.starts[0], self._home(self.grid.starts[0]), late))[1]

    def ends(self, late: bool, receipts: Sequence[Receipt] = ()) -> Iterator[tuple[Outcome, Cost]]:
        """How the search, or its rest after `receipts`, ends and what it costs for each answer that they leave: for every setting of
        the grid, and where no duration or no start is stable. Where they leave none, verdicts being out of order, for all."""
        grid = self.grid
        nothing = math.inf if self.kind == "lr" else 0
        settings = [(start, steps) for start in grid.starts for steps in (*grid.durations(start), nothing)]
        settings += [(grid.full, 0)] * (self.kind != "lr")
        answers = [self.fails_where(start, steps, late) for start, steps in settings]
        left = [fails for fails in answers if all(_agrees(fails, receipt) for receipt in receipts)]
        return (self.follow(fails, receipts) for fails in left or answers)

    def worst_case(self, receipts: Sequence[Receipt] = ()) -> Cost:
        """The dearest rest of the search, if verdicts change once along the grid and every unstable probe is so at its last step."""
        return max((cost for _, cost in self.ends(True, receipts)), key=lambda cost: cost.tokens)

    def smallest_budget(self) -> int:
        """Tokens with which the recipe's own setting can be verified at all: the least that is worth a --budget."""
        start = self.grid.starts[0]
        steps = self._home(start)
        return (len(self.all_seeds) // 2 + 1) * self.grid.tokens(start, steps, self.grid.horizon(start, steps))

    def _home(self, start: int) -> int:
        return self.grid.durations(start)[self.grid.home(start)]


def _agrees(fails: Callable[[int, int], float | None], receipt: Receipt) -> bool:
    failure = fails(receipt.probe.start, receipt.probe.steps)
    if receipt.stable:
        return failure is None or failure > receipt.stopped_at_step
    return failure is not None and failure >= receipt.fluctuation_step  # an answer fails as late as it can


def _listed(starts: dict[int, Answer], below: int) -> str:
    """What is known of the starts below `below`, as a sentence."""
    shorter = "; ".join(f"{start} {answer}" for start, answer in sorted(starts.items()) if start < below)
    return f" Shorter starts: {shorter}." if shorter else ""
