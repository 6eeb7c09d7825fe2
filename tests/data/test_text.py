"""Text sources: what is found, how documents are read, and what is said of those that cannot be
(F39)."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from efftrain_cli.data.documents import cut_at_line, read_documents
from efftrain_cli.data.text import BadDocuments, HubDataset, find_text, stdlib_files
from efftrain_cli.foundation.errors import DataError
from efftrain_cli.recipe.sections import Data
from tests.data.conftest import texts


def complaint(path: Path, content: bytes | None = None, *, field: str = "text") -> str:
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError) as refused:
        texts(path, field=field)
    return str(refused.value)


def test_files_folders_and_globs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("b/2.txt", "b/1.txt", "b/deep/3.jsonl", "b/note.md", "b/.hidden/4.txt", "a.txt"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x")

    def found(*spec: str) -> list[str]:
        return [
            str(source.path.relative_to(tmp_path)) for source in find_text(Data(train=spec)).train
        ]

    assert found("b") == ["b/1.txt", "b/2.txt", "b/deep/3.jsonl"]
    assert found("b/*.txt", "a.txt", "b/1.txt") == ["b/1.txt", "b/2.txt", "a.txt"]  # each file once
    assert found("**/*.jsonl") == ["b/deep/3.jsonl"]
    (tmp_path / "openai" / "corpus").mkdir(parents=True)
    (tmp_path / "openai" / "corpus" / "z.txt").write_text("x")
    assert found("openai/corpus") == ["openai/corpus/z.txt"]  # local things win over the Hub


def test_a_folder_of_splits_is_not_read_as_one_text(tmp_path):
    for name in ("Train", "test", "valid"):
        (tmp_path / "corpus" / name).mkdir(parents=True)
        (tmp_path / "corpus" / name / "text.txt").write_text(name)
    corpus = tmp_path / "corpus"
    with pytest.raises(DataError) as caught:
        find_text(Data(train=str(corpus)))
    fault, fix = str(caught.value).splitlines()
    assert fault.endswith("the folder has valid, test beside train, and would be read as one text")
    assert fix.startswith(f'  set data.train = "{corpus}/Train" and data.valid = "{corpus}/valid"')
    found = find_text(Data(train=f"{corpus}/Train", valid=f"{corpus}/valid"))
    assert [len(side) for side in (found.train, found.valid)] == [1, 1]
    # A run that was trained on all of it is resumed with this --set.
    assert fix.endswith(f'data.train = "{corpus}/**/*"')
    assert len(find_text(Data(train=f"{corpus}/**/*")).train) == 3


def test_a_folder_that_changes_while_it_is_listed_is_named(tmp_path, monkeypatch):
    def gone(self: Path, pattern: str) -> list[Path]:
        raise FileNotFoundError(2, "No such file or directory", str(self / "part-7"))

    monkeypatch.setattr(Path, "rglob", gone)
    with pytest.raises(
        DataError, match=r"part-7 cannot be listed: No such file or directory\n  give a folder"
    ):
        find_text(Data(train=str(tmp_path)))


def test_hub_names():
    assert find_text(Data(train="owner/name")).train == (
        HubDataset("owner/name", None, None, "train"),
    )
    assert find_text(Data(valid="owner/name/config@abc")).valid == (
        HubDataset("owner/name", "config", "abc", "valid"),
    )


def test_everything_that_is_not_there_is_said_at_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "book.pdf").write_text("x")
    (tmp_path / "book.txt.gz").write_text("x")
    with pytest.raises(DataError) as refused:
        find_text(
            Data(
                valid=(
                    "missing.txt",
                    "empty",
                    "*.jsonl",
                    "book.pdf",
                    "/no/such/folder",
                    "book.txt.gz",
                )
            )
        )
    lines = str(refused.value).splitlines()
    assert lines[1].startswith("  name files, folders or globs of .txt")
    lines = [line for line in lines if not line.startswith("  ")]
    assert len(lines) == 6
    assert all(line.startswith("data.valid = ") for line in lines)
    assert "no such file" in lines[0] and str(tmp_path) in lines[0]
    assert "holds no file" in lines[1] and "matches no file" in lines[2] and ".parquet" in lines[3]
    assert lines[3].endswith('data.format = "txt" reads it as text') and lines[5].endswith(
        "Unpack it first"
    )


def test_the_library_is_source_without_tests():
    names = [source.path.as_posix() for source in stdlib_files()]
    assert len(names) > 300
    assert any(name.endswith("/json/decoder.py") for name in names)
    assert not [
        name
        for name in names
        if re.search(r"/(tests?|site-packages|idle_test)/|_sysconfigdata", name)
    ]
    assert stdlib_files() == stdlib_files()


def test_a_text_file_is_a_document_with_plain_line_ends(tmp_path):
    path = tmp_path / "dos.txt"
    path.write_bytes(b"\xef\xbb\xbfone\r\ntwo\rthree\n")
    assert texts(path) == ["one\ntwo\nthree\n"]


def test_json_lines_plain_and_compressed(tmp_path):
    content = b'{"text": "one"}\n\n{"text": ""}\n{"text": "tw\\u00f6\\r\\n"}'
    for name, written in (
        ("a.jsonl", content),
        ("a.json.gz", gzip.compress(content)),
        ("b.jsonl.gz", gzip.compress(content)),
    ):
        (tmp_path / name).write_bytes(written)
        assert texts(tmp_path / name) == ["one", "twö\r\n"]  # JSON says which line ends it means


def test_parquet(tmp_path):
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"body": ["one", "", "two"], "id": [1, 2, 3]}), path)
    assert texts(path, field="body") == ["one", "two"]
    said = "it has 'body', 'id'\n  name the column of the text: --set data.text_field="
    assert said in complaint(path)
    content = path.read_bytes()
    assert "damaged, cut short" in complaint(path, content[:-20], field="body")
    pyarrow.parquet.write_table(pyarrow.table({"text": ["one", None]}), path)
    assert f"{path}: row 2: column 'text' is NoneType" in complaint(path)


GOOD = b'{"text": "ok"}\n'


@pytest.mark.parametrize(
    "name, content, place, what",
    [
        ("a.jsonl", GOOD * 2 + b'{"text": "x";}\n', "3, byte 42", "not JSON"),
        ("a.jsonl", GOOD + '{"é": "'.encode() + b'\xff"}\n', "2, byte 23", "not UTF-8: byte 0xff"),
        (
            "a.jsonl",
            GOOD + b'{"body": "x", "id": 3}\n',
            "2, byte 15",
            "no field 'text'; it has 'body', 'id' (data.text_field",
        ),
        ("a.jsonl", GOOD + b'{"text": 3}\n', "2, byte 15", "field 'text' is int, not text"),
        ("a.jsonl", GOOD + b'["x"]\n', "2, byte 15", "a JSON list, not an object"),
        ("a.jsonl", GOOD + b'{"text": "\\ud800"}\n', "2, byte 15", "half of a surrogate pair"),
        ("a.json.gz", gzip.compress(GOOD + b"{\n", mtime=0), "2, byte 16", "not JSON"),
        ("a.txt", "zwei\ndrei ä".encode("latin1"), "2, byte 10", "not UTF-8: byte 0xe4"),
    ],
)
def test_bad_documents_are_named_by_file_line_and_byte(tmp_path, name, content, place, what):
    path = tmp_path / name
    said = complaint(path, content)
    assert said.startswith(f"{path}:{place}: {what}")
    assert 'data.on_bad_document = "skip"' in said


def test_the_byte_of_bad_json_is_where_reading_failed(tmp_path):
    """Counted in bytes although the line has characters of two."""
    said = complaint(tmp_path / "a.jsonl", GOOD + '{"text": "éé" 3}\n'.encode())
    assert ":2, byte 31:" in said  # 15 bytes of the first line, 16 up to the 3


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.parquet", "a.json.gz"])
def test_empty_files_are_named(tmp_path, name):
    path = tmp_path / name
    said = complaint(path, b"")
    assert said.startswith(str(path)) and "empty" in said
    if name == "a.jsonl":
        assert "only blank lines" in complaint(path, b"\n \n")


def test_compressed_files_cut_short_are_named_whatever_the_policy(tmp_path):
    content = gzip.compress(
        b"".join(json.dumps({"text": str(i)}).encode() + b"\n" for i in range(10_000))
    )
    for damaged in (
        content[: len(content) // 2],
        GOOD,
        content[:5000] + b"\0\0\0\0" + content[5004:],
    ):
        path = tmp_path / "a.json.gz"
        path.write_bytes(damaged)
        with pytest.raises(DataError, match=re.escape(f"{path}:")):
            texts(path, policy="skip")


def test_a_thousandth_may_be_skipped_and_is_counted(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(GOOD * 999 + b"{\n")
    bad = BadDocuments("skip")
    (source,) = find_text(Data(train=str(path))).train
    assert len(list(read_documents(source, "text", bad))) == 999
    bad.check()
    assert (bad.seen, bad.skipped) == (1000, 1)
    assert bad.examples[0].startswith(f"{path}:1000, byte {999 * 15 + 1}: not JSON")
    path.write_bytes(GOOD * 998 + b"{\n[]\n")
    bad = BadDocuments("skip")
    list(read_documents(source, "text", bad))
    with pytest.raises(DataError, match=r"2 of 1,000 documents.*0\.20%.*at most 0\.1%"):
        bad.check()


@pytest.mark.parametrize(
    "text, fraction, expected",
    [
        ("aaaa\nbbbb\ncccc\ndddd\n", 0.25, ("aaaa\nbbbb\ncccc\n", "dddd\n")),
        ("aaaa\nbbbb\ncccc\ndddd", 0.3, ("aaaa\nbbbb\ncccc\n", "dddd")),
        (
            "aaaa\nbbbb\ncccc\ndddd\n",
            0.01,
            ("aaaa\nbbbb\ncccc\n", "dddd\n"),
        ),  # no line starts after the place
        ("one line without an end", 0.5, ("one line without an end", "")),
        ("one line\n", 0.4, ("one line\n", "")),
    ],
)
def test_cut_at_line(text, fraction, expected):
    assert cut_at_line(text, fraction) == expected
