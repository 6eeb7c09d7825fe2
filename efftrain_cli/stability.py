"""How stable a run is: measures over the rows of metrics.jsonl, on the host, without touching the training.

The measures are those of Li, Zhang, He (NeurIPS 2022, arXiv 2108.06084):

    loss ratio_t = loss_t / min(loss_1 .. loss_t-1)        above 1 where the loss is worse than it has been
    norm_t = sum of sqrt(v_t), max_t = max of sqrt(v_t)    v_t: Adam's raw second moments, all parameters

The loss ratio is counted above 1.2 and above 1.5, and correlated (Pearson) with the norm, the maximum and the gradient norm.
Two alarms read the same rows as they come: `SpikeAlarm` says that the loss has jumped, `EarlyWarning` that it may be about to.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

Row = Mapping[str, object]

SLIGHT, SEVERE = 1.2, 1.5
"""Loss ratios from which a step counts as slightly and as severely unstable."""

CORRELATED = ("adam_sqrt_v_l1", "adam_sqrt_v_max", "grad_norm")
"""Columns that the loss ratio is correlated with."""


class Correlation(NamedTuple):
    """Pearson's r of two columns over a run's steps. Steps are not independent of each other, so p is too small."""

    r: float
    p: float
    """Two-sided probability of such an r between independent normal samples."""
    n: int
    """Steps."""


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
    max_sqrt_v: float | None
    """Largest adam_sqrt_v_max of any step."""
    first_nonfinite_step: int | None
    """First step whose loss or gradient was not finite; no update was applied from there on."""
    correlations: Mapping[str, Correlation | None]
    """By column, with the loss ratio; None where a column is constant or has fewer than three values."""

    @property
    def share_slight(self) -> float:
        """Share of the steps with a loss ratio above 1.2, in [0, 1]."""
        return self.above_slight / self.steps if self.steps else 0.0

    @property
    def share_severe(self) -> float:
        """Share of the steps with a loss ratio above 1.5, in [0, 1]."""
        return self.above_severe / self.steps if self.steps else 0.0


def loss_ratios(losses: Sequence[float | None]) -> list[float | None]:
    """loss / best before it, for each loss in nats; None for the first one and where a loss is None or not finite."""
    best = math.inf
    ratios: list[float | None] = []
    for loss in losses:
        if loss is None or not math.isfinite(loss):
            ratios.append(None)
            continue
        ratios.append(loss / best if best < math.inf else None)
        best = min(best, loss)
    return ratios


def measure(rows: Iterable[Row]) -> Stability:
    """The stability of the run whose rows these are: one per step, in order of steps."""
    rows = list(rows)
    ratios = [(ratio, row) for row in rows if (ratio := number(row.get("loss_ratio"))) is not None]
    values = [ratio for ratio, _ in ratios]
    worst = max(ratios, key=lambda entry: entry[0], default=None)
    roots = [value for row in rows if (value := number(row.get("adam_sqrt_v_max"))) is not None]
    return Stability(
        steps=len(values),
        above_slight=sum(ratio > SLIGHT for ratio in values),
        above_severe=sum(ratio > SEVERE for ratio in values),
        max_loss_ratio=worst[0] if worst else None,
        max_loss_ratio_step=int(str(worst[1]["step"])) if worst else None,
        max_sqrt_v=max(roots, default=None),
        first_nonfinite_step=next((int(str(row["step"])) for row in rows if row.get("nonfinite") is True), None),
        correlations={column: _correlation(ratios, column) for column in CORRELATED},
    )


def _correlation(ratios: Sequence[tuple[float, Row]], column: str) -> Correlation | None:
    pairs = [(ratio, value) for ratio, row in ratios if (value := number(row.get(column))) is not None]
    if len(pairs) < 3:
        return None
    xs, ys = zip(*pairs, strict=True)
    if min(xs) == max(xs) or min(ys) == max(ys):
        return None
    from scipy.stats import pearsonr

    found = pearsonr(xs, ys)
    return Correlation(float(found.statistic), float(found.pvalue), len(pairs))


def number(value: object) -> float | None:
    """`value` as a finite float; None for anything else (null in a row, a column that is not there)."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return float(value)


def describe(stability: Stability) -> list[str]:
    """The stability in a few lines of text for the end of a run."""
    if stability.max_loss_ratio is None:
        return ["stability: no step has a loss ratio"]
    lines = [
        f"stability: loss ratio above {SLIGHT}: {stability.above_slight} of {stability.steps} steps "
        f"({stability.share_slight:.1%}), above {SEVERE}: {stability.above_severe} ({stability.share_severe:.1%}), "
        f"largest {stability.max_loss_ratio:.2f} at step {stability.max_loss_ratio_step}"
    ]
    known = [
        f"{column} {found.r:+.2f} (p {found.p:.1g})"
        for column, found in stability.correlations.items()
        if found is not None
    ]
    if known:
        lines.append(f"  correlation of the loss ratio with {', '.join(known)}")
    if stability.first_nonfinite_step is not None:
        lines.append(f"  not finite from step {stability.first_nonfinite_step} on")
    return lines


# --- alarms ----------------------------------------------------------------------------------------------------------


class Spike(NamedTuple):
    """A jump of the training loss."""

    step: int
    loss: float
    """Nats per token."""
    usual: float
    """Median of the losses before it, nats per token."""


@dataclass
class SpikeAlarm:
    """Says when the training loss jumps: above `ratio` times the median of the last `window` losses, and above that median
    by `deviations` times their usual scatter. One alarm per jump; it is armed again once the loss is back."""

    ratio: float = 1.5
    deviations: float = 6.0
    window: int = 32
    _losses: deque[float] = field(default_factory=deque)
    _jumped: bool = False

    def read(self, row: Row) -> Spike | None:
        """The spike that begins with this row, if one does."""
        loss = number(row.get("loss"))
        if loss is None:
            return None
        spike = None
        if len(self._losses) >= self.window // 4:
            usual = median(self._losses)
            # 1.4826 makes the median absolute deviation the standard deviation where the scatter is normal.
            scatter = 1.4826 * median(abs(value - usual) for value in self._losses)
            high = loss > self.ratio * usual and loss > usual + self.deviations * scatter
            if high and not self._jumped:
                spike = Spike(int(str(row["step"])), loss, usual)
            self._jumped = high
        self._losses.append(loss)
        if len(self._losses) > self.window:
            self._losses.popleft()
        return spike
