"""A prepared corpus: two splits of token shards, their tokenizer, and a manifest that binds them
together.

A shard is a file of token ids, uint16 or uint32, little-endian, and nothing else. Sizes are checked
whenever a corpus is opened, so truncation never goes unseen. Contents are checked by
`Corpus.verify`, before training, and by every read from a shard whose file has changed since.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, ClassVar, NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from efftrain_cli.foundation.errors import DataError
from efftrain_cli.foundation.files import sha256_of
from efftrain_cli.foundation.records import Part as Fields
from efftrain_cli.foundation.records import Record, read_record, text_digest, write_record


class ShardEntry(Fields):
    """What a manifest says of a shard."""

    file: str
    tokens: int
    sha256: str
    """Of the file."""


def dtype_for(vocab_size: int) -> np.dtype:
    """Return the smaller type that holds every id, little-endian."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


@dataclass
class ShardWriter:
    """Writes token ids as shards `<prefix>-00000.bin`, ... into a folder that nobody reads yet."""

    folder: Path
    prefix: str
    vocab_size: int
    entries: list[ShardEntry] = field(default_factory=list)
    """Of the closed shards."""
    open_tokens: int = 0
    """Ids of the open shard."""
    in_document: bool = False
    """Whether the last document goes on."""
    _file: IO[bytes] | None = None

    @property
    def tokens(self) -> int:
        """Ids of all shards."""
        return self.open_tokens + sum(entry.tokens for entry in self.entries)

    @property
    def _path(self) -> Path:
        return self.folder / f"{self.prefix}-{len(self.entries):05d}.bin"

    def add(self, ids: np.ndarray) -> None:
        """Append ids.

        Raises:
            DataError: an id is not below the vocabulary size.
            OSError: the disk refused; the error names the shard.
        """
        if len(ids) == 0:
            return
        largest = int(ids.max())
        if largest >= self.vocab_size:
            raise DataError(
                f"token id {largest}, but the tokenizer's vocabulary has {self.vocab_size} tokens"
                " (ids from 0)\n  give files of a tokenizer that belong together"
            )
        content = ids.astype(dtype_for(self.vocab_size)).tobytes()
        with _named_errors(self._path):
            if self._file is None:
                self._file = open(self._path, "wb")  # noqa: SIM115  closed by close()
                self._hash = hashlib.sha256()
            self._file.write(content)
        self._hash.update(content)
        self.open_tokens += len(ids)

    def close(self) -> None:
        """Flush the open shard to disk; nothing happens if none is open."""
        if self._file is None:
            return
        with _named_errors(self._path), self._file as file:
            self._file = None
            file.flush()
            os.fsync(file.fileno())
        digest = self._hash.hexdigest()
        self.entries.append(
            ShardEntry(file=self._path.name, tokens=self.open_tokens, sha256=digest)
        )
        self.open_tokens = 0


class Part(NamedTuple):
    """One of several sources of a split: a stretch of its tokens."""

    name: str
    weight: float
    """Its share of the windows, relative to the others' weights."""
    tokens: int


def apportion(weights: list[float], total: int) -> list[int]:
    """Share out `total` by weight in whole numbers, largest remainders first (Hamilton)."""
    exact = [weight * total / sum(weights) for weight in weights]
    shares = [int(share) for share in exact]
    by_remainder = sorted(range(len(weights)), key=lambda i: shares[i] - exact[i])
    for i in by_remainder[: total - sum(shares)]:
        shares[i] += 1
    return shares


