"""zeroshot.json and its items: keyed, replaced whole, readable later."""

from __future__ import annotations

import json
from typing import Any

import pytest

from efftrain_cli.foundation.errors import DataError
from efftrain_cli.zeroshot.results import read_items, read_results, save_result


def entry(**changes: Any) -> dict[str, Any]:
    return {
        "schema_version": 1,
        "checkpoint_sha256": "a" * 64,
        "task": "piqa",
        "protocol": "lm-eval piqa v1.0",
        "limit": None,
        "value": 0.5,
        **changes,
    }


def test_the_same_key_replaces_and_another_adds(tmp_path):
    other = {"checkpoint_sha256": "b" * 64}
    save_result(tmp_path, entry(), [{"doc_id": 0, "acc": 1.0}, {"doc_id": 1, "acc": 0.0}])
    save_result(tmp_path, entry(limit=1), [{"doc_id": 0, "acc": 1.0}])
    save_result(tmp_path, entry(**other), [{"doc_id": 0, "acc": 0.0}])
    save_result(tmp_path, entry(value=0.75), [{"doc_id": 0, "acc": 0.5}])
    results = [(r["checkpoint_sha256"][0], r["limit"], r["value"]) for r in read_results(tmp_path)]
    assert results == [("a", 1, 0.5), ("b", None, 0.5), ("a", None, 0.75)]
    items = [(i["checkpoint_sha256"][0], i["limit"], i["acc"]) for i in read_items(tmp_path)]
    assert items == [("a", 1, 1.0), ("b", None, 0.0), ("a", None, 0.5)]


def test_what_json_cannot_hold_changes_nothing(tmp_path):
    save_result(tmp_path, entry(), [])
    with pytest.raises(ValueError):
        save_result(tmp_path, entry(value=float("nan")), [])
    assert read_results(tmp_path)[0]["value"] == 0.5
    assert {path.name for path in tmp_path.iterdir()} == {"zeroshot.json", "zeroshot_items.jsonl"}


@pytest.mark.parametrize(
    "content, words",
    [
        ("[1]", r"zeroshot\.json is damaged"),
        ('[{"task": "piqa"}]', r"zeroshot\.json is damaged"),
        (json.dumps([entry(schema_version=2)]), "update efftrain"),
    ],
)
def test_a_damaged_or_newer_file_is_refused(tmp_path, content, words):
    assert read_results(tmp_path) == read_items(tmp_path) == []
    (tmp_path / "zeroshot.json").write_text(content)
    with pytest.raises(DataError, match=words):
        read_results(tmp_path)
