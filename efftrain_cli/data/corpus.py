"""A prepared corpus: two splits of token shards, the tokenizer that made them, and a manifest that binds them
together."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from efftrain_cli.data.shards import (
    SCHEMA_VERSION,
    Part,
    ShardEntry,
    TokenShards,
    damaged,
    open_shard,
)
from efftrain_cli.foundation.files import sha256_of
from efftrain_cli.foundation.records import Part as Fields
from efftrain_cli.foundation.records import Record, read_record


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
        sources: name and weight of each of several sources; the corpus itself does not depend on them.

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
    manifest = record.to_json()
    tokenizer_path = folder / "tokenizer.json"
    stated = manifest["tokenizer"]
    if not tokenizer_path.is_file() or sha256_of(tokenizer_path) != stated["file_sha256"]:
        raise damaged(tokenizer_path, "missing or changed since the corpus was prepared")
    splits = {}
    for name in ("train", "valid"):
        side: SplitEntry = getattr(record, name)
        shards = [open_shard(folder, entry, stated["vocab_size"]) for entry in side.shards]
        counts = side.parts or []
        parts = (
            tuple(Part(*source, tokens) for source, tokens in zip(sources, counts, strict=True))
            if counts
            else ()
        )
        splits[name] = TokenShards(shards, parts, side.documents)
    return Corpus(
        folder=folder,
        train=splits["train"],
        valid=splits["valid"],
        tokenizer_path=tokenizer_path,
        vocab_size=stated["vocab_size"],
        eot_id=stated["eot_id"],
        tokenizer_sha256=stated["sha256"],
        data_hash=manifest["data_hash"],
        bytes_per_token=manifest["valid"]["bytes"] / splits["valid"].tokens,
        manifest=manifest,
        notes=notes,
    )
