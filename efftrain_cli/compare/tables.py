"""A comparison as tables of text, which every format for people shows: terminal, Markdown, LaTeX and the report."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from efftrain_cli.compare.comparison import Comparison
from efftrain_cli.compare.engine import Verdict
from efftrain_cli.compare.groups import Group
from efftrain_cli.compare.inference import Estimate
from efftrain_cli.compare.measures import Question, Value, human, mean_sd, numbers, quantity
from efftrain_cli.compare.planning import MOST_SEEDS, sd_interval, seeds_needed
from efftrain_cli.compare.verdicts import p_text, short_verdict
from efftrain_cli.foundation.console import counted
from efftrain_cli.foundation.why import Why


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
    sections = dict.fromkeys(
        question.section for question in comparison.questions if question.tested != "score"
    )
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
    asked: dict[str, list[Verdict]] = {}
    for found in comparison.verdicts:
        if found.question.tested != "score":
            asked.setdefault(found.question.key, []).append(found)
    every = [found for each in asked.values() for found in each]
    reasons = list(dict.fromkeys(_footnote(found) for found in every if _footnote(found)))
    rows = []
    for each in asked.values():
        question = each[0].question
        if all(found.why and found.why.kind == "nothing" for found in each):
            continue
        title = _title(question, each, reasons)
        base, *sides = (_short_cell(comparison, question, side) for side in comparison.groups)
        if len(others) == 1:
            rows.append((title, base, *sides, *_answer(each[0])))
            continue
        under = [
            (comparison.letter(group), side, *_answer(found))
            for group, side, found in zip(others, sides, each, strict=True)
        ]
        if question.tested != "match":
            under.insert(0, ("A", base, "", "", ""))
        rows += [("" if i else title, *row) for i, row in enumerate(under)]
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
    if any(found.question.tested == "match" for found in comparison.verdicts):
        note += " To match: what the better run of a pair needs to the other's final loss, on its own curve."
    return note


def _footnote(found: Verdict) -> str:
    return found.why.text if found.why and found.why.kind not in ("nothing", "one_seed") else ""


def _title(question: Question, found: Sequence[Verdict], reasons: Sequence[str]) -> str:
    marks = dict.fromkeys(
        _mark(reasons.index(_footnote(each)) + 1) for each in found if _footnote(each)
    )
    title = question.title.replace("training seconds", "seconds")
    return f"{title} {''.join(marks)}" if marks else title


def _mark(number: int) -> str:
    """A footnote's number, as narrow as it can be."""
    return str(number).translate(str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹"))


def _short_cell(comparison: Comparison, question: Question, group: Group) -> str:
    values = list(comparison.values[question.key, group.label].values())
    there = numbers(values)
    if question.tested == "match":
        return ""
    if question.tested == "failures":
        return f"{sum(there):.0f} of {len(values)}"
    if len(there) == len(values):
        return number_text(question, fmean(there))
    if isinstance(values[0], Why) and len(values) == 1:
        return values[0].text
    return f"{len(there)} of {len(values)} runs"


def _answer(found: Verdict) -> tuple[str, str, str]:
    test, estimate = found.exact, found.estimate
    if test is None:
        number = estimate_text(estimate)
    else:
        known = found.question.tested != "failures" and not math.isnan(test.wins)
        number = f"ahead in {100 * test.wins:.0f} % of pairs" if known else "-"
        if not math.isnan(estimate.mean):
            number = f"{'more than' if estimate.bound > 0 else 'less than'} {estimate.mean:.2f}x, {number}"
    return number, p_text(found.p_holm), short_verdict(found)


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
            "; ".join(mark.text for mark in run.marks) or "-",
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
    for question in comparison.questions:
        if question.section == section and question.tested != "match":
            title = f"{question.title}, {question.unit}" if question.unit else question.title
            sides = [
                comparison.values[question.key, group.label].values() for group in comparison.groups
            ]
            rows.append((title, *(cell_text(question, list(side)) for side in sides)))
    several = any(len(group.runs) > 1 for group in comparison.groups)
    note = "mean ± standard deviation over seeds; no ± where all seeds agree" if several else ""
    return Table(section, ("", *_heads(comparison)), tuple(rows), note)


def _tests(comparison: Comparison) -> Table:
    """Every test in full."""
    letters = {group.label: comparison.letter(group) for group in comparison.groups}
    rows = []
    for found in comparison.verdicts:
        kind = found.why.kind if found.why else ""
        if found.question.tested == "score" or kind == "nothing":
            continue
        rows.append(
            (
                f"{found.question.title}, {letters[found.arm]}",
                estimate_text(found.estimate),
                "-" if kind == "not_judged" else p_text(found.test.p),
                p_text(found.p_holm),
                found.test.method or "-",
                _min_detectable_effect(found),
                found.text,
            )
        )
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


def _min_detectable_effect(found: Verdict) -> str:
    seen = found.min_detectable_effect
    if seen is None:
        return "-"
    return f"{1 + seen:.3g}x" if found.estimate.log else f"{seen:.2g}"


def _zero_shot(comparison: Comparison) -> Table:
    rows = []
    others = len(comparison.groups) > 2
    for question in comparison.questions:
        if question.tested != "score":
            continue
        cells = [
            _scores_text(list(comparison.values[question.key, group.label].values()))
            for group in comparison.groups
        ]
        against = []
        for group in comparison.groups[1:]:
            found = comparison.verdict(question.key, group.label)
            assert found is not None
            letter = f"{comparison.letter(group)}: " if others else ""
            against.append(f"{letter}{_score_text(found)}")
        rows.append((question.title, *cells, "; ".join(against) or "-"))
    return Table(
        "Zero-shot",
        ("task (protocol), metric", *_heads(comparison), "against A"),
        tuple(rows),
        "Differences from A. p is corrected (Holm) over all tasks, metrics and recipes; items speak for these checkpoints only.",
    )


def _scores_text(scores: Sequence[Value]) -> str:
    there = numbers(scores)
    if len(there) < len(scores):
        missing = f"{len(scores) - len(there)} of {len(scores)} seeds"
        return f"missing ({missing})" if len(scores) > 1 else "missing"
    return f"{fmean(there):.4g}" + (f" ± {stdev(there):.2g}" if len(there) > 1 else "")


def _score_text(found: Verdict) -> str:
    over, estimate = "seeds", found.estimate
    if estimate.low is None and found.items is not None:
        over, estimate = "items", found.items
    number = ""
    if estimate.low is not None:
        number = f"{estimate.mean:+.4f} [{estimate.low:+.4f}, {estimate.high:+.4f}] over {estimate.n} {over}; "
    if found.p_holm is not None:
        number += f"p {p_text(found.p_holm)}; "
    return f"{number}{found.text}"


def cell_text(question: Question, values: Sequence[Value]) -> str:
    """A measure of a group: mean ± sd, or what is missing in how many seeds."""
    mean, sd = mean_sd(values)
    if mean is None:
        reasons = Counter(value.text for value in values if isinstance(value, Why))
        n = len(values)
        if n in reasons.values():
            return next(iter(reasons))
        return ", ".join(f"{reason} ({count} of {n} seeds)" for reason, count in reasons.items())
    return number_text(question, mean) if sd is None else spread_text(question, mean, sd)


_COUNTS = ("tokens_to_target", "trained_tokens", "tokens_per_second")
_SCALES = ((1e12, 1e12, "T"), (1e9, 1e9, "B"), (1e6, 1e6, "M"), (1e4, 1e3, "K"), (0.0, 1.0, ""))
_SECONDS = ((7200.0, 3600.0, " h"), (120.0, 60.0, " min"), (0.0, 1.0, " s"))


def _unit(measure: Question, value: float) -> tuple[float, str]:
    """What a number is divided by for reading, and the suffix that says so; a mean and its spread share it."""
    if measure.key in _COUNTS:
        return next((divisor, suffix) for limit, divisor, suffix in _SCALES if abs(value) >= limit)
    if measure.key in ("flops_to_target", "trained_flops") and value:
        exponent = math.floor(math.log10(abs(value)))
        return 10.0**exponent, f"e{exponent}"
    if measure.key in ("seconds_to_target", "train_seconds", "train_cpu_seconds"):
        return next((divisor, suffix) for limit, divisor, suffix in _SECONDS if abs(value) >= limit)
    return 1.0, ""


def _fixed(measure: Question) -> int | None:
    """Decimals of measures that are read in fixed steps; None: four significant digits."""
    key = measure.key
    if key.endswith("_loss") or key.startswith("loss_at") or key == "final_bits_per_byte":
        return 4
    if key in ("share_over_1_2", "share_over_1_5", "mfu"):
        return 2
    return None


def number_text(measure: Question, value: float) -> str:
    """A number of a measure, rounded for reading."""
    divisor, suffix = _unit(measure, value)
    decimals = _fixed(measure)
    return (f"{value / divisor:.4g}" if decimals is None else f"{value:.{decimals}f}") + suffix


def spread_text(measure: Question, mean: float, sd: float) -> str:
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
    for found in comparison.verdicts:
        if found.question.tested not in ("difference", "ratio", "match"):
            continue
        estimate, title = found.estimate, found.question.title
        if not estimate.sd or estimate.p is None:
            why = estimate.why or found.why
            missing = why.text if why else "no spread"
            rows.append((title, found.arm, "-", *("-" for _ in differences), missing))
            continue
        paired = estimate.paired
        low, high = sd_interval(estimate.sd, estimate.n)
        needed = []
        for size in differences:
            n = seeds_needed(math.log1p(size) if estimate.log else size, estimate.sd, paired)
            needed.append(f">{MOST_SEEDS}" if n is None else str(n))
        behind = f"{'pairs' if paired else 'unpaired'}: {estimate.n} so far"
        rows.append(
            (title, found.arm, f"{estimate.sd:.3g} [{low:.3g}, {high:.3g}]", *needed, behind)
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
