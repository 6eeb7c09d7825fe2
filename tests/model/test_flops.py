"""What a token costs, and what a device could do."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from efftrain_cli.model.flops import (
    flops_per_token,
    newton_schulz_flops,
    parameter_count,
    peak_flops,
)
from efftrain_cli.model.gpt import GPT
from tests.tiny import config_of

CONFIG = config_of(n_layer=3)


def test_gpt2_has_its_published_number_of_parameters():
    gpt2 = config_of(
        n_layer=12, n_head=12, n_embd=768, seq_len=1024, vocab_size=50257, padded_vocab_size=50257
    )
    assert parameter_count(gpt2) == 124_439_808


def test_the_model_and_the_plan_count_alike():
    model = GPT(CONFIG)
    assert (
        model.parameter_count
        == parameter_count(CONFIG)
        == sum(p.numel() for p in model.parameters())
    )
    # 6 N without the positions, and 12 L C T for the attention
    expected = 6 * (model.parameter_count - 32 * 16) + 12 * 3 * 16 * 8
    counted = flops_per_token(CONFIG, 8, 3)
    assert counted.with_logits == expected
    assert counted.without_logits == expected - 6 * 64 * 16


def test_newton_schulz_by_hand_and_by_pytorchs_own_count():
    # A block of width 4: four matrices 4 x 4 of 5 (4 * 64 + 2 * 64) = 1,920 FLOPs, and two 16 x 4
    # of 5 (4 * 16 * 16 + 2 * 64) = 5,760.
    tiny = replace(CONFIG, n_layer=1, n_head=1, n_embd=4)
    assert newton_schulz_flops(tiny) == 4 * 1920 + 2 * 5760 == 300 * 4**3
    assert newton_schulz_flops(replace(CONFIG, n_layer=12, n_embd=768)) == 12 * 300 * 768**3
    model = GPT(CONFIG)
    matrices = [p for name, p in model.named_parameters() if name.startswith("h.") and p.dim() == 2]
    parts = [part for p in matrices for part in p.detach().chunk(3 if len(p) == 3 * 16 else 1)]
    for part in parts:
        part.grad = torch.randn_like(part)
    with FlopCounterMode(display=False) as counter:
        torch.optim.Muon(parts, lr=0.1).step()
    assert counter.get_total_flops() == newton_schulz_flops(CONFIG)


@pytest.mark.parametrize(
    "name, bf16, fp32",
    [
        ("NVIDIA L4", 121e12, 30.3e12),
        ("NVIDIA L40S", 362e12, 91.6e12),
        ("NVIDIA A100-SXM4-80GB", 312e12, 19.5e12),
        ("A100-SXM4-40GB", 312e12, 19.5e12),  # older drivers leave the vendor out
        ("NVIDIA H100 80GB HBM3", 989.5e12, 67e12),
        ("NVIDIA H200", 989.5e12, 67e12),
        ("NVIDIA B200", 2250e12, 75e12),
        ("NVIDIA GB200", 360e15 / 2 / 72, 5760e12 / 72),  # NVL72: 360 PFLOP/s with sparsity
        ("NVIDIA B300 SXM6 AC", 36e15 / 2 / 8, 600e12 / 8),  # HGX B300: 36 PFLOP/s with sparsity
        ("NVIDIA GeForce RTX 4090", 165.2e12, 82.6e12),
        ("AMD Instinct MI300X", 1307.4e12, 163.4e12),
        ("Tesla T4", None, 8.1e12),  # no bf16 units
    ],
)
def test_peaks_are_those_of_the_data_sheets(name, bf16, fp32):
    assert peak_flops(name, "bf16") == (None if bf16 is None else pytest.approx(bf16))
    assert peak_flops(name, "fp32") == pytest.approx(fp32)


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA RTX A3000 Laptop GPU",
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
        "NVIDIA H100",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "AMD Instinct MI300A",
        "cpu",
        "",
    ],
)
def test_other_names_have_no_peak(name):
    assert all(peak_flops(name, dtype) is None for dtype in ("bf16", "tf32", "fp32"))


def test_tf32_stands_between_bf16_and_fp32():
    assert peak_flops("NVIDIA A100-SXM4-80GB", "tf32") == pytest.approx(156e12)
    assert peak_flops("NVIDIA H100 80GB HBM3", "tf32") == pytest.approx(494.7e12)
    assert peak_flops("Tesla V100-SXM2-32GB", "tf32") == peak_flops("Tesla V100-SXM2-32GB", "fp32")
