"""Reads back the file that wandb writes offline: a LevelDB log of protobuf records."""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_BLOCK = 32768
_HEADER = struct.Struct("<IHB")


def _records(data: bytes) -> Iterator[bytes]:
    """Whole records. Each block of 32 KiB holds chunks of crc32, length, type (1 whole, 2 first, 3
    middle, 4 last)."""
    position, parts = 7, b""  # after the file's own header
    assert data[:4] == b":W&B"
    while position + _HEADER.size <= len(data):
        if _BLOCK - position % _BLOCK < _HEADER.size:
            position += _BLOCK - position % _BLOCK
            continue
        crc, length, kind = _HEADER.unpack_from(data, position)
        position += _HEADER.size
        chunk = data[position : position + length]
        position += length
        assert crc == zlib.crc32(bytes([kind]) + chunk), "a record is damaged"
        parts += chunk
        if kind in (1, 4):
            yield parts
            parts = b""


def read_records(folder: Path) -> list[Any]:
    """Every record of the only offline run below `folder`, in the order it was written."""
    from wandb.proto import wandb_internal_pb2

    (file,) = folder.rglob("*.wandb")
    records = []
    for data in _records(file.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        records.append(record)
    return records


def read_history(folder: Path) -> list[dict[str, Any]]:
    """The history of the only offline run below `folder`, in the order it was logged."""
    return [
        {
            (item.key or "/".join(item.nested_key)): json.loads(item.value_json)
            for item in record.history.item
        }
        for record in read_records(folder)
        if record.HasField("history")
    ]
