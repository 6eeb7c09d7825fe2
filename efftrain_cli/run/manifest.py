"""The manifest of a checkpoint: size and sha256 of each of its files, and proof that the manifest itself is whole.

No torch, so that `efftrain checkpoint list` answers at once.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from efftrain_cli.foundation.errors import CheckpointError, NewerFormatError
from efftrain_cli.foundation.files import sha256_of

SCHEMA_VERSION = 1
MANIFEST = "manifest.json"
WITHOUT_OPTIMIZER = frozenset({"model.safetensors", "progress.json", "recipe.toml"})
"""Files of a checkpoint that its weights alone need."""
REQUIRED = WITHOUT_OPTIMIZER | {"optimizer.safetensors"}


def write_manifest(directory: Path, hashes: Mapping[str, str]) -> None:
    """Writes manifest.json: size and sha256 of the files in `hashes`, by name, and the sha256 of these entries."""
    entries = {
        name: {"bytes": (directory / name).stat().st_size, "sha256": hashes[name]}
        for name in sorted(hashes)
    }
    (directory / MANIFEST).write_text(_text(entries), encoding="utf-8")


def verify_checkpoint(directory: Path, needed: frozenset[str] | None = None) -> frozenset[str]:
    """Checks every file of a checkpoint, or those that are needed, against its manifest; returns the files' names.

    Raises:
        CheckpointError: naming the first bad file.
    """
    manifest = directory / MANIFEST
    try:
        written = manifest.read_bytes().decode("utf-8")
        values = json.loads(written)
        entries = values["files"]
        version = values["schema_version"]
        listed = {name: (entry["bytes"], entry["sha256"]) for name, entry in entries.items()}
        whole = written == _text(entries, version)
    except FileNotFoundError:
        raise CheckpointError(f"{manifest} is missing: the checkpoint is not complete") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise CheckpointError(f"{manifest} is damaged: it is not a manifest") from None
    except OSError as error:
        raise CheckpointError(f"{manifest} cannot be read: {error.strerror}") from None
    if not whole:
        raise CheckpointError(f"{manifest} is damaged: it does not match its own sha256")
    if version != SCHEMA_VERSION:
        raise newer_format(manifest, version)
    expected = {name: entry for name, entry in listed.items() if needed is None or name in needed}
    for name in sorted((needed or REQUIRED) - expected.keys()):
        raise CheckpointError(f"{manifest} is damaged: it does not list {name}")
    for name, (size, _) in expected.items():
        path = directory / name
        if "/" in name or not path.is_file():
            raise CheckpointError(f"{path} is missing")
        if path.stat().st_size != size:
            raise CheckpointError(
                f"{path} is damaged: {path.stat().st_size} bytes, {size} were written"
            )
    with ThreadPoolExecutor() as pool:
        hashes = pool.map(sha256_of, [directory / name for name in expected])
        try:
            for (name, (_, digest)), found in zip(expected.items(), hashes, strict=True):
                if found != digest:
                    raise CheckpointError(
                        f"{directory / name} is damaged: its sha256 is not the one that was written"
                    )
        except OSError as error:
            raise CheckpointError(f"{error.filename} cannot be read: {error.strerror}") from None
    # What else may be wrong with the progress is found where it is read.
    with contextlib.suppress(ValueError, RecursionError, AttributeError):
        version = json.loads((directory / "progress.json").read_text(encoding="utf-8")).get(
            "schema_version"
        )
        if isinstance(version, int) and version > SCHEMA_VERSION:
            raise newer_format(directory / "progress.json", version)
    return frozenset(expected)


def newer_format(path: Path, version: object) -> NewerFormatError:
    """The error of a file in a format that this program does not know."""
    return NewerFormatError(
        f"{path} has format {version}, this efftrain reads formats up to {SCHEMA_VERSION}. It was written by a newer efftrain: "
        "install that one. Nothing was changed"
    )


def _text(entries: object, version: object = SCHEMA_VERSION) -> str:
    """The whole of manifest.json; its last value is the sha256 of the others, so that no bit changes unseen."""
    content = {"schema_version": version, "files": entries}
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    return json.dumps({**content, "sha256": digest}, indent=1)
