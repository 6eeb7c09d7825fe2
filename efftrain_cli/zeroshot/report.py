"""Say what an evaluation found: scores, means of suites, published scores beside them."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from efftrain_cli.foundation.console import Row, table_lines
from efftrain_cli.run.directory import run_path
from efftrain_cli.zeroshot.results import RESULTS, Result, is_exported
from efftrain_cli.zeroshot.suites import AVERAGED, suite_mean


def result_lines(
    run: str, entries: Sequence[Result], tasks: Sequence[str], references: bool
) -> Iterator[str]:
    """Describe the entries of one run's evaluation.

    Args:
        tasks: names of tasks and suites as they were asked for.
        references: show published scores too.
    """
    yield from _score_lines(run, entries)
    yield from _mean_lines(tasks, entries)
    if references:
        yield from _reference_lines(entries)
    elif any(entry["lm_eval"] and entry["limit"] is None for entry in entries):
        yield "\n--references shows published scores, each with its protocol"
    folder = Path(run) if is_exported(run) else run_path(run)
    yield f"written to {folder / RESULTS}"


def _score_lines(run: str, entries: Sequence[Result]) -> Iterator[str]:
    first = entries[0]
    yield f"{run}, step {first['step']}, context {first['context_length']} tokens, {first['dtype']}"
    limits = [entry["limit"] for entry in entries if entry["limit"] is not None]
    if limits:
        yield f"first {limits[0]} items only where a task has more: not comparable with full scores"
    rows = []
    for entry in entries:
        rows += _score_rows(entry)
    yield from table_lines(("task", "metric", "score", "± s.e.", "chance", "items", "cut"), rows)
    if any(entry["truncated"] for entry in entries):
        yield "cut: requests whose context was longer than the model's and lost its beginning"
    for entry in entries:
        left_out = entry["left_out"]
        if left_out:
            shown = ", ".join(left_out[:5]) + ", ..." * (len(left_out) > 5)
            why = "left out, as an answer alone is longer than the context"
            yield f"{entry['task']}: {len(left_out)} {why}: {shown}"
    yield ""
    for entry in entries:
        yield f"{entry['task']:<18}  {entry['protocol']}"


def _score_rows(entry: Result) -> list[Row]:
    """Return a row per metric of a task, the one that counts first; the others leave task and items
    out."""
    metrics = entry["metrics"]
    rows: list[Row] = []
    for metric in sorted(metrics, key=lambda name: name != entry["metric"]):
        score = _format_score(metric, metrics[metric]["value"])
        stderr = metrics[metric]["stderr"]
        # No item differs from another: the estimate, 0, says nothing of the error.
        error = _format_score(metric, stderr).removesuffix(" %") if stderr else ""
        task = chance = items = cut = ""
        if metric == entry["metric"]:
            task = entry["task"]
            chance = f"{100 * entry['chance']:.0f} %" if entry["chance"] else ""
            items = str(entry["items"])
            if entry["items"] != entry["items_total"]:
                items += f"/{entry['items_total']}"
            cut = str(entry["truncated"] or "")
        rows.append((task, metric, score, error, chance, items, cut))
    return rows


def _format_score(metric: str, value: float | None) -> str:
    if value is None:
        return "infinite"
    if "perplexity" in metric or metric.startswith("bits"):
        return f"{value:.4g}"
    return f"{100 * value:.2f} %"


def _mean_lines(tasks: Sequence[str], entries: Sequence[Result]) -> Iterator[str]:
    scores = {entry["task"]: entry["value"] for entry in entries if entry["value"] is not None}
    limited = any(entry["limit"] is not None for entry in entries)
    note = " of first items only: not comparable with full scores" if limited else ""
    for suite in AVERAGED:
        if suite in tasks:
            try:
                yield f"{suite}: unweighted mean {100 * suite_mean(suite, scores):.2f} %{note}"
            except ValueError as error:
                yield str(error)


def _reference_lines(entries: Sequence[Result]) -> Iterator[str]:
    whole = [entry["task"] for entry in entries if entry["limit"] is None]
    if not whole:
        yield (
            "\nno published scores: they are of whole tasks, and these are of the first items only"
        )
        return
    rows = []
    sources: dict[str, int] = {}
    for task in whole:
        for reference in read_references():
            if reference["task"] == task:
                source = f"{reference['protocol']}: {reference['source']}"
                number = sources.setdefault(source, len(sources) + 1)
                metric = reference["metric"]
                score = _format_score(metric, reference["value"])
                rows.append((reference["model"], task, metric, score, f"({number})"))
    if rows:
        yield (
            "\npublished scores; none was measured here,"
            " and they compare only where protocols agree"
        )
        yield from table_lines(("model", "task", "metric", "score", "measured by"), rows)
        for source, number in sources.items():
            yield f"({number}) {source}"


def read_references() -> list[dict[str, Any]]:
    """Return the published scores of references.toml: model, protocol, source, task, metric and
    value of each.

    None of them was measured here; accuracies are fractions.
    """
    text = Path(__file__).with_name("references.toml").read_text("utf-8")
    references = []
    for measured in tomllib.loads(text)["measured"]:
        for score in measured.pop("scores"):
            references.append({**measured, **score})
    return references
