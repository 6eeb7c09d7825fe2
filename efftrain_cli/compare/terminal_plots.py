"""Curves in the terminal: each recipe is drawn with its letter, and a cell that several share says so."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from efftrain_cli.compare.comparison import Comparison
from efftrain_cli.compare.plots import AXIS_LABELS, LATE, tick
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
        (comparison.letter(group)[0], run.evaluated[axis], run.evaluated["val_loss"])
        for group in comparison.groups
        for run in group.runs
        if len(run.evaluated[axis]) > 1
    ]
    furthest = max(float(x[-1]) for _, x, _ in curves)
    # From where the fall that all share is over; before it no difference could be seen.
    start = LATE * furthest if all(len(x) > 6 for _, x, _ in curves) else 0.0
    late = np.concatenate([loss[x >= start] for _, x, loss in curves if (x >= start).any()])
    points: list[tuple[str, float, float]] = []
    for letter, x, loss in curves:
        # Several points a column, so that a steep line leaves no gaps.
        at = np.linspace(max(start, float(x[0])), float(x[-1]), 8 * width)
        points += (
            (letter, *point)
            for point in zip(at.tolist(), np.interp(at, x, loss).tolist(), strict=True)
        )
    # The next 1, 2, 2.5 or 5 times a power of ten at or above a quarter of what is shown.
    power = 10.0 ** math.floor(math.log10((furthest - start) / 4))
    step = next(
        factor * power
        for factor in (1, 2, 2.5, 5, 10)
        if factor * power >= (furthest - start) / 4 * 0.999
    )
    marks = [i * step for i in range(math.ceil(start / step), math.floor(furthest / step) + 1)]
    ticks = [(mark, tick(mark)) for mark in marks]
    colours = {
        comparison.letter(group)[0]: COLOURS[i % len(COLOURS)]
        for i, group in enumerate(comparison.groups)
    }
    lines = character_plot(
        points,
        (start, furthest),
        (float(late.min()), float(late.max())),
        ticks,
        width,
        AXIS_LABELS[axis],
        colours if colour else {},
    )
    key = ", ".join(f"{comparison.letter(group)} {group.label}" for group in comparison.groups)
    shared = f", {SHARED} several" if any(SHARED in line for line in lines) else ""
    return "\n".join(["validation loss (nats/token)", *lines, key + shared])


def character_plot(
    points: Iterable[tuple[str, float, float]],
    across: tuple[float, float],
    down: tuple[float, float],
    ticks: Sequence[tuple[float, str]],
    width: int,
    label: str = "",
    colours: Mapping[str, int] | None = None,
) -> list[str]:
    """Points (letter, x, y) in a frame; those outside of it are left out.

    Args:
        across, down: the ranges of x and y that the frame shows.
        ticks: where x is written below the frame, and what; one that has no room is left out.
        label: what x is.
        colours: SGR colour by letter; none: no colours.
    """
    (left, right), (low, high) = across, down
    high = high if high > low else low + 1.0
    labels = [f"{high - row * (high - low) / (HEIGHT - 1):.3f}" for row in range(HEIGHT)]
    margin = max(map(len, labels))
    columns = max(10, width - margin - 2)
    cells: dict[tuple[int, int], str] = {}
    for letter, x, y in points:
        if low <= y <= high and left <= x <= right:
            cell = (
                round((high - y) / (high - low) * (HEIGHT - 1)),
                round((x - left) / (right - left) * (columns - 1)),
            )
            cells[cell] = letter if cells.get(cell, letter) == letter else SHARED
    shown = {letter: f"\x1b[{number}m{letter}\x1b[0m" for letter, number in (colours or {}).items()}
    lines = []
    for row in range(HEIGHT):
        letters = [cells.get((row, column), " ") for column in range(columns)]
        lines.append(
            f"{labels[row] if row % 2 == 0 else '':>{margin}} |{''.join(shown.get(c, c) for c in letters)}"
        )
    below, end = [" "] * (columns + 8), -1
    for x, text in ticks:
        at = round((x - left) / (right - left) * (columns - 1))
        first = max(0, min(at - len(text) // 2, columns - len(text)))
        if first > end:
            below[first : first + len(text)] = text
            end = first + len(text)
    indent = " " * (margin + 2)
    lines += [" " * margin + " +" + "-" * columns, indent + "".join(below).rstrip()]
    return [*lines, indent + label.center(columns).rstrip()] if label else lines
