"""What is decided for CUDA devices before anything runs on them; torch.cuda is replaced, so this
needs none."""

from __future__ import annotations

import pytest
import torch

from efftrain_cli.foundation.errors import UsageError
from efftrain_cli.model.flops import peak_flops
from efftrain_cli.model.kernels import attention_kernels, choose_matmul_precision
from efftrain_cli.training.precision import compute_dtype
from efftrain_cli.training.session import choose_device
from efftrain_cli.training.stopwatch import Stopwatch
from tests.conftest import python
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


class FakeEvent:
    """A CUDA event that remembers its stream; its time is the number of events recorded before it,
    in ms."""

    recorded: list[object] = []  # noqa: RUF012

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        self.time = -1

    def record(self, stream: object) -> None:
        self.time = len(self.recorded)
        self.recorded.append(stream)

    def synchronize(self) -> None:
        assert self.time >= 0

    def elapsed_time(self, other: FakeEvent) -> float:
        return float(other.time - self.time)


def test_the_stopwatch_times_the_stream_of_its_own_device(monkeypatch):
    waited: list[torch.device] = []
    FakeEvent.recorded = []
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    watch = Stopwatch(CUDA).stop()
    assert FakeEvent.recorded == ["stream of cuda:1"] * 2 and not waited
    assert watch.seconds() == pytest.approx(0.001)
    Stopwatch(CUDA, idle=True)
    assert waited == [CUDA]
    assert Stopwatch(torch.device("cpu"), idle=True).stop().seconds() >= 0 and waited == [CUDA]


def test_cudnn_attention_is_taken_away_for_changing_shapes_only():
    before = torch.backends.cuda.cudnn_sdp_enabled()
    order = torch._C._get_sdp_priority_order()
    for device, same_shape, want in (
        (CUDA, True, True),
        (CUDA, False, False),
        (torch.device("cpu"), False, True),
    ):
        torch.backends.cuda.enable_cudnn_sdp(True)
        try:
            with attention_kernels(device, same_shape):
                assert torch.backends.cuda.cudnn_sdp_enabled() is want
                assert (
                    torch.backends.cuda.flash_sdp_enabled()
                    and torch._C._get_sdp_priority_order() == order
                )
            assert torch.backends.cuda.cudnn_sdp_enabled()
            with pytest.raises(KeyError), attention_kernels(device, same_shape):
                raise KeyError
            assert torch.backends.cuda.cudnn_sdp_enabled(), "as it was, after an error too"
        finally:
            torch.backends.cuda.enable_cudnn_sdp(before)


def test_tf32_is_a_choice_of_its_own(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
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


@pytest.mark.parametrize(
    "given, want",
    [
        ({}, {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}),
        ({"PYTORCH_ALLOC_CONF": ""}, {"PYTORCH_ALLOC_CONF": ""}),
        (
            {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:512"},
            {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:512"},
        ),
    ],
)
def test_cuda_segments_grow_unless_the_user_chose_otherwise(given, want, monkeypatch):
    code = """
import os, sys
from efftrain_cli import __main__
sys.argv = ["efftrain", "--version"]
assert "torch" not in sys.modules
try:
    __main__.main()
except SystemExit:
    pass
print({name: value for name, value in os.environ.items() if name.endswith("ALLOC_CONF")})
"""
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    assert python(code, **given).stdout.splitlines()[-1] == str(want)
