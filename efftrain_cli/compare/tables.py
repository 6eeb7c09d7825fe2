"""A comparison as tables of text, which every format for people shows: terminal, Markdown, LaTeX and the report."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from efftrain_cli.compare import statistics
from efftrain_cli.compare.comparison import Cell, Comparison, Difference
from efftrain_cli.compare.measures import Measure, human, quantity
from efftrain_cli.compare.statistics import Estimate
from efftrain_cli.compare.zero_shot import ZeroShotDifference, ZeroShotRow


@dataclass(frozen=True)
class Table:
    """A table of strings. The first column names the row."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""


def tables_of(comparison: Comparison) -> list[Table]:
    """All tables of a comparison that have rows."""
    sections = dict.fromkeys(measure.section for measure in comparison.measures)
    tables = [
        _runs(comparison),
        _recipe_differences(comparison),
        *(_measures(comparison, section) for section in sections),
        _differences(comparison),
        _zero_shot(comparison),
    ]
    return [table for table in tables if table.rows]


def headline(comparison: Comparison) -> list[str]:
    """What is compared with what, in one or two lines."""
    lines = []
    if len(comparison.groups) > 1:
        lines.append(f"Baseline: {comparison.baseline.label}")
    if comparison.target_loss is not None:
        lines.append(f"Target loss: {comparison.target_loss:.4f} nats/token ({comparison.target_origin})")
    return lines


def _heads(comparison: Comparison) -> tuple[str, ...]:
    return tuple(f"{group.label} ({_seeds(len(group.runs))})" for group in comparison.groups)


def _seeds(n: int) -> str:
    return "1 seed" if n == 1 else f"{n} seeds"


def _runs(comparison: Comparison) -> Table:
    rows = []
    for group in comparison.groups:
        for run in group.runs:
            rows.append(
                (run.name, group.label, str(run.seed), run.status, human(run.tokens), "; ".join(run.marks) or "-")
            )
    return Table("Runs", ("run", "recipe", "seed", "status", "tokens", "marks"), tuple(rows))


def _recipe_differences(comparison: Comparison) -> Table:
    labels = tuple(group.label for group in comparison.groups)
    rows = tuple((key, *values) for key, values in comparison.recipe_differences)
    return Table("Recipes differ in", ("key", *labels), rows)


def _measures(comparison: Comparison, section: str) -> Table:
    rows = []
    for measure in comparison.measures:
        if measure.section == section:
            title = f"{measure.title}, {measure.unit}" if measure.unit else measure.title
            cells = [comparison.cells[measure.key, group.label] for group in comparison.groups]
            rows.append((title, *(cell_text(measure, cell) for cell in cells)))
    several = any(len(group.runs) > 1 for group in comparison.groups)
    note = "mean ± standard deviation over seeds; no ± where all seeds agree" if several else ""
    return Table(section, ("", *_heads(comparison)), tuple(rows), note)


def _differences(comparison: Comparison) -> Table:
    rows = [
        (
            difference.measure.title if difference.measure.tested == "difference" else f"{difference.measure.title} to target",
            difference.label,
            estimate_text(difference.measure, difference.estimate),
            p_text(difference.p_holm),
            _n_text(difference),
            difference.verdict,
        )
        for difference in comparison.differences
    ]
    others = len(comparison.groups) - 1
    note = (
        "Losses: method - baseline, nats/token. Cost: baseline / method, so 2.00x is half of it. 95 % intervals, each for "
        "itself. "
        + (f"p: Holm over the {others} recipes compared with the baseline within a row's measure. " if others > 1 else "")
        + "Several measures are shown: decide before looking which one counts."
    )
    covered = {d.coverage for d in comparison.differences if d.coverage is not None}
    if covered:
        note += f" Bootstrap intervals: measured coverage {100 * min(covered):.1f} % on normal draws of this many seeds."
    return Table(
        f"Against {comparison.baseline.label}",
        ("measure", "recipe", "difference [95 %]", "p", "pairs", "verdict"),
        tuple(rows),
        note,
    )


def _n_text(difference: Difference) -> str:
    if difference.seeds:
        return str(len(difference.seeds))
    return "unpaired" if difference.estimate.method else "-"


