"""Loss against learning rate, drawn: figures for a page, and a plot for the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from efftrain_cli.compare.sensitivity import Curve, band

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
"""Okabe and Ito's, which colour-blind readers tell apart."""
STYLES = ("-", "--", "-.", ":")
MARKERS = ("o", "s", "^", "D", "v", "P")


def write_figures(curves: Sequence[Curve], folder: Path) -> list[Path]:
    """Writes learning-rate.svg and learning-rate.png (200 dpi) into `folder`; returns their paths."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullFormatter

    folder.mkdir(parents=True, exist_ok=True)
    figure = Figure(figsize=(5.4, 3.7))
    axes = figure.add_subplot()
    for i, curve in enumerate(curves):
        colour, seeds = COLOURS[i % len(COLOURS)], len(curve.seeds)
        # No band where a seed has no loss: it would look narrow exactly where seeds differ most.
        bands = [(rate, band(curve, j)) for j, rate in enumerate(curve.rates) if curve.means[j] is not None]
        there = [(rate, *ends) for rate, ends in bands if ends is not None]
        if there:
            x, lows, highs = zip(*there, strict=True)
            axes.fill_between(x, lows, highs, color=colour, alpha=0.2, linewidth=0)
        means = [(rate, mean) for rate, mean in zip(curve.rates, curve.means, strict=True) if mean is not None]
        label = f"{curve.label} ({seeds} seed{'s' * (seeds != 1)})"
        style: dict[str, Any] = {"linestyle": STYLES[i % len(STYLES)], "marker": MARKERS[i % len(MARKERS)], "markersize": 4}
        axes.plot(*zip(*(means or [(curve.rates[0], float("nan"))]), strict=True), color=colour, label=label, **style)
    low, high = axes.get_ylim()
    for i, curve in enumerate(curves):
        failed = [rate for rate, mean in zip(curve.rates, curve.means, strict=True) if mean is None]
        # On the upper edge: a loss that is not there has no height.
        height = high + 0.02 * (high - low) * (1 + 2 * i)
        axes.plot(failed, [height] * len(failed), "x", color=COLOURS[i % len(COLOURS)], clip_on=False, label="_")
    axes.set_ylim(low, high + 0.02 * (high - low) * (2 + 2 * len(curves)))
    axes.set_xscale("log")
    rates = sorted({rate for curve in curves for rate in curve.rates})
    axes.set_xticks(rates, [f"{rate:g}" for rate in rates])
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("learning rate")
    axes.set_ylabel("final validation loss (nats/token)")
    missing = any(mean is None for curve in curves for mean in curve.means)
    axes.set_title("Loss against learning rate, mean and range of seeds" + "\nx: a seed diverged" * missing, fontsize=10, loc="left")
    axes.grid(alpha=0.18, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    # Below the axes, where no curve is.
    axes.legend(loc="upper left", bbox_to_anchor=(0, -0.17), frameon=False, fontsize=8.5)
    paths = []
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "learning-rate"}):
        for ending, options in (("svg", {"metadata": {"Date": None}}), ("png", {"dpi": 200})):
            path = folder / f"learning-rate.{ending}"
            figure.savefig(path, bbox_inches="tight", **options)
            paths.append(path)
    return paths


def terminal_plot(curves: Sequence[Curve], width: int) -> str:
    """Mean loss against learning rate in characters: A, B, C are the recipes, * where two share a place."""
    import math

    points = [
        (math.log(rate), mean, chr(ord("A") + i))
        for i, curve in enumerate(curves)
        for rate, mean in zip(curve.rates, curve.means, strict=True)
        if mean is not None
    ]
    rates = sorted({rate for curve in curves for rate in curve.rates})
    if not points or len(rates) < 2:
        return ""
    rows, columns = 12, max(20, min(width, 80) - 10)
    low, high = min(y for _, y, _ in points), max(y for _, y, _ in points)
    left, right = math.log(rates[0]), math.log(rates[-1])
    cells = [[" "] * columns for _ in range(rows)]

    def place(x: float) -> int:
        return round((x - left) / (right - left) * (columns - 1))

    for x, y, letter in points:
        row = rows - 1 - (round((y - low) / (high - low) * (rows - 1)) if high > low else 0)
        cell = cells[row][place(x)]
        cells[row][place(x)] = letter if cell in (" ", letter) else "*"
    lines = ["mean final validation loss (nats/token) against learning rate; * shared by several"]
    for i, drawn in enumerate(cells):
        loss = high - (high - low) * i / (rows - 1)
        lines.append((f"{loss:8.3f} |" if i % 3 == 0 or i == rows - 1 else "         |") + "".join(drawn).rstrip())
    lines.append("         +" + "-" * columns)
    ticks = [" "] * (columns + 10)
    end = -1
    for rate in rates:
        text = f"{rate:g}"
        start = min(max(0, place(math.log(rate)) - len(text) // 2), len(ticks) - len(text))
        if start > end:
            ticks[start : start + len(text)] = text
            end = start + len(text)
    lines.append("          " + "".join(ticks).rstrip())
    lines += [f"  {chr(ord('A') + i)}  {curve.label}" for i, curve in enumerate(curves)]
    return "\n".join(lines)
