"""What a sweep prints: its runs, and what the grid showed: learning rates, budgets, and the settings that were
tried."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean, stdev
from typing import Any

from efftrain_cli.compare.groups import BEST_RULE
from efftrain_cli.compare.ladder import Gain
from efftrain_cli.compare.sensitivity import Curve, band, edge_warning, unequal_grids
from efftrain_cli.foundation.console import (
    Row,
    folded,
    human_bytes,
    human_count,
    human_seconds,
    table_lines,
)
from efftrain_cli.trials.curves import optimum
from efftrain_cli.trials.trial import ENDED, Choice


def plan_lines(runs: Sequence[Mapping[str, Any]], jobs: int) -> list[str]:
    """List the runs of a sweep with what is left of each, as `--plan --format json` has them."""
    rows = [
        (
            run["run"],
            run["recipe"],
            " ".join(run["settings"]) or "-",
            str(run["seed"]),
            run["state"],
            human_count(run["tokens_left"]),
        )
        for run in runs
    ]
    lines = table_lines(("run", "recipe", "settings", "seed", "state", "tokens left"), rows)
    left = [run for run in runs if run["state"] not in ENDED]
    seconds = [run["seconds_left"] for run in left]
    known = [value for value in seconds if value is not None]
    time = "; time unknown: nothing was measured here yet"
    if len(known) == len(left):
        time = f", about {human_seconds(sum(known))} one run after the other, by the nearest measurements here"
    share = f"; --jobs {jobs} divides the processor among as many runs" if jobs > 1 else ""
    total = f"{len(left)} of {len(runs)} runs to train, at most {human_count(sum(run['tokens_left'] for run in left))} tokens"
    return [
        *lines,
        "",
        folded(
            f"{total}{time}{share}; disk {human_bytes(sum(run['disk_bytes'] for run in runs))} at most"
        ),
    ]


def choice_lines(choices: Sequence[Choice]) -> list[str]:
    """List every setting that was tried, and which one each recipe is compared with."""
    tried = []
    for choice in choices:
        mark = "compared" if choice.best else ""
        tried.append((choice.recipe, " ".join(choice.settings), choice.losses, mark))
    return [
        "Settings tried",
        *settings_table(("recipe", "setting", "mean loss", "by seed", ""), tried, "-"),
        "They were chosen on these same runs, so both sides look a little better than on new seeds.",
    ]


def settings_table(
    head: Row,
    tried: Sequence[tuple[str, str, Sequence[float | None], str]],
    without: str,
) -> list[str]:
    """Format (owner, setting, losses, mark) as a table with the rule; `without` stands for a seed without a loss."""
    rows: list[Row] = []
    for owner, setting, losses, mark in tried:
        finished = [loss for loss in losses if loss is not None]
        missing = len(losses) - len(finished)
        mean = f"{missing} of {len(losses)} not finished"
        if finished and not missing:
            mean = f"{sum(finished) / len(finished):.4f}"
        each = " ".join(without if loss is None else f"{loss:.4f}" for loss in losses)
        rows.append((owner, setting, mean, each, mark))
    return [*table_lines(head, rows), f"rule: {BEST_RULE}"]


def curve_lines(curves: Sequence[Curve]) -> list[str]:
    """Format loss by learning rate, and each recipe's sensitivity."""
    rates = sorted(set[float]().union(*(curve.rates for curve in curves)))
    rows: list[Row] = []
    for rate in rates:
        rows.append((f"{rate:g}", *(_cell(curve, rate) for curve in curves)))
    optima = [optimum(curve) for curve in curves]
    if any(optima):
        rows.append(("optimum", *(f"{rate:.3g}" if rate else "-" for rate in optima)))
    rows.append(("sensitivity", *map(_sensitivity, curves)))
    lines = [
        "Final loss by learning rate: mean [lowest, highest seed], nats per token; * each recipe's best"
    ]
    lines += table_lines(("learning rate", *(curve.label for curve in curves)), rows)
    if any(optima):
        lines.append("optimum: of the parabola through the best rate and its neighbours")
    lines.append(
        "sensitivity: mean of min(loss, loss before training) over the log grid, less the best loss (Wortsman et al. 2023); "
        "0 means that the rate does not matter"
    )
    return lines


def curve_warnings(curves: Sequence[Curve]) -> list[str]:
    """Warn of best rates at an edge and of unequal grids."""
    warnings = [warning for curve in curves if (warning := edge_warning(curve))]
    if unequal := unequal_grids(curves):
        warnings.append(unequal)
    return [f"warning: {warning}" for warning in warnings]


def _cell(curve: Curve, rate: float) -> str:
    if rate not in curve.rates:
        return "-"
    i = curve.rates.index(rate)
    failed = f"{sum(loss is None for loss in curve.losses[i])} of {len(curve.seeds)} without a loss"
    ends, mean = band(curve, i), curve.means[i]
    if ends is None:
        return failed
    spread = f"[{ends[0]:.4f}, {ends[1]:.4f}]"
    if mean is None:
        return f"{spread}, {failed}"
    return f"{mean:.4f}{f' {spread}' * (len(curve.seeds) > 1)}{' *' * (curve.best == i)}"


def _sensitivity(curve: Curve) -> str:
    values = curve.sensitivities
    if not values:
        return f"{curve.pending} runs not ended"
    return f"{fmean(values):.4f}" + (f" ± {stdev(values):.4f}" if len(values) > 1 else "")


def gain_lines(label: str, baseline: str, found: Mapping[str, Sequence[Gain]]) -> list[str]:
    """Format the compute-equivalent gain at every rung of a recipe's ladder."""
    rows: list[Row] = []
    for unit, gains in found.items():
        for gain in gains:
            rows.append(
                (
                    human_count(gain.budget),
                    f"{gain.loss:.4f}",
                    unit,
                    _gain(gain),
                    str(gain.estimate.n),
                )
            )
    lines = [
        f"{label}: cost at which {baseline} reaches the same loss / cost, every point a finished run of its own budget"
    ]
    return [
        *lines,
        *table_lines(("train.tokens", "mean loss", "cost in", "gain [95 %]", "seeds"), rows),
    ]


def _gain(gain: Gain) -> str:
    estimate = gain.estimate
    why = estimate.why.text if estimate.why else ""
    if gain.above and not gain.below:
        return f"more than {gain.most:.2f}x in {gain.above} of {estimate.n} seeds: the baseline's ladder ends there"
    if gain.below and not gain.above:
        return f"less than {gain.least:.2f}x in {gain.below} of {estimate.n} seeds: the baseline's ladder begins there"
    if gain.above:
        return f"undecided: {why}"
    if estimate.low is None or estimate.high is None:
        return f"{estimate.mean:.2f}x ({why})"
    return f"{estimate.mean:.2f}x [{estimate.low:.2f}, {estimate.high:.2f}]"
