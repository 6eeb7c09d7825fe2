"""What `efftrain tune-warmup` chooses from: a grid of settings around the recipe's own, the recipe
of each, and its tokens.

Four kinds of warmup can be tuned, each by two numbers: a start, in tokens per sequence (the first
of the two lengths where there are two stages) or sequences per step, and a duration in optimizer
steps (for a batch the ramp's, set as its sequences). `KEYS` says where they stand in a recipe. That
of the learning rate has no start.

Neighbours on the grid differ by a factor of about the square root of two: probes do not tell finer
differences.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from itertools import takewhile
from typing import Literal

from efftrain_cli.foundation.errors import UsageError
from efftrain_cli.methods.batch_size_warmup import BatchSizeWarmup
from efftrain_cli.methods.method import varying
from efftrain_cli.methods.seq_len_warmup import SeqLenWarmup
from efftrain_cli.recipe.recipe import Recipe

Kind = Literal["length", "batch", "two-stage", "lr"]
KEYS: dict[Kind, tuple[str, str]] = {
    "length": ("seq_len_warmup.start", "seq_len_warmup.steps"),
    "batch": ("batch_size_warmup.start", "batch_size_warmup.sequences"),
    "two-stage": ("seq_len_warmup.lengths", "seq_len_warmup.until"),
    "lr": ("", "optim.warmup_steps"),
}
"""Recipe keys of the start and of the duration."""
BILLION = 10**9
LONGEST_LR_WARMUP = 1 / 3
"""Share of a full run's steps; beyond it the learning rate climbs for most of the run."""


