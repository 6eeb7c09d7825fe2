"""Small files that are read back: each is sealed, checked field by field, and named when it was
changed."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from efftrain_cli.data.corpus import open_corpus
from efftrain_cli.data.prepare import prepare
from efftrain_cli.foundation.errors import EfftrainError
from efftrain_cli.foundation.records import LARGEST, Record, digest_of, read_record, write_record
from efftrain_cli.recipe.recipe import dump_recipe, load_recipe
from efftrain_cli.recipe.sections import Data
from efftrain_cli.run.directory import Run
from efftrain_cli.run.manifest import verify_checkpoint
from efftrain_cli.run.origin import read_origin
from efftrain_cli.run.small_files import read_recipe_values
from efftrain_cli.run_list import read_runs
from efftrain_cli.study.registration import Registration
from efftrain_cli.zeroshot.results import read_results, save_result
from tests.damage import flips
from tests.faults.conftest import call
from tests.trained_run import make_run


class SmallFile(NamedTuple):
    """How a kind of file is made in a folder, and read by the function that its users read it
    by."""

    make: Callable[[Path], Path]
    read: Callable[[Path], Any]
    field: str
    """A field that may hold no list."""


def make_origin(folder: Path) -> Path:
    with Run.create("r", "seed = 1\n", {"recipe": "small", "data": {"vocab_size": 300}}) as run:
        return run.path / "origin.json"


def make_recipe(folder: Path) -> Path:
    recipe = load_recipe("small", ["train.tokens=8000"])
    with Run.create("r", dump_recipe(recipe), {"recipe": "small"}) as run:
        return run.path / "recipe.toml"


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
    monkeypatch.chdir(tmp_path)
    return tmp_path


def message_of(kind: str, path: Path) -> str:
    """The refusal of a file, which must be for the user, with exit code 3 and the file's name."""
    with pytest.raises(EfftrainError) as raised:
        FILES[kind].read(path)
    assert raised.value.exit_code == 3
    assert str(path) in str(raised.value)
    return str(raised.value)


# --- a changed bit --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", FILES)
def test_a_flipped_bit_is_found_before_use(home, kind):
    """F88: 50 in each."""
    path = FILES[kind].make(home)
    FILES[kind].read(path)
    for _ in flips(path, 50, seed=kind):
        message_of(kind, path)
    FILES[kind].read(path)


@pytest.mark.parametrize("kind", ["origin", "recipe", "plan", "zeroshot"])
def test_a_file_from_before_seals_is_read_as_before(home, kind):
    path = FILES[kind].make(home)
    whole = FILES[kind].read(path)
    if kind == "recipe":
        path.write_text(path.read_text().rpartition("\n#")[0])
    else:
        values = json.loads(path.read_text())
        for entry in values if kind == "zeroshot" else [values]:
            del entry["sha256"]
        path.write_text(json.dumps(values))
    read = FILES[kind].read(path)
    if isinstance(read, Record):
        read, whole = read.to_json(), whole.to_json()
    assert read == whole


@pytest.mark.parametrize("kind", ["origin", "recipe", "zeroshot"])
def test_verify_lists_a_damaged_file_and_counts_those_without_a_seal(home, kind):
    """F88: of the three small files of a run, two are sealed here."""
    run = make_origin(home).parent
    make_zeroshot(run)
    values = json.loads((run / "zeroshot.json").read_text())
    del values[0]["sha256"]
    (run / "zeroshot.json").write_text(json.dumps(values))
    code, message = call("runs", "verify", "r")
    assert (code, message) == (
        0,
        "r: 0 rows, 0 events, 0 checkpoints: no damage; 1 file without a seal\n",
    )
    name = {"recipe": "recipe.toml"}.get(kind, f"{kind}.json")
    content = (run / name).read_bytes()
    (run / name).write_bytes(content.replace(b"1", b"3", 1))
    code, message = call("runs", "verify", "r")
    assert code == 3 and f"{run / name} " in message


