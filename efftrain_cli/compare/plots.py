"""Figures of a comparison, drawn with matplotlib off screen.

Colours are Okabe and Ito's (2008), which colour-blind readers tell apart; each recipe has a line style of its own
besides. A figure for a page is an SVG whose text and axes take the page's text colour, so that it reads on light and on
dark.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy import special

from efftrain_cli.compare.comparison import Comparison
from efftrain_cli.compare.groups import Group
from efftrain_cli.compare.inference import ALPHA
from efftrain_cli.compare.measures import human, quantity
from efftrain_cli.compare.reading import AXES, RunNumbers

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
STYLES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 1)))
_INK = "#010203"
"""Stands for the page's text colour until the SVG is written."""
AXIS_LABELS = {
    "tokens": "tokens trained",
    "flops": "FLOPs executed",
    "seconds": "training time (s)",
}
LATE = 1 / 3
"""Where a zoomed figure begins, as a share of the cost: later than the fall that all curves share."""
_FEW_RUNS = 12
"""Above this many runs their own lines are left out where a group's mean is drawn."""

Hover = list[tuple[float, float, str]]
"""Points in data coordinates with what they are."""


@dataclass(frozen=True)
class Plot:
    """A figure that has not been drawn yet."""

    name: str
    """File name without its ending."""
    title: str
    draw: Callable[[Axes, Hover], None]
    """Draws into the axes, and adds the points that a page names when the pointer rests on them."""


def plots_of(comparison: Comparison) -> list[Plot]:
    """The figures that the runs have data for."""
    plots = []
    evaluations = max((len(run.evaluated["val_loss"]) for run in comparison.runs), default=0)
    draw_loss = partial(_draw_loss, comparison=comparison)
    if any(_paired(comparison, group) for group in comparison.groups):
        title = f"Difference from A {comparison.baseline.label}, seed by seed"
        plots.append(Plot("difference", title, partial(_draw_difference, comparison=comparison)))
    if evaluations > 3:
        late = partial(draw_loss, axis="tokens", start_share=LATE)
        plots.append(Plot("loss-late", "Validation loss, the last two thirds", late))
    if evaluations:
        for axis in AXES:
            title = f"Validation loss against {AXIS_LABELS[axis].split(' (')[0]}"
            plots.append(
                Plot(f"loss-{axis}", title, partial(draw_loss, axis=axis, start_share=0.0))
            )
    for name, title, label in (
        ("seq_len", "Sequence length", "sequence length (tokens)"),
        ("batch_size", "Batch size", "batch size (sequences)"),
        ("lr", "Learning rate", "learning rate"),
        ("loss", "Training loss", "training loss (nats/token)"),
        ("grad_norm", "Gradient norm before clipping", "gradient norm"),
        ("loss_ratio", "Loss ratio", "loss / lowest loss so far"),
        ("adam_sqrt_v_max", "Largest Adam sqrt(v)", "max sqrt(v)"),
        (
            "standardization_loss",
            "Divergence of activations from N(0, 1), mean over sites",
            "nats per channel",
        ),
    ):
        if any(name in run.series for run in comparison.runs):
            draw = partial(_draw_series, comparison=comparison, name=name, label=label)
            plots.append(Plot(name.replace("_", "-"), title, draw))
    for group in comparison.groups:
        run = next((run for run in group.runs if run.sites), None)
        if run is not None:
            letter = comparison.letter(group)
            title = f"Divergence from N(0, 1) by site: {letter}, seed {run.seed}"
            plots.append(Plot(f"sites-{letter}", title, partial(_draw_sites, run=run)))
    return plots


def _draw_sites(axes: Axes, hover: Hover, run: RunNumbers) -> None:
    """A line per site: the colour is the kind of activation, a paler line stands earlier in the network."""
    kinds = list(dict.fromkeys(map(_kind_of, run.sites)))
    for kind in kinds:
        same = [(site, series) for site, series in run.sites.items() if _kind_of(site) == kind]
        for number, (site, series) in enumerate(same):
            depth = (number + 1) / len(same)
            label = (
                f"{kind} (paler: earlier blocks)"
                if depth == 1 and len(same) > 1
                else kind
                if depth == 1
                else None
            )
            colour = COLOURS[kinds.index(kind) % len(COLOURS)]
            axes.plot(
                series.tokens,
                series.values,
                color=colour,
                alpha=0.25 + 0.75 * depth,
                linewidth=1.3,
                label=label,
            )
            _name(hover, site, series.tokens, series.values, "{:.4g} nats per channel", 60)
    axes.set_yscale("log")
    _label_axes(axes, "tokens", "nats per channel")


