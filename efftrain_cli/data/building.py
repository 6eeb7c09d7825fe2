"""The building of one corpus: documents in, two files of tokens out, and a place on disk from which
a killed build continues.

The shards of both sides are closed together, at the end of the batch of documents that fills one.
Then `progress.json` names the closed shards and the place in the text. What lies behind them is
written again by a later start, with the same bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
from pydantic import ConfigDict

from efftrain_cli.data.corpus import (
    CorpusManifest,
    ShardWriter,
    SplitEntry,
    TokenizerEntry,
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
from efftrain_cli.foundation.errors import DataError
from efftrain_cli.foundation.files import fsync, made_beside, sha256_of
from efftrain_cli.foundation.progress import Report
from efftrain_cli.foundation.records import Record, digest_of, read_record, write_record
from efftrain_cli.foundation.signals import check_stop

if TYPE_CHECKING:
    from efftrain_cli.recipe.sections import Data

SHARD_TOKENS = 1 << 26
"""Shards are closed at the end of the batch that reaches this many tokens."""
BATCH = 1 << 22
"""Characters that are tokenized at once, on all cores."""
TOKENIZER_SAMPLE = 100_000_000
"""Characters of training text, from its beginning, that a "bpe:N" tokenizer is trained on at most;
of several sources, each gives its share."""
SIDES = ("train", "valid")
_OVERHEAD = 100
"""Characters that a piece counts for besides its own: short ones take memory too."""
_SAMPLE_PIECE = 1 << 12
"""Characters of a piece that a tokenizer is trained on."""


class Piece(NamedTuple):
    """A stretch of a document, encoded at once."""

    side: str
    part: int
    text: str
    is_last: bool
    """Whether it ends its document."""


class Place(Record):
    """progress.json: what is written, and where a later start continues."""

    model_config = ConfigDict(frozen=False)
    restore: ClassVar[str] = "remove its folder; the text is then prepared from its beginning"

    split: Split
    train: SplitEntry
    valid: SplitEntry
    tally: dict[str, Any]
    """Fields of the `Tally` up to `position`."""
    source: int = 0
    """Number of the source that is read."""
    position: Position | None = None
    """Of its reader; None: at its beginning."""
    pieces: int = 0
    """Pieces behind it that are written, of a source that is one document."""
    open_side: str = ""
    """Side of the document that goes on."""


@dataclass
class Building:
    """Tokenizes both sides of a text into `folder`, the manifest last."""

    folder: Path
    data: Data
    text: TextSources
    limits: Limits
    tell: Report

    def write(self) -> None:
        """Write tokens, tokenizer and manifest; continue from what an earlier start left.

        Raises:
            DataError: a document cannot be read, the sides overlap, or one of them is empty.
        """
        self._weights = [source.weight for source in self.data.sources or ()] or [1.0]
        self._begin()
        batch: list[Piece] = []
        size = 0
        part = 0
        for piece in self._pieces():
            if piece.part != part:
                self._write(batch)
                self._close()
                part = piece.part
                size = 0
            batch.append(piece)
            size += len(piece.text) + _OVERHEAD
            if size >= BATCH and (piece.is_last or self._reader.source.is_whole):
                self._write(batch)
                size = 0
                if any(writer.open_tokens >= SHARD_TOKENS for writer in self._writers.values()):
                    self._close()
                    self._save()
        self._write(batch)
        self._close()
        self._tally.check_skipped()
        write_record(self.folder / "manifest.json", self._manifest())
        (self.folder / "progress.json").unlink()
        fsync(self.folder)

    def _begin(self) -> None:
        """Survey the text and make its tokenizer, or continue from what `_save` left."""
        path = self.folder / "progress.json"
        tokenizer_path = self.folder / "tokenizer.json"
        try:
            self._place = read_record(path, Place)
        except FileNotFoundError:
            split = survey(self.data, self.text, self.tell)
            self._tokenizer = self._make_tokenizer(split)
            with made_beside(tokenizer_path) as beside:
                self._tokenizer.save(beside)
            train, valid = (SplitEntry.begin(len(self._weights)) for _ in SIDES)
            self._place = Place(split=split, train=train, valid=valid, tally={})
            write_record(path, self._place)
        else:
            spec = self.data.tokenizer
            self._tokenizer = load_tokenizer(tokenizer_path if bpe_size(spec) else spec)
        place = self._place
        self._tally = Tally(**place.tally)
        self._writers = {}
        for side, entry in zip(SIDES, (place.train, place.valid), strict=True):
            shards = self.folder / f"{side}.bin"
            self._writers[side] = ShardWriter(shards, self._tokenizer.vocab_size, entry)
        self._known: set[int] = set()
        tokens = self._tokens()
        if tokens:
            for source in self.text.sources:
                if source.validates:
                    for document in self._open(source, Tally()).documents():
                        self._known.add(document.number)
            self.tell(f"continuing after {tokens:,} tokens that are prepared already", 0)

    def _tokens(self) -> int:
        return sum(self._place.train.parts) + sum(self._place.valid.parts)

    def _make_tokenizer(self, split: Split) -> Tokenizer:
        size = bpe_size(self.data.tokenizer)
        if not size:
            return load_tokenizer(self.data.tokenizer)
        self.tell(f"training a tokenizer of {size:,} tokens", 0)
        return train_tokenizer(size, self._sample(split))

    def _sample(self, split: Split) -> Iterator[str]:
        """Yield the beginning of each source's training text, by weight."""
        most = min(TOKENIZER_SAMPLE, 8 * (self.limits.train or TOKENIZER_SAMPLE))
        left = apportion(self._weights, most)
        for source in self.text.sources:
            if source.validates:
                continue
            for document in self._open(source, Tally()).documents():
                for side, pieces in split.sides(document, source):
                    for piece in cut_pieces(pieces):
                        if side == "train" and left[source.part] > 0:
                            left[source.part] -= len(piece)
                            # The library keeps 256 of them.
                            yield from cut_pieces(iter([piece]), _SAMPLE_PIECE)
                if left[source.part] <= 0:
                    break

    def _open(self, source: Source, tally: Tally) -> Reader:
        return Reader(source, tally, self.data.on_bad_document == "skip")

    def _pieces(self) -> Iterator[Piece]:
        """Yield the pieces of the text behind the place, and move it."""
        place = self._place
        for number in range(place.source, len(self.text.sources)):
            source = self.text.sources[number]
            place.source = number
            place.tally = asdict(self._tally)
            self._reader = self._open(source, self._tally)
            for document in self._reader.documents(place.position):
                self._check_overlap(source, document)
                for piece in islice(self._cut(source, document), place.pieces, None):
                    place.pieces += source.is_whole
                    yield piece
                if self._has_enough(source):
                    break
            place.position = None
            place.pieces = 0

    def _cut(self, source: Source, document: Document) -> Iterator[Piece]:
        """Yield the pieces of a document."""
        for side, texts in self._place.split.sides(document, source):
            pieces = cut_pieces(texts)
            if not self._tokenizer.can_cut:
                pieces = iter(["".join(texts)])
            before = ""
            for text in chain(pieces, [""]):
                if before:
                    yield Piece(side, source.part, before, is_last=not text)
                before = text

    def _check_overlap(self, source: Source, document: Document) -> None:
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
        limit = self.limits._asdict()[side]
        if limit is None:
            return False
        return self._writers[side].split.parts[part] >= apportion(self._weights, limit)[part]

    def _wants(self, piece: Piece) -> bool:
        """Return whether a piece is written: its document is begun, or its side has room."""
        return piece.side == self._place.open_side or not self._is_full(piece.side, piece.part)

    def _has_enough(self, source: Source) -> bool:
        """Return whether the limits of the sides that a source serves are reached."""
        sides: tuple[str, ...] = SIDES
        if self.text.has_valid:
            sides = ("valid",) if source.validates else ("train",)
        return all(self._is_full(side, source.part) for side in sides)

    def _write(self, batch: list[Piece]) -> None:
        """Tokenize and write a batch, and empty it."""
        check_stop()
        pieces = [piece for piece in batch if self._wants(piece)]
        batch.clear()
        encoded = self._tokenizer.encode([piece.text for piece in pieces])
        for piece, ids in zip(pieces, encoded, strict=True):
            if not self._wants(piece):
                continue
            writer = self._writers[piece.side]
            writer.split.documents += piece.is_last
            writer.split.bytes += len(piece.text.encode())
            self._place.open_side = piece.side
            if piece.is_last:
                self._place.open_side = ""
                ids = np.append(ids, np.uint32(self._tokenizer.eot_id))
            writer.add(ids, piece.part)
        self.tell("tokens prepared", self._tokens())

    def _close(self) -> None:
        for writer in self._writers.values():
            writer.close()

    def _save(self) -> None:
        """Save the place behind what is written; no shard is open."""
        place = self._place
        if not self._reader.source.is_whole:
            place.position = self._reader.position()
            place.tally = asdict(self._tally)
        write_record(self.folder / "progress.json", place)

    def _manifest(self) -> CorpusManifest:
        tokenizer = self._tokenizer
        how = "held out"
        if self.text.has_valid:
            how = "given"
        elif self._place.split.threshold < 0:
            how = "cut"
        sources: dict[str, list[str]] = {side: [] for side in SIDES}
        for source in self.text.sources:
            name = "stdlib" if source.kind == "stdlib" else source.name
            names = sources["valid" if source.validates else "train"]
            if names[-1:] != [name]:
                names.append(name)
        place = self._place
        for split, wanted in ((place.train, "training"), (place.valid, "validation")):
            if not split.shards:
                raise DataError(
                    f"no text is left for {wanted}; of {self._tally.rows:,} rows and files"
                    f" {self._tally.empty:,} are empty\n"
                    "  give more documents, name validation text in data.valid,"
                    f" or change data.valid_fraction ({self.data.valid_fraction:g})"
                )
        hashes = []
        for split in (place.train, place.valid):
            hashes.append([shard.sha256 for shard in split.shards])
        return CorpusManifest(
            schema_version=CorpusManifest.newest,
            tokenizer=TokenizerEntry(
                sha256=tokenizer.sha256,
                file_sha256=sha256_of(self.folder / "tokenizer.json"),
                vocab_size=tokenizer.vocab_size,
                eot_id=tokenizer.eot_id,
            ),
            train=place.train,
            valid=place.valid,
            split=how,
            sources=sources,
            tally=asdict(self._tally),
            limits=self.limits._asdict(),
            data_hash=digest_of([tokenizer.sha256, *hashes]),
            notes=list(self._notes()),
        )

    def _notes(self) -> Iterator[str]:
        """Yield what a reader should know of the corpus, in sentences."""
        yield from (*self.text.notes, *self._tokenizer.notes)
        size = bpe_size(self.data.tokenizer)
        if self._tokenizer.vocab_size < size:
            yield (
                f"data.tokenizer = {self.data.tokenizer!r}: the text repeats too few pairs for"
                f" {size:,} tokens; the vocabulary has {self._tokenizer.vocab_size:,}"
            )
        share = sum(self._place.valid.parts) / self._tokens()
        fraction = self.data.valid_fraction
        if not self.text.has_valid and self.limits.valid is None and share < fraction / 2:
            yield (
                f"validation has {share:.2%} of the tokens, not {fraction:.2%}: the longest"
                " documents are longer than that. Name validation text in data.valid"
            )
