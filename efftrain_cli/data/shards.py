"""Token shards: files of token ids behind a header that says what they are and proves it.

A shard is 1,024 bytes of header and then the ids, little-endian. The header is a line of JSON, spaces, and the sha256
of what stands before it; the JSON holds the sha256 of the ids. Header and size are checked whenever a shard is opened,
so truncation never goes unseen. The ids are checked all at once by `TokenShards.verify`, before training, or when a
shard is first read, and again once the file has changed.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np

from efftrain_cli.foundation.errors import DataError

MAGIC = "efftrain tokens"
SCHEMA_VERSION = 1
HEADER_BYTES = 1024
SHARD_TOKENS = 1 << 26
"""A shard is closed with the document that reaches this many tokens: small enough to check in a tenth of a second."""
_DIGEST_BYTES = 65  # 64 hex digits and a newline
_CHUNK = 1 << 22  # tokens checked at a time


@dataclass(frozen=True, kw_only=True)
class Header:
    """What a shard says about itself."""

    magic: str = MAGIC
    schema_version: int = SCHEMA_VERSION
    dtype: str
    """"uint16" or "uint32", little-endian."""
    tokens: int
    """Token ids in this file."""
    documents: int
    """Documents in this file; each ends with eot_id."""
    vocab_size: int
    """Every id is below this."""
    eot_id: int
    """Id of the end-of-text token."""
    tokenizer_sha256: str
    """Fingerprint of the tokenizer that made the ids."""
    sha256: str
    """Of the ids as stored."""


def dtype_for(vocab_size: int) -> np.dtype:
    """The smaller type that holds every id, little-endian."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


class ShardWriter:
    """Writes documents as shards `<prefix>-00000.bin`, ... into a folder that nobody reads yet.

    Every file is synced to disk when it is closed; the folder becomes visible by a rename, which is the caller's.
    """

    def __init__(
        self,
        folder: Path,
        prefix: str,
        *,
        vocab_size: int,
        eot_id: int,
        tokenizer_sha256: str,
        shard_tokens: int = SHARD_TOKENS,
    ) -> None:
        self.folder, self.prefix, self.shard_tokens = folder, prefix, shard_tokens
        self.vocab_size, self.eot_id, self.tokenizer_sha256 = vocab_size, eot_id, tokenizer_sha256
        self.dtype = dtype_for(vocab_size)
        self.paths: list[Path] = []
        self.headers: list[Header] = []
        """Of the shards that are closed."""
        self.tokens = 0
        """Ids written, end-of-text tokens included."""
        self._file: IO[bytes] | None = None
        self._tokens = self._documents = 0

    def add(self, ids: np.ndarray, document: str) -> None:
        """Appends one document and its end of text; a `DataError` where an id is not below the vocabulary size."""
        if len(ids) and int(ids.max()) >= self.vocab_size:
            at = int(np.argmax(ids >= self.vocab_size))
            raise DataError(
                f"{document}: token {at} is {int(ids[at])}, but the tokenizer's vocabulary has {self.vocab_size} tokens "
                "(ids from 0): the tokenizer's files do not belong together"
            )
        if self._file is None:
            self.paths.append(self._path(len(self.paths)))
            self._file = open(self.paths[-1], "wb")  # noqa: SIM115  closed by close()
            self._file.write(b"\0" * HEADER_BYTES)
            self._hash, self._tokens, self._documents = hashlib.sha256(), 0, 0
        stored = np.empty(len(ids) + 1, dtype=self.dtype)
        stored[:-1] = ids
        stored[-1] = self.eot_id
        content = stored.tobytes()
        self._file.write(content)
        self._hash.update(content)
        self._tokens += len(stored)
        self.tokens += len(stored)
        self._documents += 1
        if self._tokens >= self.shard_tokens:
            self.close()

    def _path(self, number: int) -> Path:
        return self.folder / f"{self.prefix}-{number:05d}.bin"

    def sync(self) -> dict[str, int]:
        """Brings what is written to disk and says where it ends: whole shards, and tokens and documents of the open
        one."""
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())
        tokens, documents = (self._tokens, self._documents) if self._file is not None else (0, 0)
        return {"shards": len(self.headers), "tokens": tokens, "documents": documents}

    def resume(self, at: dict[str, int]) -> None:
        """Takes up what `sync` left on disk, cutting off what came after; a `DataError` where less is there."""
        self.paths = [self._path(number) for number in range(at["shards"])]
        self.headers = [open_shard(path).header for path in self.paths]
        self.tokens = sum(header.tokens for header in self.headers) + at["tokens"]
        if not at["tokens"]:
            return
        self.paths.append(self._path(at["shards"]))
        size = HEADER_BYTES + at["tokens"] * self.dtype.itemsize
        try:
            file = open(self.paths[-1], "r+b")  # noqa: SIM115  closed by close()
            if os.path.getsize(self.paths[-1]) < size:
                raise damaged(self.paths[-1], "cut short")
        except OSError as error:
            raise damaged(self.paths[-1], f"cannot be read: {error.strerror}") from error
        file.truncate(size)
        file.seek(HEADER_BYTES)
        self._hash = hashlib.sha256()
        while chunk := file.read(1 << 22):
            self._hash.update(chunk)
        self._file, self._tokens, self._documents = file, at["tokens"], at["documents"]

    def close(self) -> None:
        """Writes the open shard's header and syncs it to disk."""
        if self._file is None:
            return
        header = Header(
            dtype=self.dtype.name,
            tokens=self._tokens,
            documents=self._documents,
            vocab_size=self.vocab_size,
            eot_id=self.eot_id,
            tokenizer_sha256=self.tokenizer_sha256,
            sha256=self._hash.hexdigest(),
        )
        with self._file as file:
            self._file = None
            file.seek(0)
            file.write(header_bytes(header))
            file.flush()
            os.fsync(file.fileno())
        self.headers.append(header)


