"""The measures of one run, and the rules by which a loss between two evaluations is read.

The validation loss is known at the evaluated steps only. Between two of them it is taken to be a straight line over
tokens, FLOPs or seconds, and nothing is read beyond the last one. Only the cost to reach a loss reads a smoothed curve,
as the first crossing of a jittery one comes too early: that of the best-fitting curve that never rises.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from efftrain_cli.compare.reading import AXES, RunNumbers
from efftrain_cli.foundation.console import human_count, perplexity

NOT_REACHED = "not reached"
FAILED = "failed"
SAME_SCHEDULE = 0.02
"""Runs whose schedules stand further apart than this share of their decay are not compared at equal cost."""
AXIS_WORDS = {"tokens": "tokens", "flops": "FLOPs", "seconds": "training seconds"}


@dataclass(frozen=True)
class Measure:
    """A question about two recipes: a row of the table."""

    key: str
    title: str
    unit: str
    section: str
    tested: str = ""
    """How two recipes are compared: "difference" (of losses), "ratio" (of costs to a target, baseline / method),
    "match" (of costs to the worse run's final loss), "rank" (of shares of steps), "failures" (of runs), "" shown and
    never tested."""
    axis: str = ""
    """Tokens, FLOPs or seconds, where it is about cost."""


@dataclass(frozen=True)
class EqualPoint:
    """Where the runs are compared at equal tokens, FLOPs or seconds: as far as the finished run that got least far."""

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
    """The largest tokens, FLOPs and seconds at which every finished run has, or can be read between, evaluations."""
    points = {}
    over = [run for run in runs if run.status == "finished" and len(run.evaluated["step"])]
    for axis in AXES:
        value, name = min(
            ((float(run.evaluated[axis][-1]), run.name) for run in over), default=(0.0, "")
        )
        if value > 0:
            points[axis] = EqualPoint(axis, value, name)
    return points


def final_loss(run: RunNumbers) -> float | str:
    """The final loss of a finished run; else the run's status."""
    none = "no evaluation" if run.status == "finished" else run.status
    return none if run.final_loss is None else run.final_loss


def loss_at(run: RunNumbers, axis: str, value: float) -> float | None:
    """Validation loss at `value` tokens, FLOPs or seconds; None before the first or beyond the last evaluation."""
    x, loss = run.evaluated[axis], run.evaluated["val_loss"]
    if not len(x) or not x[0] <= value <= x[-1]:
        return None
    return float(np.interp(value, x, loss))


def falling_curve(x: np.ndarray, loss: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Knots (x, loss) of the curve that never rises and fits the evaluations best (isotonic least squares).

    Evaluations that rise and fall again around one level become one knot at their mean; where the losses fall from one
    evaluation to the next, the curve is the evaluations themselves. Robertson, Wright and Dykstra (1988).
    """
    from scipy.optimize import isotonic_regression

    if not len(x):
        return x, loss
    fitted = isotonic_regression(loss, increasing=False)
    edges = fitted.blocks
    sizes = np.diff(edges)
    centres = np.add.reduceat(x, edges[:-1]) / sizes
    return centres, fitted.x[edges[:-1]]


def needed_for(run: RunNumbers, axis: str, target: float) -> float | None:
    """Tokens, FLOPs or seconds at which the run's falling curve comes down to `target`; None: it never does."""
    x, loss = falling_curve(run.evaluated[axis], run.evaluated["val_loss"])
    if not len(x) or loss[-1] > target:
        return None
    if loss[0] <= target:
        return float(x[0])
    return float(np.interp(-target, -loss, x))


def smooth_end(run: RunNumbers, axis: str) -> float:
    """The loss at the run's end on a line through the last fifth of its evaluations; the last one of few."""
    x, loss = run.evaluated[axis], run.evaluated["val_loss"]
    last = len(loss) // 5
    if last < 3 or x[-1] <= x[-last]:
        return float(loss[-1])
    _, end = np.polyfit(x[-last:] - x[-1], loss[-last:], 1)
    return float(end)


def match_ratio(baseline: RunNumbers, method: RunNumbers, axis: str) -> float:
    """Signed logarithm of how much less the better of two finished runs needs for the worse one's final loss.

    Above 0: the method is the better one, and reached the baseline's final loss at exp(-value) of the baseline's cost.
    Below 0 the same with the sides changed, so two equal methods are as often above as below. Both final losses are
    `smooth_end`s: a single last evaluation would let its noise decide, always for the side that is evaluated more
    quietly.
    """
    return match_ratios([baseline], [method], axis)[0][0]


def match_ratios(
    baselines: Sequence[RunNumbers], methods: Sequence[RunNumbers], axis: str
) -> list[list[float]]:
    """`match_ratio` of every method's run (row) and every baseline's (column)."""
    before, after = ([_read_end(run, axis) for run in side] for side in (baselines, methods))
    return [[_match(a, b) for a in before] for b in after]


@dataclass(frozen=True)
class _Ended:
    spent: float
    end: float
    x: np.ndarray
    loss: np.ndarray
    """Knots of the falling curve."""


def _read_end(run: RunNumbers, axis: str) -> _Ended:
    x, loss = falling_curve(run.evaluated[axis], run.evaluated["val_loss"])
    return _Ended(float(run.evaluated[axis][-1]), smooth_end(run, axis), x, loss)


def _match(baseline: _Ended, method: _Ended) -> float:
    better, worse, sign = (
        (method, baseline, 1.0) if method.end < baseline.end else (baseline, method, -1.0)
    )
    # Where its falling curve ends above, the better run needs all that it spent.
    needed = better.spent
    if better.end < worse.end and better.loss[-1] <= worse.end:
        needed = min(needed, float(np.interp(-worse.end, -better.loss, better.x)))
    return sign * math.log(worse.spent / needed) if needed > 0 and worse.spent > 0 else math.nan


def schedule_position(run: RunNumbers, axis: str, value: float) -> float | None:
    """Where the learning-rate schedule stands at `value` tokens, FLOPs or seconds: 1 at the end of its decay.

    None where nothing decays. Growth sets a schedule whose place the rows do not hold: 1 at the run's own end, NaN
    before.
    """
    recipe, x = run.recipe, run.evaluated[axis]
    if recipe.get("optim.schedule") == "constant":
        return None
    if any(key.startswith("stages.") for key in recipe):
        return 1.0 if len(x) and value >= (1 - SAME_SCHEDULE) * x[-1] else math.nan
    by_steps = recipe.get("optim.decay_steps")
    end = by_steps or recipe.get("optim.decay_tokens") or recipe.get("train.tokens")
    if not end or not len(x):
        return math.nan
    # Steps that a rewind abandoned are cost; the schedule went back with the run.
    clock = run.evaluated["step"] if by_steps else run.evaluated["schedule_tokens"]
    return float(min(1.0, np.interp(value, x, clock) / end))


def schedule_tokens(run: RunNumbers) -> float:
    """Tokens at which the decay of the learning rate ends; of a constant one, the budget; NaN where that is unknown."""
    recipe = run.recipe
    end = recipe.get("optim.decay_steps")
    if not end:
        return float(recipe.get("optim.decay_tokens") or recipe.get("train.tokens") or math.nan)
    steps, tokens = run.evaluated["step"], run.evaluated["schedule_tokens"]
    if not len(steps) or steps[-1] <= 0:
        return math.nan
    # Beyond the last step, as many tokens a step as the whole run had.
    return float(
        np.interp(end, steps, tokens) if end <= steps[-1] else tokens[-1] * end / steps[-1]
    )


def other_budgets(runs: Sequence[RunNumbers]) -> str:
    """Why costs that are read along these runs' ways are not judged; "" where they are.

    A longer schedule stands earlier in its decay there, so it looks more costly than it is.
    """
    finished = [run for run in runs if run.status == "finished" and len(run.evaluated["step"])]
    if all(run.recipe.get("optim.schedule") == "constant" for run in finished):
        return ""
    lengths = [schedule_tokens(run) for run in finished]
    least, most = min(lengths), max(lengths)
    if most <= (1 + SAME_SCHEDULE) * least:
        return ""
    return (
        f"schedules of {human(least)} and {human(most)} tokens, and the longer is read in mid-decay; compare over a ladder "
        "of budgets instead: efftrain sweep --set train.tokens=a,b,c"
    )


def why_not_matched(runs: Sequence[RunNumbers], axis: str) -> str:
    """Why costs to match among these runs are not judged; "" where they are: budgets must be the same. And where a run
    failed, ranks by final loss stand for ranks by cost, which they are only at equal cost.
    """
    if found := other_budgets(runs):
        return found
    finished = [run for run in runs if run.status == "finished" and len(run.evaluated[axis])]
    spent = [float(run.evaluated[axis][-1]) for run in finished]
    if (
        any(run.status != "finished" for run in runs)
        and spent
        and max(spent) > (1 + SAME_SCHEDULE) * min(spent)
    ):
        return "cost to match cannot be ranked where a run failed and costs differ"
    return ""


def measures(
    costs: Costs,
    with_bits: bool,
    points: dict[str, EqualPoint],
    target: float | None,
    several: bool = True,
) -> list[Measure]:
    """The measures of a comparison, in the order of its table.

    Args:
        several: there is a baseline to compare with; without one, costs to match it are left out.
    """
    loss, cost, stability, speed = "Validation loss", "Cost", "Stability", "Throughput"
    found = [
        Measure("final_loss", "final loss", "nats/token", loss, "difference"),
        Measure("final_perplexity", "final perplexity", "", loss),
    ]
    if with_bits:
        found.append(Measure("final_bits_per_byte", "final, per byte of text", "bits/byte", loss))
    found += [
        Measure(
            f"loss_at_{axis}",
            f"loss at {quantity(point.value, axis)}",
            "nats/token",
            loss,
            "difference",
            axis,
        )
        for axis, point in points.items()
    ]
    found.append(Measure("best_loss", "best loss (never tested)", "nats/token", loss))
    if target is not None:
        found += [
            Measure(f"{axis}_to_target", f"{AXIS_WORDS[axis]} to target", "", cost, "ratio", axis)
            for axis in AXES
        ]
        if costs.price_per_hour is not None:
            found.append(
                Measure("price_to_target", f"price at {costs.price_per_hour:g} per hour", "", cost)
            )
        if costs.power_watts is not None:
            found.append(
                Measure("kwh_to_target", f"energy at {costs.power_watts:g} W", "kWh", cost)
            )
    elif several:
        found += [
            Measure(f"{axis}_to_match", f"{AXIS_WORDS[axis]} to match", "", cost, "match", axis)
            for axis in AXES
        ]
    found += [
        Measure("diverged", "runs that diverged", "", stability, "failures"),
        Measure("share_over_1_2", "steps with loss ratio above 1.2", "%", stability, "rank"),
        Measure("share_over_1_5", "steps with loss ratio above 1.5", "%", stability),
        Measure("max_loss_ratio", "largest loss ratio", "", stability),
        Measure("nonfinite_stops", "non-finite stops", "", stability),
        Measure("rewinds", "rewinds", "", stability),
        Measure("tokens_per_second", "tokens per training second", "", speed),
        Measure("mfu", "MFU", "%", speed),
        Measure("trained_tokens", "tokens trained", "", speed),
        Measure("trained_flops", "FLOPs executed", "", speed),
        Measure("train_seconds", "training time", "", speed),
        Measure("train_cpu_seconds", "processor time of training", "", speed),
    ]
    return found


def measure_run(
    run: RunNumbers, points: dict[str, EqualPoint], target: float | None, costs: Costs
) -> dict[str, float | str]:
    """Every measure of a run by key: a number, or the reason why there is none. What compares two runs is not here."""
    loss = run.evaluated["val_loss"]
    none = "no evaluation" if not len(loss) else ""
    final = final_loss(run)
    values: dict[str, float | str] = {
        "final_loss": final,
        "best_loss": none or float(loss.min()),
        "final_perplexity": final,
    }
    if isinstance(final, float):
        overflows = perplexity(final) == math.inf
        values["final_perplexity"] = "above 1e308" if overflows else perplexity(final)
    data = run.origin.get("data")
    bytes_per_token = data.get("valid_bytes_per_token") if isinstance(data, dict) else None
    values["final_bits_per_byte"] = final
    if isinstance(final, float):
        values["final_bits_per_byte"] = (
            final / math.log(2) / bytes_per_token if bytes_per_token else "unknown"
        )
    for axis, point in points.items():
        at = loss_at(run, axis, point.value)
        values[f"loss_at_{axis}"] = (
            at if at is not None else none or (FAILED if run.failed else "not evaluated")
        )
    if target is not None:
        for axis in AXES:
            needed = needed_for(run, axis, target)
            values[f"{axis}_to_target"] = needed if needed is not None else NOT_REACHED
        seconds = values["seconds_to_target"]
        for key, per_second in (
            (
                "price_to_target",
                None if costs.price_per_hour is None else costs.price_per_hour / 3600,
            ),
            ("kwh_to_target", None if costs.power_watts is None else costs.power_watts / 3.6e6),
        ):
            if per_second is not None:
                values[key] = seconds * per_second if isinstance(seconds, float) else seconds
    missing = "not logged"
    return values | {
        "diverged": float(run.has_diverged),
        "share_over_1_2": 100 * run.over_1_2 / run.ratio_steps if run.ratio_steps else missing,
        "share_over_1_5": 100 * run.over_1_5 / run.ratio_steps if run.ratio_steps else missing,
        "max_loss_ratio": run.max_ratio if run.max_ratio is not None else missing,
        "nonfinite_stops": float(run.nonfinite_stops),
        "rewinds": float(run.rewinds),
        "tokens_per_second": run.tokens_per_second if run.tokens_per_second is not None else "N/A",
        "mfu": 100 * run.mfu if run.mfu is not None else "N/A",
        "trained_tokens": run.tokens,
        "trained_flops": run.flops,
        "train_seconds": run.seconds,
        "train_cpu_seconds": run.cpu_seconds if run.cpu_seconds is not None else missing,
    }


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
