"""Name text and its documents: find the sources that `[data]` names, say what becomes of documents
that cannot be read.

A source is the standard library, a file, or a dataset on the Hugging Face Hub. `documents` and
`hub` read them.
"""

from __future__ import annotations

import glob
import hashlib
import os
import re
import sysconfig
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from efftrain_cli.foundation.console import counted, printable
from efftrain_cli.foundation.environment import expanded
from efftrain_cli.foundation.errors import DataError

if TYPE_CHECKING:
    import numpy as np

    from efftrain_cli.recipe.sections import Data

Side = Literal["train", "valid"]
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
    """A dataset on the Hugging Face Hub, written "owner/name", "owner/name/config" or
    "owner/name@revision"."""

    name: str
    config: str | None
    revision: str | None
    purpose: Side
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

    def found(self, where: object, what: str) -> None:
        """Count a bad document; raise a `DataError` if the policy is "error"."""
        self.seen += 1
        where = printable(where)
        if self.policy == "error":
            raise DataError(
                f'{where}: {what}\n  repair or remove it, or set data.on_bad_document = "skip" '
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
                f"{self.skipped:,} of {counted(self.seen, 'document')} cannot be read"
                f" ({self.skipped / self.seen:.2%}; at most {SKIPPED_SHARE:.1%} may be skipped)."
                " The first: " + "; ".join(self.examples)
            )


def problem_of(value: object, field: str) -> str:
    """Return why the value of a field is not text that UTF-8 can hold, or "". JSON can spell half
    of a surrogate pair."""
    if not isinstance(value, str):
        return f"field {field!r} is {type(value).__name__}, not text"
    try:
        value.encode()
    except UnicodeEncodeError as error:
        return f"half of a surrogate pair at character {error.start}: not text"
    return ""


SUFFIXES: dict[str, Kind] = {
    ".txt": "txt",
    ".jsonl": "jsonl",
    ".jsonl.gz": "jsonl",
    ".json.gz": "jsonl",
    ".jsonl.zst": "jsonl",
    ".json.zst": "jsonl",
    ".parquet": "parquet",
}
"""What a folder or glob is searched for first."""
MORE_SUFFIXES: dict[str, Kind] = {
    ".md": "txt",
    ".raw": "txt",
    ".json": "json",
    ".csv": "csv",
    ".bin": "bin",
}
"""Read where a file is named, or where a folder holds nothing of the above: beside text such files
are often about it."""
_KINDS = ", ".join([*SUFFIXES, *MORE_SUFFIXES])

_HUB = re.compile(r"([A-Za-z0-9][\w.-]*/[\w.-]+)(?:/([\w.-]+))?(?:@([\w.-]+))?")
_NOT_LIBRARY = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


@dataclass(frozen=True)
class TextSources:
    """What `[data]` names."""

    train: tuple[Source, ...]
    valid: tuple[Source, ...]
    notes: tuple[str, ...]
    """What was left out of folders, in sentences."""


def find_text(data: Data) -> TextSources:
    """Return the sources that `[data]` names.

    Raises:
        DataError: an entry names nothing, or a folder is for the most part of a kind that is not
            read; all are listed.
    """
    notes = []
    problems = []
    sides: dict[str, dict[Source, None]] = {"train": {}, "valid": {}}
    for key, purpose, entry, part, text_field in _entries(data):
        try:
            sources, left_out = _find(entry, purpose, data)
        except DataError as error:
            problems.append(f"{key} = {entry!r}: {error}")
            continue
        if left_out:
            notes.append(f"{key} = {entry!r}: {left_out}")
        sides[purpose] |= dict.fromkeys(
            source._replace(part=part, text_field=text_field) for source in sources
        )
    if problems:
        raise DataError("\n".join(problems))
    return TextSources(tuple(sides["train"]), tuple(sides["valid"]), tuple(notes))


def names_hub(data: Data) -> bool:
    """Return whether any of the training text or validation text is a dataset on the Hub. Reads
    nothing but names."""
    entries = [entry for _, _, entry, _, _ in _entries(data)]
    return any(_HUB.fullmatch(entry) and not Path(entry).exists() for entry in entries)


def _entries(data: Data) -> Iterator[tuple[str, Side, str, int, str | None]]:
    """Yield every text that is named: its key, what it is for, its name, the number of its source
    and its text field."""
    for part, source in enumerate(data.sources or ()):
        yield f"data.sources.{part}.path", "train", source.path, part, source.text_field
    if data.sources is None:
        for entry in _listed(data.train or "stdlib"):
            yield "data.train", "train", entry, 0, None
    for entry in _listed(data.valid or ()):
        yield "data.valid", "valid", entry, 0, None


def _listed(entries: str | Sequence[str]) -> Sequence[str]:
    return (entries,) if isinstance(entries, str) else entries


def _find(entry: str, purpose: Side, data: Data) -> tuple[list[Source], str]:
    """Return the sources that an entry names, and what its folder has besides ("" if nothing)."""
    if entry == "stdlib":
        return stdlib_files(), ""
    stated: Kind | None = None if data.format == "auto" else data.format
    path = expanded(entry, "write the path without ~")
    if path.is_file():
        return [TextFile(path.resolve(), stated or _kind_of_named(path))], ""

    hidden: list[Path] = []
    if path.is_dir():
        _check_no_splits(path)
        files, hidden = _list_folder(path)
        what = "the folder holds"
    elif glob.has_magic(entry):
        files = [Path(name) for name in sorted(glob.glob(str(path), recursive=True))]
        what = "the pattern matches"
    else:
        return [_hub_dataset(entry, path, purpose, data)], ""
    files = [file for file in files if file.is_file()]

    for suffixes in (SUFFIXES, MORE_SUFFIXES):
        chosen = []
        for file in files:
            kind = stated or _kind_of(file, suffixes)
            if kind is not None:
                chosen.append(TextFile(file.resolve(), kind))
        if chosen:
            return list(chosen), _left_out(files, [file.path for file in chosen])
    hint = ""
    if files:
        hint = f'; it has {_suffixes(files)}. data.format = "txt" reads them as text'
    elif hidden:
        hint = (
            f"; hidden files and folders, such as {hidden[0].name}, are not read:"
            " name one to read it"
        )
    elif entry.startswith("["):
        hint = '; several texts are a list in quotes: --set \'data.train=["a.txt", "b.txt"]\''
    raise DataError(f"{what} no file of a known kind ({_KINDS}){hint}")