def test_verify_reads_the_files_of_a_study(home):
    folder = home / "runs" / "s-study"
    folder.mkdir(parents=True)
    path = make_plan(folder)
    assert call("runs", "verify", "s-study")[0] == 0
    path.write_text(path.read_text().replace("0.05", "0.06"))
    code, message = call("runs", "verify", "s-study")
    assert code == 3 and str(path) in message


# --- wrong values ---------------------------------------------------------------------------------


def with_field(text: str, key: str, value: str) -> str:
    """JSON text whose (first) object has another value, written as it stands, and no seal."""
    values = json.loads(text)
    entry = values[0] if isinstance(values, list) else values
    for seal in ("sha256", "file_sha256"):
        if key != "values":
            entry.pop(seal, None)
    entry[key] = "HERE"
    return json.dumps(values).replace('"HERE"', value)


VALUES = {
    "10,000 deep": "[" * 10_000 + "]" * 10_000,
    "an integer of 100,000 digits": "9" * 100_000,
    "an integer of 400 digits": "9" * 400,
    "a float beyond the largest": "1e400",
    "not a number": "NaN",
}


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("kind", JSON_FILES)
def test_a_value_that_nothing_can_hold(home, kind, value):
    """F89: in a field that this version does not know, too."""
    path = FILES[kind].make(home)
    whole = path.read_text()
    for key in (FILES[kind].field, "unknown_field"):
        path.write_text(with_field(whole, key, VALUES[value]))
        message = message_of(kind, path)
        if "digits" not in value and "deep" not in value:
            assert key in message, message


@pytest.mark.parametrize("kind", JSON_FILES)
def test_a_field_of_a_wrong_type_is_named(home, kind):
    """F89."""
    path = FILES[kind].make(home)
    path.write_text(with_field(path.read_text(), FILES[kind].field, '[["x"]]'))
    message = message_of(kind, path)
    assert FILES[kind].field in message, message


CONTENTS = {
    "empty": b"",
    "cut": b'{"schema_version": 1, "a',
    "a number": b"3",
    "not UTF-8": b'{"schema_version": 1, "a": "\xff"}',
    "a list of numbers": b"[1, 2]",
    "control characters": b'{"schema_version": 1, "\\u001b[2J": 1e999}',
}


@pytest.mark.parametrize("content", CONTENTS)
@pytest.mark.parametrize("kind", JSON_FILES)
def test_a_file_that_holds_something_else(home, kind, content):
    """F89; what it holds is escaped."""
    path = FILES[kind].make(home)
    path.write_bytes(CONTENTS[content])
    assert "\x1b" not in message_of(kind, path)


@pytest.mark.parametrize("kind", JSON_FILES)
def test_a_newer_format_is_named_as_such(home, kind):
    """F89: both versions."""
    path = FILES[kind].make(home)
    path.write_text(with_field(path.read_text(), "schema_version", "7"))
    newest = 3 if kind == "corpus" else 1
    assert f"has format 7, this efftrain reads formats up to {newest}" in message_of(kind, path)


@pytest.mark.parametrize("kind", FILES)
def test_size_and_kind_of_a_file_come_first(home, kind):
    path = FILES[kind].make(home)
    path.unlink()
    with path.open("wb") as file:
        file.truncate(LARGEST + 1)
    assert f"{LARGEST + 1:,} bytes" in message_of(kind, path)
    path.unlink()
    os.mkfifo(path)
    assert "not an ordinary file" in message_of(kind, path)


@pytest.mark.parametrize("kind", ["origin", "recipe"])
def test_an_unreadable_run_stops_no_list(home, kind):
    """F89: the run is named with its reason, the others are shown."""
    path = FILES[kind].make(home)
    with Run.create("other", "seed = 1\n", {}):
        pass
    path.write_bytes(path.read_bytes().replace(b"1", b"2", 1))
    found = {run.name: run for run in read_runs().itertuples()}
    assert found["other"].status == "not started" and not found["other"].problem
    assert found["r"].status == "unreadable" and str(path) in found["r"].problem
