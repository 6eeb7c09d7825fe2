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


def tensor_buffers(tensors: Mapping[str, Tensor]) -> list[memoryview]:
    """The file that holds `tensors`, as consecutive buffers: 8 bytes of length, the JSON header, and each tensor's
    bytes, the widest dtype first so that all are aligned (https://huggingface.co/docs/safetensors, "Format").

    Tensors on the CPU are not copied: their buffers are their memory.

    Raises:
        KeyError: a dtype that no training state has.
    """
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header, buffers, start = {}, [], 0
    for name in order:
        tensor = tensors[name]
        buffer = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
        end = start + buffer.nbytes
        header[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
        buffers.append(buffer)
        start = end
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return [memoryview(len(text).to_bytes(8, "little") + text), *buffers]


def write_buffers(path: Path, buffers: Sequence[memoryview]) -> None:
    """Writes a new file, or raises an OSError."""
    with path.open("xb") as file:
        for buffer in buffers:
            file.write(buffer)


def sha256_of_buffers(buffers: Sequence[memoryview]) -> str:
    """Hex sha256 of the file that `write_buffers` makes; releases the interpreter lock."""
    digest = hashlib.sha256()
    for buffer in buffers:
        digest.update(buffer)
    return digest.hexdigest()
