"""A comparison as tables of text, views of its rows for people: terminal, Markdown, LaTeX and the report."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from efftrain_cli.compare.comparison import Comparison
from efftrain_cli.compare.engine import count_members
from efftrain_cli.compare.formats import (
    format_estimate,
    format_number,
    format_p,
    format_quantity,
)
from efftrain_cli.compare.frames import Row, rows_of
from efftrain_cli.compare.inference import ALPHA
from efftrain_cli.compare.planning import MOST_SEEDS, assured_sd, sd_interval, seeds_needed
from efftrain_cli.compare.verdicts import verdict_sentences
from efftrain_cli.foundation.console import counted
from efftrain_cli.foundation.why import Why

SIGNS = {"allowed": "NOT COMPARABLE", "warning": "warning", "note": "note"}
"""How a label is announced, the gravest first."""


@dataclass(frozen=True)
class Table:
    """A table of strings. The first column names the row."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""


def tables_of(comparison: Comparison, details: bool = True) -> list[Table]:
    """Return all tables of a comparison that have rows; the first ones, the key and the answers, have no title.

    Args:
        details: add the runs, every recipe key that differs, every measure and every test.
    """
    rows = rows_of(comparison)
    tables = [
        key_table(comparison),
        answers(comparison),
        _trials(comparison),
        answers(comparison, scores=True),
    ]
    if details or len(comparison.groups) == 1:
        sections = dict.fromkeys(row["section"] for row in rows)
        tables += [
            _recipe_differences(comparison),
            *(_measures(comparison, rows, section) for section in sections),
            _tests(rows),
            _runs(comparison),
        ]
    return [table for table in tables if table.rows]


def opening_lines(comparison: Comparison) -> list[str]:
    """Return what comes before every table: a sentence per recipe, its caveat, and the target if one was given."""
    lines = verdict_sentences(comparison)
    if comparison.caveat:
        lines.append(comparison.caveat)
    if comparison.target_loss is not None:
        lines.append(
            f"Target loss: {comparison.target_loss:.4f} nats/token (given by --target-loss)"
        )
    return lines


def gravest_first(labels: Sequence[Why]) -> list[Why]:
    """Return labels in the order of SIGNS."""
    return sorted(labels, key=lambda label: list(SIGNS).index(label.kind))


def key_table(comparison: Comparison) -> Table:
    """Say what the letters stand for, with the first four settings that differ."""
    rows = []
    for i, group in enumerate(comparison.groups):
        named = [
            f"{key}={values[i]}"
            for key, values in comparison.recipe_differences
            if values[i] != "-"
        ]
        settings = " ".join(named[:4]) + (f" and {len(named) - 4} more" if len(named) > 4 else "")
        seeds = counted(len(group.runs), "seed")
        name = group.label if group.label == group.runs[0].name else group.recipe_name
        rows.append((comparison.letter(group), name, seeds, settings or "-"))
    return Table("", ("", "recipe", "seeds", "settings that differ"), tuple(rows))


def answers(comparison: Comparison, scores: bool = False) -> Table:
    """Answer each question about losses and costs, or with `scores` about zero-shot scores.

    With two recipes a question is one row: both results, how they differ, and the verdict. With more each recipe has a
    row of its own.
    """
    asked: dict[str, list[Row]] = {}
    for row in rows_of(comparison):
        if (row["test"] == "score") == scores:
            asked.setdefault(row["measure"], []).append(row)
    footnotes: dict[str, str] = {}
    rows = []
    several = len(comparison.groups) > 2
    for base, *others in asked.values():
        judged = [row for row in others if row["text"]]
        if all(row["kind"] == "nothing" for row in judged):
            continue
        reasons = dict.fromkeys(filter(None, map(_footnote, judged)))
        for reason in reasons:
            footnotes.setdefault(reason, _mark(len(footnotes) + 1))
        marks = "".join(footnotes[reason] for reason in reasons)
        title = str(base["title"]).replace("training seconds", "seconds")
        title = f"{title} {marks}" if marks else title
        if not several:
            rows.append((title, *map(_short_cell, (base, *judged)), *_answer(judged[0])))
            continue
        under = [(row["letter"], _short_cell(row), *_answer(row)) for row in judged]
        if base["test"] != "match":
            under.insert(0, ("A", _short_cell(base), "", "", ""))
        rows += [("" if i else title, *cells) for i, cells in enumerate(under)]
    head: tuple[str, ...] = ("", "A", "B", "B against A [95 %]", "p", "verdict")
    if several:
        head = ("", "", "mean", "against A [95 %]", "p", "verdict")
    notes = [_note(comparison, scores), *(f"{mark} {text}." for text, mark in footnotes.items())]
    return Table("Zero-shot scores" if scores else "", head, tuple(rows), " ".join(notes))


