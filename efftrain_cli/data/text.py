"""Text: what `data.train` and `data.valid` name, read as documents.

A source is the standard library, a file, or a dataset on the Hugging Face Hub. Every kind of file is read here rather
than through `datasets`, because a damaged file must be reported with its line and byte.
"""

from __future__ import annotations

import glob
import gzip
import json
import os
import re
import sysconfig
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Literal

from efftrain_cli.data.documents import (
    BadDocuments,
    Document,
    HubDataset,
    Kind,
    Source,
    TextFile,
    unusable,
)
from efftrain_cli.data.hub import hub_documents
from efftrain_cli.foundation.errors import DataError

SUFFIXES: dict[str, Kind] = {
    ".txt": "txt",
    ".jsonl": "jsonl",
    ".jsonl.gz": "jsonl",
    ".json.gz": "jsonl",
    ".parquet": "parquet",
}

_HUB = re.compile(r"([A-Za-z0-9][\w.-]*/[\w.-]+)(?:/([\w.-]+))?(?:@([\w.-]+))?")
_NOT_LIBRARY = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


def find_sources(spec: str | tuple[str, ...], key: Literal["train", "valid"]) -> tuple[Source, ...]:
    """The sources that `data.<key>` names, in order, each file once. What exists locally wins over the Hub.

    Raises:
        DataError: an entry names nothing; every such entry is listed.
    """
    sources: dict[Source, None] = {}
    problems = []
    for entry in (spec,) if isinstance(spec, str) else spec:
        try:
            sources |= dict.fromkeys(_find(entry, key))
        except DataError as error:
            problems.append(f"data.{key} = {entry!r}: {error}")
    if not sources and not problems:
        problems.append(f'data.{key} is empty; name files, folders, globs, a Hub dataset or "stdlib"')
    if problems:
        raise DataError("\n".join(problems))
    return tuple(sources)


def _find(entry: str, key: Literal["train", "valid"]) -> list[Source]:
    kinds = ", ".join(SUFFIXES)
    if entry == "stdlib":
        return stdlib_files()
    path = Path(entry).expanduser()
    if path.is_file():
        kind = kind_of(path)
        if kind is None:
            raise DataError(f"the file's kind is not known by its name; known are {kinds}")
        return [TextFile(path.resolve(), kind)]
    if path.is_dir():
        found = [p for p in sorted(path.rglob("*")) if not any(part.startswith(".") for part in p.relative_to(path).parts)]
        what = f"the folder holds no file of a known kind ({kinds})"
    elif glob.has_magic(entry):
        found = [Path(name) for name in sorted(glob.glob(os.path.expanduser(entry), recursive=True))]
        what = f"the pattern matches no file of a known kind ({kinds})"
    else:
        hub = _HUB.fullmatch(entry)
        if hub is None or kind_of(path) is not None:
            raise DataError(
                f"no such file or folder (looked in {Path.cwd()}); name files, folders or globs of {kinds}, "
                'a Hub dataset "owner/name", or "stdlib"'
            )
        return [HubDataset(hub[1], hub[2], hub[3], key)]
    files: list[Source] = []
    for p in found:
        kind = kind_of(p)
        if kind is not None and p.is_file():
            files.append(TextFile(p.resolve(), kind))
    if not files:
        raise DataError(what)
    return files


def kind_of(path: Path) -> Kind | None:
    """How a file is read, by its name; None where the name does not say."""
    name = path.name.lower()
    return next((kind for suffix, kind in SUFFIXES.items() if name.endswith(suffix)), None)