def _zero_shot(comparison: Comparison) -> Table:
    rows = []
    for row in comparison.zero_shot:
        cells = [_scores_text(row, group.label) for group in comparison.groups]
        against = "; ".join(_zero_shot_text(difference, len(row.differences)) for difference in row.differences)
        limit = f", first {row.limit}" if row.limit else ""
        rows.append((f"{row.task} ({row.protocol}{limit}), {row.metric}", *cells, against or "-"))
    return Table(
        "Zero-shot",
        ("task (protocol), metric", *_heads(comparison), f"against {comparison.baseline.label}"),
        tuple(rows),
        "Differences are method - baseline; intervals over items hold for these checkpoints only.",
    )


def _scores_text(row: ZeroShotRow, label: str) -> str:
    scores = row.scores[label]
    there = [score for score in scores if score is not None]
    if len(there) < len(scores):
        return f"missing ({len(scores) - len(there)} of {len(scores)} seeds)" if len(scores) > 1 else "missing"
    mean = sum(there) / len(there)
    if len(there) == 1:
        return f"{mean:.4g}"
    sd = math.sqrt(sum((score - mean) ** 2 for score in there) / (len(there) - 1))
    return f"{mean:.4g} ± {sd:.2g}"


def _zero_shot_text(difference: ZeroShotDifference, others: int) -> str:
    estimate = difference.over_seeds if difference.over_seeds.low is not None else difference.over_items
    number = ""
    if estimate is not None and estimate.low is not None and estimate.high is not None:
        over = "seeds" if estimate is difference.over_seeds else "items"
        number = f"{estimate.mean:+.4f} [{estimate.low:+.4f}, {estimate.high:+.4f}] over {estimate.n} {over}; "
    name = f"{difference.label}: " if others > 1 else ""
    return f"{name}{number}{difference.verdict}"


def cell_text(measure: Measure, cell: Cell) -> str:
    """A measure of a group: mean ± sd, or what is missing in how many seeds."""
    if cell.mean is None:
        reasons: dict[str, int] = {}
        for value in cell.values:
            if isinstance(value, str):
                reasons[value] = reasons.get(value, 0) + 1
        n = len(cell.values)
        if n == 1 or (len(reasons) == 1 and next(iter(reasons.values())) == n):
            return next(iter(reasons))
        return ", ".join(f"{reason} ({count} of {n} seeds)" for reason, count in reasons.items())
    if cell.sd is None:
        return number_text(measure, cell.mean)
    return spread_text(measure, cell.mean, cell.sd)


_COUNTS = ("tokens_to_target", "trained_tokens", "tokens_per_second")
_SCALES = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e4, "K"))
_SECONDS = ((7200.0, 3600.0, " h"), (120.0, 60.0, " min"), (0.0, 1.0, " s"))


def _unit(measure: Measure, value: float) -> tuple[float, str]:
    """What a number is divided by for reading, and the suffix that says so; a mean and its spread share it."""
    if measure.key in _COUNTS:
        suffix = next((suffix for limit, suffix in _SCALES if abs(value) >= limit), "")
        return {"T": 1e12, "B": 1e9, "M": 1e6, "K": 1e3, "": 1.0}[suffix], suffix
    if measure.key in ("flops_to_target", "trained_flops") and value:
        exponent = math.floor(math.log10(abs(value)))
        return 10.0**exponent, f"e{exponent}"
    if measure.key in ("seconds_to_target", "train_seconds"):
        return next((divisor, suffix) for limit, divisor, suffix in _SECONDS if abs(value) >= limit)
    return 1.0, ""


def _fixed(measure: Measure) -> int | None:
    """Decimals of measures that are read in fixed steps; None: four significant digits."""
    key = measure.key
    if key.endswith("_loss") or key.startswith("loss_at") or key == "best_bits_per_byte":
        return 4
    if key in ("share_over_1_2", "share_over_1_5", "mfu"):
        return 2
    return None


