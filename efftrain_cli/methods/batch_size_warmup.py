"""Batch size warmup: the schedule of GPT-3, and a baseline that sequence length warmup is compared
with.

Brown et al.: "Language Models are Few-Shot Learners", 2020, arXiv 2005.14165 (batch size raised
over the first tokens). The formula is Megatron-LM's `--rampup-batch-size START INCREMENT SAMPLES`
(`microbatches.py`).

The first steps train on few sequences, of full length; the batch then grows by equal increments,
each after the same number of sequences, until it is full.

    n = (B - start) / increment                                      B: train.batch_size
    B_t = start + floor(consumed_t / (sequences / n)) * increment    while consumed_t <= sequences
    B_t = B                                                          after that

consumed_t counts the sequences trained before the step. It attaches to `plan_step`, which asks
`batch_size_at`.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import replace
from typing import ClassVar

from pydantic import Field
from pydantic.dataclasses import dataclass

from efftrain_cli.foundation.section import SECTION, Count
from efftrain_cli.methods.method import Changes, Method, Problems, Sections, varying


@dataclass(frozen=True, kw_only=True, config=SECTION)
class BatchSizeWarmup(Method):
    """Batch size warmup: begin with few sequences per step and add `increment` at a time over
    `sequences` sequences."""

    varies: ClassVar = frozenset({"batch"})
    aliases: ClassVar = {"": "rampup_batch_size batch_warmup batch_size_rampup"}

    start: int = Field(ge=1)
    """Sequences per step at the beginning."""
    increment: int = Field(ge=1)
    """Sequences added at each increase; divides train.batch_size - start."""
    sequences: Count = Field(ge=1)
    """Length of the ramp, in sequences trained."""

    def batch_size_at(self, consumed: int, full: int) -> int:
        """Return the sequences of the step after `consumed` of them; `full` is the final batch."""
        if consumed > self.sequences or self.start >= full:
            return full
        per_increment = self.sequences / ((full - self.start) // self.increment)
        return self.start + int(consumed / per_increment) * self.increment

    def steps_of_ramp(self, full: int) -> int:
        """Count the optimizer steps that run at less than the `full` batch."""
        steps = consumed = 0
        while (batch_size := self.batch_size_at(consumed, full)) < full:
            steps += 1
            consumed += batch_size
        return steps

    def sequences_through(self, step: int, full: int) -> int:
        """Count the sequences trained by the end of `step`."""
        consumed = 0
        while step > 0:
            batch_size = self.batch_size_at(consumed, full)
            if batch_size == full:
                return consumed + step * full
            # Steps until the batch has grown.
            after = range(consumed + batch_size, consumed + step * batch_size, batch_size)
            growth = bisect_left(
                after, batch_size + 1, key=lambda sequences: self.batch_size_at(sequences, full)
            )
            steps = growth + 1
            consumed += steps * batch_size
            step -= steps
        return consumed

    def sequences_for(self, steps: int, full: int) -> int:
        """Return the `sequences` with which this ramp takes about `steps` optimizer steps.

        Each of its n stretches has the same number of sequences, at a batch of its own.
        """
        batch_sizes = range(self.start, full, self.increment)
        return round(steps * len(batch_sizes) / sum(1 / batch_size for batch_size in batch_sizes))

    def problems(self, recipe: Sections) -> Problems:
        full = recipe.train.batch_size
        budget = recipe.train.tokens
        # A lower bound of a sequence's tokens if another method decides them.
        seq_len = recipe.model.seq_len
        if varying(recipe.methods, "length"):
            seq_len = 1
        if self.start > full:
            yield (
                "batch_size_warmup.start",
                f"{self.start} sequences is above the final batch, train.batch_size = {full};"
                " start below it",
            )
        elif (full - self.start) % self.increment:
            yield (
                "batch_size_warmup.increment",
                (
                    f"{self.increment} does not divide the {full - self.start} sequences"
                    f" between start = {self.start} and train.batch_size = {full},"
                    " so the ramp would not end at it"
                ),
            )
        elif self.sequences * seq_len > budget:
            yield (
                "batch_size_warmup.sequences",
                (
                    f"{self.sequences:,} is beyond the budget: the ramp alone"
                    f" trains {self.sequences * seq_len:,} tokens, train.tokens is {budget:,};"
                    f" lower it to at most {budget // seq_len:,}, or raise train.tokens"
                ),
            )

    def batch_bounds(self, batch_size: int) -> tuple[int, int]:
        return min(self.start, batch_size), batch_size

    def shortened(self, recipe: Sections, half: int, batch_size: int) -> Changes:
        start = batch_size // 2
        return {
            "batch_size_warmup": replace(
                self, start=start, increment=start, sequences=half * batch_size
            )
        }

    def without_schedule(self) -> Changes:
        return {"batch_size_warmup": None}
