"""Draw figures: with matplotlib for pages, or with plotext in a terminal.

Colours are Okabe and Ito's (2008), which colour-blind readers can distinguish, and a grey; each
group also has its own line style.
"""

from __future__ import annotations

import io
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from string import ascii_letters
from typing import TYPE_CHECKING

import numpy as np

from efftrain_cli.foundation.console import human

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#777777")
STYLES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 1)), (0, (6, 4)))
LETTERS = ascii_letters.swapcase()
HEIGHT = 20
"""Height of a plot in the terminal, in lines."""
TURN = 8
"""Points of a curve after which the next one is drawn in a terminal: none hides another."""
Values = Sequence[float] | np.ndarray


@dataclass(frozen=True)
class Plot:
    """A figure that has not been drawn yet."""

    name: str
    """File name without its ending."""
    title: str
    curves: pd.DataFrame
    """A row per point: group, label, line, x, y, low, high; see `curve`."""
    x: str
    """Label of the x axis, with its unit."""
    y: str
    """Label of the y axis, with its unit."""
    has_log_x: bool = False
    """Whether the x axis is logarithmic."""
    fit_from: float = 0.0
    """The y axis covers the curves from this x on."""
    levels: tuple[float, ...] = ()
    """Values of y with a dotted line."""
    ticks: Mapping[float, str] = field(default_factory=dict)
    """Place on the x axis -> its label; round numbers if empty."""
    fades: bool = False
    """Whether earlier lines of a group are paler."""

    @property
    def low_high(self) -> tuple[float, float]:
        """Range of the y axis, with a margin."""
        late = self.curves[self.curves.x >= self.fit_from]
        values = [*late[["y", "low", "high"]].to_numpy().ravel(), *self.levels]
        low = float(np.nanmin(values))
        high = float(np.nanmax(values))
        margin = 0.05 * (high - low) or 0.01
        return low - margin, high + margin

    def tick(self, value: float) -> str:
        """Format a number of tokens, FLOPs, seconds or steps beside the x axis."""
        if self.x.startswith("FLOPs"):
            return human(value, "FLOP").removesuffix("FLOP").strip()
        return human(value, digits=4)


def curve(
    group: int,
    label: str,
    x: Values,
    y: Values,
    low: Values | float = np.nan,
    high: Values | float = np.nan,
    line: int = 0,
) -> pd.DataFrame:
    """Return the points of one curve.

    Args:
        group: number of the group on a page, which decides colour and style.
        label: name of the group in the legend.
        low, high: band around the curve; NaN if it has none.
        line: number of the curve within the group.
    """
    import pandas as pd

    points = {"x": x, "y": y, "low": low, "high": high}
    return pd.DataFrame({"group": group, "label": label, "line": line, **points})


def joined(curves: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """Return the points of several curves; a frame without rows if there are none."""
    import pandas as pd

    return pd.concat(curves or [curve(0, "", [], [])], ignore_index=True)


def draw_figure(plot: Plot) -> Figure:
    """Draw a plot and its legend."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.4, 3.7), layout="constrained")
    draw_plot(figure.subplots(), plot)
    # Below the axes, where it hides no curve.
    figure.legend(
        loc="outside lower center",
        ncols=2,
        frameon=False,
    )
    return figure


def draw_plot(axes: Axes, plot: Plot) -> None:
    """Draw the curves and axes of a plot."""
    from matplotlib.ticker import FuncFormatter

    for group, curves in plot.curves.groupby("group", sort=False):
        colour = COLOURS[group % len(COLOURS)]
        style = STYLES[group % len(STYLES)]
        # A name with a dollar sign is not a formula; the legend has one entry per group.
        label = curves.label.iloc[0].replace("$", r"\$")
        lines = curves.groupby("line", sort=False)
        for number, (_, points) in enumerate(lines, 1):
            alpha = number / len(lines) if plot.fades else 0.9
            axes.plot(
                points.x,
                points.y,
                label=label,
                color=colour,
                linestyle=style,
                alpha=alpha,
                marker="o" if points.x.nunique() == 1 else "",
                markersize=4,
            )
            axes.fill_between(
                points.x,
                points.low,
                points.high,
                color=colour,
                alpha=0.2,
            )
            label = "_"
    for level in plot.levels:
        axes.axhline(
            level,
            color="black",
            linewidth=0.8,
            linestyle=":",
        )
    axes.set_ylim(plot.low_high)
    if plot.has_log_x:
        axes.set_xscale("log")
    if plot.ticks:
        axes.set_xticks(list(plot.ticks), list(plot.ticks.values()))
    else:
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: plot.tick(value)))
    axes.set_title(plot.title, fontsize=11, loc="left")
    axes.set_xlabel(plot.x)
    axes.set_ylabel(textwrap.fill(plot.y, 40))
    axes.grid(alpha=0.2)


def inline_svg(plot: Plot) -> str:
    """Return the figure as an SVG element for a page."""
    import matplotlib

    out = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        draw_figure(plot).savefig(out, format="svg")
    svg = out.getvalue()
    return svg[svg.index("<svg") :]


def draw_in_terminal(plot: Plot, width: int) -> str:
    """Return a plot as text of this many characters a line, each group's curves as its letter."""
    import plotext

    shown = plot.curves[np.isfinite(plot.curves.y)]
    if shown.empty:
        return ""
    plotext.clear_figure()
    plotext.theme("clear")
    plotext.limit_size(False, False)
    plotext.plot_size(width, HEIGHT)
    groups = list(shown.groupby("group"))
    names = []
    for turn, (group, curves) in enumerate(groups):
        letter = LETTERS[group % len(LETTERS)]
        names.append(f"{letter} {curves.label.iloc[0]}")
        for _, points in curves.groupby("line"):
            is_turn = np.arange(len(points)) // TURN % len(groups) == turn
            drawn = points[is_turn | (len(points) <= TURN)]
            plotext.scatter(drawn.x.tolist(), drawn.y.tolist(), marker=letter)
    if plot.has_log_x:
        plotext.xscale("log")
    else:
        marks = np.linspace(shown.x.min(), shown.x.max(), 5)
        plotext.xticks(marks.tolist(), [plot.tick(mark) for mark in marks])
    plotext.ylim(*plot.low_high)
    plotext.title(plot.y)
    plotext.xlabel(plot.x)
    text = plotext.uncolorize(plotext.build())
    return f"{text.rstrip()}\n{textwrap.fill(', '.join(names), width)}"
