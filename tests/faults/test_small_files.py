"""Small files that are read back: each is checked field by field, and named if it is not usable."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from pydantic import ValidationError

from efftrain_cli.data.corpus import open_corpus
from efftrain_cli.data.prepare import prepare
from efftrain_cli.foundation.errors import EfftrainError
from efftrain_cli.foundation.records import digest_of, read_record, write_record
from efftrain_cli.recipe.sections import Data
from efftrain_cli.run.directory import new_run, run_path
from efftrain_cli.run.manifest import verify_checkpoint
from efftrain_cli.run.origin import read_origin
from efftrain_cli.run.small_files import read_recipe_values
from efftrain_cli.run_list import read_runs
from efftrain_cli.study.registration import Registration
from efftrain_cli.zeroshot.results import read_results, save_result
from tests.faults.damage import call
from tests.trained_run import make_run


class SmallFile(NamedTuple):
    """How a kind of file is made in a folder, and read by the function that its users read it
    by."""

    make: Callable[[Path], Path]
    read: Callable[[Path], Any]
    field: str
    """A field that may hold no list."""


def make_origin(folder: Path) -> Path:
    with new_run("r", "seed = 1\n", {"recipe": "small", "data": {"vocab_size": 300}}):
        pass
    return run_path("r") / "origin.json"


def make_recipe(folder: Path) -> Path:
    return make_origin(folder).with_name("recipe.toml")


def make_plan(folder: Path) -> Path:
    values = {"alpha": 0.05, "arms.none.name": "none"}
    record = Registration(
        schema_version=1,
        registered="2026-11-22T00:00:00+00:00",
        values_sha256=digest_of(values),
        values=values,
        looks=[],
    )
    write_record(folder / "plan.json", record)
    return folder / "plan.json"


def make_zeroshot(folder: Path) -> Path:
    entry = {
        "schema_version": 1,
        "checkpoint_sha256": "a" * 64,
        "task": "piqa",
        "protocol": "p",
        "limit": None,
        "value": 0.5,
    }
    save_result(folder, entry, [])
    return folder / "zeroshot.json"


def make_manifest(folder: Path) -> Path:
    return make_run(folder, "r") / "checkpoints" / "step-00000010" / "manifest.json"


def make_corpus(folder: Path) -> Path:
    text = folder / "text.txt"
    text.write_text("".join(f"line {number} of a text\n" for number in range(4000)))
    corpus = prepare(Data(train=str(text), tokenizer="bpe:300", valid_fraction=0.1))
    return corpus.folder / "manifest.json"


FILES = {
    "origin": SmallFile(make_origin, lambda path: read_origin(path.parent), "data"),
    "plan": SmallFile(make_plan, lambda path: read_record(path, Registration), "registered"),
    "zeroshot": SmallFile(make_zeroshot, lambda path: read_results(path.parent), "task"),
    "manifest": SmallFile(make_manifest, lambda path: verify_checkpoint(path.parent), "files"),
    "corpus": SmallFile(make_corpus, lambda path: open_corpus(path.parent), "tokenizer"),
    "recipe": SmallFile(make_recipe, lambda path: read_recipe_values(path.parent), ""),
}
JSON_FILES = [kind for kind in FILES if kind != "recipe"]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EFFTRAIN_CACHE", str(tmp_path / "cache"))
    return tmp_path


def message_of(kind: str, path: Path) -> str:
    """The refusal of a file, which must be for the user, with exit code 3 and the file's name."""
    with pytest.raises(EfftrainError) as raised:
        FILES[kind].read(path)
    assert raised.value.exit_code == 3
    assert str(path) in str(raised.value)
    return str(raised.value)


def test_verify_names_a_damaged_file(home):
    run = make_origin(home).parent
    make_zeroshot(run)
    make_plan(run)
    assert call("runs", "verify", "r") == (0, "r: 0 rows, 0 events, 0 checkpoints: no damage\n")
    for name in ("origin.json", "recipe.toml", "zeroshot.json", "plan.json"):
        whole = (run / name).read_bytes()
        (run / name).write_bytes(b"seed =\n")
        code, message = call("runs", "verify", "r")
        assert code == 3 and f"{run / name} is damaged" in message
        (run / name).write_bytes(whole)


def test_a_file_name_that_is_not_utf_8_is_read_back(home):
    with new_run("r", "seed = 1\n", {"recipe": "a\udcff"}) as run:
        assert read_origin(run.path)["recipe"] == "a\udcff"


def test_a_record_is_not_changed(home):
    record = read_record(make_plan(home), Registration)
    with pytest.raises(ValidationError, match="frozen"):
        record.registered = ""


def test_a_digest_is_that_of_values_in_any_order():
    assert digest_of({"a": 1, "b": 2}) == digest_of({"b": 2, "a": 1}) != digest_of({"a": 2, "b": 1})


# --- wrong values ---------------------------------------------------------------------------------


def with_field(text: str, key: str, value: str) -> str:
    """JSON text whose (first) object has another value, written as it stands."""
    values = json.loads(text)
    entry = values[0] if isinstance(values, list) else values
    entry[key] = "HERE"
    return json.dumps(values).replace('"HERE"', value)


VALUES = {
    "10,000 deep": "[" * 10_000 + "]" * 10_000,
    "a float beyond the largest": "1e400",
    "of a wrong type": '[["x"]]',
}
CONTENTS = {
    "empty": b"",
    "cut": b'{"schema_version": 1, "a',
    "a number": b"3",
    "not UTF-8": b'{"schema_version": 1, "a": "\xff"}',
    "a list of numbers": b"[1, 2]",
}


@pytest.mark.parametrize("kind", JSON_FILES)
def test_a_file_that_cannot_be_used_is_named(home, kind):
    """F89: a field of a wrong type by its name; a newer format is neither damage nor ignored."""
    path = FILES[kind].make(home)
    whole = path.read_text()
    field = FILES[kind].field
    for value in VALUES.values():
        path.write_text(with_field(whole, field, value))
        message = message_of(kind, path)
    assert field in message
    for content in CONTENTS.values():
        path.write_bytes(content)
        message_of(kind, path)
    newest = 4 if kind == "corpus" else 1
    path.write_text(with_field(whole, "schema_version", str(newest - 1)))
    assert f"it has format {newest - 1}, not {newest}" in message_of(kind, path)
    path.write_text(with_field(whole, "schema_version", "7"))
    assert f"has format 7, this efftrain reads formats up to {newest}" in message_of(kind, path)


@pytest.mark.parametrize("kind", ["origin", "recipe"])
def test_size_and_kind_of_a_file_come_first(home, kind):
    """F97: a pipe would be waited for, and a huge file fills the memory. Other runs are shown."""
    path = FILES[kind].make(home)
    with new_run("other", "seed = 1\n", {}):
        pass
    path.unlink()
    with path.open("wb") as file:
        file.truncate(67_108_865)
    assert "67,108,865 bytes" in message_of(kind, path)
    path.unlink()
    os.mkfifo(path)
    assert "not an ordinary file" in message_of(kind, path)
    path.unlink()
    path.write_text("{")
    runs = {run.name: run for run in read_runs().itertuples()}
    assert runs["other"].status == "not started" and not runs["other"].problem
    assert runs["r"].status == "unreadable" and str(path) in runs["r"].problem