@dataclass
class TokenShards:
    """The shards of one split, read as a single sequence of tokens.

    Raises:
        DataError: a shard is missing, or not of the size that the manifest says.
    """

    folder: Path
    entries: list[ShardEntry]
    vocab_size: int
    parts: tuple[Part, ...] = ()
    """The sources in their order, where there are several; their tokens stand one after the
    other."""
    documents: int = 0

    def __post_init__(self) -> None:
        self._ends = np.cumsum([entry.tokens for entry in self.entries], dtype=np.int64)
        self.stamps = [self._stamp(entry) for entry in self.entries]
        """What each file was when it was opened or last verified."""
        # A plain array over the map: slicing np.memmap itself costs several times as much.
        self.ids = [
            np.memmap(self.folder / entry.file, dtype_for(self.vocab_size), "r").view(np.ndarray)
            for entry in self.entries
        ]
        """Ids of each shard, memory-mapped."""

    @property
    def tokens(self) -> int:
        """Token ids, end-of-text tokens included."""
        return sum(entry.tokens for entry in self.entries)

    @property
    def sha256(self) -> str:
        """Fingerprint of every id in order, as the manifest states it."""
        return text_digest("\n".join(entry.sha256 for entry in self.entries))

    def read(
        self,
        starts: Sequence[int] | np.ndarray,
        length: int,
    ) -> np.ndarray:
        """Return `length` ids from each of `starts`, int64 (starts, length).

        Raises:
            DataError: a shard's file has changed, and its ids are not those that were written.
        """
        first = np.asarray(starts, dtype=np.int64)
        out = np.empty((len(first), length), dtype=np.int64)
        shards = np.searchsorted(self._ends, first, side="right")
        last = np.searchsorted(self._ends, first + length - 1, side="right")
        for number in np.unique(np.concatenate([shards, last])).tolist():
            self._check(number)
            ids = self.ids[number]
            begin = int(self._ends[number]) - len(ids)
            rows = (shards == number) & (last == number)
            if rows.any():
                out[rows] = sliding_window_view(ids, length)[first[rows] - begin]
        for row in np.flatnonzero(shards != last).tolist():
            inside = self.ids[shards[row] : last[row] + 1]
            skip = int(first[row] - self._ends[shards[row]]) + len(inside[0])
            out[row] = np.concatenate(inside)[skip : skip + length]
        return out

    def verify(self, known: dict[str, list[int]]) -> None:
        """Compare every shard with its sha256 whose file differs from a stamp in `known`.

        Raises:
            DataError: one differs.
        """
        for number, entry in enumerate(self.entries):
            self.stamps[number] = known.get(entry.file, [])
            self._check(number)

    def _check(self, number: int) -> None:
        """Compare a shard with its sha256 if its file has changed: a read past the end of a file
        that was cut would end the process (SIGBUS)."""
        entry = self.entries[number]
        stamp = self._stamp(entry)
        if stamp == self.stamps[number]:
            return
        path = self.folder / entry.file
        if sha256_of(path) != entry.sha256:
            raise damaged(path, "its tokens are not those that were written")
        self.stamps[number] = stamp

    def _stamp(self, entry: ShardEntry) -> list[int]:
        """Return what changes with the content of a shard's file; check its size."""
        path = self.folder / entry.file
        expected = entry.tokens * dtype_for(self.vocab_size).itemsize
        try:
            stat = path.stat()
        except OSError as error:
            raise damaged(path, f"cannot be read: {error.strerror}") from error
        if stat.st_size != expected:
            raise damaged(path, f"{stat.st_size:,} bytes where {expected:,} are expected")
        # The change time cannot be set back, as the modification time can.
        return [stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]


@contextmanager
def _named_errors(path: Path) -> Iterator[None]:
    """Name the file in an OSError that names none, as those of write and fsync."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def damaged(path: Path, what: str) -> DataError:
    """Return the error of a file of a prepared corpus that cannot be used."""
    return DataError(f"{path}: {what}\n  delete {path.parent} and run `efftrain prepare` again")


class TokenizerEntry(Fields):
    """The tokenizer of a corpus."""

    sha256: str
    file_sha256: str
    vocab_size: int
    eot_id: int


class SplitEntry(Fields):
    """A split's shards and counts."""

    shards: list[ShardEntry]
    documents: int
    bytes: int
    tokens: int
    parts: list[int] | None = None


