"""Files that survive: whole or not at all, flushed, and known by their sha256."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path


def sha256_of(path: Path) -> str:
    """Hex sha256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fsync(path: Path) -> None:
    """Makes a file or directory survive a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_whole(path: Path, content: str) -> None:
    """Writes a text file so that it has either its old content or all of the new."""
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        temporary.write_text(content, encoding="utf-8")
        fsync(temporary)
        temporary.replace(path)
        fsync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)