def _note(comparison: Comparison, scores: bool) -> str:
    if scores:
        return "B - A. p is corrected (Holm) over all tasks, metrics and recipes; items speak for these checkpoints only."
    note = "Losses in nats/token, B - A; costs as ratios A / B, above 1 is better. The final loss decides"
    if len(comparison.groups) > 2:
        note += ", corrected for the number of recipes"
    note += "; p of the other lines is corrected (Holm) for their number, intervals are not."
    if any(verdict.question.tested == "match" for verdict in comparison.verdicts):
        note += " To match: what the better run of a pair needs to the other's final loss, on its own curve."
    return note


def _footnote(row: Row) -> str:
    unsaid = row["kind"] == "nothing" or (row["kind"] == "one_seed" and not row["items"])
    return "" if unsaid else row["reason"] or row["caveat"]


def _mark(number: int) -> str:
    """Return a footnote's number, as narrow as it can be."""
    return str(number).translate(str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹"))


def _short_cell(row: Row) -> str:
    numbers = [value for value in row["values"] if not isinstance(value, str)]
    if row["test"] == "match":
        return ""
    if row["test"] == "failures":
        return f"{sum(numbers):.0f} of {len(row['values'])}"
    if row["mean"] is not None:
        return format_number(row["mean"], row["unit"], row["axis"])
    if len(row["values"]) == 1:
        return str(row["values"][0])
    return f"{len(numbers)} of {len(row['values'])} runs"


def _answer(row: Row) -> tuple[str, str, str]:
    return _difference(row), format_p(row["p_holm"]), row["short"]


def _difference(row: Row) -> str:
    """Write the estimate with its interval, or what an exact test counted."""
    exact, items = row["exact"], row["items"]
    if items and row["low"] is None:
        return (
            f"{format_estimate(items['mean'], items['low'], items['high'])} over {items['n']} items"
        )
    if exact is None:
        return format_estimate(row["estimate"], row["low"], row["high"], row["ratio"])
    known = row["test"] != "failures" and exact["wins"] is not None
    text = f"ahead in {100 * exact['wins']:.0f} % of pairs" if known else "-"
    return f"{row['bound']} {row['estimate']:.2f}x, {text}" if row["bound"] else text


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
    rows = []
    for group in comparison.groups:
        for run in group.runs:
            tokens = format_number(run.tokens, axis="tokens")
            marks = "; ".join(mark.text for mark in run.marks) or "-"
            rows.append((run.name, group.label, str(run.seed), run.status, tokens, marks))
    return Table("Runs", ("run", "recipe", "seed", "status", "tokens", "marks"), tuple(rows))


def _recipe_differences(comparison: Comparison) -> Table:
    letters = map(comparison.letter, comparison.groups)
    rows = tuple((key, *values) for key, values in comparison.recipe_differences)
    return Table("Recipes differ in", ("key", *letters), rows)


def _measures(comparison: Comparison, rows: Sequence[Row], section: str) -> Table:
    lines: dict[str, list[str]] = {}
    for row in rows:
        if row["section"] == section and row["test"] != "match":
            title = f"{row['title']}, {row['unit']}" if row["unit"] else row["title"]
            lines.setdefault(title, []).append(cell_text(row))
    several = any(len(group.runs) > 1 for group in comparison.groups)
    note = "mean ± standard deviation over seeds; no ± where all seeds agree" if several else ""
    head = ("", *map(comparison.letter, comparison.groups))
    return Table(section, head, tuple((title, *cells) for title, cells in lines.items()), note)


def cell_text(row: Row) -> str:
    """Write a measure of a group: mean ± standard deviation, or what is missing in how many seeds."""
    if row["mean"] is not None:
        return format_number(row["mean"], row["unit"], row["axis"], row["sd"])
    values = row["values"]
    reasons = Counter(value for value in values if isinstance(value, str))
    if len(values) in reasons.values():
        return str(values[0])
    return ", ".join(f"{text} ({n} of {len(values)} seeds)" for text, n in reasons.items())


def _tests(rows: Sequence[Row]) -> Table:
    """Show every test in full."""
    lines = []
    for row in rows:
        if not row["text"] or row["kind"] == "nothing":
            continue
        size = row["could_see"]
        seen = "-"
        if size is not None:
            seen = f"{1 + size:.3g}x" if row["ratio"] else f"{size:.2g}"
        lines.append(
            (
                f"{row['title']}, {row['letter']}",
                _difference(row),
                "-" if row["kind"] == "not_judged" else format_p(row["p"]),
                format_p(row["p_holm"]),
                row["method"] or "-",
                seen,
                row["text"],
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
    return Table("Tests against A", head, tuple(lines), note)


def plan_table(comparison: Comparison, differences: Sequence[float]) -> Table:
    """How many seeds per recipe would show true differences of these sizes, from the spread seen so far."""
    rows = []
    for verdict in comparison.verdicts:
        if verdict.question.tested not in ("difference", "ratio", "match"):
            continue
        estimate, title = verdict.estimate, verdict.question.title
        if not estimate.sd or estimate.p is None:
            why = estimate.why or verdict.why
            missing = why.text if why else "no spread"
            rows.append((title, verdict.arm, "-", *("-" for _ in differences), missing))
            continue
        paired = estimate.paired
        low, high = sd_interval(estimate.sd, estimate.n)
        needed = []
        sd = assured_sd(estimate.sd, estimate.df or estimate.n - 1)
        family = [
            each
            for each in comparison.verdicts
            if each.question.is_primary == verdict.question.is_primary
            and each.question.tested != "score"
        ]
        # Of questions that are withheld today none has a p.
        alpha = ALPHA / max(1, count_members(family))
        for size in differences:
            n = seeds_needed(math.log1p(size) if estimate.log else size, sd, paired, alpha)
            needed.append(f">{MOST_SEEDS}" if n is None else str(n))
        behind = f"{'pairs' if paired else 'unpaired'}: {estimate.n} so far"
        rows.append(
            (title, verdict.arm, f"{estimate.sd:.3g} [{low:.3g}, {high:.3g}]", *needed, behind)
        )
    heads = tuple(f"{size:g}" for size in differences)
    return Table(
        f"Seeds per recipe that show a true difference from {comparison.baseline.label} (two-sided 5 % by Holm, power 80 %)",
        ("measure", "recipe", "sd of differences [95 %]", *heads, "behind it"),
        tuple(rows),
        "Sizes: nats/token for losses; for costs the share saved or lost, as a ratio less 1. The spread of a few seeds is "
        "itself uncertain: planned is with its 80th percentile, for the strictest of Holm's steps. Plan a new study with new seeds: "
        "adding seeds to this one until it shows something makes false claims in up to a quarter of studies.",
    )


def equal_point_lines(comparison: Comparison) -> list[str]:
    """Where losses are compared at equal cost, and which run decides that."""
    by_run: dict[str, list[str]] = {}
    for point in comparison.points.values():
        by_run.setdefault(point.limited_by, []).append(format_quantity(point.value, point.axis))
    if len(comparison.runs) == 1:
        return []
    most = "the most that every run reached"
    return [
        f"Equal cost: {', '.join(values)}: {most} (least far: {name})"
        for name, values in by_run.items()
    ]
