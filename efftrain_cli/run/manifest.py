"""The manifest of a checkpoint: size and sha256 of each of its files.

No torch, so that `efftrain runs checkpoints` answers at once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ClassVar

from efftrain_cli.foundation.errors import CheckpointError, DamagedError
from efftrain_cli.foundation.files import sha256_of
from efftrain_cli.foundation.records import Part, Record, read_record, write_record

SCHEMA_VERSION = 1
MANIFEST = "manifest.json"
WITHOUT_OPTIMIZER = frozenset({"model.safetensors", "progress.json", "recipe.toml"})
"""Files of a checkpoint that using its weights needs."""
REQUIRED = WITHOUT_OPTIMIZER | {"optimizer.safetensors"}
"""Files of a checkpoint that resuming from it needs."""


class ManifestFile(Part):
    """Size and sha256 of one file."""

    bytes: int
    sha256: str


class Manifest(Record):
    """manifest.json of a checkpoint."""

    restore: ClassVar[str] = ""
    schema_version: int
    files: dict[str, ManifestFile]


def write_manifest(directory: Path, hashes: Mapping[str, str]) -> None:
    """Write manifest.json: size and sha256 of the files in `hashes`, by name."""
    files = {}
    for name, digest in sorted(hashes.items()):
        size = (directory / name).stat().st_size
        files[name] = ManifestFile(bytes=size, sha256=digest)
    write_record(directory / MANIFEST, Manifest(schema_version=SCHEMA_VERSION, files=files))


def read_manifest(directory: Path) -> Manifest:
    """Read the manifest of a checkpoint.

    Raises:
        CheckpointError: it is missing or damaged.
    """
    path = directory / MANIFEST
    try:
        return read_record(path, Manifest)
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing: the checkpoint is not complete") from None
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from None


def keep_weights(checkpoint: Path) -> None:
    """Remove all of a checkpoint but its weights: it can be used, but not resumed from.

    A kill in between leaves it whole, with files that the next call removes.

    Raises:
        CheckpointError: its manifest is missing or damaged.
    """
    manifest = read_manifest(checkpoint)
    files = {name: file for name, file in manifest.files.items() if name in WITHOUT_OPTIMIZER}
    if files != manifest.files:
        write_record(checkpoint / MANIFEST, manifest.model_copy(update={"files": files}))
    for path in checkpoint.glob("*.safetensors"):
        if path.name not in files:
            path.unlink()


def listed_files(directory: Path, required: frozenset[str]) -> dict[str, ManifestFile]:
    """Return what the manifest of a checkpoint lists, by file.

    Raises:
        CheckpointError: the manifest is damaged, or a required file is not listed.
    """
    files = read_manifest(directory).files
    for name in sorted(required - files.keys()):
        raise CheckpointError(
            f"{directory / MANIFEST} does not list {name}: it is damaged, or only the weights were"
            " kept"
        )
    return files


def verify_checkpoint(directory: Path, needed: frozenset[str] | None = None) -> frozenset[str]:
    """Check every file of a checkpoint, or those that are needed, against its manifest; return the
    files' names.

    Raises:
        CheckpointError: naming the first bad file.
    """
    listed = listed_files(directory, needed or WITHOUT_OPTIMIZER)
    checked = {name: listed[name] for name in sorted(needed or listed)}
    with ThreadPoolExecutor() as pool:
        paths = [directory / name for name in checked]
        list(pool.map(check_hash, paths, checked.values()))

    # What else may be wrong with the progress is found where it is read.
    with contextlib.suppress(DamagedError):
        read_record(directory / "progress.json", Record)
    return frozenset(checked)


def check_hash(path: Path, file: ManifestFile) -> None:
    """Check that a file is the one that a manifest lists.

    Raises:
        CheckpointError: it is not.
    """
    if not path.is_file():
        raise CheckpointError(f"{path} is missing")
    try:
        size = path.stat().st_size
        digest = sha256_of(path)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from None
    if (size, digest) != (file.bytes, file.sha256):
        raise CheckpointError(f"{path} is damaged: not the {file.bytes:,} bytes that were written")
