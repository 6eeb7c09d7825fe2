"""What text is read from and read as: sources, documents, and those that cannot be read."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from efftrain_cli.foundation.console import printable
from efftrain_cli.foundation.errors import DataError

if TYPE_CHECKING:
    import numpy as np

Kind = Literal["txt", "jsonl", "json", "csv", "parquet", "bin", "stdlib"]
"""How a file is read; "bin" holds token ids, as nanoGPT and llm.c write them."""
SKIPPED_SHARE = 0.001
"""Largest share of documents that on_bad_document = "skip" may pass over."""


class Document(NamedTuple):
    """One document; `id` says where it was found: a file, or file:line."""

    id: str
    text: str
    ids: np.ndarray | None = None
    """Token ids, of a document that is read as tokens and has no text."""

    def content(self) -> bytes:
        """Return what makes two documents the same: the text as UTF-8, or the ids."""
        return self.text.encode() if self.ids is None else self.ids.astype("<u4").tobytes()

    def digest(self) -> bytes:
        """Return the sha256 of the content."""
        return hashlib.sha256(self.content()).digest()


class TextFile(NamedTuple):
    """A local file of documents."""

    path: Path
    kind: Kind
    part: int = 0
    """Number of the [[data.sources]] it belongs to."""
    text_field: str | None = None
    """Field or column of the text, where its source names one of its own."""


class HubDataset(NamedTuple):
    """A dataset on the Hugging Face Hub, written "owner/name", "owner/name/config" or "owner/name@revision"."""

    name: str
    config: str | None
    revision: str | None
    purpose: Literal["train", "valid"]
    part: int = 0
    text_field: str | None = None
    split: str | None = None
    """None: "train" to train on; "validation", else "test", else "train" to validate."""


Source = TextFile | HubDataset


@dataclass
class BadDocuments:
    """What becomes of documents that cannot be read: an error at once, or skipped and counted."""

    policy: Literal["error", "skip"]
    seen: int = 0
    """Documents met, bad ones included."""
    skipped: int = 0
    examples: list[str] = field(default_factory=list)
    """The first few skipped, with place and reason."""

    def read(self, id: str, text: str) -> Iterator[Document]:
        """Yield a document that could be read; pass over an empty one."""
        self.seen += 1
        if text:
            yield Document(printable(id), text)

    def found(self, where: str, what: str) -> None:
        """Count a bad document; raise a `DataError` if the policy is "error"."""
        self.seen += 1
        where = printable(where)
        if self.policy == "error":
            raise DataError(
                f'{where}: {what}. Repair or remove it, or set data.on_bad_document = "skip" '
                f"(at most {SKIPPED_SHARE:.1%} of the documents may be skipped)"
            )
        self.skipped += 1
        if len(self.examples) < 5:
            self.examples.append(f"{where}: {what}")

    def check(self) -> None:
        """Raise a `DataError` if more than `SKIPPED_SHARE` were skipped; called after the last
        document."""
        if self.skipped > SKIPPED_SHARE * self.seen:
            raise DataError(
                f"{self.skipped:,} of {self.seen:,} documents cannot be read ({self.skipped / self.seen:.2%}; "
                f"at most {SKIPPED_SHARE:.1%} may be skipped). The first: "
                + "; ".join(self.examples)
            )


def problem_of(value: object, field: str) -> str | None:
    """Return why the value of a field is not text that UTF-8 can hold, or None. JSON can spell half
    of a surrogate pair."""
    if not isinstance(value, str):
        return f"field {field!r} is {type(value).__name__}, not text"
    try:
        value.encode()
    except UnicodeEncodeError as error:
        return f"half of a surrogate pair at character {error.start}: not text"
    return None
