"""Draw figures: with matplotlib for pages, or with plotext in a terminal.

Colours are Okabe and Ito's (2008), which colour-blind readers can distinguish, and a grey; each
group also has its own line style and marker. A figure for a page is an SVG whose text and axes have
the page's text colour, so that it can be read on light and on dark pages.
"""

from __future__ import annotations

import io
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from string import ascii_lowercase, ascii_uppercase
from typing import TYPE_CHECKING, Any

import numpy as np

from efftrain_cli.foundation.console import human

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#777777")
STYLES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 1)), (0, (6, 4)))
MARKERS = "os^DvPX"
_LETTERS = ascii_uppercase + ascii_lowercase
_TERMINAL_COLOURS = ("blue", "orange", "green", "magenta", "cyan", "red")
_INK = "#010203"
"""Placeholder of the page's text colour, which `inline_svg` replaces."""
_INKED = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
HEIGHT = 20
"""Height of a plot in the terminal, in lines."""


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
    log: str = ""
    """Axes on a log scale: "x" or "y"."""
    fit_from: float = 0.0
    """The y axis covers the curves from this x on."""
    include: tuple[float, ...] = ()
    """Further values that the y axis covers."""
    levels: tuple[float, ...] = ()
    """Values of y with a dotted line."""
    ticks: Mapping[float, str] = field(default_factory=dict)
    """Place on the x axis -> its label; round numbers if empty."""
    fades: bool = False
    """Whether earlier lines of a group are paler."""

    @property
    def low_high(self) -> tuple[float, float]:
        """Range of the y axis, without a margin."""
        late = self.curves[self.curves.x >= self.fit_from]
        drawn = late[["y", "low", "high"]].to_numpy()
        values = [*drawn.ravel(), *self.include]
        return float(np.nanmin(values)), float(np.nanmax(values))

    def tick(self, value: float) -> str:
        """Format a number of tokens, FLOPs, seconds or steps beside the x axis."""
        if self.x.startswith("FLOPs"):
            return human(value, "FLOP").removesuffix("FLOP").strip()
        if abs(value) >= 1e15:
            return f"{value:.3g}"
        return human(value, digits=4)


Values = Sequence[float] | np.ndarray


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

    return pd.DataFrame(
        {
            "group": group,
            "label": label,
            "line": line,
            "x": x,
            "y": y,
            "low": low,
            "high": high,
        }
    )


