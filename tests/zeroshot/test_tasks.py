"""Names of tasks and suites, and items from local files."""

from __future__ import annotations

from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from efftrain_cli.foundation.errors import DataError, UsageError
from efftrain_cli.zeroshot.tasks import SUITES, TASKS, TaskSpec, find_specs, load_tasks, suite_mean
from tests.conftest import python
from tests.fake_runs import write_jsonl

GPT3_125M = {
    "hellaswag": 0.337, "lambada_openai": 0.427, "triviaqa": 0.0415, "webqs": 0.0177,
    "winogrande": 0.52, "piqa": 0.646, "arc_challenge": 0.266, "arc_easy": 0.436,
    "anli_r1": 0.334, "anli_r2": 0.332, "anli_r3": 0.336,
}  # fmt: skip
"""As Megatron-DeepSpeed's ds_evalharness_gather_result.py lists them."""


def test_names_stand_for_tasks_once():
    names = [spec.name for spec in find_specs(["piqa", "gpt2", "lambada_openai", "blimp"], None)]
    assert names == ["piqa", "lambada_openai", "wikitext", "blimp"]
    assert (len(SUITES["slw-11"]), len(SUITES["gpt3"])) == (11, 18)
    assert all(name in TASKS for members in SUITES.values() for name in members)


def test_without_names_every_task_whose_file_is_there(tmp_path):
    for name in ("piqa.jsonl", "wikitext2_test_pages.jsonl", "other.jsonl"):
        (tmp_path / name).write_text("{}\n")
    assert [spec.name for spec in find_specs([], tmp_path)] == ["wikitext", "piqa"]


def test_the_mean_is_the_paper_s_and_needs_every_task():
    """33.57 as the authors' script prints it: the sum of eleven numbers / 11."""
    assert 100 * suite_mean("slw-11", GPT3_125M) == pytest.approx(33.57, abs=0.005)
    assert suite_mean("slw-11", {**GPT3_125M, "anli_r2": None}) is None
    assert suite_mean("gpt3", GPT3_125M) is None


def test_an_unknown_task_gets_the_nearest_names(tmp_path, monkeypatch):
    """The harness's own index, which takes 20 s to make, is asked."""
    tasks = pytest.importorskip("lm_eval.tasks")
    index = {True: SimpleNamespace(task_index={"hellaswag": ""})}
    monkeypatch.setattr(tasks, "TaskManager", lambda include_defaults: index[include_defaults])
    for name, advice in (
        ("hellaswg", "did you mean hellaswag"),
        ("zq", "`lm-eval ls tasks` lists"),
    ):
        with pytest.raises(UsageError, match=rf"{name}: .*\n  {advice}"):
            load_tasks(TaskSpec(name=name), None, tmp_path)


def test_a_field_that_an_item_lacks_is_named(tmp_path, monkeypatch):
    pytest.importorskip("lm_eval")
    piqa = {"goal": "Walk", "sol1": "home", "sol2": "away", "label": 0}
    write_jsonl(tmp_path / "piqa.jsonl", [piqa, {"goal": "Walk", "sol1": "home", "label": 0}])
    with pytest.raises(DataError, match=r"piqa\.jsonl: item 2 has no sol2"):
        load_tasks(TASKS["piqa"], tmp_path, tmp_path)
    (tmp_path / "piqa.jsonl").write_text('{"goal": "Walk", \n')
    again = tmp_path / "again"
    again.mkdir()
    with pytest.raises(DataError, match="piqa cannot be loaded"):
        load_tasks(TASKS["piqa"], tmp_path, again)
    load = Mock(side_effect=OSError(9999 * "x"))
    monkeypatch.setattr("lm_eval.tasks.TaskManager.load", load)
    with pytest.raises(DataError, match=r"piqa cannot be loaded: OSError: x{491}$"):
        load_tasks(TASKS["piqa"], tmp_path, again)


def test_names_and_refusals_import_nothing_slow():
    code = (
        "import sys; from efftrain_cli.eval_zeroshot import EvalConfig, evaluate_runs\n"
        "try: next(evaluate_runs(EvalConfig(), ['x']))\n"
        "except Exception as error: assert 'no tasks given' in str(error), error\n"
        "slow = {'torch', 'tqdm', 'lm_eval', 'datasets', 'transformers', 'pandas', 'wandb'}\n"
        "assert not slow & set(sys.modules), slow & set(sys.modules)"
    )
    python(code)