def _kind_of(site: str) -> str:
    """ "h.3.mlp.c_fc" -> "mlp.c_fc"."""
    return site.split(".", 2)[-1]


def style_of(comparison: Comparison, group: Group) -> dict[str, Any]:
    """Colour and line style of a group, the same in every figure."""
    i = comparison.groups.index(group)
    return {
        "color": COLOURS[i % len(COLOURS)],
        "linestyle": STYLES[(i + i // len(COLOURS)) % len(STYLES)],
    }


def _points_per_run(comparison: Comparison) -> int:
    return int(np.clip(6000 // max(1, len(comparison.runs)), 40, 300))


def _thin(x: np.ndarray, y: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray]:
    if len(x) <= most:
        return x, y
    keep = np.unique(np.linspace(0, len(x) - 1, most).astype(int))
    return x[keep], y[keep]


def _paired(comparison: Comparison, group: Group) -> list[tuple[RunNumbers, RunNumbers]]:
    """Runs of the baseline and the group on one seed that were both evaluated more than once."""
    if group is comparison.baseline:
        return []
    base, mine = (
        {run.seed: run for run in side.runs if len(run.evaluated["tokens"]) > 1}
        for side in (comparison.baseline, group)
    )
    return [(run, mine[seed]) for seed, run in base.items() if seed in mine]


def _draw_difference(axes: Axes, hover: Hover, comparison: Comparison) -> None:
    """Loss of a recipe less the baseline's at equal tokens, mean over the shared seeds with its 95 % t interval."""
    late = []
    for group in comparison.groups:
        pairs = _paired(comparison, group)
        if not pairs:
            continue
        end = min(run.evaluated["tokens"][-1] for pair in pairs for run in pair)
        grid = np.unique(np.concatenate([pair[0].evaluated["tokens"] for pair in pairs]))
        grid = _thin(grid[grid <= end], grid[grid <= end], 60)[0]
        at_grid = [
            [np.interp(grid, r.evaluated["tokens"], r.evaluated["val_loss"]) for r in pair]
            for pair in pairs
        ]
        gaps = np.array([b - a for a, b in at_grid])
        style, letter = style_of(comparison, group), comparison.letter(group)
        mean = gaps.mean(0)
        behind = f"{len(pairs)} pairs" if len(pairs) > 1 else "one pair"
        label = f"{letter} - A ({behind}): {_legend(comparison, group)[len(letter) + 1 :]}"
        axes.plot(grid, mean, label=label, linewidth=1.6, **style)
        half = np.zeros(len(grid))
        if len(pairs) > 1:
            t = float(special.stdtrit(len(pairs) - 1, 1 - ALPHA / 2))
            half = t * gaps.std(0, ddof=1) / np.sqrt(len(pairs))
            axes.fill_between(
                grid, mean - half, mean + half, color=style["color"], alpha=0.2, linewidth=0
            )
        for x, y, h in zip(grid, mean, half, strict=True):
            interval = f" [{y - h:+.4f}, {y + h:+.4f}]" if len(pairs) > 1 else ""
            hover.append(
                (x, y, f"{letter} - A at {human(x)} tokens: {y:+.4f}{interval} nats/token")
            )
        late += [*(mean - half)[grid >= LATE * end], *(mean + half)[grid >= LATE * end]]
    axes.axhline(0, color=_INK, linewidth=0.8, alpha=0.6)
    if late:
        low, high = min(*late, 0.0), max(*late, 0.0)
        margin = 0.08 * (high - low) or 0.01
        axes.set_ylim(low - margin, high + margin)
    _label_axes(axes, "tokens", "below 0 is better (nats/token)")


def _legend(comparison: Comparison, group: Group) -> str:
    """The letter, and as much of the recipe's name as a legend has room for."""
    name = group.recipe_name
    return f"{comparison.letter(group)} {name if len(name) <= 24 else name[:23] + '…'}"


def _draw_loss(
    axes: Axes, hover: Hover, comparison: Comparison, axis: str, start_share: float
) -> None:
    most = _points_per_run(comparison)
    for group in comparison.groups:
        style = style_of(comparison, group)
        curves = [(run.evaluated[axis], run.evaluated["val_loss"], run) for run in group.runs]
        curves = [curve for curve in curves if len(curve[0])]
        if not curves:
            continue
        letter = comparison.letter(group)
        label = _legend(comparison, group) + (
            f" ({len(group.runs)} seeds)" if len(group.runs) > 1 else ""
        )
        if len(curves) == 1:
            x, y = _thin(curves[0][0], curves[0][1], most)
            axes.plot(x, y, label=label, linewidth=1.6, **style)
            _name(hover, letter, x, y, "{:.4f} nats/token", 60, axis)
        else:
            end = min(x[-1] for x, _, _ in curves)
            start = max(x[0] for x, _, _ in curves)
            grid = np.unique(np.concatenate([_thin(x, x, most)[0] for x, _, _ in curves]))
            grid = _thin(
                grid[(grid >= start) & (grid <= end)], grid[(grid >= start) & (grid <= end)], most
            )[0]
            losses = np.array([np.interp(grid, x, loss) for x, loss, _ in curves])
            axes.fill_between(
                grid, losses.min(0), losses.max(0), color=style["color"], alpha=0.2, linewidth=0
            )
            axes.plot(grid, losses.mean(0), label=label, linewidth=1.6, **style)
            _name(hover, f"{letter}, mean", grid, losses.mean(0), "{:.4f} nats/token", 60, axis)
            for x, loss, _ in curves:
                beyond = x >= end
                if beyond.sum() > 1:  # a seed that went on after another had ended
                    axes.plot(
                        *_thin(x[beyond], loss[beyond], most), linewidth=0.8, alpha=0.6, **style
                    )
        for x, loss, run in curves:
            if run.status == "diverged":
                axes.plot(
                    x[-1:],
                    loss[-1:],
                    marker="x",
                    markersize=7,
                    color=style["color"],
                    linestyle="none",
                )
    if comparison.target_loss is not None:
        axes.axhline(comparison.target_loss, color=_INK, linewidth=0.8, alpha=0.6, linestyle=":")
    # Losses before this share of the cost are left above the frame; spikes and divergences after it stay inside.
    every = [
        (run.evaluated[axis], run.evaluated["val_loss"])
        for run in comparison.runs
        if len(run.evaluated[axis])
    ]
    furthest = max(x[-1] for x, _ in every)
    _fit(axes, [loss[x >= (start_share or 0.08) * furthest] for x, loss in every])
    _label_axes(axes, axis, "validation loss (nats/token)")
    if start_share:
        axes.set_xlim(left=start_share * furthest)


def _name(
    hover: Hover, who: str, x: np.ndarray, y: np.ndarray, form: str, most: int, axis: str = "tokens"
) -> None:
    """Names at most so many points of a curve; `form` is how their y is written."""
    for at, value in zip(*_thin(x, y, most), strict=True):
        hover.append(
            (float(at), float(value), f"{who} at {quantity(float(at), axis)}: {form.format(value)}")
        )


def _fit(axes: Axes, values: list[np.ndarray]) -> None:
    """Shows all these values, with a margin."""
    shown = np.concatenate(values)
    if len(shown) > 1 and shown.max() > shown.min():
        margin = 0.05 * (shown.max() - shown.min())
        axes.set_ylim(shown.min() - margin, shown.max() + margin)


def _draw_series(axes: Axes, hover: Hover, comparison: Comparison, name: str, label: str) -> None:
    most = _points_per_run(comparison)
    for group in comparison.groups:
        style = style_of(comparison, group)
        runs = [run for run in group.runs if name in run.series]
        # A schedule is the recipe's, the same for all its seeds; a measurement is each run's own.
        measured = name not in ("seq_len", "batch_size", "lr") or _seeds_differ(runs, name)
        for i, run in enumerate(runs if measured else runs[:1]):
            series = run.series[name]
            x, y = _thin(series.tokens, series.values, most)
            many = len(comparison.runs) > _FEW_RUNS
            letter = comparison.letter(group)
            label_once = _legend(comparison, group) if i == 0 else None
            axes.plot(x, y, label=label_once, linewidth=0.8 if many else 1.2, alpha=0.8, **style)
            if not many:
                who = f"{letter}, seed {run.seed}" if measured and len(runs) > 1 else letter
                _name(hover, who, x, y, "{:.4g}", 30)
    if name == "loss_ratio":
        for threshold in (1.2, 1.5):
            axes.axhline(threshold, color=_INK, linewidth=0.8, alpha=0.6, linestyle=":")
        low, high = axes.get_ylim()
        axes.set_ylim(low, max(high, 1.55))
    elif name == "loss":
        every = [run.series[name].values for run in comparison.runs if name in run.series]
        _fit(axes, [values[len(values) // 12 :] for values in every])
    elif name in ("seq_len", "batch_size", "lr"):
        axes.set_ylim(bottom=0)
    _label_axes(axes, "tokens", label)


def _seeds_differ(runs: list[RunNumbers], name: str) -> bool:
    return any(
        not np.array_equal(run.series[name].values, runs[0].series[name].values) for run in runs[1:]
    )


def _label_axes(axes: Axes, across: str, up: str) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axes.set_xlabel(AXIS_LABELS[across])
    axes.set_ylabel(up)
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: tick(value)))
    axes.set_xlim(left=0)


def tick(value: float) -> str:
    """A number of tokens, FLOPs or seconds beside an axis."""
    return f"{value:.3g}" if abs(value) >= 1e15 else human(value)


def _figure(plot: Plot, comparison: Comparison) -> tuple[Figure, Hover]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.4, 3.7), layout="constrained")
    axes = figure.add_subplot()
    hover: Hover = []
    plot.draw(axes, hover)
    axes.set_title(plot.title, fontsize=11, loc="left")
    axes.grid(alpha=0.18, linewidth=0.6, color=_INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=9)
    handles, labels = axes.get_legend_handles_labels()
    labels = [label.replace("$", r"\$") for label in labels]  # a foreign name is not a formula
    if len(handles) > 1 or len(comparison.groups) > 1:
        # Below the axes, so that it lies over no curve; in as many columns as have room.
        columns = max(1, min(len(handles), 70 // (8 + max(map(len, labels)))))
        figure.legend(
            handles, labels, fontsize=8.5, frameon=False, loc="outside lower center", ncols=columns
        )
    return figure, hover


_INKED = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")


def _style(plot: Plot, ink: str) -> Any:
    import matplotlib

    style: dict[Any, Any] = dict.fromkeys(_INKED, ink)
    # The salt keeps the identifiers of one page's figures apart, and equal from one run to the next.
    style |= {
        "axes.labelsize": 9.5,
        "font.size": 9.5,
        "svg.fonttype": "none",
        "svg.hashsalt": plot.name,
    }
    return matplotlib.rc_context(style)


def inline_svg(plot: Plot, comparison: Comparison) -> str:
    """The figure as an SVG element for a page: as wide as its place, in the page's text colour."""
    out = io.StringIO()
    with _style(plot, _INK):
        figure, hover = _figure(plot, comparison)
        figure.savefig(
            out, format="svg", transparent=True, metadata={"Date": None, "Creator": None}
        )
    svg = out.getvalue()
    svg = svg[svg.index("<svg") :].replace(_INK, "currentColor")
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    head, rest = svg.split(">", 1)
    head = re.sub(r' (width|height)="[^"]*"', "", head)
    # Identifiers are made unique per figure: clip paths of two figures must not be mixed up.
    rest = re.sub(r'\bid="', f'id="{plot.name}-', rest)
    rest = re.sub(r"url\(#", f"url(#{plot.name}-", rest)
    rest = re.sub(r'href="#', f'href="#{plot.name}-', rest)
    points = _hover_points(figure, hover)
    return f'{head} role="img" aria-label="{escape(plot.title)}">{rest.replace("</svg>", points + "</svg>")}'


def _hover_points(figure: Figure, hover: Hover) -> str:
    """Circles that nobody sees until the pointer rests on them, which then say what is there."""
    axes = figure.axes[0]
    scale, height = 72 / figure.dpi, 72 * figure.get_figheight()
    left, right = axes.get_xlim()
    bottom, top = axes.get_ylim()
    circles = []
    for x, y, text in hover:
        if left <= x <= right and bottom <= y <= top:
            px, py = axes.transData.transform((x, y)) * scale
            circles.append(
                f'<circle cx="{px:.1f}" cy="{height - py:.1f}" r="5"><title>{escape(text)}</title></circle>'
            )
    return f'<g class="hover">{"".join(circles)}</g>'


def write_figures(comparison: Comparison, folder: Path) -> list[Path]:
    """Writes every figure as SVG and PNG (200 dpi) and returns the paths.

    Raises:
        OSError: the folder cannot be written.
    """
    paths = []
    for plot in plots_of(comparison):
        with _style(plot, "#000000"):
            figure, _ = _figure(plot, comparison)
            paths += save_figure(figure, folder, plot.name)
    return paths


def save_figure(figure: Figure, folder: Path, name: str, tight: bool = False) -> list[Path]:
    """Writes a figure as SVG and PNG (200 dpi) into a folder, cut to what is drawn with `tight`; returns the paths.

    Raises:
        OSError: the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{name}.svg", folder / f"{name}.png"]
    edges = "tight" if tight else None
    figure.savefig(paths[0], metadata={"Date": None}, bbox_inches=edges)
    figure.savefig(paths[1], dpi=200, bbox_inches=edges)
    return paths
