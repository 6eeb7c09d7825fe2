"""Named tensors in a file: what is written is read, by whoever may read other new files; a full
disk is its error."""

from __future__ import annotations

import errno
import resource

import pytest
import torch

from efftrain_cli.foundation.tensors import read_tensors, write_tensors

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
    """For a moment no file of this process may be longer than a kilobyte."""
    path = tmp_path / "x.safetensors"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large") as refused:
            write_tensors(path, {"a": torch.ones(1000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (refused.value.errno, refused.value.filename) == (errno.EFBIG, str(path))
