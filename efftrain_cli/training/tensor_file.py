"""The bytes of a safetensors file, in pieces, so that they can be hashed while they are written.

The library writes a file in one call and could only be followed by reading the file again, which made the hashes two thirds of
a checkpoint's cost on a fast disk. Reading stays the library's.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

_DTYPES = {
    torch.float64: "F64",
    torch.int64: "I64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.uint8: "U8",
}


def tensor_pieces(tensors: Mapping[str, Tensor]) -> list[memoryview]:
    """The file that holds `tensors`, as consecutive pieces: 8 bytes of length, the JSON header, and each tensor's bytes, the
    widest dtype first so that all are aligned (https://huggingface.co/docs/safetensors, "Format").

    Tensors on the CPU are not copied: their pieces are their memory.

    Raises:
        KeyError: a dtype that no training state has.
    """
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header, pieces, start = {}, [], 0
    for name in order:
        tensor = tensors[name]
        piece = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
        end = start + piece.nbytes
        header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
        pieces.append(piece)
        start = end
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return [memoryview(len(text).to_bytes(8, "little") + text), *pieces]


def write_pieces(path: Path, pieces: Sequence[memoryview]) -> None:
    """Writes a new file.

    Raises:
        OSError: the disk is full or not writable.
    """
    with path.open("xb") as file:
        for piece in pieces:
            file.write(piece)


def sha256_of_pieces(pieces: Sequence[memoryview]) -> str:
    """Hex sha256 of the file that `write_pieces` makes; releases the interpreter lock."""
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(piece)
    return digest.hexdigest()
