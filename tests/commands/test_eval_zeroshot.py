"""`efftrain eval-zeroshot` as a user meets it: what is written, what is refused and with which exit
code."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import pytest

from efftrain_cli import eval_zeroshot
from efftrain_cli.eval_zeroshot import result_lines
from efftrain_cli.foundation.errors import CheckpointError, DataError, UsageError
from efftrain_cli.zeroshot.results import read_items, read_results
from efftrain_cli.zeroshot.tasks import SUITES, TASKS
from tests.conftest import cli, invoke
from tests.fake_runs import write_jsonl, write_sealed
from tests.trained_run import make_run

PIQA = [
    {"goal": f"Find the {thing}", "sol1": "lantern", "sol2": "ship", "label": 0} for thing in "abc"
]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_run(tmp_path)


@pytest.fixture
def sets(tmp_path: Path) -> Path:
    """A --data-dir with three items of PIQA."""
    folder = tmp_path / "sets"
    folder.mkdir()
    write_jsonl(folder / "piqa.jsonl", PIQA)
    return folder


def evaluate(line: str, *words: str) -> Any:
    return cli(f"eval-zeroshot {line}", *words)


def test_local_sets_with_a_limit(efftrain, run, sets):
    """In its own process: the libraries' switches for the Hub are read once."""
    pytest.importorskip("lm_eval")
    result = efftrain(f"eval-zeroshot random --data-dir {sets} --limit 2")
    assert result.stdout.startswith("random, step 10, context 64, fp32\n")
    assert result.stdout.splitlines()[2].split()[-1] == "2/3"
    assert "warning" not in result.stderr
    assert re.fullmatch(r"piqa: 2 items in \d+ m?s", result.stderr.splitlines()[-1])
    (entry,) = read_results(run)
    manifest = json.loads((run / "checkpoints" / "step-00000010" / "manifest.json").read_text())
    assert entry["checkpoint_sha256"] == manifest["files"]["model.safetensors"]["sha256"]
    key = ("task", "limit", "items", "items_total", "step", "context_length", "dtype")
    assert [entry[name] for name in key] == ["piqa", 2, 2, 3, 10, 64, "fp32"]
    assert entry["source"] == "piqa.jsonl" and len(entry["data_sha256"]) == 64
    assert entry["protocol"] == "lm-eval piqa v1.0 0-shot of piqa.jsonl"
    assert set(entry["metrics"]) == {"acc", "acc_norm"} and entry["metric"] == "acc_norm"


def test_the_same_question_again_replaces_its_answer(run, sets, monkeypatch):
    """A limit that leaves nothing out is none; other batches move no score."""
    pytest.importorskip("lm_eval")
    monkeypatch.delenv("TQDM_DISABLE", raising=False)
    monkeypatch.setattr(eval_zeroshot, "hub_unreachable", None)  # the Hub is not asked
    evaluate(f"random --data-dir {sets}")
    assert os.environ["TQDM_DISABLE"] == "1", "the libraries show no bars"
    again = evaluate(
        f"random --tasks piqa --data-dir {sets} --limit 3 --batch-tokens 70 --format json"
    )
    (entry,) = read_results(run)
    (shown,) = json.loads(again.stdout)
    assert shown["run"] == "random" and shown["value"] == entry["value"]
    shares = [item["acc_norm"] for item in read_items(run)]
    assert len(shares) == 3 and entry["value"] == pytest.approx(mean(shares))
    assert entry["stderr"] == pytest.approx(stdev(shares) / 3**0.5)


def test_a_text_is_read_in_windows_that_its_protocol_names(run, sets):
    pytest.importorskip("lm_eval")
    write_jsonl(sets / "wikitext2_test_pages.jsonl", [{"page": "Anna found the ship"}])
    evaluate(f"random --tasks wikitext --data-dir {sets} --stride 32")
    (entry,) = read_results(run)
    read = "0-shot of wikitext2_test_pages.jsonl window 64 stride 32"
    assert entry["protocol"] == f"lm-eval wikitext v2.0 {read}"


def test_a_missing_extra_is_said_with_its_command(run, monkeypatch):
    monkeypatch.setattr(eval_zeroshot, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"pip install '\.\[eval\]'"):
        evaluate("random --tasks piqa")


def test_refusals(run, sets, tmp_path):
    pytest.importorskip("lm_eval")
    data = f"--data-dir {sets}"
    for line, kind, words in (
        (f"randon {data}", UsageError, "did you mean random"),
        (f"random {data} --checkpoint 7", UsageError, "checkpoints of steps 10"),
        (f"random {data} --context-length 65", UsageError, "has 64 positions"),
        (f"random {data} --context-length 1", UsageError, "give 2 to 64"),
        (f"random {data} --stride 65", UsageError, "give at most its 64 tokens"),
        (f"random --data-dir {tmp_path}/no", DataError, "no such folder"),
    ):
        with pytest.raises(kind, match=re.escape(words)):
            evaluate(line)
    (run / "checkpoints" / "step-00000010" / "progress.json").unlink()
    with pytest.raises(CheckpointError):
        evaluate(f"random {data}")
    assert not (run / "zeroshot.json").exists()


def test_missing_items_are_all_named_before_anything_is_scored(run, sets, monkeypatch):
    """F77: PIQA could be scored; nothing is, and one message says which files would do."""
    pytest.importorskip("lm_eval")
    monkeypatch.setattr(eval_zeroshot, "hub_unreachable", lambda: "no network")
    with pytest.raises(DataError) as error:
        evaluate(f"random --data-dir {sets} --tasks piqa,lambada_openai,webqs")
    for word in ("lambada_openai cannot be loaded", "a folder with lambada_openai.jsonl, webqs"):
        assert word in str(error.value)
    assert not (run / "zeroshot.json").exists()


