"""Datasets and files of the Hugging Face Hub. Whether it can be reached is found out in a second,
not after retries."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

from efftrain_cli.data.sources import Source
from efftrain_cli.foundation.errors import DataError, UsageError

PROBE_SECONDS = 1.0
MODEL_NAME = re.compile(r"([A-Za-z0-9][\w.-]*/[\w.-]+)(?:@([\w.-]+))?")
"""A model of the Hub: "owner/name" or "owner/name@revision"."""
MODEL_FILES = [
    "config.json",
    "tokenizer.json",
    "model.safetensors",
    "model-*.safetensors",
    "model.safetensors.index.json",
]
"""Files of a model repository that are read."""


def hub_unreachable() -> str:
    """Return why the Hub cannot be asked, or "", after `PROBE_SECONDS` and the look-up of its name
    at most."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    url = urlsplit(getproxies().get("https") or constants.ENDPOINT)
    host = url.hostname or ""
    default_port = 80 if url.scheme == "http" else 443
    port = url.port or default_port
    # The libraries try five times with growing pauses, whatever etag_timeout says: 24 s without
    # network.
    try:
        socket.create_connection((host, port), timeout=PROBE_SECONDS).close()
    except OSError:
        return f"{host}:{port} does not answer within {PROBE_SECONDS:g} s (no network?)"
    return ""


@contextmanager
def hub_off() -> Iterator[None]:
    """Let the Hub's libraries read their caches only: else they ask the Hub, for minutes."""
    import datasets
    from huggingface_hub import constants

    before = (datasets.config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE)
    datasets.config.HF_HUB_OFFLINE = True
    constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        datasets.config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE = before


def open_dataset(source: Source) -> Any:
    """Return the rows of a file that `datasets` reads, or of a Hub dataset, streamed.

    If the Hub cannot be asked, a copy is read that `datasets` or `hf download` has in its cache.

    Raises:
        DataError: neither the Hub nor a copy can be had, or a Parquet file lacks the text's column.
    """
    import datasets

    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # every error is raised too
    if source.kind == "hub":
        return _hub_dataset(source)
    options: dict[str, Any] = {}
    if source.kind == "csv":
        # Else pandas reads "NA" as no text, and "12" as a number.
        options = {"converters": {source.text_field: str}, "keep_default_na": False}
    if source.kind == "parquet":
        import pyarrow.parquet

        names = pyarrow.parquet.read_schema(source.name).names
        if source.text_field not in names:
            raise no_field(source.name, source.text_field, names)
        options = {"columns": [source.text_field]}
    return datasets.load_dataset(
        source.kind, data_files=source.name, split="train", streaming=True, **options
    )


def no_field(
    place: str,
    name: str,
    names: Sequence[str],
) -> DataError:
    """Return the error of a record without the field of the text."""
    fields = ", ".join(map(repr, names[:8]))
    return DataError(
        f"{place}: no field {name!r}; it has {fields}\n"
        "  name the field of the text: --set data.text_field=FIELD"
    )


def _hub_dataset(source: Source) -> Any:
    """Return the rows of a split of a Hub dataset."""
    import datasets

    reason = "" if Path(source.name).is_dir() else hub_unreachable()
    if reason:
        splits = _cached(source, reason)
    else:
        splits = datasets.load_dataset(
            source.name, source.config, revision=source.revision, streaming=True
        )
    wanted = [source.split or "train"]
    if source.validates:
        wanted = ["validation", "test", "train", *splits]
    for name in wanted:
        if name in splits:
            return splits[name]
    raise DataError(
        f"{source.name} has no split {wanted[0]!r}; it has {', '.join(splits)}\n"
        "  name one: --set data.split=SPLIT"
    )


def _cached(source: Source, reason: str) -> Any:
    """Return the splits that `datasets` has prepared before, else those that `hf download
    --repo-type dataset` has fetched.

    Args:
        reason: why the Hub cannot be asked.
    """
    import datasets
    import huggingface_hub

    with hub_off():
        # Without the Hub, `datasets` gives its newest copy, whatever revision is asked for.
        if source.revision is None:
            with suppress(Exception):
                splits = datasets.load_dataset(source.name, source.config)
                return {name: rows.to_iterable_dataset() for name, rows in splits.items()}
        try:
            folder = huggingface_hub.snapshot_download(
                source.name, repo_type="dataset", revision=source.revision, local_files_only=True
            )
        except Exception as error:  # of several libraries
            revision = f" of revision {source.revision!r}" if source.revision else ""
            raise DataError(
                f"{source.name!r} is neither a file nor a folder here, the Hugging Face Hub cannot"
                f" be asked ({reason}), and its caches have no copy{revision}\n"
                "  connect, or name local files"
            ) from error
        return datasets.load_dataset(folder, source.config, streaming=True)


def model_folder(name: str) -> Path:
    """Return the folder of that name, or where the Hub's cache holds the model, which is downloaded
    if the Hub can be asked.

    Raises:
        UsageError: there is no such folder, and the name is none of a model.
        DataError: the model cannot be downloaded.
    """
    folder = Path(name)
    if folder.is_dir():
        return folder
    named = MODEL_NAME.fullmatch(name)
    if named is None or folder.exists():
        raise UsageError(
            f"{name} is not a directory\n"
            "  name one that transformers' save_pretrained wrote,"
            " or a model of the Hub as owner/name"
        )
    import huggingface_hub

    reason = hub_unreachable()
    try:
        copy = huggingface_hub.snapshot_download(
            named[1], revision=named[2], allow_patterns=MODEL_FILES, local_files_only=bool(reason)
        )
    except Exception as error:  # of several HTTP libraries
        raise DataError(f"{name} cannot be downloaded: {reason or error}") from error
    return Path(copy)


def hub_file(
    repository: str,
    name: str,
    revision: str | None,
) -> Path:
    """Return a file of a model repository, from the Hub's own cache or downloaded; raise a
    `DataError` if neither works."""
    import huggingface_hub

    cached = huggingface_hub.try_to_load_from_cache(repository, name, revision=revision)
    if isinstance(cached, str):
        return Path(cached)
    reason = hub_unreachable()
    try:
        path = huggingface_hub.hf_hub_download(
            repository, name, revision=revision, local_files_only=bool(reason)
        )
    except Exception as error:  # of several HTTP libraries
        raise DataError(
            f"{name} of {repository!r} cannot be downloaded from the Hugging Face Hub:"
            f" {reason or error}"
        ) from error
    return Path(path)
