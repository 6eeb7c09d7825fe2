"""A prepared corpus: two splits of tokens, their tokenizer, and a manifest that binds them.

A split is a file of token ids, uint16 or uint32, little-endian, and nothing else. The manifest has
the sha256 of each of its shards, stretches of about 67 million tokens. Sizes are checked whenever a
corpus is opened, so truncation never goes unseen. Contents are checked by `Corpus.verify`, before
training, and by every read from a file that has changed since.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from pydantic import ConfigDict

from efftrain_cli.foundation.errors import DataError
from efftrain_cli.foundation.files import sha256_of
from efftrain_cli.foundation.records import Part as Fields
from efftrain_cli.foundation.records import Record, read_record, text_digest, write_record

if TYPE_CHECKING:
    from efftrain_cli.recipe.sections import TextSource


class Shard(Fields):
    """A stretch of a split's file."""

    tokens: int
    sha256: str


class SplitEntry(Fields):
    """What is written of a split."""

    model_config = ConfigDict(frozen=False)

    shards: list[Shard]
    documents: int
    bytes: int
    """Of its text as UTF-8."""
    parts: list[int]
    """Tokens of each [[data.sources]], or of the one text."""

    @classmethod
    def begin(cls, parts: int = 1) -> Self:
        """Return the entry of a split of so many sources before anything is written."""
        return cls(shards=[], documents=0, bytes=0, parts=[0] * parts)


def dtype_for(vocab_size: int) -> np.dtype:
    """Return the smaller type that holds every id, little-endian."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


@dataclass
class ShardWriter:
    """Writes a split's tokens into a file that nobody reads yet, shard by shard."""

    path: Path
    vocab_size: int
    split: SplitEntry = field(default_factory=SplitEntry.begin)
    """Has the shards that are written; what else the file has is cut off."""
    _file: IO[bytes] | None = None

    @property
    def open_tokens(self) -> int:
        """Ids of the open shard."""
        return sum(self.split.parts) - sum(shard.tokens for shard in self.split.shards)

    def add(self, ids: np.ndarray, part: int = 0) -> None:
        """Append ids of a source.

        Raises:
            DataError: an id is not below the vocabulary size.
            OSError: the disk refused.
        """
        if (ids >= self.vocab_size).any():
            raise DataError(
                f"token id {ids.max()}, but the tokenizer's vocabulary has {self.vocab_size} tokens"
                " (ids from 0)\n  give files of a tokenizer that belong together"
            )
        dtype = dtype_for(self.vocab_size)
        if self._file is None:
            self._file = open(self.path, "ab")  # noqa: SIM115  closed by close()
            self._file.truncate(sum(self.split.parts) * dtype.itemsize)
            self._hash = hashlib.sha256()
        content = ids.astype(dtype).tobytes()
        self._file.write(content)
        self._hash.update(content)
        self.split.parts[part] += len(ids)

    def close(self) -> None:
        """End the open shard and flush it to disk; nothing happens if none is open."""
        if self._file is None:
            return
        with self._file as file:
            self._file = None
            file.flush()
            os.fsync(file.fileno())
        shard = Shard(tokens=self.open_tokens, sha256=self._hash.hexdigest())
        self.split.shards.append(shard)


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
    """A split: its shards, read as a single sequence of tokens.

    Raises:
        DataError: the file is missing, or not of the size that the manifest says.
    """

    path: Path
    split: SplitEntry
    vocab_size: int
    parts: tuple[Part, ...] = ()
    """The sources in their order, if there are several; their tokens stand one after the other."""

    def __post_init__(self) -> None:
        self.stamp = self._read_stamp()
        """What the file was when it was opened or last verified."""
        # A plain array over the map: slicing np.memmap itself costs several times as much.
        self.ids = np.memmap(self.path, dtype_for(self.vocab_size), "r").view(np.ndarray)

    @property
    def tokens(self) -> int:
        """Token ids, end-of-text tokens included."""
        return sum(shard.tokens for shard in self.split.shards)

    @property
    def sha256(self) -> str:
        """Fingerprint of every id in order, as the manifest states it."""
        return text_digest("\n".join(shard.sha256 for shard in self.split.shards))

    def read(
        self,
        starts: Sequence[int] | np.ndarray,
        length: int,
    ) -> np.ndarray:
        """Return `length` ids from each of `starts`, int64 (starts, length).

        Raises:
            DataError: the file has changed, and its ids are not those that were written.
        """
        self.verify(self.stamp)
        rows = np.asarray(starts, dtype=np.int64)
        return sliding_window_view(self.ids, length)[rows].astype(np.int64)

    def verify(self, known: list[int]) -> None:
        """Compare every shard with its sha256, if the file differs from the stamp `known`: a read
        past the end of a file that was cut would end the process (SIGBUS).

        Raises:
            DataError: one differs.
        """
        stamp = self._read_stamp()
        if stamp == known:
            return
        start = 0
        for shard in self.split.shards:
            ids = self.ids[start : start + shard.tokens]
            if hashlib.sha256(ids.data).hexdigest() != shard.sha256:
                raise damaged(self.path, "its tokens are not those that were written")
            start += shard.tokens
        self.stamp = stamp

    def _read_stamp(self) -> list[int]:
        """Return what changes with the content of the file; check its size."""
        expected = self.tokens * dtype_for(self.vocab_size).itemsize
        try:
            stat = self.path.stat()
        except OSError as error:
            raise damaged(self.path, f"cannot be read: {error.strerror}") from error
        if stat.st_size != expected:
            raise damaged(self.path, f"{stat.st_size:,} bytes where {expected:,} are expected")
        # The change time cannot be set back, as the modification time can.
        return [stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]


