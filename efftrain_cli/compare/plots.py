"""Describe the figures of a comparison as values of `compare.picture.Plot`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pandas as pd
from scipy import special

from efftrain_cli.compare.comparison import Comparison
from efftrain_cli.compare.groups import Group
from efftrain_cli.compare.inference import ALPHA
from efftrain_cli.compare.picture import Plot, curve
from efftrain_cli.compare.reading import AXES, POINTS, RunNumbers, Series
from efftrain_cli.foundation.console import counted
from efftrain_cli.run.columns import COLUMNS, Column
from efftrain_cli.run.stability import SEVERE, SLIGHT

AXIS_LABELS = {
    "tokens": "tokens trained",
    "flops": "FLOPs executed",
    "seconds": "training time (s)",
}
LATE = 1 / 3
"""Left end of a figure of the late losses, as a share of the cost."""
FALL = 0.08
"""Share of the cost before which losses may be outside the y axis."""
SCHEDULES = ("seq_len", "batch_size", "lr")


def plots_of(comparison: Comparison) -> list[Plot]:
    """Return every figure for which some run has data."""
    plots = []
    runs = comparison.runs
    evaluations = max((len(run.evaluated["val_loss"]) for run in runs), default=0)
    if any(_pairs(comparison, group) for group in comparison.groups):
        plots.append(_difference(comparison))
    if evaluations > 3:
        plots.append(loss_plot(comparison, "tokens", late=True))
    if evaluations:
        plots += [loss_plot(comparison, axis) for axis in AXES]
    for column in COLUMNS:
        if any(column.name in run.series for run in runs):
            plots.append(_series(comparison, column))
    for column in COLUMNS:
        for group in comparison.groups:
            logged = [run for run in group.runs if column.by and run.parts(column.name)]
            if logged:
                plots.append(_parts(column, comparison.letter(group), logged[0]))
    return plots


def terminal_plots(comparison: Comparison) -> list[Plot]:
    """Return validation loss against tokens, FLOPs and seconds, without the initial fall."""
    plots = []
    for axis in AXES:
        if any(len(run.evaluated[axis]) > 1 for run in comparison.runs):
            plots.append(loss_plot(comparison, axis, late=True))
    return plots


def loss_plot(comparison: Comparison, axis: str, late: bool = False) -> Plot:
    """Plot the mean validation loss over the seeds, with a band from the lowest to the highest.

    The curve ends where the first finished run does: with fewer seeds the mean would jump.

    Args:
        axis: tokens, flops or seconds.
        late: whether the x axis begins at LATE of the cost.
    """
    curves = []
    crosses = []
    for i, group in enumerate(comparison.groups):
        runs = [run for run in group.runs if len(run.evaluated[axis])]
        if not runs:
            continue
        grid = _thin([run.evaluated[axis] for run in runs])
        finished = [run for run in runs if run.status == "finished"]
        end = min((run.evaluated[axis][-1] for run in finished), default=grid[-1])
        grid = np.append(grid[grid < end], end)
        losses = _losses_at(grid, runs, axis)
        label = _label(comparison, group)
        if len(runs) > 1:
            label += f" ({len(runs)} seeds)"
        low = np.nanmin(losses, 0)
        high = np.nanmax(losses, 0)
        curves.append(curve(i, label, grid, np.nanmean(losses, 0), low, high))
        for run in runs:
            if run.status == "diverged":
                end = run.evaluated[axis][-1]
                loss = run.evaluated["val_loss"][-1]
                crosses.append((i, float(end), float(loss)))

    points = pd.concat(curves, ignore_index=True)
    furthest = float(points.x.max())
    against = AXIS_LABELS[axis].split(" (")[0]
    plot = Plot(
        f"loss-{axis}",
        f"Validation loss against {against}",
        points,
        AXIS_LABELS[axis],
        "validation loss (nats/token)",
        fit_from=FALL * furthest,
        levels=tuple(filter(None, [comparison.target_loss])),
        crosses=tuple(crosses),
    )
    if not late:
        return plot
    title = "Validation loss, the last two thirds"
    begin = LATE * furthest
    return replace(plot, name="loss-late", title=title, start=begin, fit_from=begin)


def _difference(comparison: Comparison) -> Plot:
    """Plot each recipe's loss minus the baseline's at equal tokens.

    The curve is the mean over the shared seeds, the band its 95 % t interval.
    """
    curves = []
    for i, group in enumerate(comparison.groups):
        pairs = _pairs(comparison, group)
        if not pairs:
            continue
        before, after = zip(*pairs, strict=True)
        end = min(run.evaluated["tokens"][-1] for run in (*before, *after))
        grid = _thin([run.evaluated["tokens"] for run in before])
        grid = np.append(grid[grid < end], end)
        gaps = _losses_at(grid, after, "tokens") - _losses_at(grid, before, "tokens")
        half = np.full(len(grid), np.nan)
        if len(pairs) > 1:
            t = float(special.stdtrit(len(pairs) - 1, 1 - ALPHA / 2))
            half = t * gaps.std(0, ddof=1) / np.sqrt(len(pairs))
        label = f"{_label(comparison, group)} - A ({counted(len(pairs), 'pair')})"
        mean = gaps.mean(0)
        curves.append(curve(i, label, grid, mean, mean - half, mean + half))
    points = pd.concat(curves, ignore_index=True)
    return Plot(
        "difference",
        f"Difference from {_label(comparison, comparison.baseline)}, seed by seed",
        points,
        AXIS_LABELS["tokens"],
        "below 0 is better (nats/token)",
        include=(0.0,),
        levels=(0.0,),
    )


def _series(comparison: Comparison, column: Column) -> Plot:
    """Plot a column over tokens, a line per run."""
    curves = []
    name = column.name
    for i, group in enumerate(comparison.groups):
        drawn = [run.series[name] for run in group.runs if name in run.series]
        alike = all(np.array_equal(series.values, drawn[0].values) for series in drawn)
        # The recipe decides a schedule: its seeds share one line.
        if name in SCHEDULES and alike:
            drawn = drawn[:1]
        label = _label(comparison, group)
        for line, series in enumerate(drawn):
            curves.append(curve(i, label, series.tokens, series.values, line=line))
    points = pd.concat(curves, ignore_index=True)
    plot = Plot(
        name.replace("_", "-"), column.title, points, x=AXIS_LABELS["tokens"], y=column.unit
    )
    if name == "loss":
        return replace(plot, fit_from=FALL * float(points.x.max()))
    if name == "loss_ratio":
        return replace(plot, include=(SEVERE,), levels=(SLIGHT, SEVERE))
    if name in SCHEDULES:
        return replace(plot, include=(0.0,))
    return plot


def _parts(column: Column, letter: str, run: RunNumbers) -> Plot:
    """Plot a line per site or block of one run.

    Each kind of activation has a colour; lines of earlier blocks are paler.
    """
    kinds: dict[str, list[Series]] = {}
    for part, series in run.parts(column.name).items():
        # "h.3" is a block; "h.3.mlp.c_fc" is a site of the kind "mlp.c_fc", "ln_f" of kind "ln_f".
        names = part.split(".", 2)
        kind = "block" if len(names) == 2 else names[-1]
        kinds.setdefault(kind, []).append(series)
    curves = []
    for i, (kind, parts) in enumerate(kinds.items()):
        label = kind
        if len(parts) > 1:
            label += " (paler: earlier blocks)"
        for line, series in enumerate(parts):
            curves.append(curve(i, label, series.tokens, series.values, line=line))
    points = pd.concat(curves, ignore_index=True)
    name = column.name.strip("_").replace("_", "-")
    if column.by == "site":
        name = "sites"
    return Plot(
        f"{name}-{letter}",
        f"{column.title}: {letter}, seed {run.seed}",
        points,
        AXIS_LABELS["tokens"],
        column.unit,
        log="y" if (points.y > 0).all() else "",
        fades=True,
    )


def _losses_at(grid: np.ndarray, runs: Sequence[RunNumbers], axis: str) -> np.ndarray:
    """Return the validation losses of runs, interpolated at a grid of costs, (runs, points).

    NaN outside a run's evaluations.
    """
    losses = []
    for run in runs:
        x = run.evaluated[axis]
        loss = run.evaluated["val_loss"]
        losses.append(np.interp(grid, x, loss, np.nan, np.nan))
    return np.array(losses)


def _pairs(comparison: Comparison, group: Group) -> list[tuple[RunNumbers, RunNumbers]]:
    """Return (baseline's run, group's run) per shared seed, if both have two evaluations."""
    if group is comparison.baseline:
        return []
    evaluated = {}
    for run in comparison.baseline.runs:
        if len(run.evaluated["tokens"]) > 1:
            evaluated[run.seed] = run
    pairs = []
    for run in group.runs:
        if run.seed in evaluated and len(run.evaluated["tokens"]) > 1:
            pairs.append((evaluated[run.seed], run))
    return pairs


def _label(comparison: Comparison, group: Group) -> str:
    """Return a group's legend: its letter and at most 24 characters of the recipe's name."""
    name = group.recipe_name
    if len(name) > 24:
        name = f"{name[:23]}…"
    return f"{comparison.letter(group)} {name}"


def _thin(values: Sequence[np.ndarray]) -> np.ndarray:
    """Return the distinct values in increasing order, thinned evenly to at most POINTS."""
    every = np.unique(np.concatenate(values))
    if len(every) <= POINTS:
        return every
    return every[np.linspace(0, len(every) - 1, POINTS).astype(int)]
