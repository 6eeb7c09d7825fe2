"""Documents: how each kind of source is read, and what is said of what cannot be (F39)."""

from __future__ import annotations

import bz2
import gzip
import json
import re
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from efftrain_cli.data import documents
from efftrain_cli.data.documents import Document, Reader, Tally, measure
from efftrain_cli.data.sources import Source
from efftrain_cli.data.split import cut_at_line
from efftrain_cli.foundation.errors import DataError
from tests.data.book import texts

GOOD = b'{"text": "ok"}\n'


def zstd(content: bytes) -> bytes:
    return pyarrow.compress(content, codec="zstd", asbytes=True)


def complaint(path: Path, content: bytes | None = None, *, field: str = "text") -> str:
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError) as refused:
        texts(path, field=field)
    return str(refused.value)


def document(text: str, size: int = 1 << 20) -> Document:
    """A document that is read in pieces of so many characters."""
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    return measure("made", lambda: iter(pieces))


def test_a_text_file_is_a_document_with_plain_line_ends(tmp_path, monkeypatch):
    """Also where a carriage return and its newline, or a character, are read apart."""
    path = tmp_path / "dos.txt"
    path.write_bytes(b"\xef\xbb\xbfone\r\ntwo\rthr\xc3\xa9\xc3\xa9\n")
    for size in (1, 2, 3, 1 << 20):
        monkeypatch.setattr(documents, "_CHUNK", size)
        assert texts(path) == ["one\ntwo\nthréé\n"]


def test_json_lines_plain_and_compressed(tmp_path):
    """JSON says which line ends it means; U+2028 is none; a text that is null or empty is passed
    over, as is a byte order mark; archives may have several members."""
    lines = ['\ufeff{"text": "one"}', "", '{"text": ""}', '{"text": null}', '{"text": "a\u2028b"}']
    content = "\n".join([*lines, '{"text": "tw\\u00f6\\r\\n"}']).encode()
    packed = {
        "a.jsonl": content,
        "a.json.gz": gzip.compress(content[:30]) + gzip.compress(content[30:]),
        "b.jsonl.zst": zstd(content[:30]) + zstd(content[30:]),
        "c.jsonl.bz2": bz2.compress(content[:30]) + bz2.compress(content[30:]),
    }
    for name, written in packed.items():
        (tmp_path / name).write_bytes(written)
        tally = Tally()
        source = Source(str(tmp_path / name), "jsonl", validates=False)
        found = ["".join(each.pieces()) for each in Reader(source, tally).documents()]
        assert found == ["one", "a\u2028b", "twö\r\n"]
        assert (tally.rows, tally.empty, tally.skipped) == (6, 3, 0)


def test_json_csv_markdown_and_packed_text(tmp_path):
    """Rows of CSV are text, also where they look like a number or like no value."""
    rows = '1,plain\n2,"quoted, with\nan end of line"\n3,\n4,NA\n5,12\n'
    read = {
        "list.json": (json.dumps([{"text": "one"}, {"text": ""}]).encode(), ["one"]),
        "single.json": (json.dumps({"text": "alone"}, indent=2).encode(), ["alone"]),
        "lines.json": (b'{"text": "a"}\n{"text": "b"}\n', ["a", "b"]),
        "t.csv": (
            f"\ufeffid,text\n{rows}".encode(),
            ["plain", "quoted, with\nan end of line", "NA", "12"],
        ),
        "notes.md": (b"# title\r\ntext", ["# title\ntext"]),
        "book.txt.gz": (gzip.compress(b"packed"), ["packed"]),
    }
    for name, (content, expected) in read.items():
        (tmp_path / name).write_bytes(content)
        assert texts(tmp_path / name) == expected


def test_parquet(tmp_path):
    path = tmp_path / "a.parquet"
    table = pyarrow.table({"body": ["one", "", None, "two"], "id": [1, 2, 3, 4]})
    pyarrow.parquet.write_table(table, path)
    assert texts(path, field="body") == ["one", "two"]
    said = "no field 'text'; it has 'body', 'id'\n  name the field of the text: --set data.text_f"
    assert said in complaint(path)
    content = path.read_bytes()
    assert "a.parquet" in complaint(path, content[:-20], field="body")
    pyarrow.parquet.write_table(pyarrow.table({"text": [3]}), path)
    assert f"{path}:1: field 'text' is int, not text" in complaint(path)


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be"])
def test_a_mark_names_the_encoding(tmp_path, encoding):
    (tmp_path / "a.txt").write_bytes("\ufeffünïcode\nlines\n".encode(encoding))
    assert texts(tmp_path / "a.txt") == ["ünïcode\nlines\n"]
    lines = '\ufeff{"text": "ü"}\n{"text": "two"}\n'
    (tmp_path / "a.jsonl").write_bytes(lines.encode(encoding))
    assert texts(tmp_path / "a.jsonl") == ["ü", "two"]


