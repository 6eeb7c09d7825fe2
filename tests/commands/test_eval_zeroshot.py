"""`efftrain eval-zeroshot` as a user meets it: what is written, what is refused and with which exit
code."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from efftrain_cli.foundation.errors import CheckpointError, DataError, UsageError
from efftrain_cli.zeroshot import harness
from efftrain_cli.zeroshot.results import read_items, read_results
from tests.conftest import cli, invoke
from tests.fake_runs import write_jsonl
from tests.trained_run import make_run


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_run(tmp_path)


def efftrain(line: str, *words: str) -> Any:
    return cli(f"eval-zeroshot {line}", *words)


def test_offline_is_the_default_and_needs_nothing(run, monkeypatch):
    monkeypatch.setattr(
        harness, "find_spec", lambda name: None
    )  # as if the extra were not installed
    result = efftrain("random")
    assert "offline_cloze" in result.stdout and "bits_per_byte" in result.stdout
    entries = read_results(run)
    assert [entry["task"] for entry in entries] == ["offline_cloze", "offline_bytes"]
    entry = entries[0]
    manifest = json.loads((run / "checkpoints" / "step-00000010" / "manifest.json").read_text())
    assert entry["checkpoint_sha256"] == manifest["files"]["model.safetensors"]["sha256"]
    assert (entry["step"], entry["limit"], entry["context_length"], entry["dtype"]) == (
        10,
        None,
        64,
        "fp32",
    )
    items = [item for item in read_items(run) if item["task"] == "offline_cloze"]
    assert len(items) == entry["items"] > 5
    assert entry["value"] == pytest.approx(sum(item["acc"] for item in items) / len(items))

    again = efftrain("random --format json --batch-tokens 70 --tasks offline_bytes")
    assert json.loads(again.stdout)[0]["value"] == pytest.approx(entries[1]["value"], rel=1e-5)
    efftrain("random --limit 100000")  # leaves nothing out
    assert len(read_results(run)) == 2  # the same question again replaces its answer


def test_a_missing_extra_is_said_with_its_command(run, monkeypatch):
    monkeypatch.setattr(harness, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"pip install '\.\[eval\]'"):
        efftrain("random --tasks piqa")


@pytest.mark.slow
def test_local_sets_with_a_limit(run, tmp_path):
    pytest.importorskip("lm_eval")
    folder = tmp_path / "sets"
    folder.mkdir()
    lines = [
        {"goal": f"Find the {thing}", "sol1": "lantern", "sol2": "ship", "label": 0}
        for thing in "abc"
    ]
    write_jsonl(folder / "piqa.jsonl", lines)
    # In its own process: the libraries' switches for the Hub and their bars are read once, at
    # import.
    command = [
        sys.executable,
        "-m",
        "efftrain_cli",
        "eval-zeroshot",
        "random",
        "--data-dir",
        str(folder),
        "--limit",
        "2",
    ]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parent.parent.parent)}
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=120, env=env, check=False
    )
    assert result.returncode == 0, result.stderr
    assert (
        "first 2 items only where a task has more: not comparable with full scores" in result.stdout
    )
    assert (
        result.stderr.splitlines()[-1].startswith("piqa: 2 items in ")
        and len(result.stderr.splitlines()) < 4
    )
    (entry,) = read_results(run)
    assert (entry["task"], entry["limit"], entry["items"], entry["items_total"]) == (
        "piqa",
        2,
        2,
        3,
    )
    assert entry["source"] == "piqa.jsonl" and len(entry["data_sha256"]) == 64
    assert set(entry["metrics"]) == {"acc", "acc_norm"} and entry["metric"] == "acc_norm"
    with (folder / "piqa.jsonl").open("a") as file:
        file.write("{torn")
    with pytest.raises(DataError, match=r"piqa\.jsonl:4"):
        efftrain(f"random --data-dir {folder}")


def test_refusals(run, tmp_path):
    for line, kind, words in (
        ("random --tasks offlin", UsageError, "did you mean offline"),
        ("randon", UsageError, "did you mean random"),
        ("random --checkpoint 7", UsageError, "checkpoints of steps 10"),
        ("random --context-length 65", UsageError, "has 64 positions"),
        ("random --stride 65", UsageError, "the context\n  give at most its 64 tokens"),
        ("random --context-length 0", UsageError, "give 2 to 64"),
        (f"random --data-dir {tmp_path}/no", DataError, "no such folder"),
    ):
        with pytest.raises(kind, match=re.escape(words)):
            efftrain(line)
    for option in ("--limit 0", "--dtype fp8"):
        assert invoke(f"eval-zeroshot random {option}").exit_code == 2
    (run / "checkpoints" / "step-00000010" / "progress.json").unlink()
    with pytest.raises(CheckpointError):
        efftrain("random")
    assert not (run / "zeroshot.json").exists()


def test_a_warmup_that_has_not_ended_is_evaluated_as_far_as_it_came(tmp_path):
    run = make_run(tmp_path, overrides=("seq_len_warmup.start=8", "seq_len_warmup.steps=100"))
    # 40 at the checkpoint's step 10; what came after it does not count.
    rows = [{"step": step, "seq_len": 4 * step} for step in range(1, 17)]
    write_jsonl(run / "metrics.jsonl", rows)
    result = efftrain("random --tasks offline_bytes")
    assert "sequences of at most 40 of its 64 positions" in result.stderr
    assert read_results(run)[0]["context_length"] == 40


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


def test_any_yaml_by_the_harness_and_items_that_do_not_fit(run, tmp_path):
    """F77: a long context is cut and counted; an answer longer than the context is left out and
    named; the next task is scored; the table is printed whatever failed."""
    pytest.importorskip("lm_eval")
    task = sets_in(tmp_path / "sets", tmp_path)
    broken = tmp_path / "broken.yaml"
    broken.write_text(
        json.dumps(
            {
                **json.loads(Path(task).read_text()),
                "task": "broken",
                "doc_to_text": "{{nothing.at.all}}",
            }
        )
    )
    result = invoke("eval-zeroshot random --tasks", f"{broken},{task},offline_bytes")
    assert isinstance(result.exception, DataError), result.output
    assert "1 of 3 tasks could not be scored" in str(result.exception) and "broken.yaml: " in str(
        result.exception
    )
    assert (
        "my_choice: 1 left out, as an answer alone is longer than the context: item 6"
        in result.stdout
    )
    assert "offline_bytes" in result.stdout
    entry = next(entry for entry in read_results(run) if entry["task"] == "my_choice")
    assert (entry["items"], entry["items_total"], entry["left_out"], entry["limit"]) == (
        7,
        8,
        ["item 6"],
        None,
    )
    assert entry["truncated"] == 2  # both answers of the item with the long context
    assert entry["protocol"].startswith(
        "harness's default protocol: lm-eval my_choice v3.0 0-shot without 1 items"
    )
    items = [item for item in read_items(run) if item["task"] == "my_choice"]
    assert [item["doc_id"] for item in items] == [0, 1, 2, 3, 4, 5, 7]
    assert entry["value"] == pytest.approx(sum(item["acc"] for item in items) / 7)
    assert entry["stderr"] is not None


def test_the_source_of_a_yaml_is_the_file_that_it_names(run, tmp_path):
    """The YAML calls its task piqa, and --data-dir has a file for the task of that name."""
    pytest.importorskip("lm_eval")
    folder = tmp_path / "sets"
    task = Path(sets_in(folder, tmp_path))
    task.write_text(task.read_text().replace("my_choice", "piqa"))
    write_jsonl(folder / "piqa.jsonl", [{"goal": "g", "sol1": "a", "sol2": "b", "label": 0}])
    efftrain("random", "--tasks", str(task), "--data-dir", str(folder))
    (entry,) = read_results(run)
    assert (entry["task"], entry["source"]) == ("piqa", "items.jsonl")
    items = (folder / "items.jsonl").read_bytes()
    assert entry["data_sha256"] == hashlib.sha256(items).hexdigest()


def test_the_offline_suite_is_of_the_run_s_own_text(run, tmp_path):
    """The text has changed since: the run's origin has another hash of its validation tokens."""
    origin = json.loads((run / "origin.json").read_text())
    origin.pop("sha256")
    origin["data"]["valid_hash"] = "e" * 64
    (run / "origin.json").write_text(json.dumps(origin))
    with pytest.raises(DataError, match="another validation text than the run has"):
        efftrain("random")
    origin["data"]["valid_hash"] = None  # an imported run's
    (run / "origin.json").write_text(json.dumps(origin))
    efftrain("random", "--tasks", "offline_bytes")


def test_several_runs_and_an_exported_directory(run, tmp_path, monkeypatch):
    pytest.importorskip("lm_eval")
    monkeypatch.chdir(tmp_path)
    cli("export random --out hf")
    task = sets_in(tmp_path / "sets", tmp_path)
    result = efftrain(f"random hf --tasks {task} --format json")
    of_run, of_export = json.loads(result.stdout)
    assert (of_run["run"], of_export["run"]) == ("random", "hf")
    assert of_run["value"] == of_export["value"] and of_export["step"] == 10
    assert [entry["task"] for entry in read_results(tmp_path / "hf")] == ["my_choice"]
    with pytest.raises(UsageError, match="exported directory"):
        efftrain("hf")


def test_task_names_of_the_harness_are_known_without_loading_it(run):
    pytest.importorskip("lm_eval")
    assert harness.foreign_tasks(["piqa", "offline", "blimp", "no_such_task_anywhere"]) == ["blimp"]
    with pytest.raises(UsageError, match="no such file"):
        harness.foreign_tasks(["no_such.yaml"])
