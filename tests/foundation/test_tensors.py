"""Named tensors in a file: what is written is read, by whoever may read other new files; a full
disk is its error."""

from __future__ import annotations

import pytest
import torch

from efftrain_cli.foundation.tensors import read_tensors, write_tensors
from tests.conftest import python

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
def test_tensors_are_read_as_they_were_written(tmp_path, names):
    tensors = {name: TENSORS[name] for name in names}
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    path = folder / "x.safetensors"
    write_tensors(path, tensors)
    read = read_tensors(path)
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert read[name].dtype == tensor.dtype and torch.equal(read[name], tensor)
    other = folder / "other"
    other.touch()
    assert path.stat().st_mode == other.stat().st_mode


def test_a_refusing_disk_is_an_os_error(tmp_path):
    """No file of this process may be longer than a kilobyte."""
    code = """
import errno, resource, torch
from pathlib import Path
from efftrain_cli.foundation.tensors import write_tensors
resource.setrlimit(resource.RLIMIT_FSIZE, (1024, 1024))
try:
    write_tensors(Path("x.safetensors"), {"a": torch.ones(1000)})
except OSError as error:
    print(errno.errorcode[error.errno], error.filename)
"""
    assert python(code, cwd=tmp_path).stdout.split() == ["EFBIG", "x.safetensors"]
