"""What a token costs, and what a device could do."""

from __future__ import annotations

import re
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


SHEETS = """
NVIDIA GB200                                       2500    1250   80
NVIDIA B300 SXM6 AC                                2250    1125   75
NVIDIA B200                                        2250    1100   75
NVIDIA GH200 480GB                                 989.5   494.7  67
NVIDIA H200                                        989.5   494.7  67
NVIDIA H200 NVL                                    835.5   417.5  60
NVIDIA H100 80GB HBM3                              989.5   494.7  67
NVIDIA H100 NVL                                    835.5   417.5  60
NVIDIA H100 PCIe                                   756     378    51
NVIDIA H800                                        989.5   494.7  67
NVIDIA H800 PCIe                                   756     378    51
NVIDIA H20                                         148     74     44
NVIDIA A100-SXM4-80GB                              312     156    19.5
A100-SXM4-40GB                                     312     156    19.5
NVIDIA A100-PCIE-40GB                              312     156    19.5
NVIDIA A100 80GB PCIe                              312     156    19.5
NVIDIA A40                                         149.7   74.8   37.4
NVIDIA A30                                         165     82     10.3
NVIDIA A10                                         125     62.5   31.2
NVIDIA A10G                                        70      35     35
NVIDIA L40S                                        362     183    91.6
NVIDIA L40                                         181     90.5   90.5
NVIDIA L4                                          121     60     30.3
NVIDIA RTX PRO 6000 Blackwell Workstation Edition  503.8   251.9  126
NVIDIA RTX A6000                                   154.8   77.4   38.7
NVIDIA GeForce RTX 5090                            209.5   104.8  104.8
NVIDIA GeForce RTX 4090                            165.2   82.6   82.6
NVIDIA GeForce RTX 3090                            71      35.6   35.6
AMD Instinct MI300X                                1307.4  none   163.4
Tesla T4                                           none    8.1    8.1
Tesla V100-SXM2-16GB                               none    15.7   15.7
Tesla V100-SXM2-32GB                               none    15.7   15.7
Tesla V100-PCIE-16GB                               none    14     14
Tesla V100-PCIE-32GB                               none    14     14
NVIDIA A100-SXM4-40GB MIG 1g.5gb                   none    none   none
NVIDIA H100                                        none    none   none
NVIDIA GeForce RTX 4090 Laptop GPU                 none    none   none
cpu                                                none    none   none
"""
"""TFLOP/s in bf16, TF32 and fp32. Older drivers leave the vendor out; an H100 is of two kinds."""


def test_peaks_are_those_of_the_data_sheets():
    for line in SHEETS.strip().splitlines():
        name, *peaks = re.split(" {2,}", line)
        for dtype, peak in zip(("bf16", "tf32", "fp32"), peaks, strict=True):
            expected = None if peak == "none" else pytest.approx(1e12 * float(peak))
            assert peak_flops(name, dtype) == expected, name
