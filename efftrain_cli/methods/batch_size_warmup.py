"""Batch size warmup (Brown et al. 2020, GPT-3; Megatron-LM's --rampup-batch-size)."""

from __future__ import annotations

from pydantic.dataclasses import dataclass

from efftrain_cli.section import SECTION, Count


@dataclass(frozen=True, kw_only=True, config=SECTION)
class BatchSizeWarmup:
    """Batch size warmup: begin with few sequences per step and add `increment` at a time over `sequences` sequences."""

    start: int
    """Sequences per step at the beginning."""
    increment: int
    """Sequences added at each increase."""
    sequences: Count
    """Length of the ramp, in sequences trained."""
