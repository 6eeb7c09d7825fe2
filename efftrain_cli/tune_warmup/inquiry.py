"""What a search of `efftrain tune-warmup` asks, one question after another, and what the answers amount to. It knows
settings and verdicts; which probes and seeds answer a question, and what they cost, is `search.py`'s.

Li, Zhang, He (NeurIPS 2022, arXiv 2108.06084) tune a warmup by short probes instead of full runs. A probe is unstable
when its validation perplexity fluctuates significantly, that is, rises above a threshold times the best before it.

 1. Raise `start` until the perplexity does not fluctuate at the very beginning: while the learning rate warms up.
 2. Search the largest `steps` without fluctuation in the first few multiples of the learning-rate warmup.

The search begins with the recipe's own setting, takes for granted that a longer start is no less stable and a longer
warmup no more, and says where the answers contradict that.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

from efftrain_cli.tune_warmup.grid import Grid
from efftrain_cli.tune_warmup.verdict import share_interval


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The end of a search."""

    start: int | None = None
    steps: int | None = None
    """The setting to take, or None twice: no setting probed is stable."""
    verified: bool = False
    """The setting was probed for its duration, and stable."""
    complete: bool = True
    """Nothing was left out for want of budget."""
    statement: str
    """What the search has and has not shown."""
    tried_start: int | None = None
    """Where no duration from a start is stable, and longer starts are left: that start."""


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
        # The seeds that were not probed once the majority stood may be either: the interval covers what all would have
        # given.
        low, _ = share_interval(self.stable_seeds, self.of)
        _, high = share_interval(self.stable_seeds + self.of - self.seeds, self.of)
        probed = (
            f"{self.seeds} seeds"
            if self.seeds == self.of
            else f"{self.seeds} seeds probed, {self.of} given"
        )
        return (
            f"{'stable by majority, on' if self.stable else 'unstable by majority, stable on'} {self.stable_seeds} of {probed} "
            f"(95 % interval of the share {low:.0%} to {high:.0%}){f', unstable first{where}' if where else ''}"
        )


