"""A comparison as tables of text, which every format for people shows: terminal, Markdown, LaTeX and the report."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from efftrain_cli.compare import inference
from efftrain_cli.compare.comparison import Comparison
from efftrain_cli.compare.differences import Cell, Difference
from efftrain_cli.compare.groups import Group
from efftrain_cli.compare.inference import Estimate
from efftrain_cli.compare.measures import Measure, human, quantity
from efftrain_cli.compare.planning import MOST_SEEDS, sd_interval, seeds_needed
from efftrain_cli.compare.verdicts import p_text, short_verdict
from efftrain_cli.compare.zero_shot import ZeroShotDifference, ZeroShotRow
from efftrain_cli.foundation.console import counted


@dataclass(frozen=True)
class Table:
    """A table of strings. The first column names the row."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""


def tables_of(comparison: Comparison, details: bool = True) -> list[Table]:
    """All tables of a comparison that have rows.

    Args:
        details: the runs, every recipe key that differs and every measure too; else the key, the answers and the
            scores.
    """
    sections = dict.fromkeys(measure.section for measure in comparison.measures)
    tables = [
        key_table(comparison),
        answers(comparison),
        _trials(comparison),
        _zero_shot(comparison),
    ]
    if details or len(comparison.groups) == 1:
        measured = [_measures(comparison, section) for section in sections]
        tables += [
            _recipe_differences(comparison),
            *measured,
            _tests(comparison),
            _runs(comparison),
        ]
    return [table for table in tables if table.rows]


def headline(comparison: Comparison) -> list[str]:
    """What costs are measured by, where a target was given."""
    if comparison.target_loss is None:
        return []
    return [f"Target loss: {comparison.target_loss:.4f} nats/token (given by --target-loss)"]


def _heads(comparison: Comparison) -> tuple[str, ...]:
    return tuple(comparison.letter(group) for group in comparison.groups)


def key_table(comparison: Comparison) -> Table:
    """What the letters stand for: the settings that differ are shown where they are few."""
    rows = []
    for i, group in enumerate(comparison.groups):
        named = [
            f"{key}={values[i]}"
            for key, values in comparison.recipe_differences
            if values[i] != "-"
        ]
        settings = " ".join(named[:4]) + (f" and {len(named) - 4} more" if len(named) > 4 else "")
        rows.append(
            (
                comparison.letter(group),
                group.recipe_name,
                counted(len(group.runs), "seed"),
                settings or "-",
            )
        )
    return Table("", ("", "recipe", "seeds", "settings that differ"), tuple(rows))


def answers(comparison: Comparison) -> Table:
    """One line per question: each recipe's result, how they differ, and the verdict."""
    others = [group for group in comparison.groups if group is not comparison.baseline]
    if not others:
        return Table("", (), ())
    asked = list(dict.fromkeys(d.measure for d in comparison.differences if d.reason != "none"))
    reasons = list(dict.fromkeys(_footnote(d) for d in comparison.differences if _footnote(d)))
    rows = []
    for measure in asked:
        found = [d for d in comparison.differences if d.measure == measure]
        question = _question(measure, found, reasons)
        base, *sides = (
            _short_cell(comparison, measure, side) for side in (comparison.baseline, *others)
        )
        if len(others) == 1:
            rows.append((question, base, *sides, *_answer(found[0])))
            continue
        under = [
            (comparison.letter(group), side, *_answer(d))
            for group, side, d in zip(others, sides, found, strict=True)
        ]
        if measure.tested != "match":
            under.insert(0, ("A", base, "", "", ""))
        rows += [("" if i else question, *row) for i, row in enumerate(under)]
    head: tuple[str, ...] = ("", "A", "B", "B against A [95 %]", "p", "verdict")
    if len(others) > 1:
        head = ("", "", "mean", "against A [95 %]", "p", "verdict")
    notes = [f"{_mark(i)} {reason}." for i, reason in enumerate(reasons, 1)]
    return Table("", head, tuple(rows), " ".join([_answers_note(comparison), *notes]))


