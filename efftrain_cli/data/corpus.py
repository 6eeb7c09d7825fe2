"""A prepared corpus: two splits of token shards, their tokenizer, and a manifest that binds them
together.

A shard is 1,024 bytes that say what the file is, and then the ids, little-endian. Shards written
before are the same but for JSON in the first bytes, which nothing reads. The size is checked
whenever a shard is opened, so truncation never goes unseen. The ids are checked all at once by
`TokenShards.verify`, before training, or when a shard is first read, and again once the file has
changed.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, ClassVar, NamedTuple

import numpy as np

from efftrain_cli.foundation.errors import DataError
from efftrain_cli.foundation.files import named_errors, sha256_of
from efftrain_cli.foundation.records import Part as Fields
from efftrain_cli.foundation.records import Record, read_record, text_digest

MAGIC = "efftrain tokens"
SCHEMA_VERSION = 2
"""Of a corpus; in format 1 a shard had a header of its own, and the manifest said all of it but
documents."""
HEADER_BYTES = 1024
_HEADER = MAGIC.encode().ljust(HEADER_BYTES)
_HEADER_BEFORE = b'{"magic": "efftrain tokens", '
"""Of shards written before; the JSON goes on."""
SHARD_TOKENS = 1 << 26
"""A shard is closed with the document that reaches this many tokens: small enough to check in a
tenth of a second."""
_CHUNK = 1 << 22  # tokens checked at a time


class ShardEntry(Fields):
    """What a manifest says of a shard."""

    file: str
    tokens: int
    """Token ids, end-of-text tokens included."""
    sha256: str
    """Of the ids as stored."""


def dtype_for(vocab_size: int) -> np.dtype:
    """Return the smaller type that holds every id, little-endian."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


@dataclass
class ShardWriter:
    """Writes documents as shards `<prefix>-00000.bin`, ... into a folder that nobody reads yet.

    Every file is synced to disk when it is closed; the folder becomes visible by a rename, which is
    the caller's.
    """

    folder: Path
    prefix: str
    vocab_size: int
    eot_id: int
    shard_tokens: int = SHARD_TOKENS
    entries: list[ShardEntry] = field(default_factory=list)
    """Of the shards that are closed."""
    tokens: int = 0
    """Ids written, end-of-text tokens included."""
    _file: IO[bytes] | None = None
    _tokens: int = 0
    """Ids of the open shard."""

    def add(self, ids: np.ndarray, document: str) -> None:
        """Append one document and its end of text.

        Raises:
            DataError: an id is not below the vocabulary size.
            OSError: the disk refused; the error names the shard.
        """
        if len(ids) and int(ids.max()) >= self.vocab_size:
            at = int(np.argmax(ids >= self.vocab_size))
            raise DataError(
                f"{document}: token {at} is {int(ids[at])},"
                f" but the tokenizer's vocabulary has {self.vocab_size} tokens (ids from 0):"
                " the tokenizer's files do not belong together"
            )
        with named_errors(self._path):
            if self._file is None:
                self._file = open(self._path, "wb")  # noqa: SIM115  closed by close()
                self._file.write(_HEADER)
                self._hash = hashlib.sha256()
            stored = np.empty(len(ids) + 1, dtype=dtype_for(self.vocab_size))
            stored[:-1] = ids
            stored[-1] = self.eot_id
            content = stored.tobytes()
            self._file.write(content)
        self._hash.update(content)
        self._tokens += len(stored)
        self.tokens += len(stored)
        if self._tokens >= self.shard_tokens:
            self.close()

    @property
    def _path(self) -> Path:
        return self.folder / f"{self.prefix}-{len(self.entries):05d}.bin"

    def sync(self) -> dict[str, Any]:
        """Flush what is written to disk and return where it ends: closed shards, and tokens of the
        open one."""
        if self._file is not None:
            self._flush(self._file)
        shards = [entry.model_dump() for entry in self.entries]
        return {"shards": shards, "tokens": self._tokens}

    def resume(self, at: dict[str, Any]) -> None:
        """Take up what `sync` left on disk and cut off what came after.

        Raises:
            DataError: less is there.
        """
        self.entries = [ShardEntry(**entry) for entry in at["shards"]]
        self.tokens = sum(entry.tokens for entry in self.entries) + at["tokens"]
        self.opened()
        if not at["tokens"]:
            return
        size = HEADER_BYTES + at["tokens"] * dtype_for(self.vocab_size).itemsize
        try:
            file = open(self._path, "r+b")  # noqa: SIM115  closed by close()
            if os.path.getsize(self._path) < size:
                raise damaged(self._path, "cut short")
        except OSError as error:
            raise damaged(self._path, f"cannot be read: {error.strerror}") from error
        file.truncate(size)
        file.seek(HEADER_BYTES)
        self._hash = hashlib.sha256()
        while chunk := file.read(1 << 22):
            self._hash.update(chunk)
        self._file = file
        self._tokens = at["tokens"]

    def close(self) -> None:
        """Flush the open shard to disk; nothing happens if none is open."""
        if self._file is None:
            return
        with named_errors(self._path), self._file as file:
            self._file = None
            self._flush(file)
        entry = ShardEntry(file=self._path.name, tokens=self._tokens, sha256=self._hash.hexdigest())
        self.entries.append(entry)
        self._tokens = 0

    def _flush(self, file: IO[bytes]) -> None:
        with named_errors(self._path):
            file.flush()
            os.fsync(file.fileno())

    def opened(self) -> TokenShards:
        """Open the shards that are closed."""
        return TokenShards(
            [open_shard(self.folder, entry, self.vocab_size) for entry in self.entries]
        )