def number_text(measure: Measure, value: float) -> str:
    """A number of a measure, rounded for reading."""
    divisor, suffix = _unit(measure, value)
    decimals = _fixed(measure)
    return (f"{value / divisor:.4g}" if decimals is None else f"{value:.{decimals}f}") + suffix


def spread_text(measure: Measure, mean: float, sd: float) -> str:
    """A mean and its standard deviation in one unit, the deviation with two digits: "78.46K ± 0.52K"."""
    if sd == 0:
        return number_text(measure, mean)
    divisor, suffix = _unit(measure, mean)
    decimals = _fixed(measure)
    if decimals is None:
        # Decimals that show two digits of the spread, and four of the mean where the spread is small.
        decimals = max(0, 1 - math.floor(math.log10(sd / divisor)), _decimals(mean / divisor))
        decimals = min(decimals, 6)
    first, second = f"{mean / divisor:.{decimals}f}", f"{sd / divisor:.{decimals}f}"
    if suffix.startswith("e"):
        return f"({first} ± {second}){suffix}"
    return f"{first} ± {second}{suffix}" if suffix.startswith(" ") else f"{first}{suffix} ± {second}{suffix}"


def _decimals(value: float) -> int:
    """Decimals that show four significant digits, none of a whole number."""
    if value == 0 or value == round(value):
        return 0
    return max(0, 3 - math.floor(math.log10(abs(value))))


def estimate_text(measure: Measure, estimate: Estimate) -> str:
    """A difference or ratio with its interval."""
    if math.isnan(estimate.mean):
        return "-"
    ratio = measure.tested == "ratio"
    text = f"{estimate.mean:.2f}x" if ratio else f"{estimate.mean:+.4f}"
    if estimate.low is None or estimate.high is None:
        return text
    return text + (
        f" [{estimate.low:.2f}, {estimate.high:.2f}]" if ratio else f" [{estimate.low:+.4f}, {estimate.high:+.4f}]"
    )


def p_text(p: float | None) -> str:
    """A p-value with two digits."""
    if p is None:
        return "-"
    return f"{p:.2g}" if p >= 0.0001 else "<0.0001"


def plan_table(comparison: Comparison, differences: Sequence[float]) -> Table:
    """How many seeds per recipe would show true differences of these sizes, from the spread seen so far."""
    rows = []
    for difference in comparison.differences:
        estimate = difference.estimate
        ratio = difference.measure.tested == "ratio"
        title = f"{difference.measure.title} to target" if ratio else difference.measure.title
        if not estimate.sd or estimate.p is None:
            rows.append((title, difference.label, "-", *("-" for _ in differences), estimate.reason or "no spread"))
            continue
        paired = bool(difference.seeds)
        low, high = statistics.sd_interval(estimate.sd, estimate.n)
        needed = []
        for size in differences:
            n = statistics.seeds_needed(math.log1p(size) if ratio else size, estimate.sd, paired)
            needed.append(f">{statistics.MOST_SEEDS}" if n is None else str(n))
        rows.append(
            (
                title,
                difference.label,
                f"{estimate.sd:.3g} [{low:.3g}, {high:.3g}]",
                *needed,
                f"{'pairs' if paired else 'unpaired'}: {estimate.n} so far",
            )
        )
    heads = tuple(f"{size:g}" for size in differences)
    return Table(
        f"Seeds per recipe that show a true difference from {comparison.baseline.label} (two-sided 5 %, power 80 %)",
        ("measure", "recipe", "sd of differences [95 %]", *heads, "behind it"),
        tuple(rows),
        "Sizes: nats/token for losses; for costs the share saved or lost, as a ratio less 1. The spread of a few seeds is "
        "itself uncertain: plan with the upper end of its interval where a claim matters. One comparison, no Holm.",
    )


def equal_point_lines(comparison: Comparison) -> list[str]:
    """Where losses are compared at equal cost, and which run decides that."""
    by_run: dict[str, list[str]] = {}
    for point in comparison.points.values():
        by_run.setdefault(point.limited_by, []).append(quantity(point.value, point.axis))
    if len(comparison.runs) == 1:
        return []
    return [
        f"Equal cost: {', '.join(values)}: the most that every run reached (least far: {name})"
        for name, values in by_run.items()
    ]
