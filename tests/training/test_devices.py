"""What is decided for CUDA devices before anything runs on them; torch.cuda is replaced, so this
needs none."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from efftrain_cli.foundation.errors import UsageError
from efftrain_cli.foundation.step import Progress, StepResult
from efftrain_cli.model.flops import peak_flops
from efftrain_cli.model.kernels import choose_matmul_precision
from efftrain_cli.plan.plan import plan_step
from efftrain_cli.training import device, dist
from efftrain_cli.training.device import compute_dtype
from efftrain_cli.training.record import StepRecord, read_records
from efftrain_cli.training.session import choose_device
from tests.tiny import tiny_recipe

CUDA = torch.device("cuda:1")


@pytest.fixture
def two_devices(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """Two CUDA devices that are there as long as nobody computes on them; the list tells which were
    made current."""
    current: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    return current


def test_a_named_cuda_device_becomes_the_current_one(two_devices):
    assert choose_device("cuda:1") == CUDA
    assert two_devices == [CUDA]
    first = torch.device("cuda:0")
    assert choose_device("cuda") == choose_device("auto") == first
    assert two_devices == [CUDA, first, first]


def test_a_cuda_device_that_is_not_there_is_refused(two_devices, monkeypatch):
    with pytest.raises(UsageError, match=r"no device cuda:2: this PyTorch .* sees 2 of CUDA"):
        choose_device("cuda:2")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(UsageError, match=r"no device cuda:1: this PyTorch .* sees 1 of CUDA"):
        choose_device("cuda:1")
    assert not two_devices
    assert UsageError.exit_code == 2
    # srun may show each process its own device only.
    monkeypatch.setenv("SLURM_LOCALID", "1")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert choose_device("cuda") == torch.device("cuda:0")


def test_mfu_is_of_the_peaks_of_all_devices(monkeypatch):
    """F44: 494.7 TFLOPs in 2 s of training and 0.5 s of compiling on two H100."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(dist, "world_size", lambda: 2)
    recipe = tiny_recipe()
    plan = plan_step(recipe, Progress())
    watch: Any = SimpleNamespace(seconds=lambda: 2.5, cpu_seconds=9.0)
    record = StepRecord(
        progress=Progress(),
        plan=plan,
        result=StepResult(128, 494.7e12, 0.0, 0.0, 2.0),
        scalars={"loss": torch.tensor(3.0), "nonfinite": torch.tensor(0.0)},
        training=watch,
        compile_seconds=0.5,
    )
    state: Any = SimpleNamespace(device=CUDA, dtype="tf32", progress=Progress(train_seconds=1.0))
    (row,) = read_records(state, recipe, [record])
    assert (row["mfu"], row["tokens_per_second"], row["cpu_seconds"]) == (0.25, 64.0, None)
    assert state.progress.train_seconds == row["train_seconds"] == 3.0


@pytest.mark.parametrize("has_units, dtype", [(True, "bf16"), (False, "fp32")])
def test_auto_is_bf16_where_there_are_units_for_it(monkeypatch, has_units, dtype):
    monkeypatch.setattr(device, "has_bf16", lambda _: has_units)
    assert compute_dtype(tiny_recipe("train.dtype=auto"), torch.device("cpu")) == dtype


def test_tf32_is_a_choice_of_its_own(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    tf32 = tiny_recipe("train.dtype=tf32")
    assert compute_dtype(tf32, CUDA) == "tf32"
    assert compute_dtype(tiny_recipe("train.dtype=fp32"), CUDA) == "fp32"
    assert compute_dtype(tf32, torch.device("cpu")) == "fp32"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert compute_dtype(tf32, CUDA) == "fp32"
    before = torch.backends.cuda.matmul.allow_tf32
    try:
        for dtype, want in (("tf32", True), ("fp32", False), ("tf32", True), ("bf16", False)):
            choose_matmul_precision(dtype, CUDA)
            assert torch.backends.cuda.matmul.allow_tf32 is want
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    assert peak_flops("NVIDIA H100 80GB HBM3", "tf32") == 494.7e12
    assert peak_flops("NVIDIA H100 80GB HBM3", "fp32") == 67e12
