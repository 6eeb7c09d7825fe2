"""Define the measures of a run, and interpolate its validation loss.

Between two evaluations the loss is interpolated linearly over tokens, FLOPs or seconds; beyond the
last one nothing is extrapolated. The cost to reach a loss is the exception: the first crossing of a
noisy curve comes too early, so it is read from the best-fitting curve that never rises.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import numpy as np

from efftrain_cli.compare.formats import format_number, format_quantity
from efftrain_cli.compare.groups import Group, finished_runs, runs_of
from efftrain_cli.compare.inference import Direction
from efftrain_cli.compare.reading import AXES, RunNumbers
from efftrain_cli.foundation.console import perplexity
from efftrain_cli.foundation.why import Why
from efftrain_cli.recipe.schedules import has_end
from efftrain_cli.recipe.toml import flatten
from efftrain_cli.run.stability import SLIGHT

Value = float | Why
"""A number, or the reason why the number is missing."""
NOT_AVAILABLE = Why("missing", "N/A")
NOT_REACHED = Why("not_reached", "not reached")
PRIMARY = "final_loss"
"""Key of the measure that decides; all others are corrected as one family."""
SAME_SCHEDULE = 0.02
"""Largest difference in the share of the learning-rate decay, or in budgets, of runs compared."""
MOST_LEFT = 0.5
"""A rate that ends above this share of its peak hardly decays: another shape than one that falls
to 0."""
Cost = Literal["tokens", "flops", "seconds"]
AXIS_WORDS = {"tokens": "tokens", "flops": "FLOPs", "seconds": "seconds"}
NATS = "nats/token"
_LOSS = "Validation loss"
_COST = "Cost"
_STABILITY = "Stability"
_THROUGHPUT = "Throughput"


@dataclass(frozen=True)
class Question:
    """A measure, and how two recipes are compared by it: a row of the table."""

    key: str
    title: str
    unit: str
    section: str
    read: Callable[..., Any]
    """Return the value of one seed from its run, or from its runs over learning rates, or None."""
    tested: str = ""
    """How two recipes are compared.

    "difference" of losses; "ratio" of costs to a target, baseline / method; "match" for costs to
    the worse run's final loss; "rank" of shares of steps; "failures" of runs; "score" of zero-shot
    results; "" if the measure is shown and never tested.
    """
    axis: str = ""
    """Cost that it is about: "tokens", "flops" or "seconds"; else ""."""
    point: float | None = None
    """Cost at which losses are compared; None for the ends of the runs."""
    direction: Direction = "different"
    margin: float | None = None
    """Margin in nats per token, or as a share of a cost; None without one."""
    target: float | None = None
    """Loss to reach, nats per token."""
    higher: bool = False
    """Whether a higher value is better."""
    equal: Cost | None = None
    """Cost that must be equal within SAME_SCHEDULE; None for tokens, or FLOPs if only they are."""
    stuck_at: float = 0.2
    """Share of the tokens; a run that ends above the baseline's median loss at it is stuck."""
    near_copy: bool = True
    """Whether a cost counts with the arm's other costs as one claim in Holm's correction."""
    over_rates: bool = False
    """Whether `read` takes a seed's runs at every learning rate instead of one run."""

    @property
    def is_primary(self) -> bool:
        """Return whether it is the measure that decides in `compare`."""
        return self.key == PRIMARY

    def member(self, place: int) -> tuple[object, ...]:
        """Return a key of the claim in Holm's correction; costs to one loss share a key.

        Tokens, FLOPs and seconds are near-copies of each other.

        Args:
            place: number of the question, distinct from all others.
        """
        if self.tested in ("match", "ratio") and self.near_copy:
            return "cost", self.target
        return (place,)

    def values(self, group: Group) -> dict[int, Any]:
        """Return the values by seed: a number, an `Ended` for a cost to match, or a `Why`."""
        values = {}
        for seed, runs in group.by_seed.items():
            value = self.read(*runs)
            if value is None:
                value = NOT_AVAILABLE
            values[seed] = float(value) if isinstance(value, int) else value
        return values


