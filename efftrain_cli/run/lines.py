"""Files of JSON lines, metrics.jsonl and events.jsonl: appended to, never rewritten, each line with
a check value.

The check is the CRC-32 of the line without it, as eight hexadecimal digits under the key `check`,
last in the line. It detects every single flipped bit. JSON alone does not: a changed digit is still
a number.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import compress
from pathlib import Path
from typing import Any, NamedTuple

from efftrain_cli.foundation.errors import DiskError
from efftrain_cli.foundation.files import write_whole

Values = dict[str, Any]
"""Values by name, as JSON or TOML holds them: a row, an event, a recipe."""
Fields = Mapping[str, object]
"""Values by name, to be written."""
TAIL = 1 << 15
"""Bytes of a file's end that hold its last lines."""
_LINE_END = b', "check": "%08x"}'
"""End of a checked line, with a place for the CRC-32."""
_END_LENGTH = len(_LINE_END % 0)


def sealed(value: Fields) -> str:
    """Return the line for `value` with its check, without newline; NaN and infinity become null."""
    text = json.dumps(finite(value))
    end = _LINE_END % zlib.crc32(text.encode())
    return text[:-1] + end.decode()


def finite(value: Any) -> Any:
    """Return the value as JSON can hold it: None for nonfinite numbers, tuples as lists."""
    if isinstance(value, Mapping):
        return {key: finite(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class Lines(NamedTuple):
    """The lines of a file of JSON lines, compared with their checks but not parsed."""

    texts: list[bytes]
    """Lines that match their check, in file order."""
    corrupt: tuple[int, ...]
    """Numbers, from 1, of the lines that do not."""
    torn: bool
    """Whether an unfinished last line was dropped: its writer was killed, or is writing now."""


def split_lines(content: bytes) -> Lines:
    """Split a file into lines and compare each with its check."""
    *lines, rest = content.split(b"\n")
    # A last line that lacks nothing but its newline is whole if its check says so.
    if _is_whole(rest):
        lines.append(rest)
        rest = b""
    valid = list(map(_is_whole, lines))
    corrupt = [number for number, is_valid in enumerate(valid, 1) if not is_valid]
    return Lines(list(compress(lines, valid)), tuple(corrupt), torn=bool(rest))


def _is_whole(line: bytes) -> bool:
    """Return whether a line matches its check."""
    # The sum is over the line as it was before its check was added: with a closing brace.
    crc = zlib.crc32(b"}", zlib.crc32(line[:-_END_LENGTH]))
    return line[-_END_LENGTH:] == _LINE_END % crc


def parse(line: bytes) -> Values | None:
    """Return the object that a line holds, without its check; None if it holds no object."""
    try:
        value = json.loads(line)
    # UnicodeDecodeError and numbers of thousands of digits are ValueErrors.
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict):
        return None
    value.pop("check", None)
    return value


def read_file(path: Path) -> Lines:
    """Read the lines of a file; one that does not exist has none.

    Raises:
        OSError: the file is there and cannot be read.
    """
    try:
        return split_lines(path.read_bytes())
    except FileNotFoundError:
        return split_lines(b"")


def read_lines(path: Path) -> list[Values]:
    """Return the objects of a file, without their checks; leave out lines that are damaged or hold
    no object.

    Raises:
        OSError: the file is there and cannot be read.
    """
    values = map(parse, read_file(path).texts)
    return [value for value in values if value is not None]


def newest_lines(path: Path) -> Iterator[Values]:
    """Yield the last whole objects of a file, the newest first, of which only the end is read; none
    without a file."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL))
            texts = split_lines(file.read()).texts
    except FileNotFoundError:
        return
    for text in reversed(texts):
        value = parse(text)
        if value is not None:
            yield value


class JsonLines:
    """A file of JSON lines to append to.

    An unfinished last line, left by a killed writer, is cut off first. Lines that the disk does not
    take wait in memory, so that training continues.
    """

    WARN_EVERY = 60.0
    """Seconds between two warnings."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._beside = path.with_name(f"{path.name}.unwritten")
        """File for the lines that could not be written when this one was closed."""
        self._file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
        self._cut_torn_line()
        self._waiting: list[bytes] = []
        self._written = 0
        """Bytes of the first waiting line that are in the file already."""
        self._warned = -self.WARN_EVERY
        self._append_unwritten()

    def _cut_torn_line(self) -> None:
        """Complete a last line that lacks only its newline; cut off any other unfinished one."""
        size = os.fstat(self._file).st_size
        # No line is expected to be longer than 1 MiB.
        length = min(size, 1 << 20)
        tail = os.pread(self._file, length, size - length)
        last = tail[tail.rfind(b"\n") + 1 :]
        if _is_whole(last):
            os.write(self._file, b"\n")
        elif last:
            os.ftruncate(self._file, size - len(last))

    def _append_unwritten(self) -> None:
        """Append the lines that an earlier process left beside the file."""
        if self._beside.is_file():
            self._waiting = self._beside.read_bytes().splitlines(keepends=True)
            if self._flush():
                os.fsync(self._file)
                self._beside.unlink()
            else:
                # The lines stay in the file beside for the next process.
                self._waiting = []
                self._written = 0

    def write(self, values: Sequence[Fields]) -> None:
        """Append a line for each of `values`, now or as soon as there is room."""
        self._waiting += [f"{sealed(value)}\n".encode() for value in values]
        self._flush()

    def sync(self) -> None:
        """Write the waiting lines and flush the file to the disk; warn if that fails."""
        if self._flush():
            try:
                os.fsync(self._file)
            except OSError as error:
                self._warn(error)

    def close(self) -> None:
        """Close the file.

        Raises:
            DiskError: lines could not be written; the message says how many, and where they are.
        """
        try:
            if self._flush():
                return
            lines = len(self._waiting)
            try:
                write_whole(self._beside, b"".join(self._waiting))
            except OSError as error:
                raise DiskError(
                    f"{self.path}: the last {lines} lines could not be written"
                    f" ({error.strerror}) and are lost. The checkpoints are not affected:"
                    " make room, or repair the disk, and resume the run"
                ) from None
            raise DiskError(
                f"{self.path}: the last {lines} lines could not be written;"
                f" they are in {self._beside.name} beside it."
                " Repair the disk: the next `efftrain pretrain --resume` of the run puts them back"
            )
        finally:
            os.close(self._file)

    def _flush(self) -> bool:
        """Write waiting lines until the disk fails; return whether all are written."""
        try:
            while self._waiting:
                content = b"".join(self._waiting)[self._written :]
                # The system may write a part only.
                self._written += os.write(self._file, content)
                while self._waiting and self._written >= len(self._waiting[0]):
                    line = self._waiting.pop(0)
                    self._written -= len(line)
        except OSError as error:
            self._warn(error)
            return False
        return True

    def _warn(self, error: OSError) -> None:
        now = time.monotonic()
        if now - self._warned < self.WARN_EVERY:
            return
        self._warned = now
        print(
            f"warning: {self.path}: {error.strerror};"
            f" training goes on, {len(self._waiting)} lines wait in memory until there is room",
            file=sys.stderr,
        )
