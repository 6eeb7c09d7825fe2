"""The measures of one run, and the rules by which a loss between two evaluations is read.

The validation loss is known at the evaluated steps only. Between two of them it is taken to be a straight line over
tokens, FLOPs or seconds; nothing is read beyond the last one, and nothing is smoothed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from efftrain_cli.compare.reading import AXES, RunNumbers
from efftrain_cli.foundation.console import human_count

NOT_REACHED = "not reached"


@dataclass(frozen=True)
class Measure:
    """A row of the table."""

    key: str
    title: str
    unit: str
    section: str
    tested: str = ""
    """How two recipes are compared: "difference" (of losses), "ratio" (baseline / method), "" not at all."""


@dataclass(frozen=True)
class EqualPoint:
    """Where the runs are compared at equal tokens, FLOPs or seconds: as far as the one that got least far."""

    axis: str
    value: float
    limited_by: str
    """Name of that run."""


@dataclass(frozen=True)
class Costs:
    """What training time costs, where the user said so."""

    price_per_hour: float | None = None
    """In the user's currency."""
    power_watts: float | None = None


def equal_points(runs: Sequence[RunNumbers]) -> dict[str, EqualPoint]:
    """The largest tokens, FLOPs and seconds at which every run has, or can be read between, evaluations."""
    points = {}
    for axis in AXES:
        furthest = [(float(run.evaluated[axis][-1]) if len(run.evaluated[axis]) else 0.0, run.name) for run in runs]
        value, name = min(furthest, default=(0.0, ""))
        if value > 0:
            points[axis] = EqualPoint(axis, value, name)
    return points


def loss_at(run: RunNumbers, axis: str, value: float) -> float | None:
    """Validation loss at `value` tokens, FLOPs or seconds; None before the first or beyond the last evaluation."""
    x, loss = run.evaluated[axis], run.evaluated["val_loss"]
    if not len(x) or not x[0] <= value <= x[-1]:
        return None
    return float(np.interp(value, x, loss))


def needed_for(run: RunNumbers, axis: str, target: float) -> float | None:
    """Tokens, FLOPs or seconds when the validation loss first came down to `target`; None: it never did."""
    x, loss = run.evaluated[axis], run.evaluated["val_loss"]
    below = np.flatnonzero(loss <= target)
    if not len(below):
        return None
    i = int(below[0])
    if i == 0:
        return float(x[0])
    return float(x[i - 1] + (x[i] - x[i - 1]) * (loss[i - 1] - target) / (loss[i - 1] - loss[i]))


def measures(costs: Costs, with_bits: bool, points: dict[str, EqualPoint], target: float | None) -> list[Measure]:
    """The measures of a comparison, in the order of its table."""
    loss, cost, stability, speed = "Validation loss", "Cost to reach the target loss", "Stability", "Throughput"
    found = [
        Measure("final_loss", "final", "nats/token", loss, "difference"),
        Measure("best_loss", "best", "nats/token", loss, "difference"),
        Measure("final_perplexity", "final perplexity", "", loss),
        Measure("best_perplexity", "best perplexity", "", loss),
    ]
    if with_bits:
        found.append(Measure("best_bits_per_byte", "best, per byte of text", "bits/byte", loss))
    words = {"tokens": "tokens", "flops": "FLOPs", "seconds": "training seconds"}
    found += [
        Measure(f"loss_at_{axis}", f"at {quantity(point.value, axis)}", "nats/token", loss, "difference")
        for axis, point in points.items()
    ]
    if target is not None:
        found += [Measure(f"{axis}_to_target", words[axis], "", cost, "ratio") for axis in AXES]
        if costs.price_per_hour is not None:
            found.append(Measure("price_to_target", f"price at {costs.price_per_hour:g} per hour", "", cost))
        if costs.power_watts is not None:
            found.append(Measure("kwh_to_target", f"energy at {costs.power_watts:g} W", "kWh", cost))
    found += [
        Measure("share_over_1_2", "steps with loss ratio above 1.2", "%", stability),
        Measure("share_over_1_5", "steps with loss ratio above 1.5", "%", stability),
        Measure("max_loss_ratio", "largest loss ratio", "", stability),
        Measure("nonfinite_stops", "non-finite stops", "", stability),
        Measure("rewinds", "rewinds", "", stability),
        Measure("tokens_per_second", "tokens per training second", "", speed),
        Measure("mfu", "MFU", "%", speed),
        Measure("trained_tokens", "tokens trained", "", speed),
        Measure("trained_flops", "FLOPs executed", "", speed),
        Measure("train_seconds", "training time", "", speed),
    ]
    return found