def _answers_note(comparison: Comparison) -> str:
    note = (
        "Losses in nats/token, B - A; costs as ratios A / B, above 1 is better. The final loss decides"
        + (", corrected for the number of recipes" if len(comparison.groups) > 2 else "")
        + "; p of the other lines is corrected (Holm) for their number."
    )
    if any(d.measure.tested == "match" for d in comparison.differences):
        note += (
            " To match: what the better run of a pair needs to reach the worse one's final loss."
        )
    return note


def _footnote(difference: Difference) -> str:
    reason = difference.reason
    return "" if reason in ("", "none", inference.ONE_SEED) else reason


def _question(measure: Measure, differences: Sequence[Difference], reasons: Sequence[str]) -> str:
    title = {"share_over_1_2": "% of steps jumping", "diverged": "runs that diverged"}.get(
        measure.key, measure.title
    )
    marks = dict.fromkeys(
        _mark(reasons.index(_footnote(d)) + 1) for d in differences if _footnote(d)
    )
    return " ".join(
        (title.replace("training seconds", "seconds"), *(["".join(marks)] if marks else []))
    )


def _mark(number: int) -> str:
    """A footnote's number, as narrow as it can be."""
    return str(number).translate(str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹"))


def _short_cell(comparison: Comparison, measure: Measure, group: Group) -> str:
    cell = comparison.cells.get((measure.key, group.label))
    if cell is None:
        return ""
    if measure.tested == "failures":
        return f"{sum(cell.numbers):.0f} of {len(cell.values)}"
    if cell.mean is None:
        return (
            f"{len(cell.numbers)} of {len(cell.values)} runs"
            if len(cell.values) > 1
            else str(cell.values[0])
        )
    return number_text(measure, cell.mean)


def _answer(difference: Difference) -> tuple[str, str, str]:
    test, estimate = difference.exact, difference.estimate
    if test is None:
        number = estimate_text(estimate)
    else:
        known = difference.measure.tested != "failures" and not math.isnan(test.wins)
        number = f"ahead in {100 * test.wins:.0f} % of pairs" if known else "-"
        if not math.isnan(estimate.mean):
            number = f"{'more than' if estimate.bound > 0 else 'less than'} {estimate.mean:.2f}x, {number}"
    return number, p_text(difference.p_holm), short_verdict(difference)


def _trials(comparison: Comparison) -> Table:
    rows = [
        (
            trial.label,
            "-" if trial.mean_final_loss is None else f"{trial.mean_final_loss:.4f}",
            counted(len(trial.seeds), "seed"),
            str(trial.unfinished or "-"),
            "compared" if trial.chosen else "",
        )
        for trial in comparison.trials
    ]
    head = ("setting", "mean final loss", "seeds", "unfinished", "")
    return Table("Settings tried", head, tuple(rows))


def _runs(comparison: Comparison) -> Table:
    rows = [
        (
            run.name,
            group.label,
            str(run.seed),
            run.status,
            human(run.tokens),
            "; ".join(run.marks) or "-",
        )
        for group in comparison.groups
        for run in group.runs
    ]
    return Table("Runs", ("run", "recipe", "seed", "status", "tokens", "marks"), tuple(rows))


def _recipe_differences(comparison: Comparison) -> Table:
    rows = tuple((key, *values) for key, values in comparison.recipe_differences)
    return Table("Recipes differ in", ("key", *_heads(comparison)), rows)


def _measures(comparison: Comparison, section: str) -> Table:
    rows = []
    for measure in comparison.measures:
        if measure.section == section and measure.tested != "match":
            title = f"{measure.title}, {measure.unit}" if measure.unit else measure.title
            cells = [comparison.cells[measure.key, group.label] for group in comparison.groups]
            rows.append((title, *(cell_text(measure, cell) for cell in cells)))
    several = any(len(group.runs) > 1 for group in comparison.groups)
    note = "mean ± standard deviation over seeds; no ± where all seeds agree" if several else ""
    return Table(section, ("", *_heads(comparison)), tuple(rows), note)


def _tests(comparison: Comparison) -> Table:
    """Every test in full."""
    rows = [
        (
            f"{d.measure.title}, {comparison.letter(next(g for g in comparison.groups if g.label == d.label))}",
            estimate_text(d.estimate),
            "-"
            if d.reason.startswith("not judged")
            else p_text(d.exact.p if d.exact else d.estimate.p),
            p_text(d.p_holm),
            d.exact.method if d.exact else d.estimate.method or "-",
            _could_see(d),
            d.verdict,
        )
        for d in comparison.differences
        if d.reason != "none"
    ]
    head = (
        "question, recipe",
        "difference [95 %]",
        "p",
        "p corrected",
        "test",
        "could have seen",
        "verdict",
    )
    note = (
        "Could have seen: the smallest true difference that a study with this spread and size shows in 80 % of cases; nats/token "
        "for losses, for costs the ratio."
    )
    return Table("Tests against A", head, tuple(rows), note)


def _could_see(difference: Difference) -> str:
    seen = difference.decision.could_see
    if seen is None:
        return "-"
    return f"{1 + seen:.3g}x" if difference.estimate.log else f"{seen:.2g}"


def _zero_shot(comparison: Comparison) -> Table:
    rows = []
    for row in comparison.zero_shot:
        cells = [_scores_text(row, group.label) for group in comparison.groups]
        against = "; ".join(
            _zero_shot_text(comparison, d, len(row.differences)) for d in row.differences
        )
        limit = f", first {row.limit}" if row.limit else ""
        rows.append((f"{row.task} ({row.protocol}{limit}), {row.metric}", *cells, against or "-"))
    return Table(
        "Zero-shot",
        ("task (protocol), metric", *_heads(comparison), "against A"),
        tuple(rows),
        "Differences from A. p is corrected (Holm) over all tasks, metrics and recipes; items speak for these checkpoints only.",
    )


def _scores_text(row: ZeroShotRow, label: str) -> str:
    scores = row.scores[label]
    there = [score for score in scores if score is not None]
    if len(there) < len(scores):
        return (
            f"missing ({len(scores) - len(there)} of {len(scores)} seeds)"
            if len(scores) > 1
            else "missing"
        )
    return f"{fmean(there):.4g}" + (f" ± {stdev(there):.2g}" if len(there) > 1 else "")


def _zero_shot_text(comparison: Comparison, difference: ZeroShotDifference, others: int) -> str:
    estimate = (
        difference.over_seeds if difference.over_seeds.low is not None else difference.over_items
    )
    number = ""
    if estimate is not None and estimate.low is not None and estimate.high is not None:
        over = "seeds" if estimate is difference.over_seeds else "items"
        number = f"{estimate.mean:+.4f} [{estimate.low:+.4f}, {estimate.high:+.4f}] over {estimate.n} {over}; "
    if difference.p_holm is not None:
        number += f"p {p_text(difference.p_holm)}; "
    letter = next(
        comparison.letter(group) for group in comparison.groups if group.label == difference.label
    )
    return f"{f'{letter}: ' if others > 1 else ''}{number}{difference.verdict}"


def cell_text(measure: Measure, cell: Cell) -> str:
    """A measure of a group: mean ± sd, or what is missing in how many seeds."""
    if cell.mean is None:
        reasons, n = (
            Counter(value for value in cell.values if isinstance(value, str)),
            len(cell.values),
        )
        if n in reasons.values():
            return next(iter(reasons))
        return ", ".join(f"{reason} ({count} of {n} seeds)" for reason, count in reasons.items())
    if cell.sd is None:
        return number_text(measure, cell.mean)
    return spread_text(measure, cell.mean, cell.sd)


_COUNTS = ("tokens_to_target", "trained_tokens", "tokens_per_second")
_SCALES = ((1e12, 1e12, "T"), (1e9, 1e9, "B"), (1e6, 1e6, "M"), (1e4, 1e3, "K"), (0.0, 1.0, ""))
_SECONDS = ((7200.0, 3600.0, " h"), (120.0, 60.0, " min"), (0.0, 1.0, " s"))


def _unit(measure: Measure, value: float) -> tuple[float, str]:
    """What a number is divided by for reading, and the suffix that says so; a mean and its spread share it."""
    if measure.key in _COUNTS:
        return next((divisor, suffix) for limit, divisor, suffix in _SCALES if abs(value) >= limit)
    if measure.key in ("flops_to_target", "trained_flops") and value:
        exponent = math.floor(math.log10(abs(value)))
        return 10.0**exponent, f"e{exponent}"
    if measure.key in ("seconds_to_target", "train_seconds", "train_cpu_seconds"):
        return next((divisor, suffix) for limit, divisor, suffix in _SECONDS if abs(value) >= limit)
    return 1.0, ""


def _fixed(measure: Measure) -> int | None:
    """Decimals of measures that are read in fixed steps; None: four significant digits."""
    key = measure.key
    if key.endswith("_loss") or key.startswith("loss_at") or key == "final_bits_per_byte":
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
    return (
        f"{first} ± {second}{suffix}"
        if suffix.startswith(" ")
        else f"{first}{suffix} ± {second}{suffix}"
    )


def _decimals(value: float) -> int:
    """Decimals that show four significant digits, none of a whole number."""
    if value == 0 or value == round(value):
        return 0
    return max(0, 3 - math.floor(math.log10(abs(value))))


def estimate_text(estimate: Estimate) -> str:
    """A difference or ratio with its interval."""
    if math.isnan(estimate.mean):
        return "-"
    form, times = (".2f", "x") if estimate.log else ("+.4f", "")
    text = f"{estimate.mean:{form}}{times}"
    if estimate.low is None or estimate.high is None:
        return text
    return f"{text} [{estimate.low:{form}}, {estimate.high:{form}}]"


def plan_table(comparison: Comparison, differences: Sequence[float]) -> Table:
    """How many seeds per recipe would show true differences of these sizes, from the spread seen so far."""
    rows = []
    for difference in comparison.differences:
        if difference.measure.tested not in ("difference", "ratio", "match"):
            continue
        estimate = difference.estimate
        title = difference.measure.title
        if not estimate.sd or estimate.p is None:
            reason = estimate.reason or difference.reason or "no spread"
            rows.append((title, difference.label, "-", *("-" for _ in differences), reason))
            continue
        paired = estimate.method.startswith("paired")
        low, high = sd_interval(estimate.sd, estimate.n)
        needed = []
        for size in differences:
            n = seeds_needed(math.log1p(size) if estimate.log else size, estimate.sd, paired)
            needed.append(f">{MOST_SEEDS}" if n is None else str(n))
        behind = f"{'pairs' if paired else 'unpaired'}: {estimate.n} so far"
        rows.append(
            (title, difference.label, f"{estimate.sd:.3g} [{low:.3g}, {high:.3g}]", *needed, behind)
        )
    heads = tuple(f"{size:g}" for size in differences)
    return Table(
        f"Seeds per recipe that show a true difference from {comparison.baseline.label} (two-sided 5 %, power 80 %)",
        ("measure", "recipe", "sd of differences [95 %]", *heads, "behind it"),
        tuple(rows),
        "Sizes: nats/token for losses; for costs the share saved or lost, as a ratio less 1. The spread of a few seeds is "
        "itself uncertain: plan with the upper end of its interval where a claim matters. Plan a new study with new seeds: "
        "adding seeds to this one until it shows something makes false claims in up to a quarter of studies.",
    )


def equal_point_lines(comparison: Comparison) -> list[str]:
    """Where losses are compared at equal cost, and which run decides that."""
    by_run: dict[str, list[str]] = {}
    for point in comparison.points.values():
        by_run.setdefault(point.limited_by, []).append(quantity(point.value, point.axis))
    if len(comparison.runs) == 1:
        return []
    most = "the most that every run reached"
    return [
        f"Equal cost: {', '.join(values)}: {most} (least far: {name})"
        for name, values in by_run.items()
    ]
