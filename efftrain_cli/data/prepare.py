"""From `[data]` of a recipe to a corpus: token shards of training and validation text in a
content-hashed cache.

    sources -> documents -> split -> tokenizer -> shards -> one rename

A corpus is a folder `corpora/<key>` of the cache. The key is a hash of the files' contents and of
the settings that decide the tokens, so two recipes on the same data share the folder, and a file
that changes leads to another one. The folder is built beside its place under a lock and renamed
when all of it is on disk: a kill leaves nothing that a later start takes for a corpus, but the
shards that were whole, from which a later start goes on (`building`).
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from efftrain_cli.data import cache
from efftrain_cli.data.building import PROGRESS, Building
from efftrain_cli.data.corpus import Corpus, dtype_for, open_corpus
from efftrain_cli.data.split import (
    NO_LIMITS,
    Cursor,
    Limits,
    Split,
    Tally,
    check_findings,
    split_documents,
    survey,
)
from efftrain_cli.data.text import (
    BadDocuments,
    HubDataset,
    Source,
    TextFile,
    TextSources,
    find_text,
    names_hub,
)
from efftrain_cli.data.tokenizer import (
    Tokenizer,
    bpe_size,
    load_tokenizer,
    tokenizer_files,
    train_tokenizer,
)
from efftrain_cli.foundation.console import human_seconds
from efftrain_cli.foundation.errors import DataError
from efftrain_cli.foundation.files import fsync
from efftrain_cli.foundation.progress import Report, show_progress
from efftrain_cli.foundation.records import digest_of

if TYPE_CHECKING:
    from rich.console import Console

    from efftrain_cli.recipe.recipe import Recipe
    from efftrain_cli.recipe.sections import Data

FEW_TEXT_FILES = 20
"""With fewer .txt files than this, each file gives its end to validation instead of some files
being held out whole."""
TOKENIZER_SAMPLE = 100_000_000
"""Characters of training text, from its beginning, that a "bpe:N" tokenizer is trained on at most;
of several sources, each gives its share."""
MOST_READ = 200_000_000
"""Bytes of text that a plan reads to find its corpus, at most: below a second of hashing."""
SECONDS_BETWEEN_LINES = 10.0
"""Seconds between two plain lines of the same work."""


def prepare(
    data: Data,
    *,
    limits: Limits = NO_LIMITS,
    verify: Literal["lazy", "full"] = "lazy",
    console: Console | None = None,
) -> Corpus:
    """Open the corpus that a recipe's `[data]` describes; make it if the cache has none.

    Another process that is making the same corpus is waited for. One that was stopped while making
    it is taken up.

    Args:
        limits: how much to prepare (`limits_of`); without them data.max_tokens, else all there is.
        verify: "full" compares every token with its sha256 now, and reads source files again that
            seem unchanged; "lazy" compares each shard when it is first read (training: all before
            step 1).
        console: shows the progress of a preparation, and nothing if the corpus is ready.

    Raises:
        DataError: text, tokenizer or a cached corpus is missing, damaged or does not fit.
        DiskError: the cache's disk is full, or has less room than the shards will take.
    """
    if limits == NO_LIMITS:
        limits = Limits(data.max_tokens)
    # These two first: a mistake in the recipe costs no reading.
    tokens_from = tokenizer_files(data.tokenizer)
    text = find_text(data)
    key = _key(data, text, tokens_from, limits, afresh=verify == "full")
    folder = cache.cache_root() / "corpora" / key
    if not (folder / "manifest.json").exists():
        with _progress(console) as tell, _locked(folder, tell):
            if not (folder / "manifest.json").exists():
                _build(folder, data, text, limits, tell)
    sources = tuple((source.path, source.weight) for source in data.sources or ())
    corpus = open_corpus(folder, sources, text.notes)
    wanted = bpe_size(data.tokenizer)
    if corpus.vocab_size < wanted:
        said = (
            f"data.tokenizer = {data.tokenizer!r}: the text repeats too few pairs"
            f" for {wanted:,} tokens; the vocabulary has {corpus.vocab_size:,}"
        )
        corpus = replace(corpus, notes=(*corpus.notes, said))
    check_findings(corpus.manifest, data)
    if verify == "full":
        corpus.verify()
    return corpus


def prepared_corpus(recipe: Recipe) -> Corpus | None:
    """Return the corpus of a recipe's text if the cache holds it.

    Nothing is downloaded, and more than MOST_READ bytes of text are not read to find it.

    Raises:
        DataError: there is no such text, or the cached corpus is damaged.
    """
    data = recipe.data
    text = find_text(data)
    is_named = data.tokenizer == "gpt2" or bpe_size(data.tokenizer) > 0
    if size_of_text(text) > MOST_READ or not (is_named or Path(data.tokenizer).exists()):
        return None
    limits = limits_of(recipe)
    if limits == NO_LIMITS:
        limits = Limits(data.max_tokens)
    key = _key(data, text, tokenizer_files(data.tokenizer), limits, afresh=False)
    folder = cache.cache_root() / "corpora" / key
    if not (folder / "manifest.json").exists():
        return None
    sources = tuple((source.path, source.weight) for source in data.sources or ())
    return open_corpus(folder, sources, text.notes)


def size_of_text(text: TextSources) -> int:
    """Return the bytes of the local files of a text."""
    files = [source.path for source in text.train + text.valid if isinstance(source, TextFile)]
    return sum(path.stat().st_size for path in files)


@contextmanager
def _progress(console: Console | None) -> Iterator[Report]:
    """Yield what a preparation reports its progress to; print at the end how long it took."""
    if console is None:
        from rich.console import Console

        console = Console(quiet=True, force_terminal=False)
    started = time.monotonic()
    heading = "preparing the data (once; the next run finds it in the cache)"
    with show_progress(console, "preparing the data", SECONDS_BETWEEN_LINES, heading) as tell:
        yield tell
    console.print(f"data prepared in {human_seconds(time.monotonic() - started)}")


def _locked(folder: Path, tell: Report) -> AbstractContextManager[None]:
    """Hold the lock of a corpus; report if another process holds it."""
    waiting = "waiting for another process that prepares the same data"
    return cache.locked(folder.with_name(f"{folder.name}.lock"), lambda: tell(waiting, 0, None))


def _key(
    data: Data,
    text: TextSources,
    tokens_from: tuple[Path, ...],
    limits: Limits,
    *,
    afresh: bool,
) -> str:
    """Return the name of the corpus: equal settings on equal file contents give an equal key,
    wherever the files are."""
    files = [source.path for source in text.train + text.valid if isinstance(source, TextFile)]
    hashes = iter(cache.hash_files([*files, *tokens_from], afresh=afresh))

    def identity(source: Source) -> list[Any]:
        if isinstance(source, TextFile):
            known: list[Any] = [source.kind, next(hashes)]
        else:
            known = ["hub", source.name, source.config, source.revision]
            if source.split:
                known.append(source.split)
        if data.sources is not None:
            known += [source.part, source.text_field]
        return known

    sides = [[identity(source) for source in side] for side in (text.train, text.valid)]
    fields = {kind for kind, *_ in sides[0] + sides[1]} & {"hub", "jsonl", "json", "csv", "parquet"}
    settings = [
        1,  # format of the key
        sides,
        None if text.valid else data.valid_fraction,
        data.text_field if fields else None,
        list(hashes) or data.tokenizer,
    ]
    # Absent, not null: what was prepared before there were limits is still found.
    if limits != NO_LIMITS:
        settings += [limits.train, limits.valid, [source.weight for source in data.sources or ()]]
    return digest_of(settings)[:32]


def _build(folder: Path, data: Data, text: TextSources, limits: Limits, tell: Report) -> None:
    """Make the corpus beside its place and rename it there. The caller holds the lock."""
    size = bpe_size(data.tokenizer)
    # A bad tokenizer costs no reading of text.
    tokenizer = None if size else load_tokenizer(data.tokenizer)
    texts = sum(isinstance(source, TextFile) and source.kind == "txt" for source in text.train)
    cut = not text.valid and texts < FEW_TEXT_FILES
    split = Split(data, text.train, text.valid, cut, eot_id=tokenizer.eot_id if tokenizer else None)
    split, total = survey(split, tell)
    if tokenizer is None:
        tokenizer = _trained_tokenizer(size, split, limits, tell)
    partial = folder.with_name(f"{folder.name}.partial")
    if not (partial / PROGRESS).exists():
        # A process was killed before its first shard was whole.
        shutil.rmtree(partial, ignore_errors=True)
    needed = None if total is None else total * dtype_for(tokenizer.vocab_size).itemsize
    try:
        with cache.disk_errors(folder.parent, needed):
            partial.mkdir(exist_ok=True)
            Building(partial, tokenizer, split, limits, total, tell).write()
            # A folder without a manifest is what a user left who deleted only that.
            shutil.rmtree(folder, ignore_errors=True)
            partial.rename(folder)
            fsync(folder.parent)
    except BaseException as error:
        # The Hub may be back tomorrow, and a disk have room; text that cannot be read will be other
        # text.
        hub = any(isinstance(source, HubDataset) for source in split.train + split.valid)
        if not (partial / PROGRESS).exists() or (isinstance(error, DataError) and not hub):
            shutil.rmtree(partial, ignore_errors=True)
        raise


def _trained_tokenizer(size: int, split: Split, limits: Limits, tell: Report) -> Tokenizer:
    """Train a byte-level BPE of `size` tokens on the beginning of each source's training text."""
    weights = split.weights
    most = TOKENIZER_SAMPLE
    if limits.train is not None:
        most = min(most, 8 * limits.train)
    wanted = [most * weight / sum(weights) for weight in weights]
    sample = []
    lengths = [0] * len(weights)
    cursor = Cursor(source=len(split.valid))
    for side, part, document in split_documents(
        split, Tally(BadDocuments(split.data.on_bad_document)), cursor
    ):
        if side == "train":
            sample.append(document.text)
            lengths[part] += len(document.text)
            if lengths[part] >= wanted[part]:
                cursor.enough = True
                if len(weights) == 1:
                    break
    tell(f"training a tokenizer of {size:,} tokens", 0, None)
    return train_tokenizer(size, sample)


def limits_of(recipe: Recipe) -> Limits:
    """Return how much text to prepare for a recipe.

    Without data.max_tokens, a Hub dataset is read as far as the budget needs, rounded up to a power
    of two, so that recipes of about one budget share a corpus. Its validation text depends on
    eval.windows and model.seq_len alone: two runs of different budgets are validated on the same
    text.
    """
    data = recipe.data
    if not names_hub(data):
        return NO_LIMITS
    from efftrain_cli.plan.preview import summarize_plan

    seq_len = recipe.model.seq_len
    train = data.max_tokens or _power_of_two((summarize_plan(recipe).windows + 2) * seq_len)
    return Limits(train, _power_of_two(recipe.eval.windows * seq_len + 1))


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()
