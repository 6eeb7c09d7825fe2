"""The bytes of a safetensors file, in buffers, so that they can be hashed while they are written.

The library writes a file in one call and could only be followed by reading the file again, which made the hashes two
thirds of a checkpoint's cost on a fast disk. Reading stays the library's.
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


def header_of(tensors: Mapping[str, Tensor]) -> bytes:
    """Return the beginning of the file that holds `tensors`: 8 bytes of length, and the JSON header.

    The widest dtype comes first, so that all tensors are aligned (https://huggingface.co/docs/safetensors, "Format").

    Raises:
        KeyError: a dtype that no training state has.
    """
    header, start = {}, 0
    for name, tensor in _in_order(tensors):
        header[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, start + tensor.nbytes],
        }
        start += tensor.nbytes
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def tensor_buffers(tensors: Mapping[str, Tensor]) -> list[memoryview]:
    """Return the file that holds `tensors`, as consecutive buffers: the header, and each tensor's bytes.

    Tensors on the CPU are not copied: their buffers are their memory.
    """
    buffers = [
        tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
        for _, tensor in _in_order(tensors)
    ]
    return [memoryview(header_of(tensors)), *buffers]


def _in_order(tensors: Mapping[str, Tensor]) -> list[tuple[str, Tensor]]:
    return sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))


def write_buffers(path: Path, buffers: Sequence[memoryview]) -> None:
    """Write a new file, or raise an OSError."""
    with path.open("xb") as file:
        for buffer in buffers:
            file.write(buffer)


def sha256_of_buffers(buffers: Sequence[memoryview]) -> str:
    """Return the hex sha256 of the file that `write_buffers` makes; release the interpreter lock meanwhile."""
    digest = hashlib.sha256()
    for buffer in buffers:
        digest.update(buffer)
    return digest.hexdigest()
