"""From `[data]` of a recipe to a corpus in the cache.

    sources -> documents -> split by hash -> token ids -> shards -> manifest -> one rename

A corpus is a folder `corpora/<key>` of the cache. The key is a hash of the files' paths, sizes and
times and of the settings that decide the tokens. The folder is built beside its place under a lock
and renamed when all of it is on disk: a kill leaves nothing that a later start takes for a corpus,
but the shards that were closed, from which a later start continues (`building`).
"""

from __future__ import annotations

import fcntl
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from efftrain_cli.data.building import Building
from efftrain_cli.data.corpus import Corpus, open_corpus
from efftrain_cli.data.sources import TextSources, find_sources
from efftrain_cli.data.split import Limits
from efftrain_cli.data.tokenizer import bpe_size, tokenizer_files
from efftrain_cli.foundation.environment import cache_root
from efftrain_cli.foundation.errors import DataError, UsageError
from efftrain_cli.foundation.files import abandoned_in, discard, fsync, make_folder
from efftrain_cli.foundation.progress import Report, show_progress
from efftrain_cli.foundation.records import digest_of
from efftrain_cli.foundation.signals import check_stop

if TYPE_CHECKING:
    from rich.console import Console

    from efftrain_cli.recipe.recipe import Recipe
    from efftrain_cli.recipe.sections import Data


def prepare(
    data: Data,
    limits: Limits | None = None,
    console: Console | None = None,
) -> Corpus:
    """Open the corpus that a recipe's `[data]` describes; make it if the cache has none.

    Another process that is making the same corpus is waited for. One that was stopped while making
    it is continued.

    Args:
        limits: how much to prepare (`limits_of`); default: data.max_tokens, else all there is.
        console: shows the progress of a preparation, and nothing if the corpus is ready.

    Raises:
        DataError: text, tokenizer or a cached corpus is missing, damaged or does not fit.
        OSError: the cache's disk is full, or refuses.
    """
    limits = limits or Limits(data.max_tokens)
    text = find_sources(data)
    folder = _folder_of(corpus_key(data, text, limits))
    if not folder.exists():
        from rich.console import Console

        console = console or Console(quiet=True)
        title = "preparing the data (once)"
        with show_progress(console, title, 10.0) as tell, locked(folder, tell):
            if not folder.exists():
                _build(folder, data, text, limits, tell)
    return open_corpus(folder, data.sources)


def _folder_of(key: str) -> Path:
    return cache_root() / "corpora" / key


def corpus_of_key(key: str, data: Data) -> Corpus | None:
    """Return the corpus of a key, whatever has become of its text; None if the cache lacks it.

    Raises:
        DataError: it is damaged.
    """
    folder = _folder_of(key)
    return open_corpus(folder, data.sources) if folder.exists() else None


def prepared_corpus(recipe: Recipe) -> Corpus | None:
    """Return the corpus of a recipe's text if the cache holds it. Nothing is downloaded.

    Raises:
        DataError: there is no such text, or the cached corpus is damaged.
    """
    data = recipe.data
    text = find_sources(data)
    if not (bpe_size(data.tokenizer) or Path(data.tokenizer).exists()):
        return None
    return corpus_of_key(corpus_key(data, text, limits_of(recipe)), data)


def corpus_key(
    data: Data,
    text: TextSources,
    limits: Limits,
) -> str:
    """Return the name of a corpus: equal files and settings give an equal key.

    Raises:
        DataError: data.tokenizer names nothing.
    """
    tokenizer: list[Any] = [data.tokenizer]
    if not bpe_size(data.tokenizer):
        for path in tokenizer_files(data.tokenizer):
            stat = path.stat()
            tokenizer += [str(path), stat.st_size, stat.st_mtime_ns]
    allowed = [data.on_bad_document, data.allow_overlap]
    fraction = None if text.has_valid else data.valid_fraction
    weights = [source.weight for source in data.sources or () if limits.train is not None]
    # 3 is the format of the key.
    return digest_of([3, text.sources, tokenizer, limits, allowed, fraction, weights])[:32]


def _build(
    folder: Path,
    data: Data,
    text: TextSources,
    limits: Limits,
    tell: Report,
) -> None:
    """Make the corpus beside its place and rename it there. The caller holds the lock."""
    partial = folder.with_name(f"{folder.name}.partial")
    partial.mkdir(exist_ok=True)
    for path in abandoned_in(partial):
        discard(path)
    try:
        Building(partial, data, text, limits, tell).write()
    except DataError:
        # Repaired text is other text, with another key. But the Hub may be back tomorrow.
        if not text.has_hub:
            shutil.rmtree(partial)
        raise
    except OSError as error:
        error.filename = error.filename or str(partial)
        raise
    partial.rename(folder)
    fsync(folder.parent)


@contextmanager
def locked(folder: Path, tell: Report) -> Iterator[None]:
    """Hold the lock of a corpus, which ends with the process; report if another process holds it.

    Raises:
        UsageError: the cache's folder cannot be made.
    """
    try:
        make_folder(folder.parent)
    except (NotADirectoryError, PermissionError) as error:
        raise UsageError(
            f"{folder.parent} cannot be made: {error.strerror}\n"
            "  set EFFTRAIN_CACHE to a writable folder"
        ) from error
    path = folder.with_name(f"{folder.name}.lock")
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                tell("waiting for another process that prepares the same data", 0)
                check_stop()
                time.sleep(0.2)
        yield


def limits_of(recipe: Recipe) -> Limits:
    """Return how much text to prepare for a recipe.

    Without data.max_tokens, a Hub dataset is read as far as the budget needs, rounded up to a power
    of two, so that recipes of about one budget share a corpus. Its validation text depends on
    eval.windows and model.seq_len alone: two runs of different budgets are validated on the same
    text.
    """
    data = recipe.data
    if not find_sources(data).has_hub:
        return Limits(data.max_tokens)
    from efftrain_cli.plan.preview import summarize_plan

    seq_len = recipe.model.seq_len
    needed = (summarize_plan(recipe).windows + 2) * seq_len
    validation = recipe.eval.windows * seq_len + 1
    return Limits(data.max_tokens or _power_of_two(needed), _power_of_two(validation))


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()