def mean_sd(values: Collection[Value]) -> tuple[float | None, float | None]:
    """Return mean and standard deviation (n - 1) over the seeds.

    Both are None if a seed has no number: a missing value is never averaged away. One seed has no
    standard deviation.
    """
    known = numbers(values)
    if not known or len(known) < len(values):
        return None, None
    mean = float(np.mean(known))
    if len(known) == 1:
        return mean, None
    return mean, float(np.std(known, ddof=1))


def numbers(values: Collection[Value]) -> list[float]:
    """Return the values that are numbers."""
    return [value for value in values if not isinstance(value, Why)]


@dataclass(frozen=True)
class EqualPoint:
    """The largest cost that all finished runs reached, at which their losses are compared."""

    value: float
    limited_by: str
    """Name of the run that reached least."""


@dataclass(frozen=True)
class Costs:
    """Price and power of training, if the user gave them."""

    price_per_hour: float | None = None
    """In the user's currency."""
    power_watts: float | None = None


def equal_points(runs: Sequence[RunNumbers]) -> dict[str, EqualPoint]:
    """Return the largest tokens, FLOPs and seconds that every finished run reached."""
    points = {}
    for axis in AXES:
        ends = [(float(run.evaluated[axis][-1]), run.name) for run in finished_runs(runs)]
        if ends and min(ends)[0] > 0:
            points[axis] = EqualPoint(*min(ends))
    return points


def final_loss(run: RunNumbers) -> Value:
    """Return the final loss of a finished run; else its status."""
    if run.final_loss is None:
        return Why(run.status, run.status)
    return run.final_loss


FINAL_LOSS = Question(PRIMARY, "final loss", NATS, _LOSS, final_loss, tested="difference")


def loss_at(run: RunNumbers, axis: str, value: float) -> float | None:
    """Return the validation loss at `value` tokens, FLOPs or seconds, interpolated.

    None before the first evaluation and after the last.
    """
    x = run.evaluated[axis]
    loss = run.evaluated["val_loss"]
    if not len(x) or not x[0] <= value <= x[-1]:
        return None
    return float(np.interp(value, x, loss))


