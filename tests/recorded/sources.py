"""Hash and counts of the corpora that each kind of source gives, over twenty scenes of Shakespeare
(texts.tar.xz, public domain)."""

from __future__ import annotations

import csv
import gzip
import json
import os
import tarfile
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

from efftrain_cli.data.prepare import limits_of, prepare
from efftrain_cli.recipe.recipe import Recipe
from tests.tiny import tiny_recipe

TEXTS = Path(__file__).with_name("texts.tar.xz")
ODD = ["caf\u00e9 \u2013 na\u00efve", "one line\u2028and no other", "\U0001f600 four bytes", "last"]
"""Documents with characters of two to four bytes, and a line separator that is none in JSON."""


def record() -> dict[str, Any]:
    """Return data_hash, tokens and documents by kind of source."""
    with TemporaryDirectory() as name, patch.dict(os.environ, EFFTRAIN_CACHE=f"{name}/cache"):
        folder = Path(name)
        sources = write_sources(folder)
        corpora = {
            kind: corpus(f"data.train={path}", "data.valid_fraction=0.1")
            for kind, path in sources.items()
        }
        corpora["max_tokens"] = corpus(
            f"data.train={sources['jsonl']}", "data.valid_fraction=0.1", "data.max_tokens=5_000"
        )
        scenes = f'{{path = "{sources["txt"]}", weight = 3}}'
        lines = f'{{path = "{sources["jsonl"]}", weight = 1}}'
        mix = (f"data.sources=[{scenes}, {lines}]", "data.valid_fraction=0.1")
        corpora["mix"] = corpus(*mix)
        corpora["mix, max_tokens"] = corpus(*mix, "data.max_tokens=9_000")
        corpora["few_txt"] = corpus(
            f'data.train=["{sources["txt"]}/03.txt", "{sources["txt"]}/04.txt"]'
        )
        corpora["own_valid"] = corpus(
            f"data.train={sources['txt']}", f"data.valid={folder / 'valid.jsonl'}"
        )
    return corpora


def corpus(*overrides: str) -> dict[str, Any]:
    """Prepare the corpus of a tiny recipe; return what identifies it."""
    return identity(tiny_recipe("data.tokenizer=bpe:512", *overrides))


def identity(recipe: Recipe) -> dict[str, Any]:
    """Prepare a recipe's corpus; return its hash and its counts."""
    found = prepare(recipe.data, limits=limits_of(recipe))
    per_token = found.manifest.valid.bytes / found.valid.tokens
    counts = {"data_hash": found.data_hash, "bytes_per_token": per_token}
    for side, shards in (("train", found.train), ("valid", found.valid)):
        counts[side] = {
            "tokens": shards.tokens,
            "documents": shards.split.documents,
            "bytes": shards.split.bytes,
            "parts": [part.tokens for part in shards.parts],
        }
    return counts


def write_sources(folder: Path) -> dict[str, Path]:
    """Write the same documents, the scenes' speeches, in every kind of file; return the paths."""
    with tarfile.open(TEXTS) as tar:
        tar.extractall(folder / "scenes", filter="data")
    scenes = sorted((folder / "scenes").iterdir())
    documents = list(ODD)
    for scene in scenes:
        documents += scene.read_text().split("\n\n")
    records = [{"number": number, "text": text} for number, text in enumerate(documents)]
    lines = "".join(f"{json.dumps(each, ensure_ascii=False)}\n" for each in records).encode()

    paths = {"txt": folder / "scenes"}
    content: dict[str, bytes] = {
        "jsonl": lines,
        "jsonl.gz": gzip.compress(lines[:50_000]) + gzip.compress(lines[50_000:]),
        "jsonl.zst": _zstd(lines),
        "json": json.dumps(records).encode(),
    }
    for suffix, data in content.items():
        paths[suffix] = folder / f"speeches.{suffix}"
        paths[suffix].write_bytes(data)
    writers: dict[str, Callable[[Path, list[dict[str, Any]]], None]] = {
        "csv": _write_csv,
        "parquet": _write_parquet,
    }
    for suffix, write in writers.items():
        paths[suffix] = folder / f"speeches.{suffix}"
        write(paths[suffix], records)
    valid = "".join(f"{json.dumps({'text': text[::-1]})}\n" for text in documents[:30])
    (folder / "valid.jsonl").write_text(valid)
    return paths


def _zstd(content: bytes) -> bytes:
    import pyarrow

    sink = pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(content)
    return sink.getvalue().to_pybytes()


def _write_csv(path: Path, records: list[dict[str, Any]]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, ["number", "text"], lineterminator="\n")
        writer.writeheader()
        writer.writerows(records)


def _write_parquet(path: Path, records: list[dict[str, Any]]) -> None:
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.Table.from_pylist(records)
    pyarrow.parquet.write_table(table, path, row_group_size=100)
