"""Datasets and files of the Hugging Face Hub. Whether it can be reached is found out in a second,
not after retries."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from efftrain_cli.data.text import BadDocuments, Document, HubDataset, problem_of
from efftrain_cli.foundation.errors import DataError

PROBE_SECONDS = 1.0
MODEL_NAME = re.compile(r"([A-Za-z0-9][\w.-]*/[\w.-]+)(?:@([\w.-]+))?")
"""A model of the Hub: "owner/name" or "owner/name@revision"."""


def hub_unreachable() -> str:
    """Return why the Hub cannot be asked, or "", after `PROBE_SECONDS` and the look-up of its name
    at most."""
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        if os.environ.get(name, "").upper() in ("1", "TRUE", "YES", "ON"):
            return f"{name} is set"
    address = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    proxy = os.environ.get("HTTPS_PROXY") or os.environ.get("https_proxy")
    url = urlsplit(proxy or address)
    host = url.hostname or "huggingface.co"
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


@dataclass
class HubReader:
    """Streams a Hub dataset, and says how far it has come, so that a later stream can begin there.

    `source.name` may also be a local folder in the Hub's layout. If the Hub cannot be asked, a copy
    that `datasets` has in its cache is read instead.

    Raises:
        DataError: (by `documents`) the Hub, the dataset, its configuration, split or field cannot
            be had.
    """

    source: HubDataset
    text_field: str
    bad: BadDocuments
    begin: dict[str, Any] | None = None
    """What `state` returned; documents up to there are passed over, whole files of them without
    being downloaded."""
    _row: int = 0
    _rows: Any = None

    def state(self) -> dict[str, Any]:
        """Return the place after the document that was read last, as JSON values."""
        place = None
        if hasattr(self._rows, "state_dict"):
            place = self._rows.state_dict()
        return {"row": self._row, "dataset": place}

    def documents(self) -> Iterator[Document]:
        source = self.source
        bad = self.bad
        reason = ""
        if not Path(source.name).is_dir():
            reason = hub_unreachable()
        try:
            rows = _cached(source) if reason else _streamed(source)
            if self.begin is not None:
                self._row = int(self.begin["row"])
                if self.begin["dataset"] is None:
                    rows = rows.skip(self._row)
                else:
                    rows.load_state_dict(self.begin["dataset"])
            self._rows = rows
            for record in rows:
                self._row += 1
                if self.text_field not in record:
                    raise DataError(
                        f"dataset {source.name!r}: no field {self.text_field!r};"
                        f" it has {', '.join(map(repr, record))}\n"
                        "  name the field of the text: --set data.text_field=FIELD"
                    )
                text = record[self.text_field]
                if problem := problem_of(text, self.text_field):
                    bad.found(f"{source.name}: row {self._row}", problem)
                else:
                    yield from bad.read(f"{source.name}:{self._row}", text)
        except DataError:
            raise
        except Exception as error:  # datasets raises a dozen classes of five libraries
            if reason:
                copy = "copy"
                if source.revision is not None:
                    copy = f"copy of revision {source.revision!r}"
                raise DataError(
                    f"data.{source.purpose} = {source.name!r} is neither a file nor a folder here,"
                    f" the Hugging Face Hub cannot be asked ({reason}),"
                    f" and the Hub's caches have no {copy}\n"
                    f"  connect, or name local files, or use data.{source.purpose}=stdlib"
                ) from error
            summary = " ".join(str(error).split())[:400]
            raise DataError(
                f"dataset {source.name!r}, after {self._row:,} rows: {type(error).__name__}:"
                f" {summary}\n"
                '  write "owner/name/config" if a dataset has several configurations;'
                " data.split names a split\n  the same command goes on where this one stopped"
            ) from error


def _streamed(source: HubDataset) -> Any:
    import datasets

    splits = []
    if source.purpose == "valid":
        splits = datasets.get_dataset_split_names(
            source.name, source.config, revision=source.revision
        )
    return datasets.load_dataset(
        source.name,
        source.config,
        split=_wanted(source, splits),
        revision=source.revision,
        streaming=True,
    )


def _cached(source: HubDataset) -> Any:
    """Return what `datasets` has prepared before, else what `hf download --repo-type dataset` has
    fetched."""
    import datasets
    import huggingface_hub

    with hub_off():
        # Without the Hub, `datasets` gives its newest copy, whatever revision is asked for.
        if source.revision is None:
            with suppress(Exception):
                found = datasets.load_dataset(source.name, source.config)
                return found[_wanted(source, list(found))].to_iterable_dataset()
        folder = huggingface_hub.snapshot_download(
            source.name, repo_type="dataset", revision=source.revision, local_files_only=True
        )
        found = datasets.load_dataset(folder, source.config, streaming=True)
        return found[_wanted(source, list(found))]


def _wanted(source: HubDataset, splits: list[str]) -> str:
    if source.purpose == "valid":
        return next(name for name in ("validation", "test", "train", *splits) if name in splits)
    return source.split or "train"


def hub_file(repository: str, name: str, revision: str | None = None) -> Path:
    """Return a file of a model repository, from the Hub's own cache or downloaded; raise a
    `DataError` if neither works."""
    import huggingface_hub

    cached = huggingface_hub.try_to_load_from_cache(repository, name, revision=revision)
    if isinstance(cached, str):
        return Path(cached)
    if reason := hub_unreachable():
        raise DataError(
            f"{name} of {repository!r} is not in the Hub's cache,"
            f" and the Hugging Face Hub cannot be asked: {reason}"
        )
    try:
        return Path(huggingface_hub.hf_hub_download(repository, name, revision=revision))
    except Exception as error:  # of several HTTP libraries
        raise DataError(
            f"{name} of {repository!r} cannot be downloaded: {type(error).__name__}: {error}"
        ) from error


def hub_tokenizer(repository: str, revision: str | None = None) -> Path:
    """Return a model repository's tokenizer.json; fetch tokenizer_config.json, which may name the
    end of text, if the repository has one."""
    path = hub_file(repository, "tokenizer.json", revision)
    with suppress(DataError):
        hub_file(repository, "tokenizer_config.json", revision)
    return path
