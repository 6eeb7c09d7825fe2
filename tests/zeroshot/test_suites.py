"""Suites and their means; the published numbers beside them."""

from __future__ import annotations

import pytest

from efftrain_cli.foundation.errors import UsageError
from efftrain_cli.zeroshot.report import read_references
from efftrain_cli.zeroshot.suites import SUITES, TASKS, suite_mean, task_names
from tests.conftest import python


def test_names_stand_for_tasks_once():
    assert task_names(["piqa", "gpt2", "lambada_openai"]) == [
        "piqa", "lambada_openai", "lambada_last_token", "wikitext", "wikitext_strided",
    ]  # fmt: skip
    assert len(task_names(["slw-11"])) == 11 and len(task_names(["gpt3"])) == 19
    assert all(name in TASKS for tasks in SUITES.values() for name in tasks)


def test_every_unknown_name_is_said_with_the_nearest():
    with pytest.raises(UsageError) as error:
        task_names(["piqa", "hellaswg", "arc_hard", "slw11"])
    for word in (
        "'hellaswg' (did you mean hellaswag",
        "arc_challenge",
        "'slw11' (did you mean slw-11",
    ):
        assert word in str(error.value)


def test_the_mean_is_the_paper_s_and_needs_every_task():
    """GPT-3 125M over the eleven tasks: 33.57 as published by the authors' script (sum of eleven
    numbers / 11)."""
    gpt3 = {
        r["task"]: r["value"]
        for r in read_references()
        if r["model"] == "GPT-3 125M" and r["metric"] == TASKS[r["task"]].metric
    }
    assert 100 * suite_mean("slw-11", gpt3) == pytest.approx(33.57, abs=0.005)
    del gpt3["anli_r2"]
    with pytest.raises(ValueError, match="anli_r2 missing"):
        suite_mean("slw-11", gpt3)
    with pytest.raises(ValueError, match="no mean"):
        suite_mean("gpt2", {name: 0.5 for name in SUITES["gpt2"]})


def test_references_name_known_tasks_metrics_and_a_source():
    for reference in read_references():
        assert reference["metric"] in TASKS[reference["task"]].metrics, reference
        assert reference["protocol"] and reference["source"]
        if reference["metric"].startswith(("acc", "exact", "f1")):
            assert 0 <= reference["value"] <= 1, reference


def test_names_and_refusals_import_nothing_slow():
    code = (
        "import sys; from efftrain_cli.eval_zeroshot import EvalConfig, evaluate_run\ntry:"
        " next(evaluate_run('x', EvalConfig(tasks=('nope',))))\nexcept Exception as error: assert"
        " 'unknown task' in str(error), error\nslow = {'torch', 'lm_eval', 'datasets',"
        " 'transformers', 'pandas', 'wandb', 'matplotlib'} & set(sys.modules)\nassert not slow,"
        " slow"
    )
    python(code)
