"""Sequence length warmup.

Li, Zhang, He: "The Stability-Efficiency Dilemma: Investigating Sequence Length Warmup for Training
GPT Models", NeurIPS 2022, arXiv 2108.06084. The arithmetic is that of its public implementation,
DeepSpeed's `curriculum_scheduler.py`.

Long sequences make the first steps of a large-batch, large-LR training unstable. So the first steps
train on short ones: each window of full length is cut off after the step's length, just before the
forward pass. The length grows with the optimizer step until it is full; the tokens cut off are not
trained on.

    x_t = min(t / T, 1)                           t: the step about to run, from 1; T: `steps`
    seqlen_t = floor(seqlen_s + (seqlen_e - seqlen_s) * x_t)                      pacing = "linear"
    seqlen_t = floor(seqlen_s + (seqlen_e - seqlen_s) * x_t ** (1 / degree))      pacing = "root"
    seqlen_t -= seqlen_t mod multiple;  at least `multiple`, at most seqlen_e

With pacing = "discrete" the lengths are given phase by phase; two phases are the two-stage training
that the paper compares with (Shortformer: Press, Smith, Lewis, ACL 2021, arXiv 2012.15832).

With batch = "tokens" a step keeps its tokens instead of its sequences: the most whole sequences of
seqlen_t tokens within batch_size * seqlen_e, so that no step is small and noisy, and what short
sequences save is attention.

It attaches to `plan_step`, which asks `seq_len_at` for the step's length, `batch_size_at` for its
sequences, and `sequences_per_window_at` for those that one window gives. The learning rate warms up
by steps and decays by tokens, so that shorter steps do not decay it sooner.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass

from efftrain_cli.foundation.section import SECTION, with_implied
from efftrain_cli.methods.method import Changes, Method, Problems, Sections, varying


@dataclass(frozen=True, kw_only=True, config=SECTION)
class SeqLenWarmup(Method):
    """Sequence length warmup: train on short sequences first and lengthen them over `steps`
    optimizer steps."""

    varies: ClassVar = frozenset({"length"})
    aliases: ClassVar = {
        "": "slw curriculum curriculum_learning seqlen_warmup sequence_length_warmup",
        "start": "start_seq_len min_difficulty",
        "steps": "total_curriculum_step",
        "multiple": "difficulty_step",
    }

    start: int = Field(default=8, ge=1)
    """seqlen_s, the length of the first sequences, in tokens."""
    steps: int | None = Field(default=None, ge=1)
    """T, the optimizer step at which the full length is reached; needed unless pacing =
    "discrete"."""
    multiple: int = Field(default=8, ge=1)
    """Lengths are rounded down to a multiple of this, in tokens."""
    pacing: Literal["linear", "root", "discrete"] = "linear"
    """How the length grows with the step."""
    degree: int = Field(default=2, ge=1)
    """Degree of the root, with pacing = "root"."""
    mode: Literal["truncate", "reshape"] = "truncate"
    """What becomes of the rest of a full-length window: dropped, or cut into further short
    sequences."""
    batch: Literal["sequences", "tokens"] = "sequences"
    """What stays as train.batch_size says while sequences are short: their number, or the tokens of
    a step. "tokens" cuts windows whole: mode is "reshape" then."""
    lengths: tuple[int, ...] = Field(default=(), strict=False)
    """With pacing = "discrete": the length of each phase, in tokens; the last one is the full
    length."""
    until: tuple[int, ...] = Field(default=(), strict=False)
    """With pacing = "discrete": the last step of each phase but the final one."""

    @model_validator(mode="before")
    @classmethod
    def _tokens_cut_windows_whole(cls, given: Any) -> Any:
        return with_implied(given, "batch", "tokens", {"mode": "reshape"})

    @model_validator(mode="after")
    def _check(self) -> Self:
        breaches = []
        if self.batch == "tokens" and self.mode == "truncate":
            breaches.append(
                'batch = "tokens" fills a step with further sequences of the same windows,'
                ' and mode = "truncate" drops them; set mode = "reshape", or batch = "sequences"'
            )
        if self.pacing == "discrete":
            if not self.lengths:
                breaches.append(
                    'pacing = "discrete" needs lengths,'
                    " such as [128, 1024], and until, such as [15000]"
                )
            elif len(self.until) != len(self.lengths) - 1:
                breaches.append(
                    f"lengths has {len(self.lengths)} phases and until {len(self.until)} ends;"
                    " until names the last step of each phase but the final one,"
                    f" so it needs {len(self.lengths) - 1}"
                )
            if any(length < 1 for length in self.lengths):
                breaches.append(f"lengths = {list(self.lengths)}: a length is at least 1 token")
            if any(later <= end for end, later in pairwise((0, *self.until))):
                breaches.append(
                    f"until = {list(self.until)}: steps are 1 or more and rise from phase to phase"
                )
            if self.steps is not None:
                breaches.append(
                    f'steps = {self.steps} has no effect with pacing = "discrete";'
                    " until says when to lengthen"
                )
        else:
            if self.steps is None:
                breaches.append(
                    "steps is missing: the optimizer step at which the full length is reached"
                )
            for name, given in (("lengths", self.lengths), ("until", self.until)):
                if given:
                    breaches.append(
                        f'{name} = {list(given)} needs pacing = "discrete",'
                        f' but pacing is "{self.pacing}"'
                    )
        if breaches:
            raise ValueError("; ".join(breaches))
        return self

    def seq_len_at(self, step: int, full: int) -> int:
        """Return the length, in tokens, of the sequences of 1-based `step`; `full` (seqlen_e) is
        the model's seq_len.

        DeepSpeed's floating-point expression, so that lengths agree with it to the step; without
        its defects: no length is below `multiple` (DeepSpeed can give 0), a full length that is not
        a multiple is reached at step T (there: later), and phases may also come down (there:
        latched).
        """
        if self.steps is None:
            phase = bisect_left(self.until, step)
            return min(self.lengths[phase], full)
        if step >= self.steps or self.start >= full:
            return full
        x = step / self.steps
        if self.pacing == "root":
            x **= 1.0 / self.degree
        length = math.floor(x * (full - self.start) + self.start)
        length -= length % self.multiple
        return min(max(length, self.multiple), full)

    def batch_size_at(self, seq_len: int, full: int, batch_size: int) -> int:
        """Return the sequences of `seq_len` tokens in a step, if a full one has `batch_size` of
        `full` tokens."""
        if self.batch == "sequences":
            return batch_size
        return batch_size * full // seq_len

    def sequences_per_window_at(self, seq_len: int, full: int) -> int:
        """Return the sequences of `seq_len` tokens from one window of `full` tokens.

        1 when truncating, floor(full / seq_len) when reshaping. What a batch does not need, and the
        remainder, is discarded.
        """
        if self.mode == "truncate":
            return 1
        return full // seq_len

    @property
    def last_step(self) -> int:
        """The last step of the warmup's schedule: T, or the end of the last phase but one."""
        if self.steps is not None:
            return self.steps
        return max(self.until, default=0)

    def phases(self, full: int) -> Iterator[tuple[int, int]]:
        """Yield (first step, length) of every stretch of steps with one length, in order; the last
        has no end."""
        if self.steps is None:
            starts = [1, *(end + 1 for end in self.until)]
            yield from zip(starts, (min(length, full) for length in self.lengths), strict=True)
            return

        def length_at(step: int) -> int:
            return self.seq_len_at(step, full)

        step = length = 0
        while length < full:
            # The first step that is longer: lengths only rise.
            step = 1 + bisect_right(range(1, self.steps), length, key=length_at)
            length = length_at(step)
            yield step, length

    def tokens_through(self, step: int, full: int, batch_size: int) -> int:
        """Count the tokens trained by the end of `step`, if a full step has `batch_size`
        sequences."""
        total = 0
        first = 1
        tokens = 0  # of each step from `first` on
        for begins, length in self.phases(full):
            if begins > step:
                break
            total += (begins - first) * tokens
            first = begins
            tokens = length * self.batch_size_at(length, full, batch_size)
        return total + (step - first + 1) * tokens

    def problems(self, recipe: Sections) -> Problems:
        train = recipe.train
        full = recipe.model.seq_len
        # Where the batch is not planned, only the fewest sequences of a step are known: the tokens
        # are then a lower bound.
        smallest = min(
            method.batch_bounds(train.batch_size)[0] for method in recipe.methods.values()
        )
        if self.lengths and not self.lengths[-1] == max(self.lengths) == full:
            yield (
                "seq_len_warmup.lengths",
                f"{list(self.lengths)}: the last must be model.seq_len = {full}, which validation"
                " uses, and none may be above it",
            )
        elif self.steps is not None and self.start > full:
            yield (
                "seq_len_warmup.start",
                f"{self.start} tokens is above the full length, model.seq_len = {full};"
                " start below it",
            )
        else:
            yield from self._budget_problems(full, smallest, train.tokens)
        if self.batch == "sequences":
            return
        for name in varying(recipe.methods, "batch"):
            yield (
                "seq_len_warmup.batch",
                f'"tokens" cannot be combined with {name}: both decide the sequences of a step;'
                f' set it to "sequences", or {name} to false',
            )

    def _budget_problems(self, full: int, batch_size: int, budget: int) -> Problems:
        needed = self.tokens_through(self.last_step, full, batch_size)
        if needed <= budget:
            return
        key = "until"
        value = str(list(self.until))
        way = "end the warmup earlier"
        if self.steps:
            key = "steps"
            value = str(self.steps)
            if fitting := self.longest_within(budget, full, batch_size):
                way = f"lower it to at most {fitting}"
        yield (
            f"seq_len_warmup.{key}",
            f"{value} is beyond the budget: the warmup alone trains {needed:,} tokens,"
            f" train.tokens is {budget:,}; {way}, or raise train.tokens",
        )

    def shortened(self, recipe: Sections, half: int, batch_size: int) -> Changes:
        if self.steps is not None:
            return {"seq_len_warmup": replace(self, steps=min(self.steps, 2 * half))}
        until = (min(end, half + 1 + i) for i, end in enumerate(self.until))
        return {"seq_len_warmup": replace(self, until=tuple(until))}

    def without_schedule(self) -> Changes:
        return {"seq_len_warmup": None}

    def longest_within(self, budget: int, full: int, batch_size: int) -> int:
        """Find the largest `steps` whose warmup trains at most `budget` tokens; 0 if none does."""

        def cost(steps: int) -> int:
            return replace(self, steps=steps).tokens_through(steps, full, batch_size)

        # A step trains a token at least.
        return bisect_left(range(1, budget), budget + 1, key=cost)