def test_a_warmup_that_has_not_ended_is_evaluated_as_far_as_it_came(tmp_path, sets):
    pytest.importorskip("lm_eval")
    run = make_run(tmp_path, overrides=("seq_len_warmup.start=8", "seq_len_warmup.steps=100"))
    # 40 at the checkpoint's step 10; what came after it does not count.
    rows = [{"step": step, "seq_len": 4 * step} for step in range(1, 17)]
    write_sealed(run / "metrics.jsonl", rows)
    result = evaluate(f"random --data-dir {sets}")
    assert "sequences of at most 40 of its 64 positions" in result.stderr
    assert read_results(run)[0]["context_length"] == 40
    write_sealed(run / "metrics.jsonl", [{"step": 10, "seq_len": 65}])
    evaluate(f"random --data-dir {sets}")
    assert read_results(run)[-1]["context_length"] == 64, "never longer than its positions"


def sets_in(folder: Path, tmp_path: Path) -> str:
    """A task of one's own as the harness takes one: a YAML file and its items."""
    folder.mkdir()
    items = [{"q": "Anna found the", "a": ["lantern", "ship"], "gold": n % 2} for n in range(6)]
    items.append(
        {"q": "It was", "a": ["cold " * 200, "x"], "gold": 0}
    )  # longer than the context of 64 by itself
    items.append(
        {"q": "long ago " * 300, "a": ["ship", "garden"], "gold": 0}
    )  # its beginning is cut
    write_jsonl(folder / "items.jsonl", items)
    settings = {
        "task": "my_choice",
        "dataset_path": "json",
        "dataset_kwargs": {
            "data_files": {"test": str(folder / "items.jsonl")},
            "cache_dir": str(tmp_path / "datasets"),
        },
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{q}}",
        "doc_to_choice": "a",
        "doc_to_target": "gold",
        "metric_list": [{"metric": "acc"}],
        "metadata": {"version": 3.0},
    }
    (folder / "mine.yaml").write_text(json.dumps(settings))
    return str(folder / "mine.yaml")


def test_items_that_do_not_fit(run, tmp_path):
    """F77: a long context is cut and counted; an answer longer than the context is left out and
    named."""
    pytest.importorskip("lm_eval")
    result = evaluate(f"random --tasks {sets_in(tmp_path / 'mine', tmp_path)}")
    assert "my_choice: items 6 were not scored: an answer has no tokens, or more" in result.stdout
    (entry,) = read_results(run)
    key = ("items", "items_total", "unscored", "limit", "source")
    assert [entry[name] for name in key] == [7, 8, [6], None, "harness"]
    assert entry["truncated"] == 2  # both answers of the item with the long context
    assert entry["protocol"] == "lm-eval my_choice v3.0 0-shot without 1 item"
    items = list(read_items(run))
    assert [item["doc_id"] for item in items] == [0, 1, 2, 3, 4, 5, 7]
    assert entry["value"] == pytest.approx(sum(item["acc"] for item in items) / 7)
    assert entry["stderr"] is not None


def test_a_task_or_run_that_fails_leaves_the_others(run, sets, tmp_path, monkeypatch):
    """Named at the end, exit code 3; what was scored is written and shown."""
    pytest.importorskip("lm_eval")
    from efftrain_cli.zeroshot import score

    make_run(tmp_path, "other")
    (tmp_path / "runs" / "other" / "tokenizer.json").unlink()
    write_jsonl(sets / "webqs.jsonl", [{"question": "who?", "answers": ["Anna"]}])
    real = score.score_task

    def fail(task: Any, *rest: Any) -> Any:
        if task.task_name == "webqs":
            raise ZeroDivisionError("no words")
        return real(task, *rest)

    monkeypatch.setattr(score, "score_task", fail)
    result = invoke(f"eval-zeroshot other random --data-dir {sets}")
    assert isinstance(result.exception, DataError)
    for words in ("other: ", "tokenizer.json is missing", "random: webqs: ZeroDivisionError"):
        assert words in str(result.exception)
    assert [entry["task"] for entry in read_results(run)] == ["piqa"]
    assert "piqa" in result.stdout


def entry(task: str, value: float, **changes: Any) -> dict[str, Any]:
    """An entry of zeroshot.json, as far as it is printed."""
    return {
        "task": task,
        "step": 1234,
        "context_length": 64,
        "dtype": "fp32",
        "metric": TASKS[task].metric,
        "value": value,
        "stderr": None,
        "chance": TASKS[task].chance,
        "items": 3,
        "items_total": 3,
        "unscored": [],
        **changes,
    }


def test_a_row_has_score_error_chance_and_items():
    """Two of 3,000 items under a limit, all right, and a perplexity."""
    half = entry("hellaswag", 1.0, stderr=0.5, items=2, items_total=3000)
    first, *table = result_lines("r", [half, entry("wikitext", 37.37)], [])
    assert first == "r, step 1,234, context 64, fp32"
    assert [line.split() for line in table] == [
        ["task", "metric", "score", "±", "s.e.", "chance", "items"],
        ["hellaswag", "acc_norm", "1.0000", "0.5000", "0.25", "2/3,000"],
        ["wikitext", "word_perplexity", "37.37", "3"],
    ]


def test_the_mean_of_a_whole_suite_that_was_asked_for_is_the_last_row():
    entries = [entry(task, 0.5) for task in SUITES["slw-11"]]
    *_, last = result_lines("r", entries, ["slw-11"])
    assert last.split() == ["mean", "of", "slw-11", "0.5000"]
    for scored, names in ((entries, ["piqa"]), (entries[1:], ["slw-11"])):
        assert "mean" not in "".join(result_lines("r", scored, names))
