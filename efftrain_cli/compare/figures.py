"""Figures of a comparison: curves against each cost, logged columns, differences, rates, ladder."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from efftrain_cli.compare.arms import Arm
from efftrain_cli.compare.judge import Result
from efftrain_cli.compare.ladder import Ladder, trends_of
from efftrain_cli.compare.picture import Plot, curve, joined
from efftrain_cli.foundation.console import counted, human
from efftrain_cli.run.columns import Column
from efftrain_cli.run.reading import DRAWN

AXES = {
    "tokens": "tokens",
    "flops": "FLOPs",
    "seconds": "training seconds, by these machines' clocks",
}
"""Cost of a curve -> label of its axis."""
LOSS = "validation loss (nats/token)"
POINTS = 200


def plots_of(arms: Sequence[Arm], rows: Sequence[Result]) -> list[Plot]:
    """Return the figures of arms: loss against costs, differences, and each logged column."""
    plots = [curves_plot(arms, axis) for axis in AXES]
    plots.append(differences_plot(rows))
    for column in DRAWN:
        if column.by:
            plots += [family_plot(arm, column) for arm in arms]
        else:
            plots.append(column_plot(arms, column))
    return [plot for plot in plots if not plot.curves.empty]


def curves_plot(arms: Sequence[Arm], axis: str) -> Plot:
    """Return the mean validation loss of each arm, and the range of its seeds, against a cost."""
    points = []
    starts = []
    for number, arm in enumerate(arms):
        curves = [run.curve for run in arm.runs if len(run.curve) > 1]
        curves = [each for each in curves if each[axis].notna().all()]
        if not curves:
            continue
        end = min(each[axis].iloc[-1] for each in curves)
        x = np.linspace(0, end, POINTS)
        losses = np.array([np.interp(x, each[axis], each.val_loss) for each in curves])
        label = f"{arm.label} ({counted(len(curves), 'seed')})"
        starts.append(end / 10)
        points.append(
            curve(
                number,
                label,
                x,
                losses.mean(0),
                losses.min(0),
                losses.max(0),
            )
        )
    title = f"Validation loss against {axis}: mean and range of seeds"
    start = min(starts, default=0.0)
    return Plot(
        f"loss-{axis}",
        title,
        joined(points),
        AXES[axis],
        LOSS,
        fit_from=start,
    )


def column_plot(arms: Sequence[Arm], column: Column) -> Plot:
    """Return a column of metrics.jsonl over training, a line per run."""
    points = []
    for number, arm in enumerate(arms):
        for line, run in enumerate(arm.runs):
            if column.name in run.series:
                tokens, values = run.series[column.name].to_numpy().T
                points.append(
                    curve(
                        number,
                        arm.label,
                        tokens,
                        values,
                        line=line,
                    )
                )
    name = column.name.replace("_", "-")
    return Plot(
        name,
        column.title,
        joined(points),
        "tokens",
        column.unit,
    )


def family_plot(arm: Arm, column: Column) -> Plot:
    """Return the columns of a family over an arm's first run, a line per part of the model."""
    points = []
    label = f"{column.by} (paler: earlier ones)"
    parts = [name for name in arm.first.series if name.startswith(column.name)]
    for line, part in enumerate(parts):
        tokens, values = arm.first.series[part].to_numpy().T
        points.append(
            curve(
                0,
                label,
                tokens,
                values,
                line=line,
            )
        )
    name = f"{column.name.rstrip('_').replace('_', '-')}-{arm.label}"
    title = f"{column.title}: {arm.label}, seed {arm.first.seed}"
    return Plot(
        name,
        title,
        joined(points),
        "tokens",
        column.unit,
        fades=True,
    )


def differences_plot(rows: Sequence[Result]) -> Plot:
    """Return each arm's difference of final losses with its interval."""
    points = []
    ticks = {}
    shown = [row for row in rows if row.measure == "final_loss" and not np.isnan(row.estimate)]
    for number, row in enumerate(shown):
        ticks[float(number)] = row.arm
        points.append(
            curve(
                number,
                row.arm,
                [number, number],
                [row.low, row.high],
            )
        )
    return Plot(
        "differences",
        "Final loss less the baseline's: intervals over seeds",
        joined(points),
        "arm",
        "difference of final losses (nats/token)",
        levels=(0.0,),
        ticks=ticks,
    )


def rates_plot(grid: pd.DataFrame) -> Plot:
    """Return the mean final loss of each recipe against the setting that was varied alone."""
    title, *keys = grid.columns[:-4] if len(grid) else ["arm"]
    points = []
    if len(keys) == 1 and pd.api.types.is_numeric_dtype(grid[keys[0]]):
        for number, (arm, rows) in enumerate(grid.groupby(title, sort=False)):
            points.append(
                curve(
                    number,
                    str(arm),
                    rows[keys[0]].to_numpy(),
                    rows.loss.to_numpy(),
                )
            )
    text = "Final loss against what was varied: mean of seeds"
    return Plot(
        "rates",
        text,
        joined(points),
        "".join(keys),
        LOSS,
        has_log_x=True,
    )


def losses_plot(ladder: Ladder) -> Plot:
    """Return the final losses of the ladder against FLOPs, with a fit per arm and size."""
    points = []
    shown = ladder.points[ladder.points["size"].isin(ladder.gains["size"])]
    for group, (arm, rungs) in enumerate(shown.groupby("arm")):
        for line, (_, runs) in enumerate(rungs.groupby("size")):
            fit = np.polyfit(np.log(runs.flops), runs.loss, 1)
            ends = np.array([runs.flops.min(), runs.flops.max()])
            points.append(
                curve(
                    group,
                    str(arm),
                    ends,
                    np.polyval(fit, np.log(ends)),
                    line=line,
                )
            )
        for line, run in enumerate(rungs.itertuples()):
            points.append(
                curve(
                    group,
                    str(arm),
                    [run.flops],
                    [run.loss],
                    line=-1 - line,
                )
            )
    return Plot(
        "ladder",
        "Final loss against FLOPs: each run, and a fit per size",
        joined(points),
        "FLOPs",
        LOSS,
        has_log_x=True,
    )


def gains_plot(gains: pd.DataFrame) -> Plot:
    """Return the multiplier of each arm against the size, with intervals and their line."""
    points = []
    shown = gains[gains.why == ""]
    trends = trends_of(gains)
    for group, (arm, sizes) in enumerate(shown.groupby("arm")):
        for line, gain in enumerate(sizes.itertuples()):
            place = [gain.size] * 3
            heights = [gain.low, gain.multiplier, gain.high]
            points.append(
                curve(
                    group,
                    str(arm),
                    place,
                    heights,
                    line=line,
                )
            )
        trend = trends.get(str(arm))
        if trend is not None:
            ends = np.array([sizes["size"].min(), sizes["size"].max()])
            doublings = np.log2(ends / ends[1])
            heights = trend.largest[0] * np.exp(trend.slope * doublings)
            points.append(
                curve(
                    group,
                    str(arm),
                    ends,
                    heights,
                    line=-1,
                )
            )
    return Plot(
        "gains",
        "Compute multiplier by size: intervals of 95 %, and their line",
        joined(points),
        "parameters",
        "FLOPs of the baseline / of the arm, at equal loss",
        has_log_x=True,
        levels=(1.0,),
        ticks={size: human(size) for size in shown["size"]},
    )
