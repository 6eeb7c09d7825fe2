"""Loss against learning rate, drawn: figures for a page, and a plot for the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from efftrain_cli.compare import picture
from efftrain_cli.compare.picture import Plot, curve, draw_in_terminal, letter
from efftrain_cli.compare.sensitivity import Curve, band
from efftrain_cli.foundation.console import counted


def write_figures(curves: Sequence[Curve], folder: Path) -> list[Path]:
    """Write learning-rate.svg and learning-rate.png (200 dpi) into `folder`; return their paths."""
    return picture.write_figures([_plot(curves)], folder)


def terminal_plot(curves: Sequence[Curve], width: int) -> str:
    """Draw mean loss against learning rate in characters; empty if no mean is there."""
    return draw_in_terminal(_plot(curves), min(width, 80))


def _plot(curves: Sequence[Curve]) -> Plot:
    points, failed = [], []
    for i, found in enumerate(curves):
        means = np.array(found.means, float)
        # No band where a seed has no loss: it would look narrow exactly where seeds differ most.
        ends = [band(found, j) or (np.nan, np.nan) for j in range(len(means))]
        low, high = np.where(np.isnan(means), np.nan, np.array(ends, float).T)
        label = f"{letter(i)} {found.label} ({counted(len(found.seeds), 'seed')})"
        points.append(curve(i, label, found.rates, means, low, high))
        failed += [(i, rate) for rate in np.array(found.rates)[np.isnan(means)].tolist()]
    every = pd.concat(points, ignore_index=True)
    # At the upper edge, one above the other: a loss that is not there has no height.
    top, height = every.high.max(), np.ptp(every.y.dropna()) if every.y.notna().any() else 0.0
    top = 0.0 if np.isnan(top) else top
    return Plot(
        "learning-rate",
        "Loss against learning rate, mean and range of seeds"
        + "\nx: a seed diverged" * any(failed),
        every,
        "learning rate",
        "mean final validation loss (nats/token)",
        log="x",
        crosses=tuple((i, rate, top + 0.04 * height * (1 + i)) for i, rate in failed),
        ticks={rate: f"{rate:g}" for rate in sorted(set(every.x))},
    )
