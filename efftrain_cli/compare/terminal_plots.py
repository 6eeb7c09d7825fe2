"""Curves in the terminal: each recipe is drawn with its letter, and a cell that several share says so."""

from __future__ import annotations

import math

import numpy as np

from efftrain_cli.compare.comparison import Comparison
from efftrain_cli.compare.measures import human
from efftrain_cli.compare.plots import AXIS_LABELS, LATE
from efftrain_cli.compare.reading import AXES

COLOURS = (34, 33, 32, 35, 36, 31)
"""SGR colours of the letters."""
SHARED = "*"
"""Stands in cells that more than one recipe's curve passes."""
HEIGHT = 15


def terminal_plots(comparison: Comparison, width: int, colour: bool) -> str:
    """Validation loss against tokens, FLOPs and seconds, one below the other; every seed is a line."""
    return "\n\n".join(
        _loss_plot(comparison, axis, min(width, 100), colour)
        for axis in AXES
        if any(len(run.evaluated[axis]) > 1 for run in comparison.runs)
    )


def _loss_plot(comparison: Comparison, axis: str, width: int, colour: bool) -> str:
    curves = [
        (i, run.evaluated[axis], run.evaluated["val_loss"])
        for i, group in enumerate(comparison.groups)
        for run in group.runs
        if len(run.evaluated[axis]) > 1
    ]
    furthest = max(float(x[-1]) for _, x, _ in curves)
    # From where the fall that all share is over; before it no difference could be seen.
    start = LATE * furthest if all(len(x) > 6 for _, x, _ in curves) else 0.0
    late = np.concatenate([loss[x >= start] for _, x, loss in curves if (x >= start).any()])
    low, high = float(late.min()), float(late.max())
    high = high if high > low else low + 1.0
    labels = [f"{high - row * (high - low) / (HEIGHT - 1):.3f}" for row in range(HEIGHT)]
    margin = max(map(len, labels))
    columns = max(10, width - margin - 2)
    cells: dict[tuple[int, int], set[int]] = {}
    for i, x, loss in curves:
        # Several points a column, so that a steep line leaves no gaps.
        at = np.linspace(max(start, float(x[0])), float(x[-1]), 8 * columns)
        y = np.interp(at, x, loss)
        inside = (y <= high) & (y >= low)
        across = ((at - start) / (furthest - start) * (columns - 1)).round().astype(int)
        down = ((high - y) / (high - low) * (HEIGHT - 1)).round().astype(int)
        for row, column in zip(down[inside].tolist(), across[inside].tolist(), strict=True):
            cells.setdefault((row, column), set()).add(i)
    lines = ["validation loss (nats/token)"]
    for row in range(HEIGHT):
        head = labels[row] if row % 2 == 0 else ""
        lines.append(f"{head:>{margin}} |" + "".join(_cell(comparison, cells.get((row, c), set()), colour) for c in range(columns)))
    lines.append(" " * margin + " +" + "-" * columns)
    lines.append(" " * (margin + 2) + _ticks(start, furthest, columns))
    lines.append(" " * (margin + 2) + AXIS_LABELS[axis].center(columns).rstrip())
    key = ", ".join(f"{comparison.letter(group)} {group.label}" for group in comparison.groups)
    lines.append(key + (f", {SHARED} several" if any(len(of) > 1 for of in cells.values()) else ""))
    return "\n".join(lines)


def _cell(comparison: Comparison, groups: set[int], colour: bool) -> str:
    if not groups:
        return " "
    if len(groups) > 1:
        return SHARED
    (i,) = groups
    letter = comparison.letter(comparison.groups[i])[0]
    return f"\x1b[{COLOURS[i % len(COLOURS)]}m{letter}\x1b[0m" if colour else letter


def _ticks(start: float, end: float, columns: int) -> str:
    step = _round_step((end - start) / 4)
    line = [" "] * (columns + 8)
    for i in range(math.ceil(start / step), math.floor(end / step) + 1):
        text = human(i * step) if i * step < 1e15 else f"{i * step:.3g}"
        at = round((i * step - start) / (end - start) * (columns - 1))
        first = max(0, min(at - len(text) // 2, columns - len(text)))
        line[first : first + len(text)] = text
    return "".join(line).rstrip()


def _round_step(value: float) -> float:
    """The next 1, 2, 2.5 or 5 times a power of ten at or above `value`."""
    power = 10.0 ** math.floor(math.log10(value))
    return next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= value * 0.999)
