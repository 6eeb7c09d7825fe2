"""A comparison as tables of text, views of its rows for people: terminal, Markdown, LaTeX and the
report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain

from efftrain_cli.compare.comparison import Comparison
from efftrain_cli.compare.engine import count_members
from efftrain_cli.compare.formats import format_estimate, format_number, format_p, format_value
from efftrain_cli.compare.frames import Row, rows_by_question
from efftrain_cli.compare.groups import settings_of
from efftrain_cli.compare.inference import ALPHA
from efftrain_cli.compare.measures import PRIMARY
from efftrain_cli.compare.planning import MOST_SEEDS, assured_sd, sd_interval, seeds_needed
from efftrain_cli.compare.verdicts import verdict_sentences
from efftrain_cli.foundation.console import listed
from efftrain_cli.foundation.why import Why


@dataclass(frozen=True)
class Table:
    """A table of strings. The first column names the row."""

    title: str
    header: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    note: str = ""


def tables_of(comparison: Comparison, details: bool = True) -> list[Table]:
    """Return all tables of a comparison that have rows; the first ones, the key and the answers,
    have no title.

    Args:
        details: add the runs, every recipe key that differs, every measure and every test.
    """
    tables = [
        key_table(comparison),
        answers(comparison),
        _trials(comparison),
        answers(comparison, scores=True),
    ]
    if details or len(comparison.groups) == 1:
        asked = rows_by_question(comparison)
        tables.append(_recipe_differences(comparison))
        for section in dict.fromkeys(question.section for question in comparison.questions):
            tables.append(_measures(comparison, asked, section))
        tables += [_tests(asked), _runs(comparison)]
    return [table for table in tables if table.rows]


def opening_lines(comparison: Comparison) -> list[str]:
    """Return what comes before every table: verdicts in sentences, the comparison's caveat."""
    return [*verdict_sentences(comparison), *filter(None, [comparison.caveat])]


def key_table(comparison: Comparison) -> Table:
    """Say what the letters stand for, with the first four settings that differ."""
    rows = []
    keys = list(comparison.recipe_differences)
    for group in comparison.groups:
        name = group.recipe_name
        if group.label == group.runs[0].name:
            name = group.label
        seeds = str(len(group.runs))
        settings = listed(settings_of(group, keys))
        rows.append((comparison.letter(group), name, seeds, settings or "-"))
    return Table("", ("", "recipe", "seeds", "settings that differ"), rows)


def answers(comparison: Comparison, scores: bool = False) -> Table:
    """Answer each question about losses and costs, or with `scores` about zero-shot scores.

    With two recipes a question is one row: both results, how they differ, and the verdict. With
    more each recipe has a row of its own.
    """
    several = len(comparison.groups) > 2
    notes: dict[str, list[str]] = {}
    rows = []
    for base, *others in rows_by_question(comparison):
        judged = [row for row in others if row["text"]]
        has_any = any(row["mean"] for row in (base, *others))
        is_none = base["test"] in ("rank", "failures") and not has_any
        if not judged or is_none or (base["test"] == "score") != scores:
            continue
        title = base["title"]
        if base["measure"] != PRIMARY:  # the opening says it
            for text in dict.fromkeys(chain.from_iterable(map(_notes_of, judged))):
                arms = ", ".join(row["letter"] for row in judged if text in _notes_of(row))
                notes.setdefault(text, []).append(f"{title} ({arms})" if several else title)
        if several and base["test"] != "match":
            rows.append((title, "A", _short_cell(base), "", "", ""))
            title = ""
        for row in judged:
            first = row["letter"] if several else _short_cell(base)
            verdict = "-" if row["kind"] == "nothing" else row["short"]
            shown = (_difference(row), format_p(row["p_holm"]), verdict)
            rows.append((title, first, _short_cell(row), *shown))
            title = ""

    head: tuple[str, ...] = ("", "A", "B", "B against A [95 %]", "p", "verdict")
    if several:
        head = ("", "", "mean", "against A [95 %]", "p", "verdict")
    texts = [_note(comparison, scores)]
    texts += [f"{', '.join(titles)}: {text}." for text, titles in notes.items()]
    return Table("Zero-shot scores" if scores else "", head, rows, "\n".join(texts))


def _notes_of(row: Row) -> list[str]:
    """Return why a row is not judged, if its verdict does not say so, and how its verdict was
    reached."""
    is_seen = row["kind"] == "nothing" or (row["kind"] == "one_seed" and not row["items"])
    reason = None if is_seen else row["reason"]
    return list(filter(None, (reason, row["note"])))


def _note(comparison: Comparison, scores: bool) -> str:
    if scores:
        return (
            "B - A. p is corrected (Holm) over all tasks, metrics and recipes;"
            " items speak for these checkpoints only."
        )
    note = (
        "Losses in nats/token, B - A; costs as ratios A / B, above 1 is better."
        " The final loss decides"
    )
    if len(comparison.groups) > 2:
        note += ", corrected for the number of recipes"
    note += "; p of the other lines is corrected (Holm) for their number, intervals are not."
    if any(verdict.question.tested == "match" for verdict in comparison.verdicts):
        note += (
            " To match: what the better run of a pair needs to the other's final loss,"
            " on its own curve."
        )
    return note


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