def measure_run(
    run: RunNumbers, points: dict[str, EqualPoint], target: float | None, costs: Costs
) -> dict[str, float | str]:
    """Every measure of a run by key: a number, or the reason why there is none."""
    loss = run.evaluated["val_loss"]
    none = "no evaluation" if not len(loss) else ""
    final: float | str = none or (float(loss[-1]) if run.status == "finished" else run.status)
    best: float | str = none or float(loss.min())
    values: dict[str, float | str] = {
        "final_loss": final,
        "best_loss": best,
        "final_perplexity": _exp(final),
        "best_perplexity": _exp(best),
    }
    data = run.origin.get("data")
    bytes_per_token = data.get("valid_bytes_per_token") if isinstance(data, dict) else None
    values["best_bits_per_byte"] = (
        best / math.log(2) / bytes_per_token if isinstance(best, float) and bytes_per_token else none or "unknown"
    )
    for axis, point in points.items():
        at = loss_at(run, axis, point.value)
        values[f"loss_at_{axis}"] = at if at is not None else none or "not evaluated"
    if target is not None:
        for axis in AXES:
            needed = needed_for(run, axis, target)
            values[f"{axis}_to_target"] = needed if needed is not None else NOT_REACHED
        seconds = values["seconds_to_target"]
        for key, per_second in (
            ("price_to_target", None if costs.price_per_hour is None else costs.price_per_hour / 3600),
            ("kwh_to_target", None if costs.power_watts is None else costs.power_watts / 3.6e6),
        ):
            if per_second is not None:
                values[key] = seconds * per_second if isinstance(seconds, float) else seconds
    no_ratio = "not logged"
    return values | {
        "share_over_1_2": 100 * run.over_1_2 / run.ratio_steps if run.ratio_steps else no_ratio,
        "share_over_1_5": 100 * run.over_1_5 / run.ratio_steps if run.ratio_steps else no_ratio,
        "max_loss_ratio": run.max_ratio if run.max_ratio is not None else no_ratio,
        "nonfinite_stops": float(run.nonfinite_stops),
        "rewinds": float(run.rewinds),
        "tokens_per_second": run.tokens_per_second if run.tokens_per_second is not None else "N/A",
        "mfu": 100 * run.mfu if run.mfu is not None else "N/A",
        "trained_tokens": run.tokens,
        "trained_flops": run.flops,
        "train_seconds": run.seconds,
    }


def _exp(loss: float | str) -> float | str:
    return math.exp(loss) if isinstance(loss, float) else loss


def human(value: float) -> str:
    """A large number with four significant digits and a suffix: 1.536M, 81.9K, 512."""
    return human_count(value, 4)


def quantity(value: float, axis: str) -> str:
    """A number of tokens, FLOPs or seconds with its unit."""
    if axis == "tokens":
        return f"{human(value)} tokens"
    if axis == "flops":
        return f"{value:.4g} FLOPs"
    return duration(value)


def duration(seconds: float) -> str:
    """Seconds for people: 41.3 s, 12.5 min, 3.25 h."""
    if abs(seconds) < 120:
        return f"{seconds:.4g} s"
    if abs(seconds) < 7200:
        return f"{seconds / 60:.4g} min"
    return f"{seconds / 3600:.4g} h"
