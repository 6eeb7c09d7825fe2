"""Figures of a comparison: curves against each cost, logged columns, differences, rates, ladder."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Mapping, Sequence
from string import ascii_uppercase
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from efftrain_cli.compare.arms import Arm
from efftrain_cli.compare.grids import keys_of
from efftrain_cli.compare.judge import Result
from efftrain_cli.compare.ladder import Ladder, trends_of
from efftrain_cli.compare.measures import LABELS
from efftrain_cli.foundation.console import counted, human
from efftrain_cli.run.columns import Column, find_column
from efftrain_cli.run.reading import DRAWN

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LOSS = "validation loss (nats/token)"
POINTS = 200
STYLE = "tableau-colorblind10"
"""Matplotlib's colours that colour-blind readers can distinguish."""
HEIGHT = 20
"""Height of a plot in the terminal, in lines."""
TURN = 8
"""Points of a curve after which the next one is drawn in a terminal: none hides another."""


def figures_of(
    arms: Sequence[Arm],
    rows: Sequence[Result],
    grid: pd.DataFrame,
    ladder: Ladder,
) -> list[Figure]:
    """Draw every figure for which there are data."""
    import matplotlib.style

    # A name with dollar signs is no formula.
    with matplotlib.style.context([STYLE, {"text.parse_math": False}]):
        colours = colours_of(arms)
        figures = [curves_figure(arms, cost) for cost in LABELS]
        figures.append(differences_figure(rows, colours))
        figures += [column_figure(arms, column) for column in DRAWN]
        figures.append(rates_figure(grid, colours))
        figures.append(losses_figure(ladder, colours))
        figures.append(gains_figure(ladder.gains, colours))
        drawn = [figure for figure in figures if figure.axes[0].has_data()]
        for figure in drawn:
            add_legend(figure)
    return drawn


def new_figure(
    title: str,
    x: str,
    y: str,
    scale: str = "linear",
) -> tuple[Figure, Axes]:
    """Return a figure and its empty axes.

    Args:
        x, y: labels of the axes, with their units.
        scale: of the x axis, linear or log.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator

    figure = Figure(layout="constrained")
    axes = figure.subplots()
    axes.set_title(title, loc="left")
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.set_xscale(scale)
    if scale == "log":
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.minorticks_off()
    axes.xaxis.set_major_formatter(lambda value, _: human(value))
    return figure, axes


def add_legend(figure: Figure) -> None:
    """Add a legend that names each arm once, below the axes, where it hides no curve."""
    handles, labels = figure.axes[0].get_legend_handles_labels()
    named = dict(zip(labels, handles, strict=True))
    figure.legend(
        list(named.values()),
        list(named),
        loc="outside lower center",
    )


def colours_of(arms: Sequence[Arm]) -> dict[str, str]:
    """Return the colour of each arm, by its label and by its recipe.

    They are hexadecimal: "C0" would mean the first colour of the style in use when it is drawn.
    """
    from matplotlib.colors import to_hex

    names = [arm.label for arm in arms] + [arm.first.arm for arm in arms]
    return {name: to_hex(f"C{number}") for number, name in enumerate(dict.fromkeys(names))}


def curves_figure(arms: Sequence[Arm], cost: str) -> Figure:
    """Draw the mean validation loss of each arm, and the range of its seeds, against a cost."""
    title = f"Validation loss against {LABELS[cost]}: mean and range of seeds"
    figure, axes = new_figure(title, LABELS[cost], LOSS)
    colours = colours_of(arms)
    tops = []
    for arm in arms:
        curves = [run.curve[[cost, "val_loss"]].to_numpy().T for run in arm.runs]
        curves = [each for each in curves if each.shape[1] > 1 and np.isfinite(each).all()]
        if not curves:
            continue
        end = min(costs[-1] for costs, _ in curves)
        x = np.linspace(0, end, POINTS)
        losses = np.array([np.interp(x, *each) for each in curves])
        axes.plot(
            x,
            losses.mean(0),
            color=colours[arm.label],
            label=f"{arm.label} ({counted(len(curves), 'seed')})",
        )
        axes.fill_between(
            x,
            losses.min(0),
            losses.max(0),
            color=colours[arm.label],
            alpha=0.2,
        )
        tops.append(losses[:, POINTS // 10 :].max())
    if tops:
        # The first tenth would flatten the rest.
        axes.set_ylim(top=max(tops))
    return figure


def column_figure(arms: Sequence[Arm], column: Column) -> Figure:
    """Draw a column of metrics.jsonl over training, a line per run.

    Of a family there is a line per part of each arm's first run, earlier parts paler.
    """
    title = f"{column.title} (paler: earlier)" if column.is_family else column.title
    figure, axes = new_figure(title, "tokens", column.unit)
    colours = colours_of(arms)
    for arm in arms:
        for run in arm.runs[:1] if column.is_family else arm.runs:
            parts = [name for name in run.series if find_column(name) is column]
            for part, name in enumerate(parts, 1):
                values = run.series[["tokens", name]].dropna()
                axes.plot(
                    values.tokens,
                    values[name],
                    color=colours[arm.label],
                    # What is drawn first stays visible.
                    alpha=0.7 * part / len(parts),
                    label=arm.label,
                )
    return figure


def differences_figure(rows: Sequence[Result], colours: Mapping[str, str]) -> Figure:
    """Draw each arm's difference of final losses with its interval."""
    figure, axes = new_figure(
        "Final loss less the baseline's: intervals over seeds",
        "arm",
        "difference of final losses (nats/token)",
    )
    shown = [row for row in rows if row.measure == "final_loss" and not np.isnan(row.estimate)]
    for number, row in enumerate(shown):
        axes.errorbar(
            number,
            row.estimate,
            yerr=row.high - row.estimate,
            fmt="o",
            color=colours[row.arm],
            label=row.arm,
        )
    if shown:
        axes.axhline(color="black", linestyle=":")
        axes.set_xticks([])
    return figure