def stdlib_files() -> list[Source]:
    """The running Python's standard library: its .py files but for tests, installed packages and what the build generated.

    Raises:
        DataError: this Python carries no source of its library.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    found = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in _NOT_LIBRARY and not name.startswith("config-")]
        for name in names:
            # _sysconfigdata describes the machine that Python was built on; the other two are the administrator's.
            if name.endswith(".py") and not name.startswith(("_sysconfigdata", "sitecustomize", "usercustomize")):
                found.append(os.path.join(folder, name))
    if not found:
        raise DataError(f"this Python has no source of its standard library in {root}; give data.train files of your own")
    prefix = len(str(root)) + 1
    found.sort(key=lambda name: name[prefix:].replace(os.sep, "/"))
    return [TextFile(Path(name), "stdlib") for name in found]


def read_documents(source: Source, text_field: str, bad: BadDocuments) -> Iterator[Document]:
    """The documents of one source, in order. Records with an empty text are passed over; an empty file is a fault.

    Args:
        text_field: field or column of the text, in JSON lines, Parquet and Hub datasets.
        bad: counts every document, and decides what becomes of those that cannot be read.

    Raises:
        DataError: the file cannot be read at all, or a document cannot and the policy is "error".
    """
    if isinstance(source, HubDataset):
        yield from hub_documents(source, text_field, bad)
        return
    try:
        if source.kind == "parquet":
            yield from _parquet_documents(source.path, text_field, bad)
        elif source.kind == "jsonl":
            yield from _json_documents(source.path, text_field, bad)
        else:
            yield from _whole_file(source, bad)
    except OSError as error:
        raise DataError(f"{source.path}: cannot be read: {error.strerror or error}") from error


def _whole_file(source: TextFile, bad: BadDocuments) -> Iterator[Document]:
    """A file of text as one document, every line end a newline, as text files are read everywhere."""
    content = source.path.read_bytes().removeprefix(b"\xef\xbb\xbf")
    if not content:
        if source.kind != "stdlib":  # the library has many empty __init__.py
            bad.found(str(source.path), "the file is empty")
        return
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        bad.found(f"{source.path}:{line}:{error.start}", _not_utf8(content, error.start))
        return
    bad.seen += 1
    yield Document(str(source.path), text.replace("\r\n", "\n").replace("\r", "\n"))


def _json_documents(path: Path, text_field: str, bad: BadDocuments) -> Iterator[Document]:
    """One JSON object a line. Bytes are counted from the start of the file, uncompressed; blank lines are passed over."""
    start, number, any_line = 0, 0, False
    with gzip.open(path, "rb") if path.name.lower().endswith(".gz") else open(path, "rb") as lines:
        for number, line in enumerate(_lines(path, lines), 1):
            if line.strip():
                any_line = True
                try:
                    text = _text_of(line, text_field)
                except _BadLineError as error:
                    bad.found(f"{path}:{number}:{start + error.byte}", str(error))
                else:
                    bad.seen += 1
                    if text:
                        yield Document(f"{path}:{number}", text)
            start += len(line)
    if not any_line:
        bad.found(str(path), "the file is empty" if start == 0 else "the file holds only blank lines")


def _lines(path: Path, lines: IO[bytes]) -> Iterator[bytes]:
    number = 0
    try:
        for line in lines:
            number += 1
            yield line
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{path}:{number + 1}: the compressed file is damaged or cut short: {error}") from error


class _BadLineError(Exception):
    """What is wrong with one line, and at which of its bytes."""

    def __init__(self, what: str, byte: int = 0) -> None:
        super().__init__(what)
        self.byte = byte


def _text_of(line: bytes, text_field: str) -> str:
    try:
        decoded = line.rstrip(b"\r\n").decode("utf-8")
    except UnicodeDecodeError as error:
        raise _BadLineError(_not_utf8(line, error.start), error.start) from None
    try:
        record = json.loads(decoded)
    except json.JSONDecodeError as error:
        byte = len(decoded[: error.pos].encode())
        raise _BadLineError(f"not JSON: {error.msg} (one JSON object per line is expected)", byte) from None
    except RecursionError:
        raise _BadLineError("not JSON that can be read: nested too deeply") from None
    if not isinstance(record, dict):
        raise _BadLineError(f"a JSON {type(record).__name__}, not an object (one JSON object per line is expected)")
    if text_field not in record:
        raise _BadLineError(f"no field {text_field!r}; it has {_names(list(record))} (data.text_field names the field)")
    text = record[text_field]
    if not isinstance(text, str):
        raise _BadLineError(f"field {text_field!r} is {type(text).__name__}, not text")
    if (problem := unusable(text)) is not None:
        raise _BadLineError(problem)
    return text


def _parquet_documents(path: Path, text_field: str, bad: BadDocuments) -> Iterator[Document]:
    import pyarrow
    import pyarrow.parquet

    if path.stat().st_size == 0:
        bad.found(str(path), "the file is empty")
        return
    row = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            columns = file.schema_arrow.names
            if text_field not in columns:
                raise DataError(f"{path}: no column {text_field!r}; it has {_names(columns)} (data.text_field names the column)")
            for batch in file.iter_batches(batch_size=1024, columns=[text_field]):
                for text in batch.column(0).to_pylist():
                    row += 1
                    if not isinstance(text, str):
                        bad.found(f"{path}: row {row}", f"column {text_field!r} is {type(text).__name__}, not text")
                        continue
                    bad.seen += 1
                    if text:
                        yield Document(f"{path}:{row}", text)
            if row == 0:
                bad.found(str(path), "the file holds no rows")
    except (pyarrow.ArrowException, UnicodeDecodeError) as error:
        raise DataError(f"{path}: after row {row}: damaged, cut short or no Parquet file: {error}") from error


def _not_utf8(content: bytes, byte: int) -> str:
    return f"not UTF-8: byte 0x{content[byte]:02x} (convert the file, for example with `iconv -f latin1 -t utf-8`)"


def _names(names: list[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:8])
    return shown + (" and more" if len(names) > 8 else "") if names else "none"


def cut_at_line(text: str, fraction: float) -> tuple[str, str]:
    """A text as (train, valid): about the last `fraction` of it, from the nearest following start of a line.

    Where no line starts there, the last line before it is taken; a text of one line stays whole in train.
    """
    position = text.find("\n", int(len(text) * (1 - fraction))) + 1
    if position in (0, len(text)):
        position = text.rfind("\n", 0, len(text.rstrip("\n"))) + 1
    return (text[:position], text[position:]) if position else (text, "")
