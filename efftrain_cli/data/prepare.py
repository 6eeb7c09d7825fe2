"""From `[data]` of a recipe to a corpus: token shards of training and validation text in a content-hashed cache.

    sources -> documents -> split -> tokenizer -> shards -> one rename

A corpus is a folder `corpora/<key>` of the cache. The key is a hash of the files' contents and of the settings that
decide the tokens, so two recipes on the same data share the folder, and a file that changes leads to another one. The
folder is built beside its place under a lock and renamed when all of it is on disk: a kill leaves nothing that a later
start takes for a corpus.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from efftrain_cli.data import cache
from efftrain_cli.data.corpus import Corpus, digest_of, file_sha256, open_corpus
from efftrain_cli.data.documents import BadDocuments, Document, Source, TextFile
from efftrain_cli.data.shards import SCHEMA_VERSION, ShardWriter, dtype_for, open_shard
from efftrain_cli.data.split import Report, Split, Tally, check_findings, check_sides, split_documents, survey
from efftrain_cli.data.text import find_sources
from efftrain_cli.data.tokenizer import Tokenizer, bpe_size, load_tokenizer, tokenizer_files, train_tokenizer
from efftrain_cli.foundation.errors import DataError

if TYPE_CHECKING:
    from efftrain_cli.recipe.sections import Data

FEW_TEXT_FILES = 20
"""With fewer .txt files than this, each file gives its end to validation instead of some files being held out whole."""
TOKENIZER_SAMPLE = 100_000_000
"""Characters of training text, from its beginning, that a "bpe:N" tokenizer is trained on at most."""
_BATCH = 4_000_000  # characters tokenized at a time


def prepare(data: Data, *, report: Report | None = None, verify: Literal["lazy", "full"] = "lazy") -> Corpus:
    """The corpus that a recipe's `[data]` describes: opened if the cache has it, made if not.

    Another process that is making the same corpus is waited for.

    Args:
        verify: "full" compares every token with its sha256 now; "lazy" each shard when it is first read.

    Raises:
        DataError: text, tokenizer or a cached corpus is missing, damaged or does not fit.
        DiskError: the cache's disk is full.
    """
    tell = report or (lambda what, done, total: None)
    tokens_from = tokenizer_files(data.tokenizer)  # these three first: a mistake in the recipe costs no reading
    train = find_sources(data.train, "train")
    valid = () if data.valid is None else find_sources(data.valid, "valid")
    key = _key(data, train, valid, tokens_from)
    folder = cache.cache_root() / "corpora" / key
    if not (folder / "manifest.json").exists():
        cache.make_folder(folder.parent)
        lock = folder.with_name(f"{key}.lock")
        with cache.locked(lock, lambda: tell("waiting for another process that prepares the same data", 0, None)):
            if not (folder / "manifest.json").exists():
                _build(folder, data, train, valid, tell)
    corpus = open_corpus(folder)
    check_findings(corpus.manifest, data)
    if verify == "full":
        corpus.verify()
    return corpus


def _key(data: Data, train: tuple[Source, ...], valid: tuple[Source, ...], tokens_from: tuple[Path, ...]) -> str:
    """Names the corpus: equal settings on equal file contents give an equal key, wherever the files are."""
    files = [source.path for source in train + valid if isinstance(source, TextFile)]
    hashes = iter(cache.hash_files([*files, *tokens_from]))

    def identity(source: Source) -> list[Any]:
        if isinstance(source, TextFile):
            return [source.kind, next(hashes)]
        return ["hub", source.name, source.config, source.revision]

    sides = [[identity(source) for source in side] for side in (train, valid)]
    fields = {kind for kind, *_ in sides[0] + sides[1]} & {"hub", "jsonl", "parquet"}
    return digest_of(
        [
            SCHEMA_VERSION,
            sides,
            None if valid else data.valid_fraction,
            data.text_field if fields else None,
            list(hashes) or data.tokenizer,
        ]
    )[:32]


def _build(folder: Path, data: Data, train: tuple[Source, ...], valid: tuple[Source, ...], tell: Report) -> None:
    """Makes the corpus beside its place and renames it there. The caller holds the lock."""
    size = bpe_size(data.tokenizer)
    tokenizer = None if size else load_tokenizer(data.tokenizer)  # a bad tokenizer costs no reading of text
    texts = sum(isinstance(source, TextFile) and source.kind == "txt" for source in train)
    cut = not valid and texts < FEW_TEXT_FILES
    split, total = survey(Split(train, valid, data.valid_fraction, cut), data, tell)
    if tokenizer is None:
        tokenizer = _trained_tokenizer(size, split, data, tell)
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # of a process that was killed
    needed = None if total is None else total * (2 if dtype_for(tokenizer.vocab_size) == "uint16" else 4)
    try:
        with cache.disk_errors(folder.parent, needed):
            partial.mkdir()
            _write_corpus(partial, tokenizer, split, data, total, tell)
            # A folder without a manifest is what a user left who deleted only that.
            shutil.rmtree(folder, ignore_errors=True)
            partial.rename(folder)
            _sync_folder(folder.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _trained_tokenizer(size: int, split: Split, data: Data, tell: Report) -> Tokenizer:
    """The byte-level BPE of the training text, from the cache if this text has had one of this size."""
    sample, length = [], 0
    digest = hashlib.sha256()
    for side, document in split_documents(split, data, Tally(BadDocuments(data.on_bad_document))):
        if side == "train":
            sample.append(document.text)
            length += len(document.text)
            digest.update(hashlib.sha256(document.text.encode()).digest())
            if length >= TOKENIZER_SAMPLE:
                break
    path = cache.cache_root() / "tokenizers" / f"bpe-{size}-{digest.hexdigest()[:32]}.json"
    if path.exists():
        try:
            return load_tokenizer(path)
        except DataError:
            pass  # a damaged file of the cache: trained again below
    tell(f"training a tokenizer of {size} tokens", 0, None)
    tokenizer = train_tokenizer(size, sample)
    cache.make_folder(path.parent)
    with cache.disk_errors(path.parent):
        cache.write_whole(path, tokenizer.backend.to_str())
    return tokenizer


def _write_corpus(
    folder: Path, tokenizer: Tokenizer, split: Split, data: Data, total: int | None, tell: Report
) -> None:
    """Tokenizes both sides into `folder` and writes the manifest last.

    Raises:
        DataError: a document cannot be read, the sides overlap, or one of them is empty.
    """
    writers = {
        side: ShardWriter(
            folder, side, vocab_size=tokenizer.vocab_size, eot_id=tokenizer.eot_id, tokenizer_sha256=tokenizer.sha256
        )
        for side in ("train", "valid")
    }
    tally = Tally(BadDocuments(data.on_bad_document))
    batch: list[tuple[str, Document]] = []
    waiting = 0

    def flush() -> None:
        for (side, document), ids in zip(batch, tokenizer.encode([doc.text for _, doc in batch]), strict=True):
            writers[side].add(ids, document.id)
        batch.clear()
        tell("bytes tokenized", sum(tally.bytes.values()), total)

    try:
        for side, document in split_documents(split, data, tally):
            batch.append((side, document))
            waiting += len(document.text)
            if waiting >= _BATCH or len(batch) >= 4096:
                flush()
                waiting = 0
        flush()
    finally:
        for writer in writers.values():
            writer.close()
    check_findings(tally.findings(), data)
    check_sides(tally, split)
    tokenizer.save(folder / "tokenizer.json")
    _sync_file(folder / "tokenizer.json")
    manifest = {
        "schema_version": SCHEMA_VERSION,
        "sources": {side: _described(sources) for side, sources in (("train", split.train), ("valid", split.valid))},
        "split": "given" if split.valid else "held out" if split.threshold is not None else "cut",
        "tokenizer": {
            "spec": data.tokenizer,
            "sha256": tokenizer.sha256,
            "file_sha256": file_sha256(folder / "tokenizer.json"),
            "vocab_size": tokenizer.vocab_size,
            "eot_id": tokenizer.eot_id,
        },
        **tally.findings(),
    }
    for side, writer in writers.items():
        headers = [open_shard(path).header for path in writer.paths]
        manifest[side] = {
            "documents": tally.documents[side],
            "bytes": tally.bytes[side],
            "tokens": sum(header.tokens for header in headers),
            "shards": [
                {"file": path.name, "tokens": header.tokens, "sha256": header.sha256}
                for path, header in zip(writer.paths, headers, strict=True)
            ],
        }
    manifest["data_hash"] = digest_of(
        [tokenizer.sha256, *([shard["sha256"] for shard in manifest[side]["shards"]] for side in ("train", "valid"))]
    )
    cache.write_whole(folder / "manifest.json", json.dumps({**manifest, "sha256": digest_of(manifest)}, indent=1))
    _sync_folder(folder)


def _described(sources: tuple[Source, ...]) -> list[str]:
    """The sources in words: the library once, files by path, datasets by name."""
    import platform

    described = [
        str(source.path) if isinstance(source, TextFile) else "/".join(filter(None, (source.name, source.config)))
        for source in sources
        if not (isinstance(source, TextFile) and source.kind == "stdlib")
    ]
    library = len(sources) - len(described)
    return [f"standard library of Python {platform.python_version()} ({library} files)"] * bool(library) + described


def _sync_file(path: Path) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
