"""Read the documents of one source, in order.

Every kind of file is read here rather than through `datasets`, because a damaged file must be
reported with its line and byte, and because memory stays bounded whatever a file holds.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from efftrain_cli.data.corpus import MAGIC
from efftrain_cli.data.text import BadDocuments, Document, TextFile, problem_of
from efftrain_cli.foundation.bounds import JSON_BYTES, LINE_BYTES, UNPACKED_BYTES, UNPACKED_TIMES
from efftrain_cli.foundation.console import printable
from efftrain_cli.foundation.errors import DataError


def read_documents(
    source: TextFile, text_field: str, bad: BadDocuments, eot_id: int | None = None
) -> Iterator[Document]:
    """Yield the documents of one file, in order. Records with an empty text are passed over; an
    empty file is a fault.

    Args:
        text_field: field or column of the text, in JSON, CSV and Parquet; a source may name its
            own.
        bad: counts every document, and decides what becomes of those that cannot be read.
        eot_id: the token that ends a document in files of token ids.

    Raises:
        DataError: the file cannot be read at all, or a document cannot and the policy is "error".
    """
    field = source.text_field or text_field
    try:
        if source.kind in _READERS:
            yield from _READERS[source.kind](source.path, field, bad)
        elif source.kind == "bin":
            yield from token_documents(source.path, bad, eot_id)
        else:
            yield from _whole_file(source, bad)
    except OSError as error:
        name = printable(source.path)
        raise DataError(f"{name}: cannot be read: {error.strerror or error}") from error
    except DataError as error:
        name = str(source.path)
        raise DataError(str(error).replace(name, printable(name))) from error


def _whole_file(source: TextFile, bad: BadDocuments) -> Iterator[Document]:
    """Yield a file of text as one document, every line end a newline, as text files are read
    everywhere."""
    content = source.path.read_bytes().removeprefix(b"\xef\xbb\xbf")
    if not content:
        if source.kind != "stdlib":  # the library has many empty __init__.py
            bad.found(source.path, "the file is empty")
        return
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        bad.found(f"{source.path}:{line}, byte {error.start}", _not_utf8(content, error.start))
        return
    bad.seen += 1
    if "\r" in text:
        text = text.replace("\r\n", "\n").replace("\r", "\n")
    yield Document(printable(source.path), text)


def _json_documents(path: Path, text_field: str, bad: BadDocuments) -> Iterator[Document]:
    """Yield the document of each line's JSON object. Bytes count from the start of the uncompressed
    file; blank lines are passed over."""
    start = 0
    number = 0
    any_line = False
    with _opened(path) as file:
        for number, (line, length) in enumerate(_lines(path, file), 1):
            if length > LINE_BYTES:
                any_line = True
                bad.found(f"{path}:{number}, byte {start}", _too_long(length))
            elif line.strip():
                any_line = True
                try:
                    yield from bad.read(f"{path}:{number}", _text_of(_parsed(line), text_field))
                except _BadLineError as error:
                    bad.found(f"{path}:{number}, byte {start + error.byte}", str(error))
            start += length
    if not any_line:
        fault = "the file is empty" if start == 0 else "the file holds only blank lines"
        bad.found(path, fault)


def _json_file(path: Path, text_field: str, bad: BadDocuments) -> Iterator[Document]:
    """Yield the documents of a list of records, one record, or JSON lines under another name."""
    if path.stat().st_size <= JSON_BYTES:
        try:
            records = json.loads(path.read_bytes())
        except (ValueError, RecursionError):  # JSON lines, or damaged: said there with its line
            records = None
        if isinstance(records, dict):
            records = [records]
        if isinstance(records, list):
            for number, record in enumerate(records, 1):
                try:
                    yield from bad.read(f"{path}:{number}", _text_of(record, text_field))
                except _BadLineError as error:
                    bad.found(f"{path}: record {number}", str(error))
            if not records:
                bad.found(path, "the file holds no records")
            return
    yield from _json_documents(path, text_field, bad)


def _csv_documents(path: Path, text_field: str, bad: BadDocuments) -> Iterator[Document]:
    """Yield a document per row; the first row names the columns. Quoted text may hold line ends."""
    csv.field_size_limit(LINE_BYTES)
    number = 0
    faults = []  # of the lines of one row

    def decoded(file: io.BufferedIOBase) -> Iterator[str]:
        nonlocal number
        for number, (line, length) in enumerate(_lines(path, file), 1):
            if length > LINE_BYTES:
                raise DataError(f"{path}:{number}: {_too_long(length)}")
            encoding = "utf-8-sig" if number == 1 else "utf-8"
            try:
                text = line.decode(encoding)
            except UnicodeDecodeError as error:
                faults.append((f"{path}:{number}", _not_utf8(error.object, error.start)))
                text = line.decode(encoding, errors="replace")
            yield text

    with _opened(path) as file:
        rows = csv.DictReader(decoded(file), strict=True)
        try:
            fields = rows.fieldnames
            if faults:  # the columns cannot be told
                raise DataError(": ".join(faults[0]))
            if fields:
                _require_column(path, text_field, list(fields))
            any_row = False
            for row in rows:
                any_row = True
                text = row[text_field]
                if faults:
                    bad.found(*faults[0])
                    faults.clear()
                elif text is None:
                    bad.found(f"{path}:{number}", f"the row ends before column {text_field!r}")
                else:
                    yield from bad.read(f"{path}:{number}", text)
        except csv.Error as error:
            raise DataError(f"{path}:{number}: not CSV: {error}") from error
    if not any_row:
        bad.found(path, "the file holds no rows")


def _opened(path: Path) -> io.BufferedIOBase:
    """Open the file's content, decompressed as it is read."""
    name = path.name.lower()
    if name.endswith(".gz"):
        return gzip.open(path, "rb")
    if name.endswith(".zst"):
        import pyarrow  # whose reader, unlike zstandard's own, notices that the last frame is cut

        return io.BufferedReader(pyarrow.CompressedInputStream(path.open("rb"), "zstd"))
    return path.open("rb")