def header_bytes(header: Header) -> bytes:
    """The `HEADER_BYTES` bytes in front of a shard's ids."""
    body = json.dumps(asdict(header)).encode().ljust(HEADER_BYTES - _DIGEST_BYTES - 1) + b"\n"
    return body + hashlib.sha256(body).hexdigest().encode() + b"\n"


@dataclass
class Shard:
    """One open shard."""

    path: Path
    header: Header
    ids: np.ndarray
    """Memory-mapped ids, uint16 or uint32 (tokens,)."""
    verified: tuple[int, ...] | None = None
    """Stamp of the file when its ids were last compared with the header's sha256 and vocabulary."""

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
            expected = HEADER_BYTES + self.header.tokens * self.ids.itemsize
            if stat.st_size < expected:
                sizes = f"{stat.st_size:,} bytes where {expected:,} were when it was opened"
                raise damaged(self.path, f"{sizes}: the file was cut short while in use")
            # The change time cannot be set back, as the modification time can.
            stamp = (stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)
        if self.verified != stamp:
            self._verify()
            self.verified = stamp

    def _verify(self) -> None:
        """Read every id once; fail if one is not below the vocabulary size or the sha256 differs."""
        digest = hashlib.sha256()
        for start in range(0, len(self.ids), _CHUNK):
            chunk = self.ids[start : start + _CHUNK]
            digest.update(chunk.data)
            if int(chunk.max()) >= self.header.vocab_size:
                at = start + int(np.argmax(chunk >= self.header.vocab_size))
                place = f"token {at} (byte {HEADER_BYTES + at * self.ids.itemsize})"
                raise damaged(
                    self.path,
                    f"{place} is {int(self.ids[at])}, but the vocabulary has {self.header.vocab_size} tokens",
                )
        if digest.hexdigest() != self.header.sha256:
            hashes = f"sha256 {digest.hexdigest()[:12]}..., header {self.header.sha256[:12]}..."
            raise damaged(
                self.path,
                f"its tokens are not those that were written ({hashes}): the file is damaged",
            )


def open_shard(path: Path) -> Shard:
    """Opens a shard; a `DataError` where it is missing, cut short, too long, of another format, or its header is
    damaged."""
    try:
        with open(path, "rb") as file:
            start = file.read(HEADER_BYTES)
        size = path.stat().st_size
    except OSError as error:
        raise damaged(path, f"cannot be read: {error.strerror}") from error
    if len(start) < HEADER_BYTES:
        raise damaged(path, f"only {size} bytes, less than the header: the file is cut short")
    body, digest = start[:-_DIGEST_BYTES], start[-_DIGEST_BYTES:-1]
    if hashlib.sha256(body).hexdigest().encode() != digest:
        raise damaged(
            path, "its header is damaged" if MAGIC.encode() in start else "not a token shard"
        )
    fields = json.loads(body)
    if fields.get("schema_version") != SCHEMA_VERSION or fields["dtype"] not in (
        "uint16",
        "uint32",
    ):
        raise damaged(
            path,
            f"written in format {fields.get('schema_version')}, this version reads {SCHEMA_VERSION}",
        )
    header = Header(**fields)
    dtype = np.dtype(header.dtype).newbyteorder("<")
    expected = HEADER_BYTES + header.tokens * dtype.itemsize
    if size != expected:
        what = "cut short" if size < expected else "longer than its header says"
        raise damaged(path, f"{size:,} bytes where {expected:,} are expected: the file is {what}")
    # A plain array over the map: slicing np.memmap itself costs several times as much.
    ids = np.memmap(path, dtype=dtype, mode="r", offset=HEADER_BYTES, shape=(header.tokens,)).view(
        np.ndarray
    )
    return Shard(path, header, ids)


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
    """The sources in their order, where there are several; their tokens stand one after the other."""
    _ends: np.ndarray = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._ends = np.cumsum([shard.header.tokens for shard in self.shards])

    @property
    def tokens(self) -> int:
        """Token ids, end-of-text tokens included."""
        return int(self._ends[-1]) if len(self._ends) else 0

    @property
    def documents(self) -> int:
        return sum(shard.header.documents for shard in self.shards)

    @property
    def sha256(self) -> str:
        """Fingerprint of every id in order, as the headers state it."""
        return hashlib.sha256(
            "\n".join(shard.header.sha256 for shard in self.shards).encode()
        ).hexdigest()

    def read(self, starts: Iterable[int], length: int) -> np.ndarray:
        """Return `length` ids from each of `starts`, int64 (starts, length).

        Each shard that is read is checked once a call, by `Shard.check`.
        """
        starts = list(starts)
        out = np.empty((len(starts), length), dtype=np.int64)
        if len(self.shards) == 1:
            self.shards[0].check()
            ids = self.shards[0].ids
            for row, start in enumerate(starts):
                out[row] = ids[start : start + length]
            return out
        checked = set()
        for row, start in enumerate(starts):
            done = 0
            number = int(np.searchsorted(self._ends, start, side="right"))
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
    """The error of a file of a prepared corpus that cannot be used, with the way out."""
    return DataError(
        f"{path}: {what}. Delete the folder {path.parent} and run `efftrain prepare` again"
    )
