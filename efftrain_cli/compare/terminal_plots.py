"""Curves in the terminal, drawn with plotext."""

from __future__ import annotations

import math

from efftrain_cli.compare.comparison import Comparison
from efftrain_cli.compare.measures import human
from efftrain_cli.compare.plots import AXIS_LABELS
from efftrain_cli.compare.reading import AXES

COLOURS = ("blue", "orange", "green", "magenta", "yellow", "cyan")
MARKERS = ("braille", "dot", "x", "sd", "hd", "fhd")


def terminal_plots(comparison: Comparison, width: int, colour: bool) -> str:
    """Validation loss against tokens, FLOPs and seconds, one below the other; every seed is a line."""
    return "\n".join(
        _loss_plot(comparison, axis, width, colour)
        for axis in AXES
        if any(len(run.evaluated[axis]) > 1 for run in comparison.runs)
    )


def _loss_plot(comparison: Comparison, axis: str, width: int, colour: bool) -> str:
    import numpy as np
    import plotext as plt

    plt.clear_figure()
    plt.plotsize(min(width, 100), 16)
    plt.theme("clear" if not colour else "pro")
    plt.canvas_color("default")
    plt.axes_color("default")
    plt.ticks_color("default")
    furthest = max(float(run.evaluated[axis][-1]) for run in comparison.runs if len(run.evaluated[axis]))
    lows, highs = [], []
    for i, group in enumerate(comparison.groups):
        for j, run in enumerate(group.runs):
            x, loss = run.evaluated[axis], run.evaluated["val_loss"]
            if len(x) < 2:
                continue
            keep = np.unique(np.linspace(0, len(x) - 1, 200).astype(int))
            plt.plot(
                x[keep].tolist(),
                loss[keep].tolist(),
                label=group.label if j == 0 else None,
                marker=MARKERS[i % len(MARKERS)] if not colour else "braille",
                color=COLOURS[i % len(COLOURS)] if colour else None,
            )
            late = loss[x >= 0.08 * furthest]
            if len(late):
                lows.append(float(late.min()))
                highs.append(float(late.max()))
    if lows and max(highs) > min(lows):
        plt.ylim(min(lows), max(highs))
    step = _round_step(furthest / 4)
    ticks = [step * i for i in range(int(furthest / step) + 1)]
    plt.xticks(ticks, [human(tick) for tick in ticks])
    plt.xlabel(AXIS_LABELS[axis])
    # plotext writes a y label below the frame, where it would be read as the x axis's.
    plt.title("validation loss (nats/token)")
    text = plt.build()
    return text if colour else plt.uncolorize(text)


def _round_step(value: float) -> float:
    """The next 1, 2, 2.5 or 5 times a power of ten at or above `value`."""
    power = 10.0 ** math.floor(math.log10(value))
    return next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= value * 0.999)
