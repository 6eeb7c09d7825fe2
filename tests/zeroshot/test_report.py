"""What eval-zeroshot prints of its entries, by hand."""

from __future__ import annotations

from typing import Any

import pytest

from efftrain_cli.zeroshot.report import result_lines
from efftrain_cli.zeroshot.suites import SUITES, TASKS


def entry(task: str, value: float, **changes: Any) -> dict[str, Any]:
    """An entry of zeroshot.json, as far as it is printed."""
    metric = TASKS[task].metric
    return {
        "task": task,
        "protocol": f"protocol of {task}",
        "limit": None,
        "step": 10,
        "context_length": 64,
        "dtype": "fp32",
        "metric": metric,
        "value": value,
        "metrics": {metric: {"value": value, "stderr": None}},
        "chance": TASKS[task].chance,
        "items": 3,
        "items_total": 3,
        "truncated": 0,
        "left_out": [],
        "lm_eval": "0.4.13",
        **changes,
    }


def printed(*entries: dict[str, Any], tasks: tuple[str, ...] = ()) -> str:
    return "\n".join(result_lines("r", entries, tasks, references=False))


def test_a_row_has_score_error_chance_items_and_cuts():
    """Two of three items under a limit, one right: 50 % +- 50 %, where guessing among four gives 25
    %."""
    metrics = {
        "acc": {"value": 0.0, "stderr": 0.0},
        "acc_norm": {"value": 0.5, "stderr": 0.5},
    }
    row = entry("hellaswag", 0.5, limit=2, items=2, items_total=3, metrics=metrics, truncated=7)
    lines = printed(row, entry("wikitext", 37.37)).split("\n")
    table = [line.split() for line in lines[2:6]]
    assert table == [
        ["task", "metric", "score", "±", "s.e.", "chance", "items", "cut"],
        ["hellaswag", "acc_norm", "50.00", "%", "50.00", "25", "%", "2/3", "7"],
        ["acc", "0.00", "%"],
        ["wikitext", "word_perplexity", "37.37", "3"],
    ]
    assert lines[1].startswith("first 2 items only where a task has more")


def test_left_out_items_are_named_up_to_five():
    left_out = [f"item {number}" for number in range(7)]
    assert (
        "piqa: 7 left out, as an answer alone is longer than the context: "
        "item 0, item 1, item 2, item 3, item 4, ...\n"
    ) in printed(entry("piqa", 0.5, left_out=left_out))


@pytest.mark.parametrize("limit, note", [(None, ""), (5, " of first items only")])
def test_the_mean_of_a_suite_is_unweighted(limit, note):
    """Ten tasks at 50 % and one at 28 %: 528 / 11 = 48."""
    entries = [entry(task, 0.5, limit=limit) for task in SUITES["slw-11"]]
    entries[3] = entry(SUITES["slw-11"][3], 0.28, limit=limit)
    assert f"\nslw-11: unweighted mean 48.00 %{note}" in printed(*entries, tasks=("slw-11",))


def test_a_suite_with_a_missing_task_has_no_mean():
    entries = [entry(task, 0.5) for task in SUITES["slw-11"][1:]]
    said = printed(*entries, tasks=("slw-11", "gpt2"))
    assert "no mean of slw-11: hellaswag missing" in said
    assert "gpt2" not in said
