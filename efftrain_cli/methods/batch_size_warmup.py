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

consumed_t counts the sequences trained before the step. Late steps, in place of the ramp: Wang et
al. 2026, "Fast catch-up, late switching", arXiv 2602.14208, keep the small batch for most of the
budget and switch to the full one late. It attaches to `plan_step`, which asks `batch_size_at`.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import replace
from itertools import pairwise
from typing import ClassVar

from pydantic import Field
from pydantic.dataclasses import dataclass

from efftrain_cli.foundation.section import SECTION, Count
from efftrain_cli.methods.method import Changes, Method, Problems, Sections, varying


@dataclass(frozen=True, kw_only=True, config=SECTION)
class BatchSizeWarmup(Method):
    """Batch size warmup: begin with few sequences per step and add `increment` at a time, over
    `sequences` sequences or after each of `switch` tokens."""

    varies: ClassVar = frozenset({"batch"})
    aliases: ClassVar = {"": "rampup_batch_size batch_warmup batch_size_rampup"}

    start: int = Field(ge=1)
    """Sequences per step at the beginning."""
    increment: int = Field(ge=1)
    """Sequences added at each increase; divides train.batch_size - start."""
    sequences: Count | None = None
    """Length of the ramp, in sequences trained."""
    switch: tuple[Count, ...] | None = None
    """In place of `sequences`: tokens trained after which `increment` is added, once for each."""

    def batch_size_at(self, consumed: int, tokens: int, full: int) -> int:
        """Return the sequences of the step after `consumed` of them and `tokens`; `full` is the
        final batch."""
        if self.sequences is None:
            return self.start + bisect_right(self.switch or (), tokens) * self.increment
        if consumed > self.sequences or self.start >= full:
            return full
        per_increment = self.sequences / ((full - self.start) // self.increment)
        return self.start + int(consumed / per_increment) * self.increment

    def problems(self, recipe: Sections) -> Problems:
        if (self.sequences is None) == (self.switch is None):
            yield (
                "batch_size_warmup.sequences",
                "or switch is needed, and not both: the length of the ramp in sequences,"
                " or the tokens after which the batch grows",
            )
            return
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
        elif self.sequences is None:
            yield from self._problems_of_switch(self.switch or (), full, budget)
        elif self.sequences * seq_len > budget:
            yield (
                "batch_size_warmup.sequences",
                (
                    f"{self.sequences:,} is beyond the budget: the ramp alone"
                    f" trains {self.sequences * seq_len:,} tokens, train.tokens is {budget:,};"
                    f" lower it to at most {budget // seq_len:,}, or raise train.tokens"
                ),
            )

    def _problems_of_switch(self, switch: tuple[int, ...], full: int, budget: int) -> Problems:
        needed = (full - self.start) // self.increment
        if len(switch) != needed:
            yield (
                "batch_size_warmup.switch",
                f"has {len(switch)} entries, and from start = {self.start} it takes {needed}"
                f" of increment = {self.increment} to train.batch_size = {full}",
            )
        elif any(later <= earlier for earlier, later in pairwise((*switch, budget))):
            yield (
                "batch_size_warmup.switch",
                f"rises from above 0 to below train.tokens = {budget:,}",
            )

    def batch_bounds(self, batch_size: int) -> tuple[int, int]:
        return min(self.start, batch_size), batch_size

    def shortened(self, recipe: Sections, half: int, batch_size: int) -> Changes:
        start = batch_size // 2
        return {
            "batch_size_warmup": replace(
                self, start=start, increment=start, sequences=half * start, switch=None
            )
        }

    def without_schedule(self) -> Changes:
        return {"batch_size_warmup": None}