def _kind_of_named(path: Path) -> Kind:
    kind = _kind_of(path, SUFFIXES | MORE_SUFFIXES)
    if kind is None:
        packed = path.suffix.lower() in (".gz", ".zst", ".bz2", ".xz", ".zip")
        way = "Unpack it first" if packed else 'data.format = "txt" reads it as text'
        raise DataError(
            f"the file's name does not show what kind it is; known kinds are {_KINDS}. {way}"
        )
    return kind


def _list_folder(folder: Path) -> tuple[list[Path], list[Path]]:
    """Return what is below a folder, and what is hidden or below a hidden folder."""
    try:
        paths = sorted(folder.rglob("*"))
    except OSError as error:
        raise DataError(
            f"{error.filename} cannot be listed: {error.strerror}\n"
            "  give a folder that nothing else changes meanwhile, or a glob of files"
        ) from None
    hidden = dict.fromkeys(path for path in paths if "/." in f"/{path.relative_to(folder)}")
    return [path for path in paths if path not in hidden], list(hidden)


def _hub_dataset(entry: str, path: Path, purpose: Side, data: Data) -> HubDataset:
    """Return the dataset of the Hub that a name stands for, if no file is meant."""
    named = _HUB.fullmatch(entry)
    if named is None or _kind_of(path, SUFFIXES | MORE_SUFFIXES) is not None:
        if "," in entry:
            several = ", ".join(f'"{part.strip()}"' for part in entry.split(","))
            raise DataError(f"no such file\n  several are written as a list: [{several}]")
        raise DataError(
            f"no such file or folder (looked in {Path.cwd()})\n"
            f'  name files, folders or globs of {_KINDS}, a Hub dataset "owner/name", or "stdlib"'
        )
    split = data.split if purpose == "train" else None
    return HubDataset(named[1], named[2], named[3] or data.revision, purpose, split=split)


def _check_no_splits(path: Path) -> None:
    """Refuse a folder whose own folders are training text and text to be held out."""
    folders = {folder.name.lower(): folder for folder in path.iterdir() if folder.is_dir()}
    names = [name for name in ("valid", "validation", "val", "dev", "test") if name in folders]
    if "train" in folders and names:
        raise DataError(
            f"the folder has {', '.join(names)} beside train, and would be read as one text\n"
            f'  set data.train = "{folders["train"]}" and data.valid = "{folders[names[0]]}";'
            f' or, to read all of it as one text, data.train = "{path}/**/*"'
        )


def _left_out(files: list[Path], chosen: list[Path]) -> str:
    """Describe what is not read of some files; refuse it if it is most of them, by bytes.

    Args:
        chosen: those that are read, resolved.
    """
    taken = set(chosen)
    others = [file for file in files if file.resolve() not in taken]
    if not others:
        return ""
    read = sum(file.stat().st_size for file in chosen)
    unread = sum(file.stat().st_size for file in others)
    what = (
        f"{len(others):,} of {len(files):,} files, {unread:,} of {read + unread:,} bytes,"
        f" are not read ({_suffixes(others)})"
    )
    if unread > read:
        raise DataError(
            f"{what}: read is only {_suffixes(chosen)}\n"
            '  name what you mean by a glob, as "folder/**/*.md", or set data.format = "txt"'
            " to read every file as text"
        )
    return what


def _suffixes(files: list[Path]) -> str:
    """Count files by suffix: "12 .html, 3 .rst, ..."."""
    counts: Counter[str] = Counter()
    for file in files:
        parts = 2 if file.suffix in (".gz", ".zst") else 1
        counts["".join(file.suffixes[-parts:]) or file.name] += 1
    listed = [f"{count:,} {suffix}" for suffix, count in counts.most_common(6)]
    if len(counts) > 6:
        listed.append("...")
    return ", ".join(listed)


def _kind_of(path: Path, suffixes: dict[str, Kind]) -> Kind | None:
    """Return how a file is read, by its name; None if the name does not say."""
    name = path.name.lower()
    return next((kind for suffix, kind in suffixes.items() if name.endswith(suffix)), None)


def stdlib_files() -> list[Source]:
    """List the running Python's standard library: its .py files but for tests, installed packages
    and what the build generated. Raise a `DataError` if this Python carries none."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = []
    for folder, folders, names in os.walk(root):
        folders[:] = [
            name for name in folders if name not in _NOT_LIBRARY and not name.startswith("config-")
        ]
        for name in names:
            # _sysconfigdata describes the machine that Python was built on; the other two are the
            # administrator's.
            if name.endswith(".py") and not name.startswith(
                ("_sysconfigdata", "sitecustomize", "usercustomize")
            ):
                files.append(os.path.join(folder, name))
    if not files:
        raise DataError(
            f"this Python has no source of its standard library in {root}\n"
            "  give data.train files of your own"
        )
    prefix = len(str(root)) + 1
    files.sort(key=lambda name: name[prefix:].replace(os.sep, "/"))
    return [TextFile(Path(name), "stdlib") for name in files]
