"""How stable a run is: a detector of spikes that reads rows as they come, and the jumps and
fluctuations of a validation curve. Host only.

The measures are those of Li, Zhang, He (NeurIPS 2022, arXiv 2108.06084):

    loss ratio_t = loss_t / min(loss_1 .. loss_t-1)        above 1: worse than the best loss so far
    norm_t = sum of sqrt(v_t), max_t = max of sqrt(v_t)    v_t: raw second moments of all parameters
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any, NamedTuple

from efftrain_cli.run.metrics import to_float

JUMP = 1.2
"""A validation loss above this multiple of the lowest one before it is a jump."""
SEVERE = 1.5
"""Loss ratio from which a step counts as severely unstable."""
PROBE = "EFFTRAIN_PROBE"
"""Environment variable of a probe's process: the fluctuation above which it ends as diverged."""

WINDOW = 32
"""Steps that the usual loss is the median of."""
FEWEST = 8
"""Losses that must be known before a spike."""
DEVIATIONS = 6.0
"""Standard deviations of the usual losses by which a spike exceeds their median."""


class Spike(NamedTuple):
    """A training loss far above what is usual."""

    step: int
    loss: float
    """Nats per token."""
    usual: float
    """Median of the losses before it."""

    def __str__(self) -> str:
        """Describe the spike in one line."""
        return (
            f"spike: step {self.step}: loss {self.loss:.3f},"
            f" {self.loss / self.usual:.2f} times the usual {self.usual:.3f}"
        )


@dataclass
class LossSpikeDetector:
    """Find where the training loss rises above both SEVERE times its usual value and DEVIATIONS
    times its usual scatter.

    A spike is found once; the next one only after the loss has come down.
    """

    _losses: deque[float] = field(default_factory=partial(deque, maxlen=WINDOW))
    _is_high: bool = False

    def read(self, row: Mapping[str, object]) -> Spike | None:
        """Return the spike that begins with this row, if one does."""
        loss = to_float(row.get("loss"))
        if math.isnan(loss):
            return None
        spike = None
        if len(self._losses) >= FEWEST:
            usual = median(self._losses)
            # 1.4826 makes the median absolute deviation the standard deviation of normal scatter.
            scatter = 1.4826 * median(abs(each - usual) for each in self._losses)
            is_high = loss > SEVERE * usual and loss > usual + DEVIATIONS * scatter
            if is_high and not self._is_high:
                spike = Spike(int(str(row["step"])), loss, usual)
            self._is_high = is_high
        self._losses.append(loss)
        return spike


def validation_curve(rows: Sequence[Mapping[str, Any]]) -> list[tuple[int, float]]:
    """Return (step, validation loss in nats per token) of the rows that have one."""
    return [(row["step"], row["val_loss"]) for row in rows if row.get("val_loss") is not None]


def count_jumps(losses: Iterable[float]) -> int:
    """Count the validation losses above JUMP times the lowest one before them."""
    lowest = math.inf
    jumps = 0
    for loss in losses:
        jumps += loss > JUMP * lowest
        lowest = min(lowest, loss)
    return jumps


def fluctuations(losses: Sequence[float]) -> list[float]:
    """Return the perplexity of each loss over the best perplexity before it; 0.0 for the first.

    It is infinite for a loss that is not finite.

    Args:
        losses: validation losses in nats per token, in order of steps.
    """
    best = math.inf
    ratios = []
    for loss in losses:
        ratio = math.inf
        if math.isfinite(loss):
            # exp(a) / exp(b) = exp(a - b), which does not overflow before the ratio does.
            ratio = math.exp(min(loss - best, 700.0))
            best = min(best, loss)
        ratios.append(ratio)
    return ratios