class CorpusManifest(Record):
    """manifest.json of a prepared corpus."""

    newest: ClassVar[int] = 3
    restore: ClassVar[str] = "Delete its folder and run `efftrain prepare` again"

    schema_version: int
    tokenizer: TokenizerEntry
    train: SplitEntry
    valid: SplitEntry
    limits: dict[str, int | None]
    """Most tokens of each side; null: all there are."""
    data_hash: str
    notes: list[str]


class Verified(Record):
    """verified.json beside the shards: what their files were when they were last verified."""

    newest: ClassVar[int] = 1

    stamps: dict[str, list[int]]


@dataclass(frozen=True)
class Corpus:
    """Prepared data, open for reading."""

    folder: Path
    """Holds the shards, tokenizer.json and manifest.json."""
    train: TokenShards
    valid: TokenShards
    tokenizer_path: Path
    """tokenizer.json; `tokenizer.load_tokenizer` reads it."""
    vocab_size: int
    """Largest token id + 1; the model may pad it."""
    eot_id: int
    """Id of the end-of-text token, which ends every document."""
    tokenizer_sha256: str
    """Fingerprint of what decides the ids, whatever file it came from."""
    data_hash: str
    """Fingerprint of every token of both splits and of the tokenizer: equal means the same data."""
    bytes_per_token: float
    """UTF-8 bytes of validation text per validation token, end-of-text tokens counted."""
    manifest: dict[str, Any]
    """What prepare found: sources, counts, overlap, skipped documents."""
    notes: tuple[str, ...] = ()
    """What a reader should know of how the text was prepared, in sentences."""

    @property
    def key(self) -> str:
        """Its name in the cache."""
        return self.folder.name

    @property
    def holds_all(self) -> bool:
        """Whether all of its text was prepared, and not as much as a recipe needed."""
        return not any(self.manifest["limits"].values())

    def verify(self, full: bool = False) -> None:
        """Compare with its sha256 every shard that has changed since it was last verified.

        Args:
            full: compare all of them.

        Raises:
            DataError: one is damaged.
        """
        path = self.folder / "verified.json"
        known: dict[str, list[int]] = {}
        if not full:
            with suppress(DataError, OSError):
                known = read_record(path, Verified).stamps
        stamps = {}
        for side in (self.train, self.valid):
            side.verify(known)
            for entry, stamp in zip(side.entries, side.stamps, strict=True):
                stamps[entry.file] = stamp
        if stamps != known:
            with suppress(OSError):  # another user's cache
                write_record(path, Verified(stamps=stamps))


def open_corpus(
    folder: Path,
    sources: Sequence[tuple[str, float]] = (),
    notes: Sequence[str] = (),
) -> Corpus:
    """Open a prepared corpus. Check that its files belong together and are of full size.

    Args:
        sources: name and weight of each of several sources; the corpus itself does not depend on
            them.

    Raises:
        DataError: a file is missing, cut short, damaged, or from another corpus or tokenizer.
    """
    path = folder / "manifest.json"
    try:
        record = read_record(path, CorpusManifest)
    except FileNotFoundError:
        raise damaged(path, "missing") from None
    tokenizer = record.tokenizer
    tokenizer_path = folder / "tokenizer.json"
    if not tokenizer_path.is_file() or sha256_of(tokenizer_path) != tokenizer.file_sha256:
        raise damaged(tokenizer_path, "missing or changed since the corpus was prepared")
    splits = []
    for side in (record.train, record.valid):
        parts = []
        for source, tokens in zip(sources, side.parts or (), strict=False):
            parts.append(Part(*source, tokens))
        splits.append(
            TokenShards(folder, side.shards, tokenizer.vocab_size, tuple(parts), side.documents)
        )
    train, valid = splits
    return Corpus(
        folder,
        train,
        valid,
        tokenizer_path,
        tokenizer.vocab_size,
        tokenizer.eot_id,
        tokenizer_sha256=tokenizer.sha256,
        data_hash=record.data_hash,
        bytes_per_token=record.valid.bytes / valid.tokens,
        manifest=record.to_json(),
        notes=(*record.notes, *notes),
    )
