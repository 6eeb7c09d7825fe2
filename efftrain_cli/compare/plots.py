"""Figures of a comparison, drawn with matplotlib off screen.

Colours are Okabe and Ito's (2008), which colour-blind readers tell apart; each recipe has a line style of its own besides.
A figure for a page is an SVG whose text and axes take the page's text colour, so that it reads on light and on dark.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from efftrain_cli.compare.comparison import Comparison
from efftrain_cli.compare.groups import Group
from efftrain_cli.compare.measures import human
from efftrain_cli.compare.reading import AXES, RunNumbers

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
STYLES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 1)))
_INK = "#010203"
"""Stands for the page's text colour until the SVG is written."""
AXIS_LABELS = {"tokens": "tokens trained", "flops": "FLOPs executed", "seconds": "training time (s)"}
_FEW_RUNS = 12
"""Above this many runs their own lines are left out where a group's mean is drawn."""


@dataclass(frozen=True)
class Plot:
    """A figure that has not been drawn yet."""

    name: str
    """File name without its ending."""
    title: str
    draw: Callable[[Axes], None]


def plots_of(comparison: Comparison) -> list[Plot]:
    """The figures that the runs have data for."""
    plots = []
    if any(len(run.evaluated["val_loss"]) for run in comparison.runs):
        for axis in AXES:
            title = f"Validation loss against {AXIS_LABELS[axis].split(' (')[0]}"
            plots.append(Plot(f"loss-{axis}", title, lambda axes, axis=axis: _draw_loss(axes, comparison, axis)))
    for name, title, label in (
        ("seq_len", "Sequence length", "sequence length (tokens)"),
        ("batch_size", "Batch size", "batch size (sequences)"),
        ("lr", "Learning rate", "learning rate"),
        ("loss_ratio", "Loss ratio", "loss / lowest loss so far"),
        ("adam_sqrt_v_max", "Largest Adam sqrt(v)", "max sqrt(v)"),
    ):
        if any(name in run.series for run in comparison.runs):
            plots.append(
                Plot(
                    name.replace("_", "-"),
                    title,
                    lambda axes, name=name, label=label: _draw_series(axes, comparison, name, label),
                )
            )
    return plots


