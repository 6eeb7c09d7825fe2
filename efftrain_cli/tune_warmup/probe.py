"""The values of `efftrain tune-warmup`: a probe, its result (probe.json), the search (search.json).

Nothing here imports torch.
"""

from __future__ import annotations

import math
from typing import Annotated, ClassVar

from pydantic import BeforeValidator, Field, PlainSerializer

from efftrain_cli.foundation.records import Part, Record
from efftrain_cli.run.lines import finite

Extended = Annotated[
    float,
    BeforeValidator(lambda value: math.inf if value is None else value),
    PlainSerializer(finite),
]
"""A float that may be infinite, which JSON has as null."""
Point = Annotated[tuple[int, Extended], Field(strict=False)]
"""(step, validation loss in nats per token); JSON has a list."""


class Probe(Part):
    """One short run of the search; for a longer horizon the same run continues."""

    start: int
    """First value of the warmup: tokens per sequence, or sequences per step; 0 without one."""
    steps: int
    """Length of the warmup in optimizer steps; 0: training without it."""
    seed: int
    horizon: int
    """Steps after which the probe ends unless the loss becomes unstable before."""

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
    """Largest ratio of a perplexity to the best one before; infinite if a loss was not finite."""
    fluctuation_step: int
    """Step of `max_fluctuation`."""
    stopped_at_step: int
    tokens: int
    seconds: float
    """Wall time, validation included."""
    curve: Annotated[tuple[Point, ...], Field(strict=False)]
    max_grad_norm: float | None = None
    """Largest gradient norm before clipping. The verdict does not use it, nor the next two."""
    max_adam_sqrt_v: float | None = None
    """Largest sqrt(v) of Adam over all steps."""
    max_loss_ratio: float | None = None
    """Largest ratio of a training loss to the best one before it."""

    @property
    def verdict(self) -> str:
        return "stable" if self.stable else "unstable"

    def is_stable_until(self, horizon: int) -> bool | None:
        """Return whether the probe is stable up to step `horizon`; None if it ended before."""
        if not self.stable:
            return self.fluctuation_step > horizon
        # Too short a stable probe decides nothing.
        return self.stopped_at_step >= horizon or None


class SearchFile(Record):
    """search.json of a search: its options."""

    restore: ClassVar[str] = "restore it, or give another --name"

    schema_version: int
    tune: str
    multiples: int
    threshold: float
    max_share: float
    eval_every: int | None = None
    """Steps between validations, in files of older versions."""
