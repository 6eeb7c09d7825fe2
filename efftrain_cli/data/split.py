"""Which documents train and which validate.

Without validation text of its own, a corpus holds out the documents whose content hashes are
smallest. So a document is on the same side wherever it stands, and exact copies of one never end up
on both. Text files are held out as documents only where there are enough of them; few are cut at a
line, each keeping its last part for validation.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from efftrain_cli.data.documents import cut_at_line, read_documents
from efftrain_cli.data.hub import HubReader
from efftrain_cli.data.text import BadDocuments, Document, HubDataset, Source, TextFile
from efftrain_cli.foundation.console import counted
from efftrain_cli.foundation.errors import DataError
from efftrain_cli.foundation.progress import Report

if TYPE_CHECKING:
    from efftrain_cli.recipe.sections import Data


class Limits(NamedTuple):
    """Tokens to prepare at most; the document that reaches a limit is the last. None: all there
    is."""

    train: int | None = None
    valid: int | None = None


NO_LIMITS = Limits()


def apportion(weights: list[float], total: int) -> list[int]:
    """Share out `total` by weight in whole numbers, largest remainders first (Hamilton)."""
    exact = [weight * total / sum(weights) for weight in weights]
    shares = [int(share) for share in exact]
    by_remainder = sorted(range(len(weights)), key=lambda i: shares[i] - exact[i])
    for i in by_remainder[: total - sum(shares)]:
        shares[i] += 1
    return shares


@dataclass(frozen=True)
class Split:
    """How documents are divided into the two sides."""

    data: Data
    train: tuple[Source, ...]
    valid: tuple[Source, ...]
    cut: bool
    """Text files are cut; each ends in validation."""
    threshold: int | None = None
    """A document whose hash number is at most this is held out; None holds out none."""
    eot_id: int | None = None
    """Ends documents in files of token ids."""

    @property
    def weights(self) -> list[float]:
        """Weight of each part, a source of data.sources; a corpus without them has one part."""
        return [source.weight for source in self.data.sources or ()] or [1.0]

    def cuts(self, source: Source) -> bool:
        """Return whether the source is a text file that gives its end to validation."""
        return self.cut and isinstance(source, TextFile) and source.kind == "txt"


@dataclass
class Tally:
    """What one pass over the documents met."""

    bad: BadDocuments
    size: dict[str, int] = field(default_factory=lambda: {"train": 0, "valid": 0})
    documents: dict[str, int] = field(default_factory=lambda: {"train": 0, "valid": 0})
    overlap: int = 0
    overlap_examples: list[str] = field(default_factory=list)
    held_out: dict[str, str] = field(default_factory=dict)
    """Hexadecimal hash -> id of the validation documents so far."""

    def findings(self) -> dict[str, Any]:
        """Return what this pass found that a recipe may refuse."""
        return {
            "skipped": self.bad.skipped,
            "skipped_examples": self.bad.examples,
            "overlap": self.overlap,
            "overlap_examples": self.overlap_examples,
        }

    def count(self, side: str, document: Document, digest: bytes) -> None:
        """Count a document, and a training document that repeats an earlier validation document.

        Args:
            digest: sha256 of the document's content.
        """
        self.size[side] += len(document.text.encode())
        self.documents[side] += 1
        key = digest[:16].hex()
        if side == "valid":
            self.held_out.setdefault(key, document.id)
        elif key in self.held_out:
            self.overlap += 1
            if len(self.overlap_examples) < 5:
                self.overlap_examples.append(f"{document.id} = {self.held_out[key]}")


@dataclass
class Cursor:
    """How far a pass over the documents has come. A later pass that is given one begins there."""

    source: int = 0
    """Number of the source, validation text first."""
    taken: int = 0
    """Documents taken from it."""
    hub: HubReader | None = None
    """The reader of the source, where it is a Hub dataset."""
    hub_state: dict[str, Any] | None = None
    """Where that reader begins."""
    between: bool = False
    """The document just given out was given out whole: a later pass can begin after it."""
    enough: bool = False
    """Set by whoever takes the documents: no more of this source are wanted."""


def split_documents(
    split: Split, tally: Tally, cursor: Cursor | None = None
) -> Iterator[tuple[str, int, Document]]:
    """Yield every document with its side, "train" or "valid", and the number of its part; count it
    into `tally`.

    Validation text of its own comes first, so that every repetition is seen. Documents held out by
    their hash need no such order: copies fall on the same side.
    """
    cursor = cursor or Cursor()
    for number, source in enumerate(split.valid + split.train):
        if number < cursor.source:
            continue
        if number > cursor.source:
            cursor.source = number
            cursor.taken = 0
            cursor.hub_state = None
        cursor.enough = False
        for document in _documents_from(cursor, split, source, tally.bad):
            cursor.taken += 1
            digest = document.digest()
            if number < len(split.valid):
                parts = [("valid", document)]
            elif split.cuts(source):
                head, tail = cut_at_line(document.text, split.data.valid_fraction)
                parts = [
                    ("valid", Document(f"{document.id} (end)", tail)),
                    ("train", Document(document.id, head)),
                ]
                parts = [(side, part) for side, part in parts if part.text]
            else:
                held_out = split.threshold is not None and _number(digest) <= split.threshold
                parts = [("valid" if held_out else "train", document)]
            for at, (side, part) in enumerate(parts, 1):
                cursor.between = at == len(parts)
                tally.count(side, part, digest if part is document else part.digest())
                yield side, source.part, part
            if cursor.enough:
                break
    tally.bad.check()


def _documents_from(
    cursor: Cursor, split: Split, source: Source, bad: BadDocuments
) -> Iterator[Document]:
    """Yield the documents of a source from `cursor` on. What was met before is not counted."""
    if isinstance(source, HubDataset):
        cursor.hub = HubReader(
            source, source.text_field or split.data.text_field, bad, cursor.hub_state
        )
        yield from cursor.hub.documents()
        return
    cursor.hub = None
    before = replace(bad, examples=list(bad.examples))
    documents = read_documents(source, split.data.text_field, bad, split.eot_id)
    for _ in range(cursor.taken):
        next(documents)
    if cursor.taken:
        bad.seen = before.seen
        bad.skipped = before.skipped
        bad.examples = before.examples
    yield from documents


def _number(digest: bytes) -> int:
    """Return what documents are ranked by: the first 64 bits of their content's sha256."""
    return int.from_bytes(digest[:8], "big")