@dataclass
class Shard:
    """One open shard."""

    path: Path
    ids: np.ndarray
    """Memory-mapped ids, uint16 or uint32 (tokens,)."""
    sha256: str
    vocab_size: int
    """Every id is below this."""
    verified: tuple[int, ...] | None = None
    """Stamp of the file when its ids were last compared with sha256 and vocabulary."""

    def check(self) -> None:
        """Verify the ids before their first use, and again if the file has changed since.

        Costs one `stat` if the file is as it was. Reading past the end of a file that was cut would
        kill the process (SIGBUS).

        Raises:
            DataError: the file was cut short, or its ids are not those that were written.
        """
        try:
            stat = os.stat(self.path)
        except FileNotFoundError:  # removed by its name only: the mapped content stays
            stamp = self.verified or ()
        except OSError as error:
            raise damaged(self.path, f"cannot be read: {error.strerror}") from error
        else:
            expected = HEADER_BYTES + self.ids.nbytes
            if stat.st_size < expected:
                sizes = f"{stat.st_size:,} bytes where {expected:,} were when it was opened"
                raise damaged(self.path, f"{sizes}: the file was cut short while in use")
            # The change time cannot be set back, as the modification time can.
            stamp = (stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)
        if self.verified != stamp:
            self._verify()
            self.verified = stamp

    def _verify(self) -> None:
        """Read every id once; fail if one is beyond the vocabulary or the sha256 differs."""
        digest = hashlib.sha256()
        for start in range(0, len(self.ids), _CHUNK):
            chunk = self.ids[start : start + _CHUNK]
            digest.update(chunk.data)
            if int(chunk.max()) >= self.vocab_size:
                at = start + int(np.argmax(chunk >= self.vocab_size))
                place = f"token {at} (byte {HEADER_BYTES + at * self.ids.itemsize})"
                raise damaged(
                    self.path,
                    f"{place} is {int(self.ids[at])},"
                    f" but the vocabulary has {self.vocab_size} tokens",
                )
        if digest.hexdigest() != self.sha256:
            hashes = f"sha256 {digest.hexdigest()[:12]}..., manifest {self.sha256[:12]}..."
            raise damaged(
                self.path,
                f"its tokens are not those that were written ({hashes}): the file is damaged",
            )


def open_shard(folder: Path, entry: ShardEntry, vocab_size: int) -> Shard:
    """Open a shard of a corpus.

    Raises:
        DataError: it is missing, cut short, too long or no shard.
    """
    path = folder / entry.file
    dtype = dtype_for(vocab_size)
    expected = HEADER_BYTES + entry.tokens * dtype.itemsize
    try:
        with open(path, "rb") as file:
            start = file.read(HEADER_BYTES)
        size = path.stat().st_size
        if size != expected:
            what = "cut short" if size < expected else "longer than its manifest says"
            sizes = f"{size:,} bytes where {expected:,} are expected"
            raise damaged(path, f"{sizes}: the file is {what}")
        if start != _HEADER and not start.startswith(_HEADER_BEFORE):
            raise damaged(path, "not a token shard, or its first bytes are damaged")
        # A plain array over the map: slicing np.memmap itself costs several times as much.
        ids = np.memmap(path, dtype, "r", HEADER_BYTES, (entry.tokens,)).view(np.ndarray)
    except OSError as error:
        raise damaged(path, f"cannot be read: {error.strerror}") from error
    return Shard(path, ids, entry.sha256, vocab_size)


