"""Read the documents of a source, from a position on.

Text files and JSON lines are read here, so that a bad record is reported with its file and row, and
memory does not grow with the file. `datasets` reads everything else: Parquet, CSV, JSON lists and
the Hugging Face Hub.
"""

from __future__ import annotations

import codecs
import hashlib
import io
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any

from efftrain_cli.data.hub import no_field, open_dataset
from efftrain_cli.data.sources import PACKED, Source
from efftrain_cli.foundation.console import printable
from efftrain_cli.foundation.errors import DataError
from efftrain_cli.foundation.signals import check_stop

_MARKS = {
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
"""Byte order mark -> encoding; the longer first, as they begin with the others."""
_CHUNK = 1 << 20
"""Bytes of a text file that are decoded at a time."""
NUL_SHARE = 0.001
"""Largest share of NULs among a text's characters; UTF-16 that is read as UTF-8 has half."""
SKIPPED_SHARE = 0.001
"""Largest share of rows that on_bad_document = "skip" may pass over."""


Position = dict[str, Any]
"""A place in a source, as JSON values."""


@dataclass(frozen=True)
class Document:
    """A text that is read in pieces."""

    place: str
    """A file, or file:row."""
    pieces: Callable[[], Iterator[str]]
    """Reads the text from its beginning."""
    characters: int
    size: int
    """Bytes of the text as UTF-8."""
    number: int
    """First 64 bits of the sha256 of the text as UTF-8."""
    last_line: int
    """Characters up to the last newline inside the text, itself included; 0 if it has none."""


@dataclass
class Tally:
    """What a pass over documents met."""

    rows: int = 0
    empty: int = 0
    """Rows without text."""
    skipped: int = 0
    """Bad rows."""
    skipped_examples: list[str] = field(default_factory=list)
    """The first bad rows: place and reason."""
    overlap: int = 0
    """Training documents that are word for word in the validation text."""

    def check_skipped(self) -> None:
        """Raise a `DataError` if more than `SKIPPED_SHARE` of the rows were bad."""
        if self.skipped > SKIPPED_SHARE * self.rows:
            raise DataError(
                f"{self.skipped:,} of {self.rows:,} rows are bad, more than {SKIPPED_SHARE:.1%}:"
                f" {'; '.join(self.skipped_examples)}\n  repair or remove them"
            )


@dataclass
class Reader:
    """Reads the documents of one source. Rows without text are passed over."""

    source: Source
    tally: Tally
    skip_bad: bool = False
    """Count bad rows instead of raising them."""
    rows: int = 0
    """Rows read so far, bad and empty ones included."""
    _stream: Any = None

    def documents(self, position: Position | None = None) -> Iterator[Document]:
        """Yield the documents after `position`, or all.

        Raises:
            DataError: the source cannot be read, or a row is bad and `skip_bad` is not set.
            Stop: a signal came.
        """
        name = printable(self.source.name)
        try:
            for row in self._rows(position):
                check_stop()
                self.rows += 1
                self.tally.rows += 1
                place = name if self.source.is_whole else f"{name}:{self.rows}"
                document = self._document(place, row)
                if document is not None:
                    yield document
        except DataError:
            raise
        except Exception as error:  # `datasets` raises classes of five libraries
            summary = " ".join(str(error.__cause__ or error).split())[:400]
            fix = "repair it, or name another text"
            if self.source.kind == "hub":
                fix = "the same command continues here once the Hub answers"
            raise DataError(
                f"{name}, after row {self.rows:,}: {type(error).__name__}: {summary}\n  {fix}"
            ) from error

    def position(self) -> Position:
        """Return the place after the last row, as JSON values."""
        return {"rows": self.rows, "stream": self._stream and self._stream.state_dict()}

    def _rows(self, position: Position | None) -> Iterator[Any]:
        """Yield lines of JSON, records, or None for a source that is one document."""
        if position:
            self.rows = position["rows"]
        if self.source.is_whole:
            yield None
        elif self.source.kind == "jsonl":
            with _opened(self.source.name) as file:
                lines = io.TextIOWrapper(file, _encoding(file), "surrogateescape", newline="\n")
                yield from islice(lines, self.rows, None)
        else:
            self._stream = open_dataset(self.source)
            if position:
                self._stream.load_state_dict(position["stream"])
            yield from self._stream

    def _document(self, place: str, row: Any) -> Document | None:
        """Return the document of a row; None if it has no text or is bad."""
        try:
            pieces = partial(read_pieces, self.source.name)
            if row is not None:
                pieces = partial(iter, [self._text_of(place, row)])
            document = measure(place, pieces)
        except json.JSONDecodeError as error:
            fault = f"not JSON at character {error.pos + 1:,}: {error.msg}"
        except UnicodeEncodeError as error:
            fault = f"not UTF-8: {error.object[error.start]!r}"
        except (ValueError, TypeError, RecursionError) as error:
            fault = str(error)
        else:
            if document.characters:
                return document
            self.tally.empty += 1
            return None

        if not self.skip_bad:
            raise DataError(
                f"{place}: {fault}\n  repair or remove it; of 1,000 documents or more,"
                ' data.on_bad_document = "skip" passes over one in a thousand'
            )
        self.tally.skipped += 1
        if len(self.tally.skipped_examples) < 5:
            self.tally.skipped_examples.append(f"{place}: {fault}")
        return None

    def _text_of(self, place: str, row: Any) -> str:
        """Return the text of a row, "" if it has none."""
        name = self.source.text_field
        if isinstance(row, str):
            row = json.loads(row) if row.strip() else {name: None}
        if not isinstance(row, dict):
            raise TypeError(f"a JSON {type(row).__name__}, not an object")
        if name not in row:
            raise no_field(place, name, list(row))
        text = row[name]
        if not isinstance(text, str | None):
            raise TypeError(f"field {name!r} is {type(text).__name__}, not text")
        return text or ""


def measure(
    place: str,
    pieces: Callable[[], Iterator[str]],
) -> Document:
    """Read a text once.

    Raises:
        ValueError: it has half of a surrogate pair, or more than `NUL_SHARE` of NULs.
    """
    digest = hashlib.sha256()
    characters = size = nuls = last_line = 0
    before = ""
    for piece in pieces():
        content = piece.encode()
        digest.update(content)
        newline = piece.rfind("\n", 0, -1)
        if newline >= 0:
            last_line = characters + newline + 1
        elif before.endswith("\n"):
            last_line = characters
        before = piece
        characters += len(piece)
        size += len(content)
        nuls += piece.count("\0")
    if nuls > NUL_SHARE * characters:
        raise ValueError(f"{nuls:,} of {characters:,} characters are NUL: binary, or not UTF-8")
    number = int.from_bytes(digest.digest()[:8], "big")
    return Document(place, pieces, characters, size, number, last_line)


def read_pieces(name: str) -> Iterator[str]:
    """Yield the text of a file in pieces of about a million characters, every line end a newline.

    A byte order mark names its encoding; without one it is UTF-8.

    Raises:
        ValueError: the file is not in that encoding; names the line.
    """
    with _opened(name) as file:
        encoding = _encoding(file)
        decoder = codecs.getincrementaldecoder(encoding)()
        newlines = io.IncrementalNewlineDecoder(decoder, translate=True)
        lines = 1
        content = b"\n"
        while content:
            content = file.read(_CHUNK)
            try:
                piece = newlines.decode(content, final=not content)
            except UnicodeDecodeError as error:
                line = lines + error.object[: error.start].count(b"\n")
                byte = error.object[error.start]
                name = encoding.removesuffix("-sig").upper()
                raise ValueError(f"line {line:,}: not {name}: byte 0x{byte:02x}") from None
            if piece:
                lines += piece.count("\n")
                yield piece


def _opened(name: str) -> io.BufferedReader:
    """Open a file's content, decompressed as it is read."""
    if not name.endswith(PACKED):
        return open(name, "rb")  # without pyarrow, whose import takes longer than a small text
    import pyarrow

    return io.BufferedReader(pyarrow.input_stream(name, compression="detect"))


def _encoding(file: io.BufferedReader) -> str:
    """Return the encoding that a file's first bytes name."""
    start = file.peek()
    names = [name for mark, name in _MARKS.items() if start.startswith(mark)]
    return names[0] if names else "utf-8-sig"
