"""What a process lets PyTorch choose from."""

from __future__ import annotations

import platform
import resource

import pytest
import torch

from efftrain_cli.model.kernels import keep_freed_memory


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="it is glibc's setting")
def test_freed_memory_is_not_mapped_again():
    keep_freed_memory(torch.device("cpu"))
    faults = []
    for _ in range(20):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        torch.ones(10_000_000)  # 40 MB: glibc alone maps them anew each time
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    pages = 40_000_000 // resource.getpagesize()
    assert sum(faults[10:]) < pages, faults