def rates_figure(grid: pd.DataFrame, colours: Mapping[str, str]) -> Figure:
    """Draw the mean final loss of each recipe against the setting that was varied alone."""
    keys = keys_of(grid)
    key = ", ".join(keys)
    text = "Final loss against what was varied: mean of seeds"
    figure, axes = new_figure(text, key, LOSS, "log")
    if len(keys) == 1 and pd.api.types.is_numeric_dtype(grid[key]):
        for arm, rows in grid.groupby("arm", sort=False):
            axes.plot(
                rows[key],
                rows.loss,
                "o-",
                color=colours[str(arm)],
                label=str(arm),
            )
        values = grid[key].unique()
        axes.set_xticks(values, map("{:g}".format, values))
    return figure


def losses_figure(ladder: Ladder, colours: Mapping[str, str]) -> Figure:
    """Draw the final losses of the ladder against FLOPs, with a fit per arm and size."""
    title = "Final loss against FLOPs: each run, and a fit per size"
    figure, axes = new_figure(title, "FLOPs", LOSS, "log")
    shown = ladder.points[ladder.points["size"].isin(ladder.gains["size"])]
    for arm, rungs in shown.groupby("arm"):
        color = colours[str(arm)]
        axes.scatter(
            rungs.flops,
            rungs.loss,
            color=color,
            label=str(arm),
        )
        for _, runs in rungs.groupby("size"):
            slope, start = np.polyfit(np.log(runs.flops), runs.loss, 1)
            ends = np.array([runs.flops.min(), runs.flops.max()])
            axes.plot(ends, start + slope * np.log(ends), color=color)
    return figure


def gains_figure(gains: pd.DataFrame, colours: Mapping[str, str]) -> Figure:
    """Draw the multiplier of each arm against the size, with intervals and their line."""
    figure, axes = new_figure(
        "Compute multiplier by size: 95 % intervals, and a line",
        "parameters",
        "FLOPs of the baseline / of the arm, at equal loss",
        "log",
    )
    shown = gains[gains.why == ""]
    trends = trends_of(gains)
    for arm, sizes in shown.groupby("arm"):
        color = colours[str(arm)]
        middle = sizes.multiplier
        axes.errorbar(
            sizes["size"],
            middle,
            yerr=[middle - sizes.low, sizes.high - middle],
            fmt="o",
            color=color,
            label=str(arm),
        )
        trend = trends.get(str(arm))
        if trend is not None:
            ends = np.array([sizes["size"].min(), sizes["size"].max()])
            doublings = np.log2(ends / ends[1])
            axes.plot(ends, trend.largest[0] * np.exp(trend.slope * doublings), color=color)
    if len(shown):
        axes.axhline(1, color="black", linestyle=":")
    return figure


def inline_svg(figure: Figure) -> str:
    """Return a figure as an SVG element for a page."""
    import matplotlib

    out = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        figure.savefig(out, format="svg")
    svg = out.getvalue()
    return svg[svg.index("<svg") :]


def draw_in_terminal(figure: Figure, width: int) -> str:
    """Return the lines of a figure as text of this many characters a line, each as its letter."""
    import plotext

    (axes,) = figure.axes
    lines = axes.get_lines()
    plotext.clear_figure()
    plotext.theme("clear")
    plotext.limit_size(False, False)
    plotext.plot_size(width, HEIGHT)
    names = []
    for turn, (letter, line) in enumerate(zip(ascii_uppercase, lines, strict=False)):
        names.append(f"{letter} {line.get_label()}")
        x, y = map(np.asarray, line.get_data())
        is_turn = np.arange(len(x)) // TURN % len(lines) == turn
        plotext.scatter(
            x[is_turn].tolist(),
            y[is_turn].tolist(),
            marker=letter,
        )
    start, end = axes.dataLim.intervalx
    marks = np.linspace(start, end, 5).tolist()
    plotext.xticks(marks, list(map(human, marks)))
    plotext.ylim(*axes.get_ylim())
    plotext.title(axes.get_ylabel())
    plotext.xlabel(axes.get_xlabel())
    text = plotext.uncolorize(plotext.build())
    return f"{text.rstrip()}\n{textwrap.fill(', '.join(names), width)}"