def survey(split: Split, tell: Report) -> tuple[Split, int | None]:
    """Read all local text once before anything is written: find every fault, and which documents to
    hold out.

    A Hub dataset is too long to stream twice: its threshold is the fraction itself, and faults are
    met on the way.

    Returns:
        The split with its threshold, and the bytes of text where known.
    """
    data = split.data
    ranked = [source for source in split.train if not split.valid and not split.cuts(source)]
    if any(isinstance(source, HubDataset) for source in split.train + split.valid):
        if ranked:
            split = replace(split, threshold=int(data.valid_fraction * 2**64))
        return split, None
    if ranked:
        bad = BadDocuments(data.on_bad_document)
        numbers = []
        for source in ranked:
            for document in _documents_from(Cursor(), split, source, bad):
                numbers.append(_number(document.digest()))
                tell("documents read", len(numbers), None)
        bad.check()
        if numbers:
            held_out = max(1, round(data.valid_fraction * len(numbers)))
            split = replace(split, threshold=sorted(numbers)[held_out - 1])
    tally = Tally(BadDocuments(data.on_bad_document))
    for _ in split_documents(split, tally):
        tell("bytes checked", sum(tally.size.values()), None)
    check_tally(tally, data)
    return split, sum(tally.size.values())


def check_tally(tally: Tally, data: Data) -> None:
    """Refuse what `check_findings` does, and a side without text; called after a pass over all
    documents."""
    check_findings(tally.findings(), data)
    for side, other, wanted in (("train", "valid", "training"), ("valid", "train", "validation")):
        if tally.documents[side] == 0:
            raise DataError(
                f"no text is left for {wanted};"
                f" the other side has {counted(tally.documents[other], 'document')}\n"
                "  give more documents, or name validation text in data.valid,"
                f" or change data.valid_fraction ({data.valid_fraction:g})"
            )


def check_findings(findings: dict[str, Any], data: Data) -> None:
    """Refuse overlapping or skipped documents that this recipe does not allow. The corpus may be
    shared with one that does."""
    problems = []
    if findings["overlap"] and not data.allow_overlap:
        problems.append(
            f"the validation text holds {counted(findings['overlap'], 'training document')} word"
            " for word, so validation would measure memory:"
            f" {'; '.join(findings['overlap_examples'])}\n"
            "  remove them from one side, or set data.allow_overlap = true"
        )
    if findings["skipped"] and data.on_bad_document == "error":
        problems.append(
            f"{counted(findings['skipped'], 'document')} that cannot be read:"
            f" {'; '.join(findings['skipped_examples'])}\n"
            '  repair or remove them, or set data.on_bad_document = "skip"'
        )
    if problems:
        raise DataError("\n".join(problems))
