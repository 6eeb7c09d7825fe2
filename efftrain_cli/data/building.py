"""The building of one corpus: documents in, shards out, and a place on disk from which a killed
build continues.

The shards of both sides are closed together, at the end of the batch of documents that fills one.
Then nothing is open, and `progress.json` names the closed shards and the place in the text. What
lies behind it is written again by a later start, with the same bytes.
"""

from __future__ import annotations

import json
import platform
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np

from efftrain_cli.data.corpus import (
    CorpusManifest,
    ShardEntry,
    ShardWriter,
    apportion,
)
from efftrain_cli.data.documents import Document, Position, Reader, Tally
from efftrain_cli.data.sources import Source, TextSources
from efftrain_cli.data.split import Limits, Split, survey
from efftrain_cli.data.tokenizer import (
    Tokenizer,
    bpe_size,
    cut_pieces,
    load_tokenizer,
    train_tokenizer,
)
from efftrain_cli.foundation.environment import usable_cores
from efftrain_cli.foundation.errors import DataError
from efftrain_cli.foundation.files import fsync, made_beside, sha256_of, write_whole
from efftrain_cli.foundation.progress import Report
from efftrain_cli.foundation.records import (
    Record,
    digest_of,
    read_record,
    write_record,
)

if TYPE_CHECKING:
    from efftrain_cli.recipe.sections import Data

SHARD_TOKENS = 1 << 26
"""Shards are closed at the end of the batch that reaches this many tokens."""
BATCH = 1 << 19
"""Characters that are tokenized as one task."""
WAITING = 16
"""Batches that are read ahead of the one that is written."""
TOKENIZER_SAMPLE = 100_000_000
"""Characters of training text, from its beginning, that a "bpe:N" tokenizer is trained on at most;
of several sources, each gives its share."""
SIDES = ("train", "valid")
PROGRESS = "progress.json"
_BATCH_PIECES = 4096
_SAMPLE_PIECE = 1 << 12
"""Characters of a piece that a tokenizer is trained on."""
_BEGIN: Position = {"source": 0, "position": None, "characters": 0}


class Piece(NamedTuple):
    """A stretch of a document, encoded at once."""

    side: str
    part: int
    text: str
    is_last: bool
    """Whether it ends its document."""


class Batch(NamedTuple):
    """Pieces that are encoded as one task."""

    pieces: list[Piece]
    place: Position
    """Behind the pieces; a later start can begin there."""
    ids: Future[list[np.ndarray]]


class Progress(Record):
    """progress.json: what a killed build left, and where a later start continues."""

    restore: ClassVar[str] = "remove its folder; the text is then prepared from its beginning"

    place: Position
    counts: dict[str, int]
    shards: list[list[ShardEntry]]
    in_document: list[bool]