def style_of(comparison: Comparison, group: Group) -> dict[str, object]:
    """Colour and line style of a group, the same in every figure."""
    i = comparison.groups.index(group)
    return {"color": COLOURS[i % len(COLOURS)], "linestyle": STYLES[(i + i // len(COLOURS)) % len(STYLES)]}


def _points_per_run(comparison: Comparison) -> int:
    return int(np.clip(6000 // max(1, len(comparison.runs)), 40, 300))


def _thin(x: np.ndarray, y: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray]:
    if len(x) <= most:
        return x, y
    keep = np.unique(np.linspace(0, len(x) - 1, most).astype(int))
    return x[keep], y[keep]


def _draw_loss(axes: Axes, comparison: Comparison, axis: str) -> None:
    most = _points_per_run(comparison)
    for group in comparison.groups:
        style = style_of(comparison, group)
        curves = [(run.evaluated[axis], run.evaluated["val_loss"], run) for run in group.runs]
        curves = [curve for curve in curves if len(curve[0])]
        if not curves:
            continue
        label = group.label if len(group.runs) == 1 else f"{group.label} ({len(group.runs)} seeds)"
        if len(curves) == 1:
            axes.plot(*_thin(curves[0][0], curves[0][1], most), label=label, linewidth=1.6, **style)
        else:
            end = min(x[-1] for x, _, _ in curves)
            start = max(x[0] for x, _, _ in curves)
            grid = np.unique(np.concatenate([_thin(x, x, most)[0] for x, _, _ in curves]))
            grid = _thin(grid[(grid >= start) & (grid <= end)], grid[(grid >= start) & (grid <= end)], most)[0]
            losses = np.array([np.interp(grid, x, loss) for x, loss, _ in curves])
            axes.fill_between(grid, losses.min(0), losses.max(0), color=style["color"], alpha=0.2, linewidth=0)
            axes.plot(grid, losses.mean(0), label=label, linewidth=1.6, **style)
            for x, loss, _ in curves:
                beyond = x >= end
                if beyond.sum() > 1:  # a seed that went on after another had ended
                    axes.plot(*_thin(x[beyond], loss[beyond], most), linewidth=0.8, alpha=0.6, **style)
        for x, loss, run in curves:
            if run.status == "diverged":
                axes.plot(x[-1:], loss[-1:], marker="x", markersize=7, color=style["color"], linestyle="none")
    if comparison.target_loss is not None:
        axes.axhline(comparison.target_loss, color=_INK, linewidth=0.8, alpha=0.6, linestyle=":")
    _limit_loss(axes, comparison, axis)
    axes.set_xlabel(AXIS_LABELS[axis])
    axes.set_ylabel("validation loss (nats/token)")
    _count_axis(axes)


def _limit_loss(axes: Axes, comparison: Comparison, axis: str) -> None:
    """Leaves the fall of the first few percent above the frame; spikes and divergences after it stay inside."""
    curves = [(run.evaluated[axis], run.evaluated["val_loss"]) for run in comparison.runs]
    furthest = max(x[-1] for x, _ in curves if len(x))
    late = [loss[x >= 0.08 * furthest] for x, loss in curves if len(x)]
    shown = np.concatenate(late)
    if len(shown) > 1 and shown.max() > shown.min():
        margin = 0.05 * (shown.max() - shown.min())
        axes.set_ylim(shown.min() - margin, shown.max() + margin)


def _draw_series(axes: Axes, comparison: Comparison, name: str, label: str) -> None:
    most = _points_per_run(comparison)
    for group in comparison.groups:
        style = style_of(comparison, group)
        runs = [run for run in group.runs if name in run.series]
        # A schedule is the recipe's, the same for all its seeds; a measurement is each run's own.
        measured = name in ("loss_ratio", "adam_sqrt_v_max") or _seeds_differ(runs, name)
        for i, run in enumerate(runs if measured else runs[:1]):
            series = run.series[name]
            x, y = _thin(series.tokens, series.values, most)
            many = len(comparison.runs) > _FEW_RUNS
            axes.plot(
                x, y, label=group.label if i == 0 else None, linewidth=0.8 if many else 1.2, alpha=0.8, **style
            )
    if name == "loss_ratio":
        for threshold in (1.2, 1.5):
            axes.axhline(threshold, color=_INK, linewidth=0.8, alpha=0.6, linestyle=":")
        low, high = axes.get_ylim()
        axes.set_ylim(low, max(high, 1.55))
    elif name in ("seq_len", "batch_size", "lr"):
        axes.set_ylim(bottom=0)
    axes.set_xlabel(AXIS_LABELS["tokens"])
    axes.set_ylabel(label)
    _count_axis(axes)


def _seeds_differ(runs: list[RunNumbers], name: str) -> bool:
    first = runs[0].series[name] if runs else None
    return any(not np.array_equal(run.series[name].values, first.values) for run in runs[1:] if first is not None)


def _count_axis(axes: Axes) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _tick(value)))
    axes.set_xlim(left=0)


def _tick(value: float) -> str:
    return f"{value:.3g}" if abs(value) >= 1e15 else human(value)


def _figure(plot: Plot, comparison: Comparison) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.4, 3.7), layout="constrained")
    axes = figure.add_subplot()
    plot.draw(axes)
    axes.set_title(plot.title, fontsize=11, loc="left")
    axes.grid(alpha=0.18, linewidth=0.6, color=_INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=9)
    handles, labels = axes.get_legend_handles_labels()
    if len(handles) > 1 or len(comparison.groups) > 1:
        axes.legend(handles, labels, fontsize=8.5, frameon=False, loc="best")
    return figure


_STYLE = {
    "svg.fonttype": "none",
    "text.color": _INK,
    "axes.labelcolor": _INK,
    "axes.edgecolor": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "axes.labelsize": 9.5,
    "font.size": 9.5,
}


def inline_svg(plot: Plot, comparison: Comparison) -> str:
    """The figure as an SVG element for a page: as wide as its place, in the page's text colour."""
    import matplotlib

    out = io.StringIO()
    # The salt keeps the identifiers of one page's figures apart, and equal from one run to the next.
    with matplotlib.rc_context({**_STYLE, "svg.hashsalt": plot.name}):
        figure = _figure(plot, comparison)
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = out.getvalue()
    svg = svg[svg.index("<svg") :].replace(_INK, "currentColor")
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    head, rest = svg.split(">", 1)
    head = re.sub(r' (width|height)="[^"]*"', "", head)
    # Identifiers are made unique per figure: clip paths of two figures must not be mixed up.
    rest = re.sub(r'\bid="', f'id="{plot.name}-', rest)
    rest = re.sub(r"url\(#", f"url(#{plot.name}-", rest)
    rest = re.sub(r'href="#', f'href="#{plot.name}-', rest)
    return f'{head} role="img" aria-label="{plot.title}">{rest}'


def write_figures(comparison: Comparison, folder: Path) -> list[Path]:
    """Writes every figure as SVG and PNG (200 dpi) and returns the paths.

    Raises:
        OSError: the folder cannot be written.
    """
    import matplotlib

    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for plot in plots_of(comparison):
        style = {key: ("#000000" if value == _INK else value) for key, value in _STYLE.items()}
        with matplotlib.rc_context({**style, "svg.hashsalt": plot.name}):
            figure = _figure(plot, comparison)
            for ending, options in (("svg", {"metadata": {"Date": None}}), ("png", {"dpi": 200})):
                path = folder / f"{plot.name}.{ending}"
                figure.savefig(path, **options)
                paths.append(path)
    return paths
