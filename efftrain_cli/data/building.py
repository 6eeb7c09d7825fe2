"""The building of one corpus: documents in, shards out, and a place on disk from which a killed
build continues.

Whenever a shard is whole, `progress.json` says how far the documents were taken, what was counted,
and where each open shard ends. A later start cuts the open shards there and goes on with the next
document, so it gives the same bytes as a building that was never stopped.
"""

from __future__ import annotations

import math
import platform
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from efftrain_cli.data import corpus
from efftrain_cli.data.corpus import SCHEMA_VERSION, ShardWriter, dtype_for
from efftrain_cli.data.split import (
    Cursor,
    Limits,
    Split,
    Tally,
    apportion,
    check_tally,
    split_documents,
)
from efftrain_cli.data.text import BadDocuments, Document, Source, TextFile
from efftrain_cli.data.tokenizer import Tokenizer
from efftrain_cli.foundation.console import human_bytes
from efftrain_cli.foundation.errors import DataError, DiskError
from efftrain_cli.foundation.files import free_bytes, fsync, sha256_of, write_whole
from efftrain_cli.foundation.progress import Report
from efftrain_cli.foundation.records import Record, digest_of, read_record, sealed_text

PROGRESS = "progress.json"
_BATCH = 4_000_000  # characters tokenized at a time
_SIDES = ("train", "valid")


