"""How stable a run is: measures over the rows of metrics.jsonl, on the host, without touching the training.

The measures are those of Li, Zhang, He (NeurIPS 2022, arXiv 2108.06084):

    loss ratio_t = loss_t / min(loss_1 .. loss_t-1)        above 1 where the loss is worse than it has been
    norm_t = sum of sqrt(v_t), max_t = max of sqrt(v_t)    v_t: Adam's raw second moments, all parameters

The loss ratio is counted above 1.2 and above 1.5, and correlated (Pearson) with the norm, the maximum and the gradient
norm. Two alarms read the same rows as they come: `SpikeAlarm` says that the loss has jumped, `EarlyWarning` that it may
be about to.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import NamedTuple

from efftrain_cli.run.rows import read_counting

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


def measure(rows: Iterable[Row]) -> Stability:
    """The stability of the run whose rows these are: one per step, in order of steps."""
    every = list(rows)
    roots = [number(row.get("adam_sqrt_v_max")) for row in every]
    by_ratio = [
        (ratio, row) for row in every if (ratio := number(row.get("loss_ratio"))) is not None
    ]
    ratios = [ratio for ratio, _ in by_ratio]
    worst, at = max(by_ratio, key=lambda pair: pair[0], default=(None, None))
    beside = {column: [number(row.get(column)) for _, row in by_ratio] for column in CORRELATED}
    return Stability(
        steps=len(ratios),
        above_slight=sum(ratio > SLIGHT for ratio in ratios),
        above_severe=sum(ratio > SEVERE for ratio in ratios),
        max_loss_ratio=worst,
        max_loss_ratio_step=None if at is None else _step(at),
        max_sqrt_v=max((root for root in roots if root is not None), default=None),
        first_nonfinite_step=next(
            (_step(row) for row in every if row.get("nonfinite") is True), None
        ),
        correlations={column: correlation(ratios, values) for column, values in beside.items()},
    )


def _step(row: Row) -> int:
    return int(str(row["step"]))


def measure_run(path: Path) -> Stability:
    """The stability of the run in this directory, over the rows that count.

    A training process ends with this, so it reads without the column reader and its libraries.
    """
    return measure(read_counting(path))


def correlation(xs: Sequence[float], ys: Sequence[float | None]) -> Correlation | None:
    """Pearson's r over the steps that both columns have; None for fewer than three, or where one is constant."""
    pairs = [(x, y) for x, y in zip(xs, ys, strict=True) if y is not None]
    if len(pairs) < 3:
        return None
    first, second = zip(*pairs, strict=True)
    if min(first) == max(first) or min(second) == max(second):
        return None
    from scipy.stats import pearsonr

    found = pearsonr(first, second)
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
    found = {
        column: correlation
        for column, correlation in stability.correlations.items()
        if correlation is not None
    }
    known = [f"{column} {each.r:+.2f} (p {each.p:.1g})" for column, each in found.items()]
    if known:
        lines.append(f"  correlation of the loss ratio with {', '.join(known)}")
    if stability.first_nonfinite_step is not None:
        lines.append(f"  not finite from step {stability.first_nonfinite_step} on")
    return lines


# --- alarms ----------------------------------------------------------------------------------------------------------

WINDOW = 32
"""Steps behind what is usual."""


class Spike(NamedTuple):
    """A jump of the training loss."""

    step: int
    loss: float
    """Nats per token."""
    usual: float
    """Median of the losses before it, nats per token."""


@dataclass
class SpikeAlarm:
    """Says when the training loss jumps: above `ratio` times the median of the last WINDOW losses, and above that
    median by `deviations` times their usual scatter. One alarm per jump; it is armed again once the loss is back."""

    ratio: float = 1.5
    deviations: float = 6.0
    lasting: int = 0
    """Steps since the present jump began, itself included; 0 where the loss is as usual."""
    usual: float = math.nan
    """Median of the last WINDOW losses, nats per token."""
    _losses: deque[float] = field(default_factory=partial(deque, maxlen=WINDOW))

    def read(self, row: Row) -> Spike | None:
        """The spike that begins with this row, if one does."""
        loss = number(row.get("loss"))
        if loss is None:
            return None
        spike = None
        if len(self._losses) >= WINDOW // 4:
            usual = self.usual = median(self._losses)
            # 1.4826 makes the median absolute deviation the standard deviation where the scatter is normal.
            scatter = 1.4826 * median(abs(value - usual) for value in self._losses)
            high = loss > self.ratio * usual and loss > usual + self.deviations * scatter
            if high and not self.lasting:
                spike = Spike(_step(row), loss, usual)
            self.lasting = self.lasting + 1 if high else 0
        self._losses.append(loss)
        return spike


class GradientJump(NamedTuple):
    """A sign that the loss may be about to jump."""

    step: int
    grad_norm: float
    usual: float
    """Median of the gradient norms before it."""


@dataclass
class EarlyWarning:
    """Says when the gradient norm, before clipping, leaves its usual range: above `ratio` times the median of the last
    WINDOW. A loss cannot jump by a step whose gradient was as usual, and in recorded runs the gradient was often
    first."""

    ratio: float = 6.0
    least: int = 4
    """Norms that must be known before a warning: the first jumps come within the first ten steps."""
    _norms: deque[float] = field(default_factory=partial(deque, maxlen=WINDOW))
    _warned: bool = False

    def read(self, row: Row) -> GradientJump | None:
        """The warning that this row gives, if one; none follows until the norm has been as usual again."""
        norm = number(row.get("grad_norm"))
        if norm is None:
            return None
        warning = None
        if len(self._norms) >= self.least:
            usual = median(self._norms)
            high = norm > self.ratio * usual
            if high and not self._warned:
                warning = GradientJump(_step(row), norm, usual)
            self._warned = high or (self._warned and norm > self.ratio / 2 * usual)
        self._norms.append(norm)
        return warning


@dataclass
class Watch:
    """Both alarms over the rows of a run as they come."""

    spikes: SpikeAlarm = field(default_factory=SpikeAlarm)
    warnings: EarlyWarning = field(default_factory=EarlyWarning)

    def read(self, row: Row) -> list[Spike | GradientJump]:
        """What this row gives notice of."""
        return [
            found
            for alarm in (self.warnings, self.spikes)
            if (found := alarm.read(row)) is not None
        ]


def message(notice: Spike | GradientJump) -> str:
    """A spike or a warning in one line."""
    if isinstance(notice, Spike):
        return (
            f"spike: step {notice.step}: loss {notice.loss:.3f}, {notice.loss / notice.usual:.2f} times the usual "
            f"{notice.usual:.3f}"
        )
    return (
        f"early warning: step {notice.step}: gradient norm {notice.grad_norm:.3g}, {notice.grad_norm / notice.usual:.1f} times "
        f"the usual {notice.usual:.3g}; the loss may be about to jump"
    )
