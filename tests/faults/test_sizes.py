"""Sizes that no computer holds are refused before memory is taken for them: one message, in
seconds."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from efftrain_cli.data import documents as reader
from efftrain_cli.data.text import BadDocuments, TextFile
from efftrain_cli.foundation.errors import CheckpointError, DataError, RecipeError
from efftrain_cli.model.hf import read_hf
from efftrain_cli.recipe.recipe import load_recipe
from tests.launch import BASELINE

LITTLE_MEMORY = """
import resource
from pathlib import Path
pages = int(Path("/proc/self/statm").read_text().split()[0])
limit = pages * resource.getpagesize() + (1 << 30)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
"""
"""Lets a process take a gigabyte more than it has."""

LARGE = ("--set", "model.n_embd=100000", "--set", "model.n_layer=1000")


@pytest.mark.parametrize(
    "words, code, message",
    [
        (("sweep", "--seeds", "0..1000000000"), 2, "1,000,000,001 runs are more than the 10,000"),
        (("sweep", "--seeds", f"0..{'9' * 100_000}"), 2, "write 0..4"),
        (("pretrain", "--plan", "--set", "model.n_embd=1000000000"), 2, "at most 131072"),
        (("pretrain", "--plan", "--set", "model.n_layer=100000000"), 2, "at most 1024"),
        (("bench", *LARGE), 5, "a model of 120T parameters needs 1920.0 TB"),
        (("pretrain", "--name", "r", *LARGE), 5, "a model of 120T parameters needs 1920.0 TB"),
    ],
    ids=lambda part: " ".join(part)[:40] if isinstance(part, tuple) else None,
)
def test_numbers_on_the_command_line(lab, words, code, message):
    """F97."""
    recipe = ("--recipe", lab.recipe())
    errors = lab.call(words[0], *recipe, *words[1:], inject=LITTLE_MEMORY, code=code).errors
    assert message in errors and "Traceback" not in errors
    assert not (lab.folder / "runs" / "r").exists()


def test_growth_factors(lab):
    """F97: by the sizes that are believed, then by the memory that the grown model needs."""
    lab.train("r", "--steps", "1")
    for operator, code, message in (
        ("width:1000", 2, "the stages grow model.n_head to 2000: input should be less"),
        ("depth:100000", 2, "the stages grow model.n_layer to 200000: input should be less"),
        (f"depth:{'9' * 5000}", 2, "the factor must be a whole number"),
        ("width:500 depth:500", 5, "a model of 12.3T parameters needs 196.6 TB"),
    ):
        words = [word for each in operator.split() for word in ("--operator", each)]
        errors = lab.call("grow", "r", *words, inject=LITTLE_MEMORY, code=code).errors
        assert message in errors, errors
        assert not lab.run("r-grown").exists()


def test_a_recipe_with_thousands_of_mistakes(tmp_path):
    """F97: they are counted, and the first hundred told."""
    path = tmp_path / "many.toml"
    path.write_text(BASELINE + "".join(f"unknown_{i} = {i}\n" for i in range(4000)))
    with pytest.raises(RecipeError) as raised:
        load_recipe(str(path))
    text = str(raised.value)
    assert "has 4,000 mistakes" in text and text.endswith("and 3,900 more")
    assert "checkpoint.unknown_99 " in text and "checkpoint.unknown_100 " not in text
    assert len(raised.value.problems) == 4000


def documents(path: Path, kind: str) -> list[str]:
    source = TextFile(path, kind)  # type: ignore[arg-type]
    return [found.text for found in reader.read_documents(source, "text", BadDocuments("error"))]


def test_a_parquet_file_that_unpacks_to_gigabytes(tmp_path):
    """F97: a dictionary of one text of a megabyte, and 4,000 rows that name it."""
    path = tmp_path / "text.parquet"
    indices = pyarrow.array([0] * 4000, pyarrow.int32())
    texts = pyarrow.DictionaryArray.from_arrays(indices, pyarrow.array(["x" * 1_000_000]))
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), path, row_group_size=4000)
    read = 0
    with pytest.raises(DataError, match="unpack to more than 268,435,456"):
        for _ in reader.read_documents(TextFile(path, "parquet"), "text", BadDocuments("error")):
            read += 1
    assert read == 268


def test_a_parquet_page_that_unpacks_too_far_is_not_read(tmp_path, monkeypatch):
    """F97: its pages hold 3 MB in a few hundred bytes, and its footer says so."""
    monkeypatch.setattr(reader, "UNPACKED_BYTES", 1 << 20)
    path = tmp_path / "text.parquet"
    table = pyarrow.table({"id": [0] * 30, "text": ["a" * 100_000] * 30})
    pyarrow.parquet.write_table(table, path, use_dictionary=False, compression="zstd")
    source = TextFile(path, "parquet")
    with pytest.raises(DataError, match=r"unpack to more than 1,048,576"):
        next(reader.read_documents(source, "text", BadDocuments("error")))


def test_compressed_text_that_unpacks_to_more_than_text_does(tmp_path, monkeypatch):
    """F71, F97: lines, and one line; what is as long uncompressed is read."""
    monkeypatch.setattr(reader, "UNPACKED_BYTES", 1 << 20)
    line = json.dumps({"text": "a" * 1000}) + "\n"
    for name, content in (("lines", line * 3000), ("line", json.dumps({"text": "a" * 3_000_000}))):
        path = tmp_path / f"{name}.jsonl.zst"
        with pyarrow.CompressedOutputStream(str(path), "zstd") as file:
            file.write(content.encode())
        with pytest.raises(DataError, match="unpack to more than 1,048,576"):
            documents(path, "jsonl")
        path = tmp_path / f"{name}.jsonl"
        path.write_text(content)
        assert sum(map(len, documents(path, "jsonl"))) == 3_000_000


def test_a_row_that_is_too_long(tmp_path, monkeypatch):
    """F71, F97."""
    monkeypatch.setattr(reader, "LINE_BYTES", 1000)
    path = tmp_path / "text.parquet"
    table = pyarrow.table({"text": ["short", "x" * 1001]})
    pyarrow.parquet.write_table(table, path)
    with pytest.raises(DataError, match="row 2: a line of 1,001 bytes; at most 1,000 are read"):
        documents(path, "parquet")


@pytest.mark.parametrize("kind", ["a pipe", "/dev/zero"])
def test_what_is_no_ordinary_file_is_not_read(tmp_path, kind):
    """F97: a pipe would be waited for, and /dev/zero never ends."""

    def place(path: Path) -> Path:
        path.parent.mkdir(exist_ok=True)
        if kind == "a pipe":
            os.mkfifo(path)
        else:
            path.symlink_to("/dev/zero")
        return path

    config = place(tmp_path / "hf" / "config.json")
    with pytest.raises(CheckpointError, match=r"config\.json .*not an ordinary file"):
        read_hf(config.parent)
    place(tmp_path / "text.toml")
    with pytest.raises(RecipeError, match="there is no recipe file"):
        load_recipe(str(tmp_path / "text.toml"))
