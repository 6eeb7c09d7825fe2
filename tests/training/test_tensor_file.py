"""Our safetensors files are the library's, byte for byte, and their hash is the file's."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import safetensors.torch
import torch

from efftrain_cli.training.tensor_file import sha256_of_buffers, tensor_buffers, write_buffers

TENSORS = {
    "b.weight": torch.randn(5, 3),
    "a.weight": torch.randn(3, 4).t(),  # not contiguous
    "step": torch.tensor(7.0),
    "half": torch.randn(3).to(torch.bfloat16),
    "exact": torch.randn(2, 2, dtype=torch.float64),
    "count": torch.tensor([1, 2**40]),
    "none": torch.empty(0, 2),
    'odd "naïve" \\ name': torch.ones(1, dtype=torch.uint8),
    "parameter": torch.nn.Parameter(torch.randn(2)),
}


@pytest.mark.parametrize("names", [list(TENSORS), ["step"], []])
def test_the_file_is_the_librarys(tmp_path: Path, names: list[str]) -> None:
    tensors = {name: TENSORS[name] for name in names}
    path = tmp_path / "x.safetensors"
    buffers = tensor_buffers(tensors)
    write_buffers(path, buffers)
    written = path.read_bytes()
    assert sha256_of_buffers(buffers) == hashlib.sha256(written).hexdigest()
    assert written == safetensors.torch.save(
        {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    )
    read = safetensors.torch.load_file(path)
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert read[name].dtype == tensor.dtype and torch.equal(read[name], tensor)


def test_a_file_is_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_text("mine")
    with pytest.raises(FileExistsError):
        write_buffers(path, tensor_buffers(TENSORS))
    assert path.read_text() == "mine"
