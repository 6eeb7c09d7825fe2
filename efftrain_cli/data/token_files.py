"""Token files of other programs: nanoGPT's .bin (uint16 ids and nothing else) and llm.c's (a header of 256 int32, then
ids).

The ids are taken as they are. Which tokenizer made them is not written in the file: data.tokenizer must be that one.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from efftrain_cli.data.documents import BadDocuments, Document
from efftrain_cli.data.shards import MAGIC
from efftrain_cli.foundation.errors import DataError

LLMC = {20240520: ("<u2", 1), 20240801: ("<u4", 7)}
"""llm.c's magic numbers (dev/data/data_common.py): type of the ids, and version. GPT-2's and Llama 3's tokens."""
LLMC_HEADER_BYTES = 1024
_CHUNK = 1 << 24  # ids read at a time, and so the longest document


def open_token_file(path: Path) -> np.ndarray:
    """A file's ids, memory-mapped: uint16 or uint32 (tokens,). A `DataError` where it has neither form or is cut."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(LLMC_HEADER_BYTES)
    if MAGIC.encode() in start:
        raise DataError(f"{path}: a shard of efftrain's own cache; name the text it was made from")
    header = (
        np.frombuffer(start, dtype="<i4")
        if len(start) == LLMC_HEADER_BYTES
        else np.zeros(3, dtype="<i4")
    )
    if int(header[0]) in LLMC:
        (dtype, version), count = LLMC[int(header[0])], int(header[2])
        if int(header[1]) != version:
            raise DataError(f"{path}: llm.c's version {header[1]}; version {version} is read")
        expected = LLMC_HEADER_BYTES + count * np.dtype(dtype).itemsize
        if size != expected:
            what = "cut short" if size < expected else "longer than its header says"
            raise DataError(
                f"{path}: {size:,} bytes where llm.c's header says {expected:,}: the file is {what}"
            )
        return np.memmap(path, dtype, "r", offset=LLMC_HEADER_BYTES, shape=(count,)).view(
            np.ndarray
        )
    if (path.parent / "meta.pkl").exists():
        raise DataError(
            f"{path}: meta.pkl beside it says that nanoGPT made it with its own vocabulary (of characters, for example), and a pickle is "
            "never opened here. Name the text it was made from"
        )
    if size % 2:
        raise DataError(
            f"{path}: {size:,} bytes are not a whole number of uint16 ids, as nanoGPT writes them: the file is cut short"
        )
    if size == 0:
        return np.zeros(0, dtype="<u2")
    return np.memmap(path, dtype="<u2", mode="r").view(np.ndarray)


def token_documents(path: Path, bad: BadDocuments, eot_id: int | None) -> Iterator[Document]:
    """The documents between end-of-text tokens, as ids. A file without any is one document. Refused where no tokenizer
    is known before the text (bpe:N)."""
    if eot_id is None:
        raise DataError(
            f"{path} holds token ids, and a tokenizer cannot be trained on those: set data.tokenizer to the one that made them, "
            'for example "gpt2"'
        )
    ids = open_token_file(path)
    if len(ids) == 0:
        bad.found(str(path), "the file is empty")
    begin = 0
    while begin < len(ids):
        chunk = np.asarray(ids[begin : begin + _CHUNK])
        ends = np.flatnonzero(chunk == eot_id)
        # What follows the last end waits for the next chunk, unless it fills one alone.
        whole = begin + len(chunk) == len(ids) or not len(ends)
        at = 0
        for end in [*ends.tolist(), *([len(chunk)] if whole else [])]:
            if end > at:
                bad.seen += 1
                yield Document(f"{path}:token {begin + at}", "", chunk[at:end])
            at = end + 1
        begin += min(at, len(chunk))
