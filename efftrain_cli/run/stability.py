"""How stable a run is: measures over its rows, and a detector of spikes that reads rows as they
come. Host only.

The measures are those of Li, Zhang, He (NeurIPS 2022, arXiv 2108.06084):

    loss ratio_t = loss_t / min(loss_1 .. loss_t-1)        above 1: worse than the best loss so far
    norm_t = sum of sqrt(v_t), max_t = max of sqrt(v_t)    v_t: raw second moments of all parameters

The loss ratio is counted above 1.2 and above 1.5, and correlated (Pearson) with the norm, the
maximum and the gradient norm.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from efftrain_cli.run.metrics import columns_of, latest_rows, to_float

if TYPE_CHECKING:
    from efftrain_cli.run.metrics import Columns

SLIGHT = 1.2
SEVERE = 1.5
"""Loss ratios from which a step counts as slightly and as severely unstable."""
CORRELATED = ("adam_sqrt_v_l1", "adam_sqrt_v_max", "grad_norm")
"""Columns that the loss ratio is correlated with."""
PROBE = "EFFTRAIN_PROBE"
"""Environment variable of a probe's process: the fluctuation above which it ends as diverged."""
COLUMNS = ("step", "loss_ratio", "nonfinite", *CORRELATED)
"""Columns that the measures read."""


@dataclass(frozen=True, kw_only=True)
class Stability:
    """How stable one run was."""

    steps: int
    """Steps with a loss ratio: all but the first, and but those whose loss was not finite."""
    above_slight: int
    """Steps with a loss ratio above 1.2."""
    above_severe: int
    """Steps with a loss ratio above 1.5."""
    max_loss_ratio: float | None
    max_loss_ratio_step: int | None
    first_nonfinite_step: int | None
    """First step whose loss or gradient was not finite; no update was applied from there on."""


def measure(columns: Columns) -> Stability:
    """Measure a run by its columns `step`, `loss_ratio` and `nonfinite`, one value per step."""
    import numpy as np

    has_ratio = np.isfinite(columns["loss_ratio"])
    ratios = columns["loss_ratio"][has_ratio]
    steps = columns["step"]
    nonfinite = steps[columns["nonfinite"] > 0]
    any_ratio = len(ratios) > 0
    return Stability(
        steps=len(ratios),
        above_slight=int((ratios > SLIGHT).sum()),
        above_severe=int((ratios > SEVERE).sum()),
        max_loss_ratio=float(ratios.max()) if any_ratio else None,
        max_loss_ratio_step=int(steps[has_ratio][ratios.argmax()]) if any_ratio else None,
        first_nonfinite_step=int(nonfinite[0]) if len(nonfinite) else None,
    )


def correlations(columns: Columns) -> dict[str, Any]:
    """Return scipy's Pearson correlation of the loss ratio with each of CORRELATED, over the steps
    that have both.

    A column that is constant, or has fewer than three such steps, is left out. Steps are not
    independent of each other, so the p-values are too small.
    """
    import numpy as np
    from scipy.stats import pearsonr

    results = {}
    for name in CORRELATED:
        both = np.isfinite(columns["loss_ratio"]) & np.isfinite(columns[name])
        ratios = columns["loss_ratio"][both]
        values = columns[name][both]
        if len(ratios) >= 3 and np.ptp(ratios) > 0 and np.ptp(values) > 0:
            results[name] = pearsonr(ratios, values)
    return results


def describe_run(path: Path) -> list[str]:
    """Describe a run's stability in a few lines for the end of training; no line if it was calm.

    It was calm if every loss was finite and no validation loss was above 1.2 times the lowest
    before it.
    """
    import numpy as np

    rows = latest_rows(path)  # `read_metrics` would import Arrow, which nothing else needs here
    columns = columns_of(rows, COLUMNS)
    stability = measure(columns)
    losses = np.array([loss for _, loss in validation_curve(rows)])
    jumped = (losses[1:] > SLIGHT * np.minimum.accumulate(losses)[:-1]).any()
    is_calm = stability.first_nonfinite_step is None and not jumped
    if is_calm or stability.max_loss_ratio is None:
        return []
    lines = [
        f"stability: loss ratio above {SLIGHT}: {stability.above_slight} of {stability.steps} steps"
        f" ({stability.above_slight / stability.steps:.1%}), above {SEVERE}:"
        f" {stability.above_severe} ({stability.above_severe / stability.steps:.1%}),"
        f" largest {stability.max_loss_ratio:.2f} at step {stability.max_loss_ratio_step}"
    ]
    correlated = []
    for name, each in correlations(columns).items():
        correlated.append(f"{name} {each.statistic:+.2f} (p {each.pvalue:.1g})")
    if correlated:
        lines.append(f"  correlation of the loss ratio with {', '.join(correlated)}")
    if stability.first_nonfinite_step is not None:
        lines.append(f"  not finite from step {stability.first_nonfinite_step} on")
    return lines


# --- spikes ---------------------------------------------------------------------------------------

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


def fluctuation(curve: Sequence[tuple[int, float]]) -> tuple[float, int]:
    """Return the largest perplexity over the best perplexity before it, and the step of it.

    It is infinite if a loss is not finite, and 0.0 for a curve of one point.

    Args:
        curve: (step, validation loss in nats per token), in order of steps.
    """
    best = math.inf
    worst = 0.0
    at = curve[0][0]
    for step, loss in curve:
        if not math.isfinite(loss):
            return math.inf, step
        # exp(a) / exp(b) = exp(a - b), which does not overflow before the ratio does.
        ratio = math.exp(min(loss - best, 700.0))
        if ratio > worst:
            worst = ratio
            at = step
        best = min(best, loss)
    return worst, at