def _lines(path: Path, file: io.BufferedIOBase) -> Iterator[tuple[bytes, int]]:
    """Yield each line with its length in bytes. Of a line beyond `LINE_BYTES` only the beginning is
    kept."""
    number = 0
    total = 0
    most = _most_unpacked(path)
    try:
        while line := file.readline(LINE_BYTES + 1):
            number += 1
            length = len(line)
            last = line
            while (
                length > LINE_BYTES
                and not last.endswith(b"\n")
                and (last := file.readline(1 << 20))
            ):
                length += len(last)
                _check_unpacked(path, total + length, most)
            total += length
            _check_unpacked(path, total, most)
            yield line, length
    except (EOFError, zlib.error, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # of the disk, not of what the file holds
        # What was decompressed just before the damage may be lost with it: the damage lies after
        # this line.
        raise DataError(
            f"{path}: the compressed file is damaged or cut short after line {number:,}: {error}"
        ) from error


def _most_unpacked(path: Path) -> int:
    return max(UNPACKED_BYTES, UNPACKED_TIMES * path.stat().st_size)


def _check_unpacked(path: Path, size: int, most: int) -> None:
    if size > most:
        raise DataError(
            f"{path}: {path.stat().st_size:,} bytes unpack to more than {most:,}, as no text does\n"
            "check where the file is from, and name it unpacked if it is meant"
        )


def _too_long(length: int) -> str:
    return (
        f"a line of {length:,} bytes; at most {LINE_BYTES:,} are read"
        " (is the file text, one record a line?)"
    )


class _BadLineError(Exception):
    """What is wrong with one line, and at which of its bytes."""

    def __init__(self, what: str, byte: int = 0) -> None:
        super().__init__(what)
        self.byte = byte


def _parsed(line: bytes) -> Any:
    try:
        decoded = line.rstrip(b"\r\n").decode("utf-8")
    except UnicodeDecodeError as error:
        raise _BadLineError(_not_utf8(line, error.start), error.start) from None
    try:
        return json.loads(decoded)
    except json.JSONDecodeError as error:
        byte = len(decoded[: error.pos].encode())
        raise _BadLineError(
            f"not JSON: {error.msg} (one JSON object per line is expected)", byte
        ) from None
    except ValueError as error:  # an integer of thousands of digits
        raise _BadLineError(f"not JSON that can be read: {error}") from None
    except RecursionError:
        raise _BadLineError("not JSON that can be read: nested too deeply") from None


def _text_of(record: Any, text_field: str) -> str:
    if not isinstance(record, dict):
        raise _BadLineError(
            f"a JSON {type(record).__name__}, not an object (one JSON object per line is expected)"
        )
    if text_field not in record:
        raise _BadLineError(
            f"no field {text_field!r}; it has {_names(list(record))}"
            " (data.text_field names the field)"
        )
    if problem := problem_of(record[text_field], text_field):
        raise _BadLineError(problem)
    return str(record[text_field])


def _parquet_documents(path: Path, text_field: str, bad: BadDocuments) -> Iterator[Document]:
    import pyarrow
    import pyarrow.parquet

    if path.stat().st_size == 0:
        bad.found(path, "the file is empty")
        return
    row = 0
    total = 0
    most = _most_unpacked(path)
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            _require_column(path, text_field, file.schema_arrow.names)
            # A page is unpacked whole, and may hold a row group's text: refuse it unread.
            _check_unpacked(path, _declared_bytes(file.metadata, text_field), most)
            # Few rows at a time: a row may be as long as a line, and a page of repeated rows is
            # short.
            for batch in file.iter_batches(batch_size=8, columns=[text_field]):
                for value in batch.column(0):
                    text = value.as_py()
                    row += 1
                    if not isinstance(text, str):
                        what = f"column {text_field!r} is {type(text).__name__}, not text"
                        bad.found(f"{path}: row {row}", what)
                    elif len(text) > LINE_BYTES:
                        bad.found(f"{path}: row {row}", _too_long(len(text)))
                    else:
                        total += len(text)
                        _check_unpacked(path, total, most)
                        yield from bad.read(f"{path}:{row}", text)
            if row == 0:
                bad.found(path, "the file holds no rows")
    except (pyarrow.ArrowException, UnicodeDecodeError) as error:
        raise DataError(
            f"{path}: after row {row}: damaged, cut short or not a Parquet file: {error}"
        ) from error


def _declared_bytes(metadata: Any, column_name: str) -> int:
    """Return the bytes of a column's pages, unpacked, as a Parquet file's footer declares them.

    A text that many rows repeat may be counted once.
    """
    total = 0
    for group in range(metadata.num_row_groups):
        row_group = metadata.row_group(group)
        for number in range(row_group.num_columns):
            column = row_group.column(number)
            if column.path_in_schema == column_name:
                total += column.total_uncompressed_size
    return total


def _require_column(path: Path, name: str, columns: list[str]) -> None:
    if name not in columns:
        raise DataError(
            f"{path}: no column {name!r}; it has {_names(columns)}\n"
            "  name the column of the text: --set data.text_field=COLUMN"
        )


def _not_utf8(content: bytes, byte: int) -> str:
    return (
        f"not UTF-8: byte 0x{content[byte]:02x} (convert the file,"
        " for example with `iconv -f latin1 -t utf-8`)"
    )


def _names(names: list[str]) -> str:
    if not names:
        return "none"
    listed = ", ".join(repr(name) for name in names[:8])
    return f"{listed} and more" if len(names) > 8 else listed


_READERS = {
    "parquet": _parquet_documents,
    "jsonl": _json_documents,
    "json": _json_file,
    "csv": _csv_documents,
}
"""Kind of a file with a field of text -> its reader."""


def cut_at_line(text: str, fraction: float) -> tuple[str, str]:
    """Cut a text into (train, valid): about the last `fraction` of it, from the nearest following
    start of a line.

    Where no line starts there, the last line before it is taken; a text of one line stays whole in
    train.
    """
    position = text.find("\n", int(len(text) * (1 - fraction))) + 1
    if position in (0, len(text)):
        position = text.rfind("\n", 0, len(text.rstrip("\n"))) + 1
    return (text[:position], text[position:]) if position else (text, "")


# --- token files of other programs ----------------------------------------------------------------
#
# nanoGPT's .bin is uint16 ids and nothing else, llm.c's a header of 256 int32 and then ids. The ids
# are taken as they are. Which tokenizer made them is not written in the file: data.tokenizer must
# be that one.

LLMC = {20240520: ("<u2", 1), 20240801: ("<u4", 7)}
"""llm.c's magic numbers (dev/data/data_common.py): type of the ids, and version. GPT-2's and Llama
3's tokens."""
LLMC_HEADER_BYTES = 1024
_IDS_AT_A_TIME = 1 << 24
"""Also the longest document."""


def open_token_file(path: Path) -> np.ndarray:
    """Open a file's ids, memory-mapped: uint16 or uint32 (tokens,). Raise a `DataError` if it has
    neither form or is cut."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(LLMC_HEADER_BYTES)
    if MAGIC.encode() in start:
        raise DataError(f"{path}: a shard of efftrain's own cache; name the text it was made from")
    header = np.zeros(3, dtype="<i4")
    if len(start) == LLMC_HEADER_BYTES:
        header = np.frombuffer(start, dtype="<i4")
    if int(header[0]) in LLMC:
        dtype, version = LLMC[int(header[0])]
        count = int(header[2])
        if int(header[1]) != version:
            raise DataError(f"{path}: llm.c's version {header[1]}; version {version} is read")
        expected = LLMC_HEADER_BYTES + count * np.dtype(dtype).itemsize
        if size != expected:
            what = "cut short" if size < expected else "longer than its header says"
            raise DataError(
                f"{path}: {size:,} bytes where llm.c's header says {expected:,}: the file is {what}"
            )
        return np.memmap(path, dtype, "r", offset=LLMC_HEADER_BYTES, shape=(count,)).view(
            np.ndarray
        )
    if (path.parent / "meta.pkl").exists():
        raise DataError(
            f"{path}: meta.pkl beside it says that nanoGPT made it with its own vocabulary"
            " (of characters, for example), and a pickle is never opened here."
            " Name the text it was made from"
        )
    if size % 2:
        raise DataError(
            f"{path}: {size:,} bytes are not a whole number of uint16 ids, as nanoGPT writes them:"
            " the file is cut short"
        )
    if size == 0:
        return np.zeros(0, dtype="<u2")
    return np.memmap(path, dtype="<u2", mode="r").view(np.ndarray)


def token_documents(path: Path, bad: BadDocuments, eot_id: int | None) -> Iterator[Document]:
    """Yield the documents between end-of-text tokens, as ids. A file without any is one document. A
    tokenizer that is trained on the text (bpe:N) is a `DataError`."""
    if eot_id is None:
        raise DataError(
            f"{path} holds token ids, and a tokenizer cannot be trained on those:"
            ' set data.tokenizer to the one that made them, for example "gpt2"'
        )
    ids = open_token_file(path)
    if len(ids) == 0:
        bad.found(path, "the file is empty")
    begin = 0
    while begin < len(ids):
        chunk = np.asarray(ids[begin : begin + _IDS_AT_A_TIME])
        ends = np.flatnonzero(chunk == eot_id)
        # What follows the last end waits for the next chunk, unless it fills one alone.
        whole = begin + len(chunk) == len(ids) or not len(ends)
        at = 0
        borders = ends.tolist()
        if whole:
            borders.append(len(chunk))
        for end in borders:
            if end > at:
                bad.seen += 1
                yield Document(f"{printable(str(path))}:token {begin + at}", "", chunk[at:end])
            at = end + 1
        begin += min(at, len(chunk))