def _difference(row: Row) -> str:
    """Write the estimate with its interval, or what an exact test counted."""
    exact = row["exact"]
    items = row["items"]
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
        loss = "-"
        if trial.mean_final_loss is not None:
            loss = format_number(trial.mean_final_loss, "nats/token")
        counts = (str(len(trial.seeds)), str(trial.unfinished or "-"))
        rows.append((trial.label, loss, *counts, "compared" * trial.chosen))
    head = ("setting", "mean final loss", "seeds", "unfinished", "")
    return Table("Settings tried", head, rows)


def _runs(comparison: Comparison) -> Table:
    rows = []
    for group in comparison.groups:
        for run in group.runs:
            tokens = format_number(run.tokens, axis="tokens")
            rows.append((run.name, comparison.letter(group), str(run.seed), run.status, tokens))
    return Table("Runs", ("run", "recipe", "seed", "status", "tokens"), rows)


def _recipe_differences(comparison: Comparison) -> Table:
    rows = [
        (key, *map(format_value, values)) for key, values in comparison.recipe_differences.items()
    ]
    return Table("Recipes differ in", ("key", *_letters(comparison)), rows)


def _letters(comparison: Comparison) -> list[str]:
    if len(comparison.groups) == 1:
        return [""]
    return [comparison.letter(group) for group in comparison.groups]


def _measures(comparison: Comparison, asked: Sequence[Sequence[Row]], section: str) -> Table:
    lines = []
    for rows in asked:
        if rows[0]["section"] == section and rows[0]["test"] != "match":
            names = filter(None, (rows[0]["title"], rows[0]["unit"]))
            lines.append((", ".join(names), *map(cell_text, rows)))
    note = ""
    if any(len(group.runs) > 1 for group in comparison.groups):
        note = "mean ± standard deviation over seeds; no ± where all seeds agree"
    return Table(section, ("", *_letters(comparison)), lines, note)


def cell_text(row: Row) -> str:
    """Write a group's measure: mean ± standard deviation, or what is missing in how many seeds."""
    if row["mean"] is not None:
        return format_number(row["mean"], row["unit"], row["axis"], row["sd"])
    values = row["values"]
    reasons = Counter(value for value in values if isinstance(value, str))
    if len(values) in reasons.values():
        return str(values[0])
    return ", ".join(f"{text} ({n} of {len(values)} seeds)" for text, n in reasons.items())


def _tests(asked: Sequence[Sequence[Row]]) -> Table:
    """Show every test in full."""
    lines = []
    for row in chain.from_iterable(asked):
        if not row["text"] or row["kind"] == "nothing":
            continue
        lines.append(
            (
                f"{row['title']}, {row['letter']}",
                _difference(row),
                "-" if row["kind"] == "not_judged" else format_p(row["p"]),
                format_p(row["p_holm"]),
                row["method"] or "-",
                _could_see(row),
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
        "Could have seen: the smallest true difference that a study with this spread and size shows"
        " in 80 % of cases; nats/token for losses, for costs the ratio. p corrected: by Holm;"
        " intervals are not corrected."
    )
    return Table("Tests against A", head, lines, note)


def _could_see(row: Row) -> str:
    size = row["could_see"]
    if size is None:
        return "-"
    return f"{1 + size:.3g}x" if row["ratio"] else f"{size:.2g}"


def plan_table(comparison: Comparison, differences: Sequence[float]) -> Table:
    """Show how many seeds per recipe would show true differences of these sizes, from the spread so
    far."""
    rows = []
    for verdict in comparison.verdicts:
        question = verdict.question
        estimate = verdict.estimate
        if question.tested not in ("difference", "ratio", "match"):
            continue
        names = (question.title, verdict.arm)
        if not estimate.sd or estimate.p is None:
            why = estimate.why or verdict.why or Why("no_spread", "no spread")
            rows.append((*names, *["-"] * (1 + len(differences)), why.text))
            continue
        low, high = sd_interval(estimate.sd, estimate.n)
        sd = assured_sd(estimate.sd, estimate.df or estimate.n - 1)
        alpha = _strictest_level(comparison, question.is_primary)
        needed = []
        for size in differences:
            effect = estimate.scaled(size)
            n = seeds_needed(effect, sd, estimate.paired, alpha)
            needed.append(str(n or f">{MOST_SEEDS}"))
        spread = f"{estimate.sd:.3g} [{low:.3g}, {high:.3g}]"
        kind = "pairs" if estimate.paired else "unpaired"
        rows.append((*names, spread, *needed, f"{kind}: {estimate.n} so far"))
    heads = [f"{size:g}" for size in differences]
    return Table(
        "Seeds per recipe that show a true difference"
        f" from {comparison.baseline.label} (two-sided 5 % by Holm, power 80 %)",
        ("measure", "recipe", "sd of differences [95 %]", *heads, "behind it"),
        rows,
        "Sizes: nats/token for losses; for costs the share saved or lost, as a ratio less 1."
        " The spread of a few seeds is itself uncertain: planned is with its 80th percentile,"
        " for the strictest of Holm's steps. Plan a new study with new seeds: adding seeds"
        " to this one until it shows something makes false claims in up to a quarter of studies.",
    )


def _strictest_level(comparison: Comparison, primary: bool) -> float:
    """Return the level of Holm's first step in the family of the primary measure, or of all other
    losses and costs."""
    family = []
    for verdict in comparison.verdicts:
        if verdict.question.is_primary == primary and verdict.question.tested != "score":
            family.append(verdict)
    # Of questions that are withheld today none has a p: those with a spread are planned to be
    # tested.
    planned = [replace(verdict, p=verdict.estimate.p) for verdict in family]
    return ALPHA / max(1, count_members(family) or count_members(planned))