def joined(curves: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """Return the points of several curves; a frame without rows if there are none."""
    import pandas as pd

    return pd.concat(curves or [curve(0, "", [], [])], ignore_index=True)


def draw_figure(plots: Sequence[Plot]) -> Figure:
    """Draw plots side by side, with one y axis."""
    from matplotlib.figure import Figure

    columns = len(plots)
    figure = Figure(figsize=(5.4 * columns, 3.7), layout="constrained")
    panels = figure.subplots(
        1,
        columns,
        sharey=True,
        squeeze=False,
    )
    for axes, plot in zip(panels.flat, plots, strict=True):
        _draw_lines(axes, plot)
        _set_axes(axes, plot)

    handles, labels = panels.flat[0].get_legend_handles_labels()
    if labels:
        # Below the axes, where it hides no curve, in as many columns as fit.
        longest = max(map(len, labels))
        fitting = 70 * columns // (8 + longest)
        fitting = max(1, min(len(handles), fitting))
        # The legend's further lines take nothing from the axes.
        further = (len(handles) - 1) // fitting
        figure.set_figheight(figure.get_figheight() + 0.18 * further)
        figure.legend(
            handles,
            labels,
            loc="outside lower center",
            fontsize=8.5,
            frameon=False,
            ncols=fitting,
        )
    return figure


def _draw_lines(axes: Axes, plot: Plot) -> None:
    for group, curves in plot.curves.groupby("group", sort=False):
        # A name with a dollar sign is not a formula.
        label = curves.label.iloc[0].replace("$", r"\$")
        colour = COLOURS[group % len(COLOURS)]
        style = STYLES[(group + group // len(COLOURS)) % len(STYLES)]
        lines = curves.line.nunique()
        for line, points in curves.groupby("line", sort=False):
            alpha = 0.9
            if plot.fades:
                alpha = 0.25 + 0.75 * (line + 1) / lines
            axes.plot(
                points.x,
                points.y,
                label=label,
                color=colour,
                linestyle=style,
                linewidth=1.6 if lines == 1 else 1.1,
                alpha=alpha,
                marker=MARKERS[group % len(MARKERS)] if points.x.nunique() == 1 else "",
                markersize=4,
            )
            # The legend has one entry per group: an underscore hides the other lines.
            label = "_"
            axes.fill_between(
                points.x,
                points.low,
                points.high,
                color=colour,
                alpha=0.2,
                linewidth=0,
            )


def _set_axes(axes: Axes, plot: Plot) -> None:
    """Draw levels, and set scales, limits and labels."""
    from matplotlib.ticker import FuncFormatter, LogFormatter, MaxNLocator, NullFormatter

    thin: dict[str, Any] = {
        "color": _INK,
        "linewidth": 0.8,
        "alpha": 0.6,
        "linestyle": ":",
    }
    for level in plot.levels:
        axes.axhline(level, **thin)

    if "y" in plot.log:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter(LogFormatter())
    else:
        low, high = plot.low_high
        margin = 0.05 * (high - low) or 0.01
        axes.set_ylim(low - margin, high + margin)
    if "x" in plot.log:
        axes.set_xscale("log")
    elif not plot.ticks:
        axes.xaxis.set_major_locator(MaxNLocator(5))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: plot.tick(value)))
        axes.set_xlim(left=0.0)
    if plot.ticks:
        axes.set_xticks(list(plot.ticks), list(plot.ticks.values()))
        axes.xaxis.set_minor_formatter(NullFormatter())

    axes.set_title(
        plot.title,
        fontsize=11,
        loc="left",
    )
    axes.set_xlabel(plot.x)
    axes.set_ylabel(textwrap.fill(plot.y, 40))
    axes.grid(
        alpha=0.18,
        linewidth=0.6,
        color=_INK,
    )
    axes.spines[["top", "right"]].set_visible(False)


def inline_svg(plot: Plot) -> str:
    """Return the figure as an SVG element for a page, in the page's text colour."""
    import matplotlib

    out = io.StringIO()
    metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    style: dict[Any, Any] = dict.fromkeys(_INKED, _INK)
    # The salt makes identifiers differ between the figures of a page, and repeat from run to run.
    style |= {"font.size": 9.5, "svg.fonttype": "none", "svg.hashsalt": plot.name}
    with matplotlib.rc_context(style):
        draw_figure([plot]).savefig(
            out,
            format="svg",
            transparent=True,
            metadata=metadata,
        )
    svg = out.getvalue()
    return svg[svg.index("<svg") :].replace(_INK, "currentColor")


def draw_in_terminal(
    plot: Plot,
    width: int,
    colour: bool = False,
) -> str:
    """Return a plot as text, with the curves of each group as its letter.

    Args:
        width: width of the text, in characters.
        colour: whether to colour the letters.
    """
    import plotext
    from matplotlib.ticker import MaxNLocator

    shown = plot.curves[np.isfinite(plot.curves.y)]
    if shown.empty:
        return ""
    scale_x = np.log10 if "x" in plot.log else np.asarray
    scale_y = np.log10 if "y" in plot.log else np.asarray
    left = float(shown.x.min())
    right = float(shown.x.max())
    # A single point has no width, and a flat curve no height.
    if left == right:
        right += 1.0
    low, high = plot.low_high
    if low == high:
        high += abs(high) / 100 or 1.0
    ends = scale_x([left, right])
    heights = scale_y([low, high])

    plotext.clear_figure()
    plotext.theme("clear")
    plotext.limit_size(False, False)
    plotext.plot_size(width, HEIGHT)
    shown = shown.assign(x=scale_x(shown.x), y=scale_y(shown.y))
    _scatter_in_turns(
        shown,
        ends,
        heights,
        width,
    )

    plotext.xlim(*ends)
    plotext.ylim(*heights)
    ticks = plot.ticks or {
        mark: plot.tick(mark) for mark in MaxNLocator(5).tick_values(left, right)
    }
    marks = {mark: text for mark, text in ticks.items() if left <= mark <= right}
    plotext.xticks(scale_x(list(marks)).tolist(), list(marks.values()))
    places = np.linspace(heights[0], heights[1], 6)
    values = 10**places if "y" in plot.log else places
    plotext.yticks(places.tolist(), [f"{value:.4g}" for value in values])
    plotext.title(plot.y)
    plotext.xlabel(plot.x)
    text = plotext.build()
    if not colour:
        text = plotext.uncolorize(text)
    labels = shown.groupby("group", sort=False).label.first()
    names = [f"{letter(int(group))} {label}" for group, label in labels.items()]
    return f"{text.rstrip()}\n{textwrap.fill(', '.join(names), width)}"


def _scatter_in_turns(
    curves: pd.DataFrame,
    ends: Values,
    heights: Values,
    width: int,
) -> None:
    """Draw the groups' letters, which take turns every few columns so that none hides another.

    Args:
        curves: points on the scale of the axes.
        ends: left and right end of the x axis.
        heights: lower and upper end of the y axis.
    """
    import plotext

    left, right = ends
    low, high = heights
    n_groups = curves.group.nunique()
    for place, (group, lines) in enumerate(curves.groupby("group")):
        for _, points in lines.groupby("line"):
            x = points.x.to_numpy()
            y = points.y.to_numpy()
            # Several points a column, so that a steep line leaves no gaps.
            at = np.linspace(x[0], x[-1], 8 * width)
            height = np.interp(at, x, y)
            column = (at - left) / (right - left) * width
            is_turn = column // 4 % n_groups == place
            is_inside = (low <= height) & (height <= high)
            drawn = (is_turn | (x[0] == x[-1])) & is_inside
            plotext.scatter(
                at[drawn].tolist(),
                height[drawn].tolist(),
                marker=letter(group)[0],
                color=_TERMINAL_COLOURS[group % len(_TERMINAL_COLOURS)],
            )


def letter(group: int) -> str:
    """Return the short name of a group by its number: A to Z, a to z, then R53 and so on."""
    if group < len(_LETTERS):
        return _LETTERS[group]
    return f"R{group + 1}"