class Part(NamedTuple):
    """One of several sources of a split: a stretch of its tokens."""

    name: str
    weight: float
    """Its share of the windows, relative to the others' weights."""
    tokens: int


@dataclass
class TokenShards:
    """The shards of one split, read as a single sequence of tokens."""

    shards: list[Shard]
    parts: tuple[Part, ...] = ()
    """The sources in their order, where there are several; their tokens stand one after the
    other."""
    documents: int = 0
    _ends: np.ndarray = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._ends = np.cumsum([len(shard.ids) for shard in self.shards])

    @property
    def tokens(self) -> int:
        """Token ids, end-of-text tokens included."""
        return int(self._ends[-1]) if len(self._ends) else 0

    @property
    def sha256(self) -> str:
        """Fingerprint of every id in order, as the manifest states it."""
        return text_digest("\n".join(shard.sha256 for shard in self.shards))

    def read(self, starts: Iterable[int], length: int) -> np.ndarray:
        """Return `length` ids from each of `starts`, int64 (starts, length).

        Each shard that is read is checked once a call, by `Shard.check`.
        """
        starts = list(starts)
        out = np.empty((len(starts), length), dtype=np.int64)
        checked = set()
        first_shards = np.searchsorted(self._ends, starts, side="right").tolist()
        for row, (start, number) in enumerate(zip(starts, first_shards, strict=True)):
            done = 0
            while done < length:
                if number not in checked:
                    self.shards[number].check()
                    checked.add(number)
                ids = self.shards[number].ids
                begin = start + done - (int(self._ends[number]) - len(ids))
                part = ids[begin : begin + length - done]
                out[row, done : done + len(part)] = part
                done += len(part)
                number += 1
        return out

    def verify(self) -> None:
        """Check every shard, by `Shard.check`."""
        for shard in self.shards:
            shard.check()


def damaged(path: Path, what: str) -> DataError:
    """Return the error of a file of a prepared corpus that cannot be used, with the way out."""
    return DataError(
        f"{path}: {what}. Delete the folder {path.parent} and run `efftrain prepare` again"
    )


class Made(Fields):
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

    newest: ClassVar[int] = SCHEMA_VERSION
    restore: ClassVar[str] = "Delete its folder and run `efftrain prepare` again"

    schema_version: int
    tokenizer: Made
    train: SplitEntry
    valid: SplitEntry
    data_hash: str


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
    """What a reader should know of how the text was found, in sentences."""

    def verify(self) -> None:
        """Compare every token with its shard's sha256; a `DataError` names a damaged shard."""
        self.train.verify()
        self.valid.verify()


def open_corpus(
    folder: Path, sources: tuple[tuple[str, float], ...] = (), notes: tuple[str, ...] = ()
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
    if not record.is_sealed:
        raise damaged(path, "it does not match its own sha256")
    tokenizer_path = folder / "tokenizer.json"
    made = record.tokenizer
    if not tokenizer_path.is_file() or sha256_of(tokenizer_path) != made.file_sha256:
        raise damaged(tokenizer_path, "missing or changed since the corpus was prepared")

    def open_split(side: SplitEntry) -> TokenShards:
        shards = [open_shard(folder, entry, made.vocab_size) for entry in side.shards]
        parts = []
        if side.parts:
            for source, tokens in zip(sources, side.parts, strict=True):
                parts.append(Part(*source, tokens))
        return TokenShards(shards, tuple(parts), side.documents)

    train = open_split(record.train)
    valid = open_split(record.valid)
    return Corpus(
        folder,
        train,
        valid,
        tokenizer_path,
        made.vocab_size,
        made.eot_id,
        tokenizer_sha256=made.sha256,
        data_hash=record.data_hash,
        bytes_per_token=record.valid.bytes / valid.tokens,
        manifest=record.to_json(),
        notes=notes,
    )