def damaged(path: Path, what: str) -> DataError:
    """Return the error of a file of a prepared corpus that cannot be used."""
    return DataError(f"{path}: {what}\n  delete {path.parent} and run `efftrain prepare` again")


class TokenizerEntry(Fields):
    """The tokenizer of a corpus."""

    sha256: str
    file_sha256: str
    vocab_size: int
    eot_id: int


class CorpusManifest(Record):
    """manifest.json of a prepared corpus."""

    newest: ClassVar[int] = 4
    restore: ClassVar[str] = "Delete its folder and run `efftrain prepare` again"

    schema_version: int
    tokenizer: TokenizerEntry
    train: SplitEntry
    valid: SplitEntry
    split: str
    """How the sides were divided: "given", "cut" or "held out"."""
    sources: dict[str, list[str]]
    """What each side was read from, in words."""
    tally: dict[str, Any]
    """The fields of `documents.Tally`."""
    limits: dict[str, int | None]
    """Most tokens of each side; null: all there are."""
    data_hash: str
    notes: list[str]
    """What a reader should know of how the text was prepared, in sentences."""


class Verified(Record):
    """verified.json: what the files of the splits were when they were last verified."""

    train: list[int]
    valid: list[int]


@dataclass(frozen=True)
class Corpus:
    """Prepared data, open for reading."""

    folder: Path
    """Holds train.bin, valid.bin, tokenizer.json and manifest.json."""
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
    manifest: CorpusManifest

    @property
    def holds_all(self) -> bool:
        """Whether all of its text was prepared, and not as much as a recipe needed."""
        return not any(self.manifest.limits.values())

    def verify(self, full: bool = False) -> None:
        """Compare with its sha256 every token that may have changed since it was last verified.

        Args:
            full: compare all of them.

        Raises:
            DataError: one is damaged.
        """
        path = self.folder / "verified.json"
        known = Verified(train=[], valid=[])
        if not full:
            with suppress(DataError, OSError):
                known = read_record(path, Verified)
        self.train.verify(known.train)
        self.valid.verify(known.valid)
        now = Verified(train=self.train.stamp, valid=self.valid.stamp)
        if now != known:
            with suppress(OSError):  # another user's cache
                write_record(path, now)


def open_corpus(folder: Path, sources: Sequence[TextSource] | None = None) -> Corpus:
    """Open a prepared corpus. Check that its files belong together and are of full size.

    Args:
        sources: data.sources of the recipe; the corpus itself does not depend on names and weights.

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

    splits = {}
    for side, entry in (("train", record.train), ("valid", record.valid)):
        parts: list[Part] = []
        if side == "train" or record.split != "given":
            for source, tokens in zip(sources or (), entry.parts, strict=False):
                parts.append(Part(source.path, source.weight, tokens))
        path = folder / f"{side}.bin"
        splits[side] = TokenShards(path, entry, tokenizer.vocab_size, tuple(parts))
    return Corpus(
        folder,
        splits["train"],
        splits["valid"],
        tokenizer_path,
        tokenizer.vocab_size,
        tokenizer.eot_id,
        tokenizer_sha256=tokenizer.sha256,
        data_hash=record.data_hash,
        manifest=record,
    )
