"""What a sweep prints: its runs, and what the grid showed over learning rates and budgets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean, stdev

from efftrain_cli.compare.formats import format_estimate
from efftrain_cli.compare.inference import Estimate
from efftrain_cli.compare.ladder import Gain
from efftrain_cli.compare.sensitivity import Curve, band, edge_warning
from efftrain_cli.foundation.console import folded, human_count, table_lines
from efftrain_cli.trials.costs import Costs, total_lines
from efftrain_cli.trials.curves import optimum


def plan_lines(runs: Costs, jobs: int) -> list[str]:
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
    header = ("run", "recipe", "settings", "seed", "state", "tokens left")
    lines = table_lines(header, rows, ("seed", "recipe", "settings"))
    return [*lines, "", *map(folded, total_lines(runs, jobs))]


def curve_lines(curves: Sequence[Curve]) -> list[str]:
    """Format loss by learning rate, and each recipe's sensitivity."""
    rates = sorted(set[float]().union(*(curve.rates for curve in curves)))
    rows = []
    for rate in rates:
        rows.append((f"{rate:g}", *(_cell(curve, rate) for curve in curves)))
    optima = [optimum(curve) for curve in curves]
    if any(optima):
        rows.append(("optimum", *(f"{rate:.3g}" if rate else "-" for rate in optima)))
    rows.append(("sensitivity", *map(_sensitivity, curves)))
    lines = [
        "Final loss by learning rate: mean [lowest,"
        " highest seed], nats per token; * each recipe's best"
    ]
    lines += table_lines(("learning rate", *(curve.label for curve in curves)), rows)
    if any(optima):
        lines.append("optimum: of the parabola through the best rate and its neighbours")
    lines.append(
        "sensitivity: mean of min(loss, loss before training) over the log grid, less the best loss"
        " (Wortsman et al. 2023); 0 means that the rate does not matter"
    )
    return lines


def curve_warnings(curves: Sequence[Curve]) -> list[str]:
    """Warn of best rates at an edge."""
    warnings = map(edge_warning, curves)
    return [f"warning: {warning}" for warning in warnings if warning]


def _cell(curve: Curve, rate: float) -> str:
    if rate not in curve.rates:
        return "-"
    i = curve.rates.index(rate)
    failed = f"{sum(loss is None for loss in curve.losses[i])} of {len(curve.seeds)} without a loss"
    ends = band(curve, i)
    mean = curve.means[i]
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
    rows = []
    for unit, gains in found.items():
        for gain in gains:
            rows.append(
                (
                    human_count(gain.budget),
                    f"{gain.loss:.4f}",
                    unit,
                    _gain(gain.estimate),
                    str(gain.estimate.n),
                )
            )
    lines = [
        f"{label}: cost at which {baseline} reaches the same loss / cost,"
        " every point a finished run of its own budget"
    ]
    return [
        *lines,
        *table_lines(("train.tokens", "mean loss", "cost in", "gain [95 %]", "seeds"), rows),
    ]


def _gain(estimate: Estimate) -> str:
    text = format_estimate(estimate.mean, estimate.low, estimate.high, ratio=True)
    return f"{text} ({estimate.why.text})" if estimate.why else text