@dataclass
class Building:
    """Tokenizes both sides of a split into `folder`, the manifest last."""

    folder: Path
    tokenizer: Tokenizer
    split: Split
    limits: Limits
    total: int | None
    """Bytes of text, where known."""
    tell: Report
    tally: Tally = field(init=False)
    cursor: Cursor = field(init=False)
    written: dict[str, dict[str, int]] = field(init=False)
    """Documents and bytes of each side that are in its shards."""

    def __post_init__(self) -> None:
        self.tally = Tally(BadDocuments(self.split.data.on_bad_document))
        self.cursor = Cursor()
        self.written = {side: {"documents": 0, "bytes": 0} for side in _SIDES}
        weights = self.split.weights
        self._parts = len(weights)
        self._writers = {}
        self._limits = {}
        for side in _SIDES:
            for part in range(self._parts):
                name = side if self._parts == 1 else f"{side}-{part}"
                self._writers[side, part] = ShardWriter(
                    self.folder,
                    name,
                    vocab_size=self.tokenizer.vocab_size,
                    eot_id=self.tokenizer.eot_id,
                    shard_tokens=corpus.SHARD_TOKENS,
                )
        for side, limit in self.limits._asdict().items():
            if limit is not None:
                for part, share in enumerate(apportion(weights, limit)):
                    self._limits[side, part] = share
        self._room_checked = False

    def write(self) -> None:
        """Write shards, tokenizer and manifest; continue from what an earlier building left.

        Raises:
            DataError: a document cannot be read, the sides overlap, or one of them is empty.
            DiskError: there is less room than the shards will take.
        """
        if (self.folder / PROGRESS).exists():
            self._take_up()
        elif self.limits.train is not None and self.total is None:
            self._check_room(self.limits.train + (self.limits.valid or 0))
        batch = []
        waiting = 0
        try:
            for side, part, document in split_documents(self.split, self.tally, self.cursor):
                batch.append((side, part, document))
                waiting += len(document.text) if document.ids is None else 4 * len(document.ids)
                if (waiting >= _BATCH or len(batch) >= 4096) and self.cursor.between:
                    closed = self._closed_shards()
                    self._flush(batch)
                    waiting = 0
                    # Tells the generator to go on to the next source.
                    self.cursor.enough = self._has_enough(part)
                    if self._closed_shards() > closed:
                        self._save()
            self._flush(batch)
        finally:
            for writer in self._writers.values():
                writer.close()
        check_tally(self.tally, self.split.data)
        self.tokenizer.save(self.folder / "tokenizer.json")
        fsync(self.folder / "tokenizer.json")
        manifest = self._manifest()
        write_whole(self.folder / "manifest.json", sealed_text(manifest))
        (self.folder / PROGRESS).unlink(missing_ok=True)
        fsync(self.folder)

    def _flush(self, batch: list[tuple[str, int, Document]]) -> None:
        """Tokenize and write the documents that are still wanted."""
        wanted = [entry for entry in batch if not self._full(*entry[:2])]
        batch.clear()
        encoded = iter(self.tokenizer.encode([doc.text for _, _, doc in wanted if doc.ids is None]))
        for side, part, document in wanted:
            ids = next(encoded) if document.ids is None else document.ids
            # An earlier document of this batch may have filled it.
            if self._full(side, part):
                continue
            self._writers[side, part].add(ids, document.id)
            self.written[side]["documents"] += 1
            if document.ids is None:
                size = len(document.content())
            else:  # of ids that are in the vocabulary: others have been refused by now
                size = int(self.tokenizer.byte_lengths[ids].sum())
            self.written[side]["bytes"] += size

        tokens = sum(writer.tokens for writer in self._writers.values())
        if self.total is None:
            most = sum(self._limits.values()) or None
            self.tell("tokens prepared", tokens, most)
            return
        done = sum(side["bytes"] for side in self.written.values())
        if done and not self._room_checked:  # the first batch says how many tokens a byte makes
            self._check_room(int(self.total * tokens / done))
        self.tell("bytes tokenized", done, self.total)

    def _closed_shards(self) -> int:
        return sum(len(writer.entries) for writer in self._writers.values())

    def _full(self, side: str, part: int) -> bool:
        return self._writers[side, part].tokens >= self._limits.get((side, part), math.inf)

    def _has_enough(self, part: int) -> bool:
        """Return whether the limits of the source that is being read are reached."""
        # Validation texts are read first (`split_documents`).
        if self.cursor.source < len(self.split.valid):
            return self._full("valid", part)
        # Then, if there were any, the other sources give training text only.
        if self.split.valid:
            return self._full("train", part)
        return self._full("train", part) and self._full("valid", part)

    def _check_room(self, tokens: int) -> None:
        """Refuse a disk that has less room than so many tokens take."""
        self._room_checked = True
        needed = tokens * dtype_for(self.tokenizer.vocab_size).itemsize
        free = free_bytes(self.folder)
        if needed > free:
            raise DiskError(
                f"the disk of the cache {self.folder.parent} has too little room:"
                f" about {needed:,} bytes needed, {free:,} bytes free\n"
                "  make room, set EFFTRAIN_CACHE to a folder on another disk,"
                " or lower data.max_tokens"
            )
        if needed > 1 << 28:
            self.tell(
                f"the shards will take about {human_bytes(needed)}; {human_bytes(free)} are free",
                0,
                None,
            )

    # The place on disk.

    def _save(self) -> None:
        """Save the place that a later start continues from."""
        cursor = self.cursor
        progress = {
            "schema_version": 1,
            "tokenizer_sha256": self.tokenizer.sha256,
            "source": cursor.source,
            "taken": cursor.taken,
            "hub": None if cursor.hub is None else cursor.hub.state(),
            # Not "tally": older versions kept the documents held out in a file of their own.
            "counted": asdict(self.tally),
            "written": self.written,
            "writers": [writer.sync() for writer in self._writers.values()],
        }
        write_whole(self.folder / PROGRESS, sealed_text(progress))

    def _take_up(self) -> None:
        """Continue from what `_save` left; begin anew if that is damaged."""
        try:
            record = read_record(self.folder / PROGRESS, Record)
            progress = record.to_json()
            if not record.is_sealed or progress["tokenizer_sha256"] != self.tokenizer.sha256:
                raise ValueError("damaged, or made with another tokenizer")
            tally = Tally(**progress["counted"])
            tally.bad = BadDocuments(**progress["counted"]["bad"])
            for writer, end in zip(self._writers.values(), progress["writers"], strict=True):
                writer.resume(end)
        except (DataError, OSError, ValueError, KeyError, TypeError) as error:
            self.tell(
                f"what an earlier start left cannot be used ({error}): starting again", 0, None
            )
            (self.folder / PROGRESS).unlink(missing_ok=True)
            self.__post_init__()
            return
        self.tally = tally
        self.written = progress["written"]
        self.cursor = Cursor(progress["source"], progress["taken"], hub_state=progress["hub"])
        tokens = sum(writer.tokens for writer in self._writers.values())
        self.tell(f"going on after {tokens:,} tokens that an earlier start prepared", 0, None)

    def _manifest(self) -> dict[str, Any]:
        tokenizer = self.tokenizer
        split = self.split
        how = "held out"
        if split.valid:
            how = "given"
        elif split.threshold is None:
            how = "cut"
        manifest = {
            "schema_version": SCHEMA_VERSION,
            "sources": {"train": _described(split.train), "valid": _described(split.valid)},
            "split": how,
            "tokenizer": {
                "spec": split.data.tokenizer,
                "sha256": tokenizer.sha256,
                "file_sha256": sha256_of(self.folder / "tokenizer.json"),
                "vocab_size": tokenizer.vocab_size,
                "eot_id": tokenizer.eot_id,
            },
            **self.tally.findings(),
        }
        if any(self.limits):
            manifest["limits"] = self.limits._asdict()
        hashes = []
        for side in _SIDES:
            writers = [self._writers[side, part] for part in range(self._parts)]
            entries = list(chain.from_iterable(writer.entries for writer in writers))
            hashes.append([entry.sha256 for entry in entries])
            manifest[side] = {
                **self.written[side],
                "tokens": sum(writer.tokens for writer in writers),
                "shards": [entry.model_dump() for entry in entries],
            }
            if self._parts > 1 and not (side == "valid" and split.valid):
                manifest[side]["parts"] = [writer.tokens for writer in writers]
        manifest["data_hash"] = digest_of([tokenizer.sha256, *hashes])
        return manifest


def _described(sources: tuple[Source, ...]) -> list[str]:
    """Return the sources in words: the library once, files by path, datasets by name."""
    described = []
    library = 0
    for source in sources:
        if not isinstance(source, TextFile):
            described.append("/".join(filter(None, (source.name, source.config))))
        elif source.kind == "stdlib":
            library += 1
        else:
            described.append(str(source.path))
    if library:
        version = platform.python_version()
        described.insert(0, f"standard library of Python {version} ({library} files)")
    return described
