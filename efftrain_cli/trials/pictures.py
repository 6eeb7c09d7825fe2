"""What learning rates and tuning are worth, as figures that have not been drawn yet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

from efftrain_cli.compare.picture import Plot, curve, letter
from efftrain_cli.compare.sensitivity import Curve
from efftrain_cli.foundation.console import counted


def rates_plot(curves: Sequence[Curve]) -> Plot:
    """Return mean loss against learning rate, with the range of the seeds."""
    points = []
    failed = []
    for i, found in enumerate(curves):
        values = []
        for rate, mean, losses in zip(found.rates, found.means, found.losses, strict=True):
            ends = [loss for loss in losses if loss is not None]
            # No band where a seed has no loss: it would look narrow exactly where seeds differ
            # most.
            if mean is None:
                failed.append((i, rate))
                values.append((np.nan, np.nan, np.nan))
            else:
                values.append((mean, min(ends), max(ends)))
        label = f"{letter(i)} {found.label} ({counted(len(found.seeds), 'seed')})"
        points.append(curve(i, label, found.rates, *np.array(values).T))
    every = pd.concat(points, ignore_index=True)
    # At the upper edge, one above the other: a loss that is not there has no height.
    top = np.nan_to_num(every.high.max())
    height = np.nan_to_num(every.y.max() - every.y.min())
    crosses = []
    for i, rate in failed:
        crosses.append((i, rate, top + 0.04 * height * (1 + i)))
    return Plot(
        "learning-rate",
        "Loss against learning rate, mean and range of seeds"
        + "\nx: a seed diverged" * any(failed),
        every,
        "learning rate",
        "mean final validation loss (nats/token)",
        log="x",
        crosses=tuple(crosses),
        ticks={rate: f"{rate:g}" for rate in sorted(set(every.x))},
    )


def best_of_k_plot(lowest: Mapping[str, Sequence[float]]) -> Plot:
    """Return the lowest mean loss to expect of k settings, by arm, for k from 1."""
    points = []
    for i, (arm, losses) in enumerate(lowest.items()):
        tries = np.arange(1, len(losses) + 1)
        points.append(curve(i, f"{letter(i)} {arm}", tries, losses))
    every = pd.concat(points, ignore_index=True)
    most = max(map(len, lowest.values()))
    return Plot(
        "best-of-k",
        "Lowest loss to expect of k settings drawn at random",
        every,
        "settings tried (k)",
        "mean tuning loss (nats/token)",
        ticks={tries: str(tries) for tries in range(1, most + 1, 1 + most // 10)},
    )
