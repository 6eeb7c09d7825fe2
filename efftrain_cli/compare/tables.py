"""A comparison as tables of text, views of its rows for people: terminal, Markdown, LaTeX and the report."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from efftrain_cli.compare.comparison import Comparison
from efftrain_cli.compare.engine import CLOCK_SD, count_members
from efftrain_cli.compare.formats import (
    format_estimate,
    format_number,
    format_p,
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
        named = []
        for key, values in comparison.recipe_differences:
            if values[i] != "-":
                named.append(f"{key}={values[i]}")
        if len(named) > 4:
            named[4:] = [f"and {len(named) - 4} more"]
        name = group.label if group.label == group.runs[0].name else group.recipe_name
        seeds = counted(len(group.runs), "seed")
        rows.append((comparison.letter(group), name, seeds, " ".join(named) or "-"))
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
    several = len(comparison.groups) > 2
    footnotes: list[str] = []
    rows: list[tuple[str, ...]] = []
    for base, *others in asked.values():
        judged = [row for row in others if row["text"]]
        if all(row["kind"] == "nothing" for row in judged):
            continue
        title = _marked(base["title"], judged, footnotes)
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
    notes = [_note(comparison, scores)]
    notes += [f"{_mark(number)} {text}." for number, text in enumerate(footnotes, 1)]
    return Table("Zero-shot scores" if scores else "", head, tuple(rows), " ".join(notes))


def _marked(title: str, judged: Sequence[Row], footnotes: list[str]) -> str:
    """Return a title with the marks of its rows' footnotes; append new ones to `footnotes`."""
    marks: dict[str, None] = {}
    for row in judged:
        text = row["reason"] or row["caveat"]
        is_seen = row["kind"] == "nothing" or (row["kind"] == "one_seed" and not row["items"])
        if text and not is_seen:
            if text not in footnotes:
                footnotes.append(text)
            marks[_mark(footnotes.index(text) + 1)] = None
    return f"{title} {''.join(marks)}" if marks else title


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
        text = format_estimate(items["mean"], items["low"], items["high"])
        return f"{text} over {items['n']} items"
    if exact is None:
        return format_estimate(row["estimate"], row["low"], row["high"], row["ratio"])
    text = "-"
    if row["test"] != "failures" and exact["wins"] is not None:
        text = f"ahead in {100 * exact['wins']:.0f} % of pairs"
    return f"{row['bound']} {row['estimate']:.2f}x, {text}" if row["bound"] else text


def _trials(comparison: Comparison) -> Table:
    rows = []
    for trial in comparison.trials:
        loss = trial.mean_final_loss
        cells = (
            trial.label,
            "-" if loss is None else format_number(loss, "nats/token"),
            counted(len(trial.seeds), "seed"),
            str(trial.unfinished or "-"),
            "compared" if trial.chosen else "",
        )
        rows.append(cells)
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
    rows = tuple((key, *values) for key, values in comparison.recipe_differences)
    return Table("Recipes differ in", ("key", *_letters(comparison)), rows)


def _letters(comparison: Comparison) -> list[str]:
    return [comparison.letter(group) for group in comparison.groups]


def _measures(comparison: Comparison, rows: Sequence[Row], section: str) -> Table:
    cells: dict[str, list[str]] = {}
    for row in rows:
        if row["section"] == section and row["test"] != "match":
            title = f"{row['title']}, {row['unit']}" if row["unit"] else row["title"]
            cells.setdefault(title, []).append(cell_text(row))
    note = ""
    if any(len(group.runs) > 1 for group in comparison.groups):
        note = "mean ± standard deviation over seeds; no ± where all seeds agree"
    lines = tuple((title, *texts) for title, texts in cells.items())
    return Table(section, ("", *_letters(comparison)), lines, note)


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
        cells = (
            f"{row['title']}, {row['letter']}",
            _difference(row),
            "-" if row["kind"] == "not_judged" else format_p(row["p"]),
            format_p(row["p_holm"]),
            row["method"] or "-",
            seen,
            row["text"],
        )
        lines.append(cells)
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
        "for losses, for costs the ratio. p corrected: by Holm; intervals are not corrected."
    )
    return Table("Tests against A", head, tuple(lines), note)


def plan_table(comparison: Comparison, differences: Sequence[float]) -> Table:
    """Show how many seeds per recipe would show true differences of these sizes, from the spread so far."""
    rows = []
    for verdict in comparison.verdicts:
        question, estimate = verdict.question, verdict.estimate
        if question.tested not in ("difference", "ratio", "match"):
            continue
        if not estimate.sd or estimate.p is None:
            why = estimate.why or verdict.why
            missing = why.text if why else "no spread"
            rows.append((question.title, verdict.arm, *["-"] * (1 + len(differences)), missing))
            continue
        low, high = sd_interval(estimate.sd, estimate.n)
        sd = assured_sd(estimate.sd, estimate.df or estimate.n - 1)
        alpha = _strictest_level(comparison, question.is_primary)
        shared = CLOCK_SD if question.axis == "seconds" and estimate.log else 0.0
        needed = []
        for size in differences:
            effect = math.log1p(size) if estimate.log else size
            n = seeds_needed(effect, sd, estimate.paired, alpha, shared)
            needed.append(f">{MOST_SEEDS}" if n is None else str(n))
        spread = f"{estimate.sd:.3g} [{low:.3g}, {high:.3g}]"
        behind = f"{'pairs' if estimate.paired else 'unpaired'}: {estimate.n} so far"
        rows.append((question.title, verdict.arm, spread, *needed, behind))
    heads = tuple(f"{size:g}" for size in differences)
    return Table(
        f"Seeds per recipe that show a true difference from {comparison.baseline.label} (two-sided 5 % by Holm, power 80 %)",
        ("measure", "recipe", "sd of differences [95 %]", *heads, "behind it"),
        tuple(rows),
        "Sizes: nats/token for losses; for costs the share saved or lost, as a ratio less 1. The spread of a few seeds is "
        "itself uncertain: planned is with its 80th percentile, for the strictest of Holm's steps. Plan a new study with new seeds: "
        "adding seeds to this one until it shows something makes false claims in up to a quarter of studies.",
    )


def _strictest_level(comparison: Comparison, primary: bool) -> float:
    """Return the level of Holm's first step in the family of the primary measure, or of all other losses and costs."""
    family = []
    for verdict in comparison.verdicts:
        if verdict.question.is_primary == primary and verdict.question.tested != "score":
            family.append(verdict)
    # Of questions that are withheld today none has a p.
    return ALPHA / max(1, count_members(family))
