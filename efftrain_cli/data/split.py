"""Which documents train and which validate.

Without validation text of its own, a corpus holds out the documents whose content hashes are
smallest. So a document is on the same side wherever it stands, and exact copies of one never end up
on both. Text files are held out as documents only if there are enough of them; few are cut at a
line, each keeping its last part for validation.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple

from efftrain_cli.data.documents import Document, Reader, Tally
from efftrain_cli.data.sources import Source, TextSources
from efftrain_cli.foundation.progress import Report

if TYPE_CHECKING:
    from efftrain_cli.recipe.sections import Data

FEW_TEXT_FILES = 20
"""With fewer .txt files than this, each file gives its end to validation instead of some files
being held out whole."""


class Limits(NamedTuple):
    """Tokens to prepare at most; the document that reaches a limit is the last. None: all there
    is."""

    train: int | None
    valid: int | None = None


class Split(NamedTuple):
    """How the documents of a corpus are divided into the two sides."""

    fraction: float
    cuts_texts: bool = False
    """Whether each text file gives its end to validation."""
    threshold: int = -1
    """Documents whose hash number is at most this are held out."""
    too_long: Sequence[int] = ()
    """Numbers up to `threshold` of documents that are too long to be held out."""

    def cuts(self, source: Source) -> bool:
        """Return whether the source is a text file that gives its end to validation."""
        return self.cuts_texts and source.kind == "txt" and not source.validates

    def sides(
        self,
        document: Document,
        source: Source,
    ) -> Iterator[tuple[str, Iterator[str]]]:
        """Yield each side that has a part of the document, and the pieces of that part, which are
        to be taken before the next side."""
        if self.cuts(source):
            pieces = cut_at_line(document, self.fraction)
            for side, group in groupby(pieces, key=itemgetter(0)):
                yield side, map(itemgetter(1), group)
            return
        number = document.number
        held_out = number <= self.threshold and number not in self.too_long
        yield "valid" if source.validates or held_out else "train", document.pieces()


def cut_at_line(
    document: Document,
    fraction: float,
) -> Iterator[tuple[str, str]]:
    """Yield the pieces of a text, each with its side: "valid" from the first start of a line within
    about the last `fraction`.

    If no line starts there, the last line is taken; a text of one line stays whole in "train".
    """
    target = int(document.characters * (1 - fraction))
    starts_line = document.last_line > target
    if not starts_line:
        target = document.last_line or document.characters
    side = "train"
    passed = 0
    for piece in document.pieces():
        cut = max(target - passed, 0)
        passed += len(piece)
        if side == "train" and cut < len(piece):
            if starts_line:
                cut = piece.find("\n", cut) + 1
            if cut or not starts_line:
                yield "train", piece[:cut]
                piece = piece[cut:]
                side = "valid"
        yield side, piece


def survey(data: Data, text: TextSources, tell: Report) -> Split:
    """Choose the documents to hold out: those of the smallest hashes, `valid_fraction` of all.

    All local text is read for it, but only what is divided by hash. A Hub dataset is too long to be
    read twice: its threshold is the fraction itself.

    Raises:
        DataError: a document cannot be read.
    """
    fraction = data.valid_fraction
    texts = sum(source.kind == "txt" for source in text.sources)
    split = Split(fraction, cuts_texts=texts < FEW_TEXT_FILES)
    if text.has_valid:
        return Split(fraction)
    ranked = [source for source in text.sources if not split.cuts(source)]
    share = int(fraction * 2**64)
    if any(source.kind == "hub" for source in ranked):
        return split._replace(threshold=share)

    numbers = array("Q")
    sizes = array("Q")
    documents = total = 0
    tally = Tally()
    for source in ranked:
        for document in Reader(source, tally, data.on_bad_document == "skip").documents():
            documents += 1
            total += document.size
            # Larger numbers are not needed, but in a short text.
            if document.number < 4 * share or documents <= 10_000:
                numbers.append(document.number)
                sizes.append(document.size)
            tell("documents read", documents)
    if not documents:
        return split
    tally.check_skipped()
    ranks = sorted(zip(numbers, sizes, strict=True))
    wanted = max(1, round(fraction * documents))
    # If every document is longer than that, those of at most mean length.
    for room in (2 * fraction * total, total / documents):
        threshold, too_long = choose(ranks, wanted, room)
        if threshold >= 0:
            break
    return split._replace(threshold=threshold, too_long=too_long)


def choose(
    ranks: list[tuple[int, int]],
    wanted: int,
    room: float,
) -> tuple[int, list[int]]:
    """Return the number up to which documents are held out, -1 if there is none, and the numbers up
    to it of those for which no room is left.

    Args:
        ranks: number and bytes of each document, ascending.
        wanted: documents to hold out.
        room: bytes of all that may be held out.
    """
    threshold = -1
    too_long = []
    for number, size in ranks:
        if size > room:
            too_long.append(number)
            continue
        threshold = number
        room -= size
        wanted -= 1
        if not wanted:
            break
    return threshold, [number for number in too_long if number <= threshold]