Conversation = Generator[Question, Answer, "Outcome | None"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Inquiry:
    """The questions about the settings of a grid."""

    grid: Grid
    seeds: int
    """How many each question is answered by."""

    def conversation(self) -> Generator[Question, Answer, Outcome]:
        """Asks one question after another, and ends with what the answers amount to."""
        grid, too_short = self.grid, -1
        starts: dict[int, Answer] = {}
        while True:
            at = yield from self._first_stable_start(too_short, starts)
            if at == len(grid.starts):
                each = "; ".join(f"{start} {starts[start]}" for start in sorted(starts))
                return Outcome(
                    statement=f"No {grid.start_name} that was probed is stable for the {grid.window:,} steps of the learning-rate "
                    f"warmup: {each}. Lower optim.lr or lengthen optim.warmup_steps."
                )
            start = grid.starts[at]
            if grid.kind != "lr" and not starts[start].stable:
                return self._unverified(start, grid.home(start), _listed(starts, below=start))
            outcome = yield from self._furthest_stable_duration(
                start, at == len(grid.starts) - 1, starts
            )
            if outcome is not None:
                left_out = any(answer.stable is None for answer in starts.values())
                statement = outcome.statement + _listed(starts, below=start)
                return replace(
                    outcome, statement=statement, complete=outcome.complete and not left_out
                )
            # A duration failed while the learning rate was still climbing: that is a matter of the start.
            too_short = at

    def _first_stable_start(
        self, too_short: int, answers: dict[int, Answer]
    ) -> Generator[Question, Answer, int]:
        """Index of the first start after `too_short` that is stable while the learning rate climbs, found by doubling
        and then bisecting; len(starts) where none is; the one in question where the budget ends before any is.
        `answers` by start."""
        grid, starts = self.grid, self.grid.starts
        low, high = too_short, len(starts)
        if self.grid.kind == "lr":
            return 0
        while high - low > 1:
            at = (low + high) // 2
            if high == len(starts):
                double = (
                    index
                    for index, start in enumerate(starts)
                    if index > low and start >= 2 * starts[low]
                )
                at = 0 if low < 0 else next(double, len(starts) - 1)
            duration = grid.home(starts[at])
            answer = answers[starts[at]] = yield Question(
                starts[at], duration, grid.climb(starts[at], duration)
            )
            if answer.stable is None:
                return high if high < len(starts) else at
            low, high = (low, at) if answer.stable else (at, high)
        return high

    def _furthest_stable_duration(
        self, start: int, last: bool, starts: dict[int, Answer]
    ) -> Conversation:
        """The longest stable duration from `start`: the recipe's own first, where it is stable the next longer one,
        then whichever makes the rest of the search cheapest. None where every one so far failed, the last while the
        learning rate climbed, and a longer start is left; that failure is then the answer about `start`."""
        grid, durations = self.grid, self.grid.durations(start)
        low, high, at = -1, len(durations), durations.index(grid.home(start))
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
            at = (
                at + 1
                if len(answers) == 1 and answer.stable
                else self._cheapest(start, low, high)[1]
            )
        # Far beyond what is unstable: the furthest duration has the cheapest probe, and shows whether the verdicts turn
        # again.
        end = len(durations) - 1
        grows = grid.kind in ("length", "batch")
        if grows and high < end not in answers and durations[end] >= 2 * durations[high]:
            answer = yield Question(start, durations[end], grid.horizon(start, durations[end]))
            answers |= {end: answer} if answer.stable is not None else {}
        return self._judge(start, answers, low, high)

    @cache  # noqa: B019  inquiries are few
    def _cheapest(self, start: int, low: int, high: int) -> tuple[float, int]:
        """Expected tokens of a search for the furthest stable duration from `start`, known to be `low` or between it
        and `high`, all equally likely, and the duration to probe first; each is an index among the durations. -1 where
        nothing is left to ask.

        Unlike plain bisection it weighs what the probes cost: a short duration reaches long sequences, and costs many
        times a long one."""
        if high - low < 2:
            return 0.0, -1
        return min((self._expected(start, at, low, high), at) for at in range(low + 1, high))

    def _expected(self, start: int, at: int, low: int, high: int) -> float:
        """Tokens of the search between `low` and `high` if it begins with the duration at `at`. An unstable probe ends
        half-way."""
        grid, steps = self.grid, self.grid.durations(start)[at]
        horizon = grid.horizon(start, steps)
        half_way = (min(grid.climb(start, steps), horizon) + horizon) // 2
        stable = (high - at) * (
            grid.tokens(start, steps, horizon) + self._cheapest(start, at, high)[0]
        )
        unstable = (at - low) * (
            grid.tokens(start, steps, half_way) + self._cheapest(start, low, at)[0]
        )
        return (stable + unstable) / (high - low)

    def _judge(self, start: int, answers: dict[int, Answer], low: int, high: int) -> Outcome:
        """What the answers about the durations from `start` amount to; `low` is the furthest that is stable before any
        unstable one, `high` the first unstable one."""
        grid, durations = self.grid, self.grid.durations(start)
        again = [at for at, answer in answers.items() if answer.stable and at > high]
        unasked = [at for at, answer in answers.items() if answer.stable is None]
        if low < 0 and unasked:
            known = f" {durations[high]:,} steps: {answers[high]}." if high in answers else ""
            if grid.start_name:
                climb = grid.climb(start, durations[unasked[0]])
                known += f" The start was stable while the learning rate climbed, {climb:,} steps."
            return self._unverified(start, durations[unasked[0]], known)
        if low < 0 and not again:
            tried = "; ".join(f"{durations[at]:,} {answers[at]}" for at in sorted(answers))
            last = start == grid.starts[-1]
            return Outcome(
                tried_start=None if last else start,
                statement=f"No duration that was probed{self._from(start)} is stable: {tried}."
                f"{'' if last else ' Longer starts were not probed with them.'} Lower optim.lr"
                f"{'' if grid.kind == 'lr' else ' or lengthen optim.warmup_steps'}.",
            )
        at = low if low >= 0 else again[0]
        steps, word = durations[at], "shortest" if grid.kind == "lr" else "longest"
        horizon, seen = grid.horizon(start, steps), answers[at].seen
        statement = f"{self._named(start, steps)}: {answers[at]}, seen for "
        statement += (
            f"{horizon:,} steps."
            if seen >= horizon
            else f"{seen:,} of {horizon:,} steps, as it was calm."
        )
        for index in sorted(answers):
            if answers[index].stable is False:
                statement += f" {durations[index]:,} steps: {answers[index]}."
        early = answers[high].failed_at if high in answers else None
        if early is not None and early <= grid.climb(start, durations[high]) and grid.start_name:
            statement += f" {durations[high]:,} steps failed while the learning rate climbed; no start above {start} was probed with them."
        if not unasked and at == len(durations) - 1 and low >= 0:
            limit = (
                "an eighth of the recipe's"
                if grid.kind == "lr"
                else f"--max-share {grid.max_share:g} of the budget"
            )
            statement += f" It is the {word} allowed ({limit})."
            if all(answer.stable for answer in answers.values()):
                never = all(answer.failed_at is None for answer in answers.values())
                statement += (
                    f" {'No probe of a duration was unstable' if never else 'No duration that was probed is unstable by majority'}, so the "
                    f"probes do not tell durations apart, and the rule takes the {word}."
                )
                if never:
                    statement += (
                        " If plain training is stable as well, no warmup is needed for stability."
                    )
        if unasked:
            statement += f" The budget ended before {durations[unasked[0]]:,} steps could be judged: whether that is stable is not known."
        for index in again:
            statement += (
                f" The verdicts are not in order: stable again at {durations[index]:,} steps. One seed may have misled; "
                "probe more of them (--seeds)."
            )
        return Outcome(
            start=start, steps=steps, verified=True, complete=not unasked, statement=statement
        )

    def _unverified(self, start: int, steps: int, known: str) -> Outcome:
        label, rule = f"a rule of thumb, {self.grid.rule_of_thumb}", ""
        if (start, steps) != self.grid.own:
            label, rule = "only the next to be probed", "its stability is not known. "
        return Outcome(
            start=start,
            steps=steps,
            complete=False,
            statement=f"NOT VERIFIED, {label}. {self._named(start, steps)}: {rule}The budget does not reach to the "
            f"end of {'a probe' if self.seeds == 1 else 'the probes'} of it, {self.grid.horizon(start, steps):,} steps.{known}",
        )

    def _named(self, start: int, steps: int) -> str:
        return f"A {'learning-rate ' * (self.grid.kind == 'lr')}warmup of {steps:,} steps{self._from(start)}"

    def _from(self, start: int) -> str:
        return "" if self.grid.kind == "lr" else f" from a start of {start}"


def _listed(starts: dict[int, Answer], below: int) -> str:
    """What is known of the starts below `below`, as a sentence."""
    shorter = "; ".join(
        f"{start} {answer}" for start, answer in sorted(starts.items()) if start < below
    )
    return f" Starts below it: {shorter}." if shorter else ""