def test_a_library_s_long_message_is_cut(tmp_path, monkeypatch):
    def fail(source: Source) -> None:
        raise ValueError("x" * 500)

    monkeypatch.setattr(documents, "open_dataset", fail)
    said = complaint(tmp_path / "a.csv", b"text\n")
    assert f"ValueError: {'x' * 400}\n" in said


def test_text_of_nuls_is_refused(tmp_path):
    """UTF-16 without a mark is UTF-8 as far as bytes go, with a NUL after each letter. One NUL of
    1,000 characters passes."""
    said = complaint(tmp_path / "a.txt", ("word " * 100).encode("utf-16-le"))
    assert "500 of 1,000 characters are NUL" in said and "iconv" not in said
    assert "are NUL" in complaint(tmp_path / "a.jsonl", b'{"text": "a\\u0000"}\n')
    (tmp_path / "b.txt").write_bytes(b"\0" + b"a" * 999)
    assert len(texts(tmp_path / "b.txt")[0]) == 1000


BAD_LINES = {
    b'{"text": "x";}': "not JSON at character 13: Expecting ',' delimiter",
    b'{"text": "a\xff"}': r"not UTF-8: '\udcff'",
    b'{"text": "\\ud800"}': r"not UTF-8: '\ud800'",
    b'{"body": 1, "id": 3}': "no field 'text'; it has 'body', 'id'",
    b'{"a":0,"b":0,"c":0,"d":0,"e":0,"f":0,"g":0,"h":0,"i":0}': (
        "no field 'text'; it has 'a', 'b', 'c', 'd', 'e', 'f', 'g', 'h'\n"
    ),
    b'{"text": 3}': "field 'text' is int, not text",
    b'["x"]': "a JSON list, not an object",
    b'{"n": ' + b"7" * 5000 + b"}": "Exceeds the limit",
    b"[" * 100_000: "maximum recursion depth",
}
BAD_FILES = {
    "a.json.gz": (gzip.compress(GOOD + b"{\n"), ":2: not JSON at character 3"),
    "a.txt": ("zwei\ndrei ä".encode("latin1"), ": line 2: not UTF-8: byte 0xe4"),
    "a.csv": (b"id,body\n1,x\n", ":1: no field 'text'; it has 'id', 'body'"),
    "a.json": (b'[{"text": 1}]', ":1: field 'text' is int"),
}


def test_bad_documents_are_named_by_file_and_row(tmp_path):
    path = tmp_path / "a.jsonl"
    for line, fault in BAD_LINES.items():
        said = complaint(path, GOOD + line + b"\n")
        assert said.startswith(f"{path}:2: {fault}") and "\n  " in said
    for name, (content, fault) in BAD_FILES.items():
        assert complaint(tmp_path / name, content).startswith(f"{tmp_path / name}{fault}")


@pytest.mark.parametrize(
    "name, content",
    [
        ("a.jsonl.zst", zstd(GOOD * 9999)[:-7]),
        ("a.json.gz", gzip.compress(GOOD * 9999)[:-7]),
        ("a.json.gz", GOOD),
        ("a.csv", b'text\n"open'),
        ("a.json", b'[{"text": "x"}, {"te'),
        ("a.parquet", b"PAR1"),
        ("a.parquet", b""),
        ("a\nb.jsonl.gz", b"\xff"),
    ],
)
def test_damaged_files_are_named_whatever_the_policy(tmp_path, name, content):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(DataError, match=re.escape(str(path).replace("\n", "\\n"))):
        texts(path, policy="skip")


@pytest.mark.parametrize("size", [1, 2, 3, 100])
@pytest.mark.parametrize(
    "fraction, train, valid",
    [
        (0.25, "aaaa\nbbbb\ncccc\n", "dddd\n"),
        (0.3, "aaaa\nbbbb\ncccc\n", "dddd"),
        # No line starts behind the place.
        (0.01, "aaaa\nbbbb\ncccc\n", "dddd\n"),
        (0.5, "one line without an end", ""),
        (0.4, "one line\n", ""),
    ],
)
def test_cut_at_line(fraction, train, valid, size):
    sides = {"train": "", "valid": ""}
    for side, piece in cut_at_line(document(train + valid, size), fraction):
        sides[side] += piece
    assert (sides["train"], sides["valid"]) == (train, valid)