@dataclass(
    frozen=True, kw_only=True, eq=False
)  # known by itself: its methods keep what they counted
class Grid:
    """The settings that a search over `recipe` may choose from.

    Raises:
        UsageError: the recipe leaves nothing to search for.
    """

    recipe: Recipe
    tune: Kind | None = None
    """What is tuned; None: the warmup that the recipe has."""
    multiples: int = 3
    """A duration is seen for the step at which it becomes critical and `multiples` - 1
    learning-rate warmups after it."""
    max_share: float = 0.66
    """Share of the token budget that the longest warmup tried may take. The longest of the paper's
    authors took 63 %."""

    def __post_init__(self) -> None:
        warmup = self.recipe.seq_len_warmup
        if self.lr_warmup_steps < 1:
            raise UsageError(
                "tune-warmup measures its probes in multiples of the learning-rate warmup,"
                " and optim.warmup_steps is 0\n  set it, for example --set optim.warmup_steps=100"
            )
        if self.recipe.stages:
            raise UsageError(
                "tune-warmup searches recipes without stages\n  give it the recipe of one stage"
            )
        for name in varying(self.recipe.methods, "steps"):
            raise UsageError(
                f"tune-warmup counts a probe's tokens before it runs, and {name} decides the batch"
                f" while training\n  tune without it: --set {name}=false"
            )
        if self.kind == "batch" and self.recipe.batch_size_warmup is None:
            raise UsageError(
                "--tune batch needs a [batch_size_warmup] to begin with\n"
                "  add one, or give a recipe that has one"
            )
        if self.kind in ("length", "two-stage") and self.recipe.batch_size_warmup is not None:
            raise UsageError(
                f"--tune {self.kind} cannot be combined with the recipe's [batch_size_warmup]\n"
                "  add --set batch_size_warmup=false"
            )
        if self.kind == "batch" and warmup is not None:
            raise UsageError(
                "--tune batch cannot be combined with the recipe's [seq_len_warmup]\n"
                "  add --set seq_len_warmup=false"
            )
        if self.kind == "two-stage" and warmup is not None and len(warmup.lengths) != 2:
            raise UsageError(
                "--tune two-stage searches one length and the step where the full one follows,"
                f" and the recipe has {len(warmup.lengths) or 'no'} lengths\n  set"
                " seq_len_warmup.lengths to two and until to one, or add --set seq_len_warmup=false"
            )
        if self.kind == "length" and warmup is not None and warmup.steps is None:
            raise UsageError(
                '--tune length searches start and steps, and pacing = "discrete" has neither\n'
                "  use --tune two-stage,"
                " or --set seq_len_warmup.pacing=linear with a start and steps"
            )
        if not self.starts:
            raise UsageError(
                f"there is no {self.start_name} to search between the recipe's"
                f" and the full {self.full}\n  lower it"
            )
        for start in (self.starts[0], self.starts[-1]):
            if not self.durations(start):
                raise UsageError(
                    f"the budget of {self.recipe.train.tokens:,} tokens is too small to search:"
                    f" even {self.duration_name} = {self._shortest} takes"
                    f" more than --max-share {self.max_share:g} of it\n"
                    "  raise train.tokens or --max-share"
                )

    @cached_property
    def kind(self) -> Kind:
        """What is tuned."""
        return self.tune or kind_of(self.recipe)

    @property
    def lr_warmup_steps(self) -> int:
        """Steps of the recipe's learning-rate warmup."""
        return self.recipe.optim.warmup_steps

    @property
    def full(self) -> int:
        """Where the warmup leads: train.batch_size or model.seq_len."""
        if self.kind == "batch":
            return self.recipe.train.batch_size
        return self.recipe.model.seq_len

    @property
    def start_name(self) -> str:
        """Key of the start; empty where there is none."""
        return KEYS[self.kind][0]

    @property
    def duration_name(self) -> str:
        """Key of the duration."""
        return KEYS[self.kind][1]

    @property
    def baseline_steps(self) -> int:
        """Steps of a run whose every step is a full one."""
        train = self.recipe.train
        return max(1, train.tokens // (train.batch_size * self.recipe.model.seq_len))

    # --- the grid ---------------------------------------------------------------------------------

    @cached_property
    def own(self) -> tuple[int, int]:
        """(start, duration) of the recipe; the rule of thumb where it has none: sequences of 8
        tokens at first, 64 from a billion parameters on, an eighth of the full length in two
        stages, and a third of the run's full steps, but no less than the learning-rate warmup."""
        recipe = self.recipe
        warmup = recipe.seq_len_warmup
        full = recipe.model.seq_len
        third = max(self.lr_warmup_steps, self.baseline_steps // 3)
        if self.kind == "lr":
            return 0, self.lr_warmup_steps
        if self.kind == "batch":
            assert recipe.batch_size_warmup is not None
            return recipe.batch_size_warmup.start, recipe.batch_size_warmup.steps_of_ramp(self.full)
        if self.kind == "two-stage":
            if warmup is None:
                return max(1, full // 8), third
            return warmup.lengths[0], warmup.until[0]
        if warmup is not None:
            assert warmup.steps is not None
            return warmup.start, warmup.steps
        start = 8
        if 12 * recipe.model.n_layer * recipe.model.n_embd**2 >= BILLION:
            start = 64
        return min(start, full), third

    @property
    def rule_of_thumb(self) -> str:
        """Say in words how `own` comes about."""
        if self.recipe.seq_len_warmup is not None or self.kind in ("batch", "lr"):
            return "the recipe's own setting"
        if self.own[1] == self.baseline_steps // 3:
            return "a third of a run's full steps"
        return "as long as the learning-rate warmup"

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """List the starts to choose from, the recipe's own first, rising; full length or full batch
        is not among them."""
        first = self.own[0]
        recipe = self.recipe
        if self.kind == "lr":
            return (0,)
        if first >= self.full:
            return ()
        if recipe.batch_size_warmup is not None and self.kind == "batch":
            increment = recipe.batch_size_warmup.increment
            allowed = range(first + increment, self.full, increment)
        else:
            multiple = 8 if recipe.seq_len_warmup is None else recipe.seq_len_warmup.multiple
            allowed = range(first - first % multiple + multiple, self.full, multiple)
        wanted = (first * 2 ** (k / 2) for k in range(1, 64) if first * 2 ** (k / 2) < self.full)
        nearest = {
            allowed[min(len(allowed) - 1, max(0, round((x - allowed.start) / allowed.step)))]
            for x in wanted
            if allowed
        }
        return (first, *sorted(nearest))

    @property
    def _shortest(self) -> int:
        """Steps of the shortest duration that is searched: an eighth of the recipe's learning-rate
        warmup where that is what is tuned, else the learning-rate warmup, or the recipe's own
        duration if that is shorter."""
        if self.kind == "lr":
            return max(1, self.lr_warmup_steps // 8)
        return min(self.lr_warmup_steps, max(1, self.own[1]))

    @cache  # noqa: B019  grids are few
    def durations(self, start: int) -> tuple[int, ...]:
        """List the durations to choose from with `start`, from what is thought the most stable to
        what is wanted the most: warmups of lengths and batches grow longer, that of the learning
        rate shorter."""
        own = max(1, self.own[1])
        shorter = (two_digits(own / 2 ** (k / 2)) for k in range(1, 64))
        longer = (two_digits(own * 2 ** (k / 2)) for k in range(1, 64))
        fits = partial(self._fits, start)
        fitting = {*takewhile(fits, longer)}
        long_enough = takewhile(lambda steps: steps >= self._shortest, shorter)
        fitting |= {*filter(fits, (own, *long_enough))}
        return tuple(sorted(fitting, reverse=self.kind == "lr"))

    def nearest_duration(self, start: int) -> int:
        """Return the recipe's duration if it is one of `durations(start)`, else the nearest."""
        return min(self.durations(start), key=lambda steps: abs(steps - self.own[1]))

    def _fits(self, start: int, steps: int) -> bool:
        recipe = self.recipe
        if self.kind == "lr":
            end = recipe.optim.decay_steps
            return steps <= LONGEST_LR_WARMUP * self.baseline_steps and (end is None or steps < end)
        return self._tokens_of_warmup(start, steps) <= self.max_share * recipe.train.tokens

    def _tokens_of_warmup(self, start: int, steps: int) -> int:
        """Count the tokens trained until a warmup of lengths or of the batch ends, whether or not
        it fits the budget."""
        recipe = self.recipe
        warmup = self._warmup_with(start, steps)
        if isinstance(warmup, BatchSizeWarmup):
            return warmup.sequences * recipe.model.seq_len
        return warmup.tokens_through(steps, recipe.model.seq_len, recipe.train.batch_size)

    # --- a setting --------------------------------------------------------------------------------

    def _warmup_with(self, start: int, steps: int) -> SeqLenWarmup | BatchSizeWarmup:
        recipe = self.recipe
        own = (start, steps) == self.own
        if self.kind == "batch":
            assert recipe.batch_size_warmup is not None
            ramp = replace(recipe.batch_size_warmup, start=start)
            if own:
                return ramp
            return replace(ramp, sequences=ramp.sequences_for(steps, self.full))
        warmup = recipe.seq_len_warmup
        if self.kind == "two-stage":
            lengths = (start, recipe.model.seq_len)
            until = (steps,)
            if warmup is None:
                return SeqLenWarmup(pacing="discrete", lengths=lengths, until=until)
            return replace(warmup, lengths=lengths, until=until)
        if warmup is None:
            return SeqLenWarmup(start=start, steps=steps)
        return replace(warmup, start=start, steps=steps)

    def recipe_with(self, start: int, steps: int) -> Recipe:
        """Return the recipe with this setting and nothing else changed; without the warmup if
        `steps` is 0."""
        if not steps:
            return replace(self.recipe, seq_len_warmup=None, batch_size_warmup=None)
        if self.kind == "lr":
            return replace(self.recipe, optim=replace(self.recipe.optim, warmup_steps=steps))
        warmup = self._warmup_with(start, steps)
        if isinstance(warmup, BatchSizeWarmup):
            return replace(self.recipe, batch_size_warmup=warmup)
        return replace(self.recipe, seq_len_warmup=warmup)

    def ramp(self, start: int, steps: int) -> int | None:
        """Return the sequences of the batch's ramp in this setting; None if the batch is not warmed
        up."""
        ramp = self.recipe_with(start, steps).batch_size_warmup
        return None if ramp is None else ramp.sequences

    @cache  # noqa: B019  grids are few
    def tokens(self, start: int, steps: int, through: int) -> int:
        """Count the tokens that a run with this setting has trained after `through` steps."""
        own = self.recipe_with(start, steps)
        batch_size = own.train.batch_size
        full = own.model.seq_len
        warmup = own.batch_size_warmup or own.seq_len_warmup
        if isinstance(warmup, BatchSizeWarmup):
            return warmup.sequences_through(through, batch_size) * full
        if isinstance(warmup, SeqLenWarmup):
            return warmup.tokens_through(through, full, batch_size)
        return through * batch_size * full

    def climb(self, start: int, steps: int) -> int:
        """Count the steps at the beginning while the learning rate climbs."""
        return self._within_run(start, steps, self.lr_warmup_steps)

    def critical(self, steps: int) -> int:
        """Return the step after which a duration can be judged: the peak of the learning rate, and
        in two stages the switch too."""
        if self.kind == "lr":
            return steps
        if self.kind == "two-stage":
            return max(self.lr_warmup_steps, steps)
        return self.lr_warmup_steps

    def horizon(self, start: int, steps: int) -> int:
        """Count the steps that a duration is seen for: `multiples` - 1 learning-rate warmups more
        than the critical step."""
        return self._within_run(
            start, steps, self.critical(steps) + (self.multiples - 1) * self.lr_warmup_steps
        )

    def named(self, start: int, steps: str) -> str:
        """Name a setting, its duration as it is to be written."""
        if not self.start_name:
            return f"{steps} steps"
        return f"start {start}, {steps} steps"

    def _within_run(self, start: int, steps: int, horizon: int) -> int:
        """Return `horizon`, or the last step of the run if that comes first."""
        budget = self.recipe.train.tokens
        if self.tokens(start, steps, horizon) <= budget:
            return horizon
        all_steps = range(1, horizon + 1)
        return 1 + bisect_left(all_steps, budget, key=partial(self.tokens, start, steps))

    def settings(self) -> Iterator[tuple[int, int]]:
        """Generate every (start, duration) of the grid."""
        for start in self.starts:
            for steps in self.durations(start):
                yield start, steps


def kind_of(recipe: Recipe) -> Kind:
    """Return what is tuned by default: the warmup that the recipe has, or a sequence length warmup
    if it has none."""
    if recipe.batch_size_warmup is not None:
        return "batch"
    if recipe.seq_len_warmup is not None and recipe.seq_len_warmup.steps is None:
        return "two-stage"
    return "length"


def two_digits(number: float) -> int:
    """Round a number to two significant digits, and to a whole one: 28284.3 -> 28000."""
    if number < 100:
        return max(1, round(number))
    unit = 10 ** (math.floor(math.log10(number)) - 1)
    return round(number / unit) * unit
