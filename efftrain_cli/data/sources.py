"""Find the text that `[data]` names: the standard library, files, or datasets of the Hugging Face
Hub. `documents` reads them."""

from __future__ import annotations

import glob
import os
import re
import sysconfig
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from efftrain_cli.foundation.environment import expanded
from efftrain_cli.foundation.errors import DataError, nearest

if TYPE_CHECKING:
    from efftrain_cli.recipe.sections import Data

KINDS = {".txt": "txt", ".jsonl": "jsonl", ".parquet": "parquet"}
"""What a folder or pattern is searched for first."""
MORE_KINDS = {".md": "txt", ".raw": "txt", ".json": "json", ".csv": "csv"}
"""Read if a file is named, or if a folder has nothing of `KINDS`."""
PACKED = (".gz", ".zst", ".bz2")
"""Endings of compressed text and JSON lines."""
_HUB = re.compile(r"([A-Za-z0-9][\w.-]*/[\w.-]+)(?:/([\w.-]+))?(?:@([\w.-]+))?")
_NOT_LIBRARY = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
_MACHINE_FILES = ("_sysconfigdata", "sitecustomize", "usercustomize")


class Source(NamedTuple):
    """A file, or a dataset of the Hub."""

    name: str
    """Path, or "owner/name"."""
    kind: str
    """ "txt", "stdlib", "jsonl", "json", "csv", "parquet" or "hub"."""
    validates: bool
    part: int = 0
    """Number of its [[data.sources]]."""
    text_field: str = "text"
    config: str | None = None
    revision: str | None = None
    split: str | None = None
    """Of a Hub dataset; None: "train", and to validate "validation", "test" or "train"."""
    size: int = 0
    """Bytes of the file."""
    time: int = 0
    """When the file was last changed, nanoseconds since 1970."""

    @property
    def is_whole(self) -> bool:
        """Whether the file is one document."""
        return self.kind in ("txt", "stdlib")


@dataclass(frozen=True)
class TextSources:
    """What `[data]` names, validation text first."""

    sources: tuple[Source, ...]
    notes: tuple[str, ...]
    """What folders have besides, in sentences."""

    @property
    def has_valid(self) -> bool:
        """Whether validation has text of its own."""
        return any(source.validates for source in self.sources)

    @property
    def has_hub(self) -> bool:
        """Whether a source is a dataset of the Hub."""
        return any(source.kind == "hub" for source in self.sources)


def find_sources(data: Data) -> TextSources:
    """Return the sources that `[data]` names, each once.

    Raises:
        DataError: an entry names nothing; all such entries are listed.
    """
    model = Source("", "", validates=False, text_field=data.text_field)
    named = []
    for entry in _listed(data.valid or ()):
        named.append(("data.valid", entry, model._replace(validates=True)))
    for part, source in enumerate(data.sources or ()):
        text_field = source.text_field or data.text_field
        own = model._replace(part=part, text_field=text_field)
        named.append((f"data.sources.{part}.path", source.path, own))
    if data.sources is None:
        for entry in _listed(data.train or "stdlib"):
            named.append(("data.train", entry, model))

    sources: dict[Source, None] = {}
    notes = []
    problems = []
    for key, entry, model in named:
        try:
            found, note = _find(entry, model, data)
        except (DataError, OSError) as error:
            problems.append(f"{key} = {entry!r}: {error}")
            continue
        sources |= dict.fromkeys(found)
        if note:
            notes.append(f"{key} = {entry!r}: {note}")
    if problems:
        raise DataError("\n".join(problems))
    return TextSources(tuple(sources), tuple(notes))


def _file(model: Source, path: str | Path, kind: str) -> Source:
    stat = os.stat(path)
    return model._replace(name=str(path), kind=kind, size=stat.st_size, time=stat.st_mtime_ns)


def _listed(entries: str | Sequence[str]) -> Sequence[str]:
    return (entries,) if isinstance(entries, str) else entries


