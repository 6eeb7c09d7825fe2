"""Local evaluation files: what is accepted, and how the rest is refused."""

from __future__ import annotations

import json

import pytest

from efftrain_cli.data.hub import hub_unreachable
from efftrain_cli.foundation.errors import DataError
from efftrain_cli.zeroshot.harness import require_data
from efftrain_cli.zeroshot.local_data import check_items, example, tasks_in
from efftrain_cli.zeroshot.suites import TASKS


def test_every_form_s_example_is_of_that_form(tmp_path):
    for task in TASKS.values():
        assert bool(task.form) == bool(task.definition)
        if task.form:
            path = tmp_path / str(task.file)
            path.write_text(f"{example(task.form)}\n\n{example(task.form)}\n")
            assert check_items(path, task.form) == 2


@pytest.mark.parametrize(
    "line, message",
    [
        (b'{"query": "q", "choices": ["a", "b"], "gold": 2}', "gold: 2 is not an index into"),
        (b'{"query": "q", "choices": ["a", "b"], "gold": -1}', "gold: Input should be greater"),
        (
            b'{"query": "q", "choices": ["a", "b"], "gold": true}',
            "gold: Input should be a valid in",
        ),
        (b'{"query": "q", "choices": [], "gold": 0}', "choices: List should have at least 1"),
        (
            b'{"query": "q", "choices": ["a", 1], "gold": 0}',
            "choices.1: Input should be a valid st",
        ),
        (b'{"query": 3, "choices": ["a"], "gold": 0}', "query: Input should be a valid string"),
        (b'{"query": "q", "choices": ["a"]}', "gold: Field required; a line looks like {"),
        (b'{"query": "q", "choi', "Invalid JSON: EOF while parsing"),
        (b'["q"]', "Input should be an object"),
        (b'{"query": "\xff"}', "Invalid JSON: invalid unicode"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, message):
    path = tmp_path / "hellaswag.jsonl"
    form = TASKS["hellaswag"].form
    good = example(form).encode()
    path.write_bytes(good + b"\n" + good + b"\n" + line + b"\n" + good + b"\n")
    with pytest.raises(DataError) as error:
        check_items(path, form)
    assert f"hellaswag.jsonl:3: {message}" in str(error.value)
    assert error.value.exit_code == 3


def test_an_empty_file_and_an_empty_folder(tmp_path):
    with pytest.raises(DataError, match="none of the files"):
        tasks_in(tmp_path)
    with pytest.raises(DataError, match="no such folder"):
        tasks_in(tmp_path / "x")
    (tmp_path / "piqa.jsonl").write_text("\n")
    assert tasks_in(tmp_path) == ["piqa"]
    with pytest.raises(DataError, match="holds no items"):
        require_data(["piqa"], tmp_path)


def test_all_missing_sets_are_said_at_once(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.delenv("HF_DATASETS_CACHE", raising=False)
    (tmp_path / "piqa.jsonl").write_text(
        json.dumps({"goal": "g", "sol1": "a", "sol2": "b", "label": 1})
    )
    with pytest.raises(DataError) as error:
        require_data(
            ["piqa", "hellaswag", "anli_r1", "lambada_last_token", "lambada_openai"], tmp_path
        )
    message = str(error.value)
    assert "3 evaluation sets missing" in message and error.value.exit_code == 3
    for word in (
        "Rowan/hellaswag",
        "anli_r1.jsonl",
        "EleutherAI/lambada_openai",
        "HF_HUB_OFFLINE is set",
        "--tasks offline",
    ):
        assert word in message
    assert "baber/piqa" not in message
    # What the library has in its own cache is there.
    (tmp_path / "hf" / "datasets" / "Rowan___hellaswag").mkdir(parents=True)
    require_data(["piqa", "hellaswag"], tmp_path)


def test_local_sets_leave_the_hub_to_the_rest_of_the_program(tmp_path, monkeypatch):
    """After local sets have been checked, other data of the run may still come from the Hub."""
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "HTTPS_PROXY", "https_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    (tmp_path / "piqa.jsonl").write_text(example(TASKS["piqa"].form))
    assert not require_data(["piqa"], tmp_path)
    assert hub_unreachable() == "127.0.0.1:9 does not answer within 1 s (no network?)"


@pytest.mark.slow
def test_the_real_sets_are_of_these_forms(shared_data):
    folder = shared_data / "evalpack"
    counts = {}
    for name in tasks_in(folder):
        task = TASKS[name]
        if task.form:
            counts[name] = check_items(folder / str(task.file), task.form)
    assert (
        counts["hellaswag"] == 10042
        and counts["lambada_openai"] == 5153
        and counts["wikitext"] == 62
    )
    assert len(counts) == 13
