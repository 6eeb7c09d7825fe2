"""Loss against learning rate, drawn: figures for a page, and a plot for the terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from efftrain_cli.compare.plots import COLOURS, STYLES, save_figure
from efftrain_cli.compare.sensitivity import Curve, band
from efftrain_cli.compare.terminal_plots import SHARED, character_plot

MARKERS = ("o", "s", "^", "D", "v", "P")


def write_figures(curves: Sequence[Curve], folder: Path) -> list[Path]:
    """Writes learning-rate.svg and learning-rate.png (200 dpi) into `folder`; returns their paths."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullFormatter

    figure = Figure(figsize=(5.4, 3.7))
    axes = figure.add_subplot()
    for i, curve in enumerate(curves):
        colour, seeds = COLOURS[i % len(COLOURS)], len(curve.seeds)
        # No band where a seed has no loss: it would look narrow exactly where seeds differ most.
        bands = [
            (rate, band(curve, j))
            for j, rate in enumerate(curve.rates)
            if curve.means[j] is not None
        ]
        there = [(rate, *ends) for rate, ends in bands if ends is not None]
        if there:
            x, lows, highs = zip(*there, strict=True)
            axes.fill_between(x, lows, highs, color=colour, alpha=0.2, linewidth=0)
        means = [
            (rate, mean)
            for rate, mean in zip(curve.rates, curve.means, strict=True)
            if mean is not None
        ]
        label = f"{curve.label} ({seeds} seed{'s' * (seeds != 1)})"
        style: dict[str, Any] = {
            "linestyle": STYLES[i % len(STYLES)],
            "marker": MARKERS[i % len(MARKERS)],
            "markersize": 4,
        }
        axes.plot(
            *zip(*(means or [(curve.rates[0], float("nan"))]), strict=True),
            color=colour,
            label=label,
            **style,
        )
    low, high = axes.get_ylim()
    for i, curve in enumerate(curves):
        failed = [rate for rate, mean in zip(curve.rates, curve.means, strict=True) if mean is None]
        # On the upper edge: a loss that is not there has no height.
        height = high + 0.02 * (high - low) * (1 + 2 * i)
        axes.plot(
            failed,
            [height] * len(failed),
            "x",
            color=COLOURS[i % len(COLOURS)],
            clip_on=False,
            label="_",
        )
    axes.set_ylim(low, high + 0.02 * (high - low) * (2 + 2 * len(curves)))
    axes.set_xscale("log")
    rates = sorted({rate for curve in curves for rate in curve.rates})
    axes.set_xticks(rates, [f"{rate:g}" for rate in rates])
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("learning rate")
    axes.set_ylabel("final validation loss (nats/token)")
    missing = any(mean is None for curve in curves for mean in curve.means)
    axes.set_title(
        "Loss against learning rate, mean and range of seeds" + "\nx: a seed diverged" * missing,
        fontsize=10,
        loc="left",
    )
    axes.grid(alpha=0.18, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    # Below the axes, where no curve is.
    axes.legend(loc="upper left", bbox_to_anchor=(0, -0.17), frameon=False, fontsize=8.5)
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "learning-rate"}):
        return save_figure(figure, folder, "learning-rate", tight=True)


def terminal_plot(curves: Sequence[Curve], width: int) -> str:
    """Mean loss against learning rate in characters: A, B, C are the recipes, * where two share a place."""
    points = [
        (chr(ord("A") + i), math.log(rate), mean)
        for i, curve in enumerate(curves)
        for rate, mean in zip(curve.rates, curve.means, strict=True)
        if mean is not None
    ]
    rates = sorted({rate for curve in curves for rate in curve.rates})
    if not points or len(rates) < 2:
        return ""
    losses, ticks = [loss for *_, loss in points], [(math.log(rate), f"{rate:g}") for rate in rates]
    lines = character_plot(
        points, (ticks[0][0], ticks[-1][0]), (min(losses), max(losses)), ticks, min(width, 80)
    )
    title = (
        f"mean final validation loss (nats/token) against learning rate; {SHARED} shared by several"
    )
    return "\n".join(
        [
            title,
            *lines,
            *(f"  {chr(ord('A') + i)}  {curve.label}" for i, curve in enumerate(curves)),
        ]
    )
