"""Memory: the estimate against what autograd really keeps, the choice it leads to, and the errors
that mean "out of memory"."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from efftrain_cli.foundation import files
from efftrain_cli.foundation.errors import OutOfMemoryError
from efftrain_cli.model.flops import parameter_count
from efftrain_cli.model.gpt import GPT, GPTConfig
from efftrain_cli.plan.cost import training_bytes
from efftrain_cli.plan.preview import summarize_plan
from efftrain_cli.recipe.recipe import load_recipe
from efftrain_cli.training import dist, memory
from efftrain_cli.training.memory import (
    building_errors,
    checkpoints_activations,
    memory_errors,
)
from tests.tiny import changed, config_of

GPT_2 = config_of(n_layer=48, n_head=25, n_embd=1600, seq_len=1024, vocab_size=50257)
SMALL = load_recipe("small")
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def kept_bytes(config: GPTConfig, sequences: int, dtype: str) -> int:
    """Bytes that autograd keeps for the backward pass of a micro-batch, parameters and their bf16
    copies not counted."""
    model = GPT(config)
    model.residual_dtype = torch.bfloat16 if dtype == "bf16" else torch.float32
    weights = {parameter.shape for parameter in model.parameters()} | {
        p.t().shape for p in model.parameters() if p.dim() == 2
    }
    kept: dict[int, torch.Tensor] = {}

    def keep(x: torch.Tensor) -> torch.Tensor:
        if x.shape not in weights:
            kept[x.untyped_storage().data_ptr()] = x
        return x

    tokens = torch.zeros(sequences, config.seq_len, dtype=torch.int64)
    with (
        torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x),
        torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bf16"),
    ):
        loss = model.loss_sum(tokens, tokens)
    assert loss.requires_grad
    return sum(x.untyped_storage().nbytes() for x in kept.values())


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_the_estimate_is_what_autograd_keeps(dtype):
    def activations(n_layer: int) -> tuple[int, int]:
        """(estimated, kept) bytes of a model so deep."""
        config = config_of(n_layer=n_layer, n_embd=32, seq_len=120, vocab_size=500)
        estimate = training_bytes(SMALL, config, 3, 120, dtype=dtype, compiled=True)
        state = (16 + 2 * (dtype == "bf16")) * parameter_count(config)
        logits_gradient = 3 * 120 * 512 * (2 if dtype == "bf16" else 4)
        return estimate - state - logits_gradient, kept_bytes(config, 3, dtype)

    (deep, deep_kept), (shallow, shallow_kept) = activations(4), activations(2)
    assert deep - shallow == pytest.approx(deep_kept - shallow_kept, rel=0.02), "two blocks"
    assert deep == pytest.approx(deep_kept, rel=0.1), "the whole"


@pytest.mark.parametrize(
    "memory, want", [(85.0e9, False), (47.6e9, True), (150.0e9, False)]
)  # H100, L40S, H200
def test_auto_checkpoints_where_a_full_micro_batch_would_not_fit(monkeypatch, memory, want):
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda device: SimpleNamespace(total_memory=int(memory)),
    )
    recipe = load_recipe("gpt2-1.5b")
    assert recipe.train.activation_checkpointing == "auto"
    assert checkpoints_activations(recipe, GPT_2, CUDA, dtype="bf16", compiled=True) is want
    # 1.558e9 parameters at 16 bytes, activations and logits of twice the bytes: 24.9 + 80.6 + 6.6
    # GB, in TF32 too.
    for dtype in ("tf32", "fp32"):
        wide = checkpoints_activations(recipe, GPT_2, CUDA, dtype=dtype, compiled=True)
        assert wide is (0.9 * memory < 112.1e9), dtype
    for wanted in (True, False):
        said = changed(recipe, f"train.activation_checkpointing={str(wanted).lower()}")
        assert checkpoints_activations(said, GPT_2, CUDA, dtype="bf16", compiled=True) is wanted
    assert checkpoints_activations(recipe, GPT_2, CPU, dtype="bf16", compiled=False) is False


@pytest.mark.parametrize("memory, want", [(60.0e9, False), (52.0e9, True)])
def test_shards_need_their_part_of_the_state(monkeypatch, memory, want):
    """Of 71.8 GB in bf16, 24.9 GB of weights, gradients and moments lie on 8 devices: 50.0 GB
    each."""
    properties = SimpleNamespace(total_memory=int(memory))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(dist, "world_size", lambda: 8)
    for strategy, expected in (("replicate", True), ("shard", want)):
        recipe = load_recipe("gpt2-1.5b", [f"parallel.strategy={strategy}"])
        found = checkpoints_activations(recipe, GPT_2, CUDA, dtype="bf16", compiled=True)
        assert found is expected


def test_the_peak_where_there_is_no_proc(monkeypatch, tmp_path):
    """macOS counts in bytes."""
    monkeypatch.setattr(memory, "Path", lambda path: tmp_path / "none")
    monkeypatch.setattr(memory.resource, "getrusage", lambda _: SimpleNamespace(ru_maxrss=2048))
    assert memory.peak_memory(CPU) == {"host_bytes": 2048}


@pytest.mark.parametrize(
    "text",
    [
        "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator:"
        " can't allocate memory: you tried to allocate 1 bytes",
    ],
)
def test_out_of_memory_by_any_name_says_what_to_change(text):
    recipe = load_recipe("gpt2-117m")
    summary = summarize_plan(recipe, until=2)
    advice = r"micro_batch_tokens = 16384 .now 32768.*activation_checkpointing = true"
    with pytest.raises(OutOfMemoryError, match=advice) as caught, memory_errors(recipe, summary):
        raise RuntimeError(text)
    assert text.splitlines()[0] in str(caught.value)


SHARD = "parallel.strategy=shard"
SMALLEST = ["train.micro_batch_tokens=1024", "train.activation_checkpointing=true"]


@pytest.mark.parametrize(
    "words, fix",
    [
        ([], "set train.micro_batch_tokens = 1024 (now 32768), or train.activation_check"),
        (SMALLEST, "set a lower model.seq_len"),
    ],
)
def test_activations_that_no_memory_holds_are_refused_before_building(words, fix, monkeypatch):
    """GPT-2 117M: 2.0 GB of weights, gradients and moments; with 32 sequences of 1,024 tokens far
    more than 2.1 GB."""
    monkeypatch.setattr(memory, "machine_memory", lambda: int(2.1e9))
    recipe = load_recipe("gpt2-117m", words)
    with (
        pytest.raises(OutOfMemoryError) as caught,
        building_errors(recipe, 50257, CPU),
    ):
        pass
    assert "has 2.1 GB in all" in str(caught.value) and fix in str(caught.value)
    with building_errors(recipe, 50257, CPU, trains=False):  # growing trains nothing
        pass
    monkeypatch.setattr(memory, "machine_memory", lambda: 10**12)
    with building_errors(recipe, 50257, CPU):
        pass


def test_all_processes_of_a_machine_are_counted(monkeypatch):
    """GPT-2 117M on one sequence takes 2.5 GB, so three processes fit 9 GB and eight do not;
    eight shards of 2.0 GB are 2.0 GB together, and each has activations of its own."""
    monkeypatch.setattr(memory, "machine_memory", lambda: int(9e9))
    monkeypatch.setattr(dist, "world_size", lambda: 8)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    with building_errors(load_recipe("gpt2-117m", [*SMALLEST, SHARD]), 50257, CPU):
        pass
    with (
        pytest.raises(OutOfMemoryError, match=r"in each of 8 processes.*\n  set --devices 3"),
        building_errors(load_recipe("gpt2-117m", SMALLEST), 50257, CPU),
    ):
        pass


def test_a_containers_limit_is_that_of_the_machine(monkeypatch, tmp_path):
    monkeypatch.setattr(files, "CONTROL_GROUP", tmp_path)
    whole = files.machine_memory()
    (tmp_path / "memory.max").write_text("max\n")
    assert files.machine_memory() == whole
    (tmp_path / "memory.max").write_text("1000000\n")
    assert files.machine_memory() == 1_000_000