@dataclass
class Building:
    """Tokenizes both sides of a text into `folder`, the manifest last."""

    folder: Path
    data: Data
    text: TextSources
    limits: Limits
    tell: Report

    def write(self) -> None:
        """Write shards, tokenizer and manifest; continue from what an earlier start left.

        Raises:
            DataError: a document cannot be read, the sides overlap, or one of them is empty.
        """
        self._weights = [source.weight for source in self.data.sources or ()] or [1.0]
        self._split = self._read_split()
        self._tokenizer = self._read_tokenizer()
        self._prepare_writers()
        self._continue()
        pool = ThreadPoolExecutor(usable_cores())
        waiting: deque[Batch] = deque()
        try:
            for pieces, place in self._batches():
                texts = [each.text if self._wants(each) else "" for each in pieces]
                ids = pool.submit(self._tokenizer.encode, texts)
                waiting.append(Batch(pieces, place, ids))
                if len(waiting) > WAITING:
                    self._write(waiting.popleft())
            while waiting:
                self._write(waiting.popleft())
        finally:
            pool.shutdown(cancel_futures=True)
            for writer in self._writers.values():
                writer.close()
        self._tally.check_skipped()
        write_whole(self.folder / "manifest.json", json.dumps(self._manifest(), indent=1))
        for name in ("progress.json", "split.json"):
            (self.folder / name).unlink(missing_ok=True)
        fsync(self.folder)

    def _read_split(self) -> Split:
        """Survey the text, unless an earlier start has."""
        path = self.folder / "split.json"
        if not path.exists():
            split = survey(self.data, self.text, self.tell)
            write_whole(path, json.dumps(split))
        return Split(*json.loads(path.read_text("utf-8")))

    def _read_tokenizer(self) -> Tokenizer:
        """Load the tokenizer, or train it unless an earlier start has; save it."""
        path = self.folder / "tokenizer.json"
        size = bpe_size(self.data.tokenizer)
        if not size:
            tokenizer = load_tokenizer(self.data.tokenizer)
        elif path.exists():
            return load_tokenizer(path)
        else:
            self.tell(f"training a tokenizer of {size:,} tokens", 0)
            tokenizer = train_tokenizer(size, self._sample())
        with made_beside(path) as beside:
            tokenizer.save(beside)
        return tokenizer

    def _sample(self) -> Iterator[str]:
        """Yield the beginning of each source's training text, by weight."""
        most = min(TOKENIZER_SAMPLE, 8 * (self.limits.train or TOKENIZER_SAMPLE))
        left = apportion(self._weights, most)
        for source in self.text.sources:
            if source.validates:
                continue
            for document in self._reader(source, Tally()).documents():
                for side, pieces in self._split.sides(document, source):
                    for piece in cut_pieces(pieces):
                        if side == "train" and left[source.part] > 0:
                            left[source.part] -= len(piece)
                            # The library keeps 256 of them.
                            yield from cut_pieces(iter([piece]), _SAMPLE_PIECE)
                if left[source.part] <= 0:
                    break

    def _reader(self, source: Source, tally: Tally) -> Reader:
        return Reader(source, tally, self.data.on_bad_document == "skip")

    def _prepare_writers(self) -> None:
        self._writers: dict[tuple[str, int], ShardWriter] = {}
        self._limits: dict[tuple[str, int], int] = {}
        self._counts = {f"{side} {what}": 0 for side in SIDES for what in ("documents", "bytes")}
        for side, limit in zip(SIDES, self.limits, strict=True):
            for part in range(len(self._weights)):
                name = side if len(self._weights) == 1 else f"{side}-{part}"
                self._writers[side, part] = ShardWriter(
                    self.folder, name, self._tokenizer.vocab_size
                )
                if limit is not None:
                    self._limits[side, part] = apportion(self._weights, limit)[part]

    def _batches(self) -> Iterator[tuple[list[Piece], Position]]:
        """Yield pieces, and the place in the text behind them, where a later start can begin."""
        batch: list[Piece] = []
        size = 0
        begin = self._place
        for number in range(begin["source"], len(self.text.sources)):
            source = self.text.sources[number]
            reader = self._reader(source, self._tally)
            place = {**begin, "source": number, "tally": asdict(self._tally)}
            done = 0
            for piece in self._pieces(reader, begin["position"]):
                done += len(piece.text)
                if done <= begin["characters"]:
                    continue
                batch.append(piece)
                size += len(piece.text)
                is_full = size >= BATCH or len(batch) >= _BATCH_PIECES
                if is_full and (piece.is_last or source.is_whole):
                    if source.is_whole:
                        place["characters"] = done
                    else:
                        place |= {"position": reader.position(), "tally": asdict(self._tally)}
                    yield batch, dict(place)
                    batch = []
                    size = 0
                if piece.is_last and self._has_enough(source):
                    break
            begin = _BEGIN
            # Where a limit ends a source depends on how many batches wait: begin a new batch.
            if batch and self.limits.train is not None:
                yield batch, {**begin, "source": number + 1, "tally": asdict(self._tally)}
                batch = []
                size = 0
        yield batch, {}

    def _pieces(
        self,
        reader: Reader,
        position: Position | None,
    ) -> Iterator[Piece]:
        """Yield the pieces of a source's documents."""
        source = reader.source
        for document in reader.documents(position):
            self._check_overlap(source, document)
            for side, texts in self._split.sides(document, source):
                pieces = cut_pieces(texts)
                if not self._tokenizer.can_cut:
                    pieces = iter(["".join(texts)])
                before = ""
                for text in pieces:
                    if before:
                        yield Piece(side, source.part, before, is_last=False)
                    before = text
                if before:
                    yield Piece(side, source.part, before, is_last=True)

    def _check_overlap(
        self,
        source: Source,
        document: Document,
    ) -> None:
        """Remember a document of validation's own text; count a training document that repeats
        one."""
        if source.validates:
            self._known.add(document.number)
        elif document.number in self._known:
            if not self.data.allow_overlap:
                raise DataError(
                    f"{document.place} is word for word in the validation text, which would measure"
                    " memory\n  remove it from one side, or set data.allow_overlap = true"
                )
            self._tally.overlap += 1

    def _is_full(self, side: str, part: int) -> bool:
        limit = self._limits.get((side, part))
        return limit is not None and self._writers[side, part].tokens >= limit

    def _wants(self, piece: Piece) -> bool:
        """Return whether a piece is written: its side has room, or its document is begun."""
        writer = self._writers[piece.side, piece.part]
        return writer.in_document or not self._is_full(piece.side, piece.part)

    def _has_enough(self, source: Source) -> bool:
        """Return whether the limits of the sides that a source serves are reached."""
        sides = ("valid",) if source.validates else SIDES
        if not source.validates and self.text.has_valid:
            sides = ("train",)
        return all(self._is_full(side, source.part) for side in sides)

    def _write(self, batch: Batch) -> None:
        """Write a batch; if it fills a shard, close all and save the place behind it."""
        for piece, ids in zip(batch.pieces, batch.ids.result(), strict=True):
            if not self._wants(piece):
                continue
            writer = self._writers[piece.side, piece.part]
            writer.in_document = not piece.is_last
            if piece.is_last:
                ids = np.append(ids, np.uint32(self._tokenizer.eot_id))
                self._counts[f"{piece.side} documents"] += 1
            writer.add(ids)
            self._counts[f"{piece.side} bytes"] += len(piece.text.encode())
        writers = self._writers.values()
        self.tell("tokens prepared", sum(writer.tokens for writer in writers))
        if batch.place and any(writer.open_tokens >= SHARD_TOKENS for writer in writers):
            for writer in writers:
                writer.close()
            progress = Progress(
                place=batch.place,
                counts=self._counts,
                shards=[writer.entries for writer in writers],
                in_document=[writer.in_document for writer in writers],
            )
            write_record(self.folder / PROGRESS, progress)

    def _continue(self) -> None:
        """Continue from what `_write` saved."""
        self._place = _BEGIN
        self._tally = Tally()
        self._known: set[int] = set()
        try:
            progress = read_record(self.folder / PROGRESS, Progress)
        except FileNotFoundError:
            return
        self._place = progress.place
        self._tally = Tally(**progress.place["tally"])
        self._counts = progress.counts
        for writer, entries, in_document in zip(
            self._writers.values(), progress.shards, progress.in_document, strict=True
        ):
            writer.entries = entries
            writer.in_document = in_document
        for source in self.text.sources[: self._place["source"] + 1]:
            if source.validates:
                for document in self._reader(source, Tally()).documents():
                    self._known.add(document.number)
        tokens = sum(writer.tokens for writer in self._writers.values())
        self.tell(f"continuing after {tokens:,} tokens that an earlier start prepared", 0)

    def _manifest(self) -> dict[str, Any]:
        tokenizer = self._tokenizer
        split = "held out"
        if self.text.has_valid:
            split = "given"
        elif self._split.threshold < 0:
            split = "cut"
        manifest = {
            "schema_version": CorpusManifest.newest,
            "split": split,
            "tokenizer": {
                "sha256": tokenizer.sha256,
                "file_sha256": sha256_of(self.folder / "tokenizer.json"),
                "vocab_size": tokenizer.vocab_size,
                "eot_id": tokenizer.eot_id,
            },
            "limits": self.limits._asdict(),
            "sources": {
                "train": describe(self.text, validates=False),
                "valid": describe(self.text, validates=True),
            },
            **asdict(self._tally),
        }
        hashes = []
        for side, wanted in zip(SIDES, ("training", "validation"), strict=True):
            writers = [writer for key, writer in self._writers.items() if key[0] == side]
            entries = list(chain.from_iterable(writer.entries for writer in writers))
            if not entries:
                raise DataError(
                    f"no text is left for {wanted}; of {self._tally.rows:,} rows and files"
                    f" {self._tally.empty:,} are empty\n"
                    "  give more documents, name validation text in data.valid,"
                    f" or change data.valid_fraction ({self.data.valid_fraction:g})"
                )
            hashes.append([entry.sha256 for entry in entries])
            manifest[side] = {
                "documents": self._counts[f"{side} documents"],
                "bytes": self._counts[f"{side} bytes"],
                "tokens": sum(entry.tokens for entry in entries),
                "shards": [entry.model_dump() for entry in entries],
            }
            if len(writers) > 1 and not (side == "valid" and self.text.has_valid):
                manifest[side]["parts"] = [writer.tokens for writer in writers]
        manifest["data_hash"] = digest_of([tokenizer.sha256, *hashes])
        counts = [manifest[side]["tokens"] for side in SIDES]
        manifest["notes"] = list(self._notes(*counts))
        return manifest

    def _notes(self, train: int, valid: int) -> Iterator[str]:
        """Yield what a reader should know of the corpus, in sentences."""
        yield from self._tokenizer.notes
        size = bpe_size(self.data.tokenizer)
        if self._tokenizer.vocab_size < size:
            yield (
                f"data.tokenizer = {self.data.tokenizer!r}: the text repeats too few pairs for"
                f" {size:,} tokens; the vocabulary has {self._tokenizer.vocab_size:,}"
            )
        share = valid / (train + valid)
        fraction = self.data.valid_fraction
        if not self.text.has_valid and self.limits.valid is None and share < fraction / 2:
            yield (
                f"validation has {share:.2%} of the tokens, not {fraction:.2%}: the longest"
                " documents are longer than that. Name validation text in data.valid"
            )


def describe(text: TextSources, validates: bool) -> list[str]:
    """Return the sources of a side in words: the library once, files by path, datasets by name."""
    sources = [source for source in text.sources if source.validates == validates]
    names = [source.name for source in sources if source.kind != "stdlib"]
    library = len(sources) - len(names)
    if library:
        version = platform.python_version()
        names.insert(0, f"standard library of Python {version} ({library} files)")
    return names
