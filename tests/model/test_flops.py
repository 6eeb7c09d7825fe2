"""What a token costs, and what a device could do."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from efftrain_cli.model.flops import flops_per_token, newton_schulz_flops, peak_flops
from efftrain_cli.model.gpt import GPT
from tests.tiny import config_of

CONFIG = config_of(n_layer=3)


def test_a_token_costs_6_n_and_the_attention():
    """Without the positions, and 12 L C T for the attention."""
    matmuls = GPT(CONFIG).parameter_count - 32 * 16
    counted = flops_per_token(CONFIG, 8, 3)
    assert counted.with_logits == 6 * matmuls + 12 * 3 * 16 * 8
    assert counted.with_logits - counted.without_logits == 6 * 64 * 16


def test_newton_schulz_by_hand_and_by_pytorchs_own_count():
    # A block of width 4: four matrices 4 x 4 of 5 (4 * 64 + 2 * 64) = 1,920 FLOPs, and two 16 x 4
    # of 5 (4 * 16 * 16 + 2 * 64) = 5,760.
    tiny = replace(CONFIG, n_layer=1, n_head=1, n_embd=4)
    assert newton_schulz_flops(tiny) == 4 * 1920 + 2 * 5760
    parts = []
    for name, p in GPT(CONFIG).named_parameters():
        if name.startswith("h.") and p.dim() == 2:
            parts += p.detach().chunk(3 if "c_attn" in name else 1)
    for part in parts:
        part.grad = torch.randn_like(part)
    with FlopCounterMode(display=False) as counter:
        torch.optim.Muon(parts, lr=0.1).step()
    assert counter.get_total_flops() == newton_schulz_flops(CONFIG)


@pytest.mark.parametrize(
    "name, bf16, tf32, fp32",
    [
        ("NVIDIA L4", 121e12, 60e12, 30.3e12),
        ("NVIDIA A100-SXM4-80GB", 312e12, 156e12, 19.5e12),
        ("A100-SXM4-40GB", 312e12, 156e12, 19.5e12),  # older drivers leave the vendor out
        ("NVIDIA H100 80GB HBM3", 989.5e12, 494.7e12, 67e12),
        ("NVIDIA H200", 989.5e12, 494.7e12, 67e12),
        # NVL72: 360 PFLOP/s with sparsity
        ("NVIDIA GB200", 360e15 / 2 / 72, 180e15 / 2 / 72, 5760e12 / 72),
        ("AMD Instinct MI300X", 1307.4e12, None, 163.4e12),
        ("Tesla T4", None, 8.1e12, 8.1e12),  # no bf16 units
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None, None, None),
        ("NVIDIA H100", None, None, None),  # of two kinds
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None, None, None),
        ("cpu", None, None, None),
    ],
)
def test_peaks_are_those_of_the_data_sheets(name, bf16, tf32, fp32):
    for dtype, peak in (("bf16", bf16), ("tf32", tf32), ("fp32", fp32)):
        assert peak_flops(name, dtype) == (peak and pytest.approx(peak, rel=0.01))
