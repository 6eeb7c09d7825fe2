"""Datasets and files of the Hugging Face Hub. Whether it can be reached is found out in a second, not after retries."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from efftrain_cli.data.documents import BadDocuments, Document, HubDataset, unusable
from efftrain_cli.foundation.errors import DataError

PROBE_SECONDS = 1.0


def hub_unreachable() -> str | None:
    """Why the Hub cannot be asked, or None. Takes at most about `PROBE_SECONDS`."""
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        if os.environ.get(name, "").upper() in ("1", "TRUE", "YES", "ON"):
            return f"{name} is set"
    address = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    proxy = os.environ.get("HTTPS_PROXY") or os.environ.get("https_proxy")
    url = urlsplit(proxy or address)
    host, port = url.hostname or "huggingface.co", url.port or (80 if url.scheme == "http" else 443)
    reached = []

    def probe() -> None:
        try:
            socket.create_connection((host, port), timeout=PROBE_SECONDS).close()
            reached.append(True)
        except OSError:
            pass

    # In a thread, because looking up a name has no timeout of its own.
    thread = threading.Thread(target=probe, daemon=True)
    thread.start()
    thread.join(PROBE_SECONDS + 0.2)
    return None if reached else f"{host}:{port} does not answer within {PROBE_SECONDS:g} s (no network?)"


def hub_documents(source: HubDataset, text_field: str, bad: BadDocuments) -> Iterator[Document]:
    """Documents of a Hub dataset, streamed: split "train" to train on; "validation", else "test", else "train" to validate.

    `source.name` may also be a local folder in the Hub's layout, which needs no network.

    Raises:
        DataError: the Hub, the dataset, its configuration or the field cannot be had.
    """
    local = Path(source.name).is_dir()
    if not local and (reason := hub_unreachable()) is not None:
        raise DataError(
            f"data.{source.purpose} = {source.name!r} is no file or folder here, and the Hugging Face Hub cannot be asked: "
            f"{reason}. Connect, or name local files, or use data.{source.purpose}=stdlib"
        )
    import datasets

    row = 0
    try:
        wanted = "train"
        if source.purpose == "valid":
            splits = datasets.get_dataset_split_names(source.name, source.config, revision=source.revision)
            wanted = next(name for name in ("validation", "test", "train", *splits) if name in splits)
        rows = datasets.load_dataset(
            source.name, source.config, split=wanted, revision=source.revision, streaming=True
        )
        for row, record in enumerate(rows, 1):
            if text_field not in record:
                raise DataError(
                    f"dataset {source.name!r}: no field {text_field!r}; it has {', '.join(map(repr, record))} "
                    "(data.text_field names the field)"
                )
            text = record[text_field]
            problem = f"field {text_field!r} is {type(text).__name__}, not text"
            if not isinstance(text, str) or (problem := unusable(text)) is not None:
                bad.found(f"{source.name}: row {row}", problem)
                continue
            bad.seen += 1
            if text:
                yield Document(f"{source.name}:{row}", text)
    except (DataError, GeneratorExit, KeyboardInterrupt):
        raise
    except Exception as error:  # datasets raises a dozen classes of five libraries
        summary = " ".join(str(error).split())[:400]
        raise DataError(
            f"dataset {source.name!r}, after {row:,} rows: {type(error).__name__}: {summary}. "
            'Write "owner/name/config" where a dataset has several configurations'
        ) from error


def hub_file(repository: str, name: str) -> Path:
    """A file of a model repository: from the Hub's own cache if it is there, else downloaded.

    Raises:
        DataError: it is in no cache and the Hub cannot be asked.
    """
    import huggingface_hub

    cached = huggingface_hub.try_to_load_from_cache(repository, name)
    if isinstance(cached, str):
        return Path(cached)
    if (reason := hub_unreachable()) is not None:
        raise DataError(f"{name} of {repository!r} is not in the Hub's cache, and the Hugging Face Hub cannot be asked: {reason}")
    try:
        return Path(huggingface_hub.hf_hub_download(repository, name))
    except Exception as error:  # of several HTTP libraries
        raise DataError(f"{name} of {repository!r} cannot be downloaded: {type(error).__name__}: {error}") from error
