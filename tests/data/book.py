"""A book, and how `prepare` is asked for it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from efftrain_cli.data.documents import Reader, Tally
from efftrain_cli.data.sources import find_sources
from efftrain_cli.recipe.sections import Data
from tests.fake_runs import write_jsonl

LINES = [
    f"{i}: the quick brown fox number {i * i} jumps over {i % 7} lazy dogs\n" for i in range(2000)
]


def write_texts(path: Path, texts: Iterable[str] = LINES) -> None:
    """Write each text as a line of JSON."""
    write_jsonl(path, [{"text": text} for text in texts])


def texts(path: Path, *, field: str = "text", policy: str = "error") -> list[str]:
    """Return the documents of a file or folder."""
    found = []
    for source in find_sources(Data(train=str(path), text_field=field)).sources:
        for document in Reader(source, Tally(), policy == "skip").documents():
            found.append("".join(document.pieces()))
    return found


def write_book(folder: Path) -> Path:
    """Write LINES to book.txt and return its path."""
    path = folder / "book.txt"
    path.write_text("".join(LINES))
    return path


def data(train: Path | tuple[str, ...], **keys: object) -> Data:
    return Data(
        **{
            "train": str(train) if isinstance(train, Path) else train,
            "tokenizer": "bpe:300",
            **keys,
        }
    )