def _find(
    entry: str,
    model: Source,
    data: Data,
) -> tuple[list[Source], str]:
    """Return the sources of an entry, and what its folder has besides, "" if nothing.

    Args:
        model: has the part, field and side of the entry.
    """
    if entry == "stdlib":
        return [_file(model, name, "stdlib") for name in stdlib_files()], ""
    path = expanded(entry, "write the path without ~")
    files = [path]
    if path.is_dir():
        _check_no_splits(path)
        files = sorted(path.rglob("*"))
        files = [file for file in files if "/." not in f"/{file.relative_to(path)}"]
    elif glob.has_magic(entry) and not path.exists():
        files = [Path(name) for name in sorted(glob.glob(str(path), recursive=True))]
        if not files:
            raise DataError("no file matches this pattern\n  write [[] for [, [*] for *")
    elif not path.is_file():
        return [_hub_dataset(entry, path, model, data)], ""

    files = [file for file in files if file.is_file()]
    for kinds in (KINDS, MORE_KINDS):
        sources = []
        unread = []
        for file in files:
            kind = _kind_of(file, kinds) if data.format == "auto" else data.format
            if kind is None:
                unread.append(file)
            else:
                sources.append(_file(model, file.resolve(), kind))
        if sources:
            note = f"{len(unread):,} of {len(files):,} files are not read ({_suffixes(unread)})"
            return sources, note if unread else ""
    if any(file.suffix == ".bin" for file in files):
        raise DataError(
            "token ids (.bin) say neither their width nor their tokenizer\n"
            "  name the text that they were made from"
        )
    fix = "name another folder, or a file; hidden ones are read if they are named"
    if files:
        fix = 'data.format = "txt" reads them as text; unpack archives first'
    raise DataError(
        f"no file of a known kind ({', '.join([*KINDS, *MORE_KINDS])}), but"
        f" {_suffixes(files) or 'nothing'}\n  {fix}"
    )


def _kind_of(file: Path, kinds: dict[str, str]) -> str | None:
    """Return how a file is read, by its name; None if the name does not say."""
    name = Path(file.name.lower())
    if name.suffix not in PACKED:
        return kinds.get(name.suffix)
    kind = kinds.get(name.with_suffix("").suffix)
    return {"txt": "txt", "jsonl": "jsonl", "json": "jsonl"}.get(kind or "")


def _hub_dataset(
    entry: str,
    path: Path,
    model: Source,
    data: Data,
) -> Source:
    """Return the dataset of the Hub that a name stands for, if no file is meant."""
    named = _HUB.fullmatch(entry)
    if named is None or path.suffix in {**KINDS, **MORE_KINDS}:
        fix = 'name files, folders or patterns, a Hub dataset "owner/name", or "stdlib"'
        if path.parent.is_dir():
            names = [file.name for file in path.parent.iterdir()]
            fix = nearest(path.name, names, most=1, cutoff=0.6) or fix
        if "," in entry:
            several = ", ".join(f'"{part.strip()}"' for part in entry.strip("[]").split(","))
            fix = f"several are written as a list: --set 'data.train=[{several}]'"
        raise DataError(f"no such file or folder (looked in {Path.cwd()})\n  {fix}")
    return model._replace(
        name=named[1],
        kind="hub",
        config=named[2],
        revision=named[3] or data.revision,
        split=None if model.validates else data.split,
    )


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


def _suffixes(files: Sequence[Path]) -> str:
    """Count files by suffix: "12 .html, 3 .rst"; the six most frequent."""
    counts = Counter(file.suffix or file.name for file in files)
    return ", ".join(f"{count:,} {suffix}" for suffix, count in counts.most_common(6))


def stdlib_files() -> list[str]:
    """List the running Python's standard library, without tests and installed packages.

    Raises:
        DataError: this Python has no source of its library.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    files = []
    for folder, folders, names in os.walk(root):
        folders[:] = [
            name for name in folders if name not in _NOT_LIBRARY and not name.startswith("config-")
        ]
        for name in names:
            if name.endswith(".py") and not name.startswith(_MACHINE_FILES):
                files.append(os.path.join(folder, name))
    if not files:
        raise DataError(
            f"this Python has no source of its standard library in {root}\n"
            "  give data.train files of your own"
        )
    return sorted(files)