def isotonic_fit(x: np.ndarray, loss: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the knots (x, loss) of the best-fitting curve that never rises.

    Evaluations that rise and fall around one level become one knot at their mean. Losses that fall
    from one evaluation to the next are their own knots.

    Source: isotonic least squares, Robertson, Wright and Dykstra 1988.
    """
    from scipy.optimize import isotonic_regression

    if not len(x):
        return x, loss
    fitted = isotonic_regression(loss, increasing=False)
    edges = fitted.blocks
    sizes = np.diff(edges)
    centres = np.add.reduceat(x, edges[:-1]) / sizes
    return centres, fitted.x[edges[:-1]]


def cost_to_reach(run: RunNumbers, axis: str, target: float) -> Value:
    """Return the tokens, FLOPs or seconds at which the isotonic fit comes down to `target`."""
    x, loss = isotonic_fit(run.evaluated[axis], run.evaluated["val_loss"])
    if not len(x) or loss[-1] > target:
        return NOT_REACHED
    if loss[0] <= target:
        return float(x[0])
    return float(np.interp(-target, -loss, x))


def smooth_end(run: RunNumbers, axis: str) -> float:
    """Return the loss at the run's end, on a line through the last fifth of its evaluations.

    The last loss itself if that are fewer than three.
    """
    x = run.evaluated[axis]
    loss = run.evaluated["val_loss"]
    last = len(loss) // 5
    if last < 3 or x[-1] <= x[-last]:
        return float(loss[-1])
    _, end = np.polyfit(x[-last:] - x[-1], loss[-last:], 1)
    return float(end)


@dataclass(frozen=True)
class Ended:
    """What a cost to match needs of a finished run."""

    spent: float
    """Cost of the whole run."""
    end: float
    """Final loss by `smooth_end`."""
    x: np.ndarray
    """Costs of the knots of the isotonic fit."""
    loss: np.ndarray
    """Losses of these knots."""


def read_end(run: RunNumbers, axis: str) -> Ended | Why:
    """Return the values of a finished run; a run that is not finished has its status."""
    if run.final_loss is None:
        return Why(run.status, run.status)
    x, loss = isotonic_fit(run.evaluated[axis], run.evaluated["val_loss"])
    spent = float(run.evaluated[axis][-1])
    return Ended(spent, smooth_end(run, axis), x, loss)


def match(baseline: Ended, method: Ended) -> float:
    """Return the signed log ratio of two runs' costs to the final loss of the worse run.

    Above 0 the method is the better run, and reached the baseline's final loss at exp(-value) of
    its cost. Below 0 the sides are swapped, so two equal methods are as often above as below. Final
    losses are those of `smooth_end`: noise of a single last evaluation would favour the side with
    less of it.
    """
    better = baseline
    worse = method
    sign = -1.0
    if method.end < baseline.end:
        better = method
        worse = baseline
        sign = 1.0
    # If its isotonic fit ends above the loss, the better run needs its whole cost.
    needed = better.spent
    if better.end < worse.end and better.loss[-1] <= worse.end:
        needed = min(needed, float(np.interp(-worse.end, -better.loss, better.x)))
    if needed <= 0 or worse.spent <= 0:
        return math.nan
    return sign * math.log(worse.spent / needed)


def crossing_error(curve: Ended, target: float) -> float:
    """Return the error of interpolating where a curve crosses `target`, as a log ratio of costs.

    The crossing is read on the chord between two knots. If the curve bends in one direction, the
    two neighbouring segments, extended to the target, bound the true crossing.
    """
    x = curve.x
    loss = curve.loss
    after = int(np.searchsorted(-loss, -target))
    if after in (0, len(loss)):
        return 0.0
    left = float(x[after - 1])
    right = float(x[after])
    read = float(np.interp(-target, -loss, x))
    bounds = []
    for j in (after - 2, after):
        if 0 <= j < len(x) - 1:
            extended = x[j] + (target - loss[j]) * (x[j + 1] - x[j]) / (loss[j + 1] - loss[j])
            bounds.append(float(np.clip(extended, left, right)))
    distances = [bound - read for bound in bounds] or [left - read]
    # If both bounds are on one side, the true crossing is before the nearer one. Else the curve
    # bends in both directions, and the farther bound counts.
    one_way = min(distances) >= 0 or max(distances) <= 0
    distance = max(distances, key=abs)
    if one_way:
        distance = min(distances, key=abs)
    if read + distance <= 0:
        return -math.inf
    return math.log((read + distance) / read)


def match_error(baseline: Ended, method: Ended) -> float:
    """Return the signed error of `match` that denser evaluations would remove."""
    if method.end < baseline.end:
        return -crossing_error(method, baseline.end)
    return crossing_error(baseline, method.end)


def evaluated_every(runs: Sequence[RunNumbers]) -> float:
    """Return the largest median number of steps between evaluations, over runs with two or more."""
    steps = [run.evaluated["step"] for run in runs]
    return max(float(np.median(np.diff(each))) for each in steps if len(each) > 1)


def mean_ratio(baseline: Group, method: Group, spent: Callable[[RunNumbers], float]) -> float:
    """Return the ratio of mean costs of finished runs, method over baseline.

    1 if no run of a side has finished, NaN if the cost of a finished run is unknown.
    """
    means = []
    for group in (baseline, method):
        costs = [spent(run) for run in finished_runs(group.runs)]
        if not costs:
            return 1.0
        if min(costs) <= 0:
            return math.nan
        means.append(sum(costs) / len(costs))
    return means[1] / means[0]


def budget_ratio(baseline: Group, method: Group, cost: Cost) -> float:
    """Return the `mean_ratio` of a cost up to the last evaluation."""
    return mean_ratio(baseline, method, lambda run: float(run.evaluated[cost][-1]))


def is_same_budget(ratio: float) -> bool:
    """Return whether a ratio of budgets is within SAME_SCHEDULE of 1; False for NaN and 0."""
    return ratio > 0 and max(ratio, 1 / ratio) <= 1 + SAME_SCHEDULE


def other_shapes(runs: Sequence[RunNumbers]) -> str:
    """Return why costs to reach a loss are not judged; "" if the learning rates decay alike.

    A run before its decay (WSD) has a higher loss than one that has decayed all along (cosine).
    """
    shapes = dict.fromkeys(_shape_text(run) for run in runs)
    if len(shapes) < 2:
        return ""
    return (
        f"the learning rate decays otherwise ({' and '.join(shapes)}),"
        " so losses on the way do not compare;"
        " final losses at several budgets would: efftrain sweep --set train.tokens=a,b,c"
    )


def _shape_text(run: RunNumbers) -> str:
    shape = str(run.recipe.get("optim.schedule", "cosine"))
    share = run.recipe.get("optim.decay_share")
    if share:
        shape += f" over the last {100 * share:g} %"
    peak = run.recipe.get("optim.lr", 0.0)
    last = run.recipe.get("optim.min_lr", 0.0)
    if last > MOST_LEFT * peak > 0 and has_end(run.recipe.get("optim.schedule")):
        shape += f" to {100 * last / peak:.0f} % of its peak"
    return shape


def schedule_position(run: RunNumbers, axis: str, value: float) -> float | None:
    """Return the share of the learning-rate schedule done at `value` tokens, FLOPs or seconds.

    None if the schedule has no end. The rows of a grown run do not say its schedule: 1 at the end
    of the run, NaN before.
    """
    recipe = run.recipe
    x = run.evaluated[axis]
    if not has_end(recipe.get("optim.schedule")):
        return None
    if any(key.startswith("stages.") for key in recipe):
        return 1.0 if value >= (1 - SAME_SCHEDULE) * x[-1] else math.nan
    clock = "tokens"
    end = recipe.get("optim.decay_tokens") or recipe.get("train.tokens")
    if recipe.get("optim.decay_steps"):
        clock = "step"
        end = recipe["optim.decay_steps"]
    if not end:
        return math.nan
    return float(min(1.0, np.interp(value, x, run.evaluated[clock]) / end))


def schedule_tokens(run: RunNumbers) -> float:
    """Return the tokens at the end of the learning-rate decay, else the budget; NaN if unknown."""
    recipe = run.recipe
    end = recipe.get("optim.decay_steps")
    if not end:
        return float(recipe.get("optim.decay_tokens") or recipe.get("train.tokens") or math.nan)
    steps = run.evaluated["step"]
    tokens = run.evaluated["tokens"]
    if steps[-1] <= 0:
        return math.nan
    # Beyond the last step, assume the mean tokens per step of the run.
    if end > steps[-1]:
        return float(tokens[-1] * end / steps[-1])
    return float(np.interp(end, steps, tokens))


def other_budgets(runs: Sequence[RunNumbers]) -> str:
    """Return why costs to reach a loss are not judged; "" if the schedules have one length.

    At equal cost a longer schedule is earlier in its decay, so it looks more costly than it is.
    """
    finished = finished_runs(runs)
    if not any(has_end(run.recipe.get("optim.schedule")) for run in finished):
        return ""
    lengths = [schedule_tokens(run) for run in finished]
    least = min(lengths)
    most = max(lengths)
    if most <= (1 + SAME_SCHEDULE) * least:
        return ""
    shorter = format_number(least, axis="tokens")
    longer = format_quantity(most, "tokens")
    return (
        f"schedules of {shorter} and {longer}, and the longer is read in mid-decay;"
        " compare over a ladder of budgets instead: efftrain sweep --set train.tokens=a,b,c"
    )


def measures(
    groups: Sequence[Group],
    target: float | None = None,
    costs: Costs | None = None,
    margin: float | None = None,
    equal: Cost | None = None,
) -> list[Question]:
    """Return the measures of a comparison, in the order of its table.

    Args:
        groups: the baseline first; a baseline alone has no costs to match.
        target: loss to reach, nats per token.
        margin: nats per token within which final losses count as equal.
        equal: cost that must be equal for final losses to be judged.
    """
    runs = runs_of(groups)
    is_matched = target is None and len(groups) > 1
    questions = [
        replace(FINAL_LOSS, margin=margin, equal=equal),
        Question("final_perplexity", "final perplexity", "", _LOSS, _perplexity),
    ]
    if any(map(valid_bytes_per_token, runs)):
        questions.append(_BITS_PER_BYTE)
    for axis, point in equal_points(runs).items():
        at_point = Question(
            f"loss_at_{axis}",
            f"loss at {format_quantity(point.value, axis)}",
            NATS,
            _LOSS,
            partial(loss_at, axis=axis, value=point.value),
            tested="difference",
            axis=axis,
            point=point.value,
        )
        questions.append(at_point)
    questions.append(_BEST_LOSS)

    if target is not None or is_matched:
        questions += [cost_question(axis, target) for axis in AXES]
    if is_matched and has_unequal_steps(runs):
        questions.append(_UPDATES)
    return [*questions, *_prices(costs or Costs(), target), *_STEADY]


def _prices(costs: Costs, target: float | None) -> list[Question]:
    """Return questions for price and energy, up to the target loss or of the whole run."""
    asked = []
    if costs.price_per_hour is not None:
        title = f"price at {costs.price_per_hour:g} per hour"
        asked.append(("price", title, "", costs.price_per_hour / 3600))
    if costs.power_watts is not None:
        title = f"energy at {costs.power_watts:g} W"
        asked.append(("kwh", title, "kWh", costs.power_watts / 3.6e6))
    questions = []
    for key, title, unit, per_second in asked:
        if target is not None:
            key = f"{key}_to_target"
        read = partial(_price, target=target, per_second=per_second)
        questions.append(Question(key, title, unit, _COST, read))
    return questions


def _price(run: RunNumbers, target: float | None, per_second: float) -> Value:
    seconds: Value = run.seconds
    if target is not None:
        seconds = cost_to_reach(run, "seconds", target)
    if isinstance(seconds, Why):
        return seconds
    return seconds * per_second


def cost_question(axis: str, target: float | None) -> Question:
    """Return the question for the cost to reach a loss.

    Args:
        target: the loss; None: of each pair of runs, the worse run's final loss.
    """
    if target is None:
        title = f"{AXIS_WORDS[axis]} to match"
        read = partial(read_end, axis=axis)
        return Question(f"{axis}_to_match", title, "", _COST, read, tested="match", axis=axis)
    title = f"{AXIS_WORDS[axis]} to loss {target:g}"
    return Question(
        f"{axis}_to_target",
        title,
        "",
        _COST,
        partial(cost_to_reach, axis=axis, target=target),
        tested="ratio",
        axis=axis,
        target=target,
    )


def has_unequal_steps(runs: Sequence[RunNumbers]) -> bool:
    """Return whether tokens per step differ by more than SAME_SCHEDULE, up to any evaluation."""
    means = []
    for run in finished_runs(runs):
        steps = run.evaluated["step"]
        tokens = run.evaluated["tokens"]
        means += [*(tokens[steps > 0] / steps[steps > 0])]
    return bool(means) and max(means) > (1 + SAME_SCHEDULE) * min(means)


def _perplexity(run: RunNumbers) -> Value:
    final = final_loss(run)
    if isinstance(final, Why):
        return final
    value = perplexity(final)
    if value == math.inf:
        return Why("overflow", "above 1e308")
    return value


def _bits_per_byte(run: RunNumbers) -> Value | None:
    final = final_loss(run)
    bytes_per_token = valid_bytes_per_token(run)
    if isinstance(final, Why):
        return final
    if not bytes_per_token:
        return None
    return final / math.log(2) / bytes_per_token


def valid_bytes_per_token(run: RunNumbers) -> float | None:
    """Return the mean bytes of text of a scored target; None if unknown."""
    return flatten(run.origin).get("data.valid_bytes_per_token")


def _best_loss(run: RunNumbers) -> float | None:
    return min(run.evaluated["val_loss"], default=None)


def _validation_jumps(run: RunNumbers) -> float | None:
    """Return the number of evaluations whose loss exceeds SLIGHT times the lowest before it."""
    loss = run.evaluated["val_loss"]
    if not len(loss):
        return None
    lowest_before = np.minimum.accumulate(loss)[:-1]
    return float((loss[1:] > SLIGHT * lowest_before).sum())


def _share(run: RunNumbers, steps: int) -> float | None:
    if not run.stability.steps:
        return None
    return 100 * steps / run.stability.steps


def _mfu(run: RunNumbers) -> float | None:
    if run.mfu is None:
        return None
    return 100 * run.mfu


_BITS_PER_BYTE = Question(
    "final_bits_per_byte",
    "final, per byte of text",
    "bits/byte",
    _LOSS,
    _bits_per_byte,
)
_BEST_LOSS = Question("best_loss", "best loss (never tested)", NATS, _LOSS, _best_loss)
_UPDATES = Question(
    "updates_to_match",
    "updates to match",
    "",
    _COST,
    partial(read_end, axis="step"),
    tested="match",
    axis="step",
    near_copy=False,
)
_STEADY = (
    Question(
        "diverged",
        "runs that diverged",
        "",
        _STABILITY,
        lambda run: run.has_diverged,
        tested="failures",
    ),
    Question(
        "validation_jumps",
        "validation jumps",
        "",
        _STABILITY,
        _validation_jumps,
        tested="rank",
    ),
    # Never tested: at small batches the loss of a batch is above its best by chance.
    Question(
        "share_over_1_2",
        "steps with loss ratio above 1.2",
        "%",
        _STABILITY,
        lambda run: _share(run, run.stability.above_slight),
    ),
    Question(
        "share_over_1_5",
        "steps with loss ratio above 1.5",
        "%",
        _STABILITY,
        lambda run: _share(run, run.stability.above_severe),
    ),
    Question(
        "max_loss_ratio",
        "largest loss ratio",
        "",
        _STABILITY,
        lambda run: run.stability.max_loss_ratio,
    ),
    Question(
        "nonfinite_stops", "non-finite stops", "", _STABILITY, lambda run: run.nonfinite_stops
    ),
    Question(
        "tokens_per_second",
        "tokens per training second",
        "",
        _THROUGHPUT,
        lambda run: run.tokens_per_second,
        axis="tokens",
    ),
    Question("mfu", "MFU", "%", _THROUGHPUT, _mfu),
    Question(
        "trained_tokens", "tokens trained", "", _THROUGHPUT, lambda run: run.tokens, axis="tokens"
    ),
    Question(
        "trained_flops", "FLOPs executed", "", _THROUGHPUT, lambda run: run.flops, axis="flops"
    ),
    Question(
        "train_seconds", "training time", "", _THROUGHPUT, lambda run: run.seconds, axis="seconds"
    ),
    Question(
        "train_cpu_seconds",
        "processor time of training",
        "",
        _THROUGHPUT,
        lambda run: run.spent.get("cpu_seconds"),
        axis="seconds",
    ),
)
