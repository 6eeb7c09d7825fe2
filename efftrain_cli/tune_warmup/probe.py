"""A probe of `efftrain tune-warmup`, and the files about it: probe.json beside each, search.json
for all. No torch."""

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
    """One short run of the search. Asked for a longer horizon, it goes on from where it stands."""

    start: int
    """Where the warmup begins: tokens per sequence, or sequences per step; 0 if it has no start."""
    steps: int
    """How long the warmup is set to last, in optimizer steps; 0: training without it."""
    seed: int
    horizon: int
    """Steps after which the probe ends, if nothing happened."""

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
    """Largest of perplexity / best perplexity before it; infinite if the loss was not finite."""
    fluctuation_step: int
    """The step it was measured at."""
    stopped_at_step: int
    tokens: int
    seconds: float
    """Wall time, validation included."""
    curve: Annotated[tuple[Point, ...], Field(strict=False)]
    max_grad_norm: float | None = None
    """Largest gradient norm before clipping, over the steps. This field and the next two do not
    enter the verdict."""
    max_adam_sqrt_v: float | None = None
    """Largest of Adam's sqrt(v), over the steps."""
    max_loss_ratio: float | None = None
    """Largest training loss over the best before it."""

    @property
    def verdict(self) -> str:
        return "stable" if self.stable else "unstable"

    def is_stable_until(self, horizon: int) -> bool | None:
        """Return whether the probe is stable up to step `horizon`; None if not seen that long."""
        if not self.stable:
            return self.fluctuation_step > horizon
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
    """Steps between validations, if an older version was told."""
