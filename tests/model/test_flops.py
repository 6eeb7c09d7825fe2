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
from tests.tiny import config_of, drawn, init_weights

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


def test_every_parameter_has_a_kind():
    kinds = GPT(CONFIG).parameter_kinds()
    assert len(kinds) == 4 + 3 * 12
    assert kinds["wte.weight"] == "token_embedding" and kinds["wpe.weight"] == "position_embedding"
    assert (
        kinds["h.2.attn.c_attn.weight"] == "fused_matrix"
        and kinds["h.0.mlp.c_fc.weight"] == "matrix"
    )
    assert kinds["ln_f.bias"] == "last_norm" and kinds["h.1.ln_2.weight"] == "vector"


def test_hidden_and_head_are_the_model_with_and_without_caches():
    model = GPT(CONFIG)
    init_weights(model, 1)
    tokens = drawn(61, 2, 9, seed=2)
    with torch.no_grad():
        whole = model.hidden(tokens)
        assert whole.shape == (2, 9, 16)
        assert torch.equal(model.head(whole), model(tokens))
        caches = model.new_caches()
        parts = [
            model.hidden(tokens[:, :4], caches),
            model.hidden(tokens[:, 4:5], caches),
            model.hidden(tokens[:, 5:], caches),
        ]
        assert torch.allclose(torch.cat(parts, dim=1), whole, atol=1e-6)
        assert [cache.length for cache in caches] == [9, 9, 9]
        with pytest.raises(ValueError, match="33 positions asked of a model that has 32"):
            model.hidden(torch.zeros((2, 24), dtype=torch.int64), caches)


@pytest.mark.parametrize(
    "name, bf16, fp32",
    [
        ("NVIDIA L4", 121e12, 30.3e12),
        ("NVIDIA L40", 181e12, 90.5e12),
        ("NVIDIA L40S", 362e12, 91.6e12),
        ("NVIDIA A10", 125e12, 31.2e12),
        ("NVIDIA A10G", 70e12, 35e12),
        ("NVIDIA A30", 165e12, 10.3e12),
        ("NVIDIA A40", 149.7e12, 37.4e12),
        ("NVIDIA RTX A6000", 154.8e12, 38.7e12),
        ("NVIDIA A100-SXM4-80GB", 312e12, 19.5e12),
        ("A100-SXM4-40GB", 312e12, 19.5e12),  # older drivers leave the vendor out
        ("NVIDIA H100 80GB HBM3", 989.5e12, 67e12),
        ("NVIDIA H100 PCIe", 756e12, 51e12),
        ("NVIDIA H200", 989.5e12, 67e12),
        ("NVIDIA H200 NVL", 835.5e12, 60e12),
        ("NVIDIA H20", 148e12, 44e12),
        ("NVIDIA B200", 2250e12, 75e12),
        ("NVIDIA GB200", 360e15 / 2 / 72, 5760e12 / 72),  # NVL72: 360 PFLOP/s with sparsity
        ("NVIDIA B300 SXM6 AC", 36e15 / 2 / 8, 600e12 / 8),  # HGX B300: 36 PFLOP/s with sparsity
        ("NVIDIA H800", 1979e12 / 2, 67e12),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 503.8e12, 126e12),
        ("NVIDIA GeForce RTX 3090", 71e12, 35.6e12),
        ("NVIDIA GeForce RTX 4090", 165.2e12, 82.6e12),
        ("NVIDIA GeForce RTX 5090", 209.5e12, 104.8e12),
        ("AMD Instinct MI300X", 1307.4e12, 163.4e12),
        ("Tesla T4", None, 8.1e12),  # no bf16 units
        ("Tesla V100-SXM2-16GB", None, 15.7e12),
    ],
)
def test_peaks_are_those_of_the_data_sheets(name, bf16, fp32):
    assert peak_flops(name, "bf16") == (None if bf16 is None else pytest.approx(bf16))
    assert peak_flops(name, "fp32") == pytest.approx(fp32)


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA RTX A3000 Laptop GPU",
        "NVIDIA A2",
        "NVIDIA A16",
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
        "NVIDIA H100 80GB HBM3 MIG 3g.40gb",
        "NVIDIA H100",
        "NVIDIA H800 PCIe MIG 1g.10gb",
        "NVIDIA RTX 6000 Ada Generation",
        "Quadro RTX 6000",
        "NVIDIA GeForce RTX 3090 Ti",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA L40G",
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
