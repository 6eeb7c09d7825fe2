"""What a step costs and how well the device is used. Plain arithmetic: no torch, so that plans can be costed without it.

Convention (reported with every figure): (6 N + 12 n_layer n_embd seq_len) FLOPs per trained token over the blocks that
ran, forward and backward together, N counting the tied embedding matrix once and no position table. The logit matmul
is 6 * vocabulary rows * n_embd of it; figures exist with and without it.
"""

from __future__ import annotations

from typing import NamedTuple


class FlopsPerToken(NamedTuple):
    """FLOPs per trained token, forward and backward."""

    with_logits: float
    without_logits: float


def block_parameters(n_embd: int) -> int:
    """Parameters of one GPT-2 block: four matrices (12 n_embd^2), their biases and two layer norms (13 n_embd)."""
    return 12 * n_embd * n_embd + 13 * n_embd


def parameter_count(n_layer: int, n_embd: int, seq_len: int, vocab_rows: int) -> int:
    """Parameters of a GPT: embedding of `vocab_rows` rows (tied head), positions, blocks, final layer norm."""
    return vocab_rows * n_embd + seq_len * n_embd + n_layer * block_parameters(n_embd) + 2 * n_embd


def flops_per_token(n_embd: int, seq_len: int, vocab_rows: int, blocks: float) -> FlopsPerToken:
    """FLOPs per token at `seq_len`, where `blocks` blocks were executed (an average may be fractional)."""
    in_blocks = blocks * (6.0 * block_parameters(n_embd) + 12.0 * n_embd * seq_len)
    without_logits = in_blocks + 6.0 * 2 * n_embd  # the final layer norm's parameters belong to N
    return FlopsPerToken(without_logits + 6.0 * vocab_rows * n_embd, without_logits)


# Dense matmul peaks in TFLOP/s from the vendors' data sheets and white papers, without sparsity: (bf16 with fp32 accumulation,
# TF32, fp32). None: bf16 would be emulated, or PyTorch has no such mode there. Names are PyTorch's, without "NVIDIA " before.
_PEAK_TFLOPS: dict[str, tuple[float | None, float | None, float]] = {
    "B200": (2250, 1100, 75),
    "GH200 480GB": (989.5, 494.7, 67),
    "H200": (989.5, 494.7, 67),
    "H200 NVL": (835.5, 417.5, 60),
    "H100 80GB HBM3": (989.5, 494.7, 67),
    "H100 PCIe": (756, 378, 51),
    "H100 NVL": (835.5, 417.5, 60),
    "H20": (148, 74, 44),
    "A100-SXM4-40GB": (312, 156, 19.5),
    "A100-SXM4-80GB": (312, 156, 19.5),
    "A100-PCIE-40GB": (312, 156, 19.5),
    "A100 80GB PCIe": (312, 156, 19.5),
    "A40": (149.7, 74.8, 37.4),
    "A30": (165, 82, 10.3),
    "A10": (125, 62.5, 31.2),
    "A10G": (70, 35, 35),
    "L40S": (362, 183, 91.6),
    "L40": (181, 90.5, 90.5),
    "L4": (121, 60, 30.3),
    "RTX A6000": (154.8, 77.4, 38.7),
    "GeForce RTX 5090": (209.5, 104.8, 104.8),
    "GeForce RTX 4090": (165.2, 82.6, 82.6),
    "GeForce RTX 3090": (71, 35.6, 35.6),
    "Tesla T4": (None, 8.1, 8.1),  # neither bf16 nor TF32, which is then plain fp32
    "Tesla V100-SXM2-16GB": (None, 15.7, 15.7),
    "Tesla V100-SXM2-32GB": (None, 15.7, 15.7),
    "Tesla V100-PCIE-16GB": (None, 14, 14),
    "Tesla V100-PCIE-32GB": (None, 14, 14),
    "AMD Instinct MI300X": (1307.4, None, 163.4),
}


def peak_flops(device_name: str, dtype: str) -> float | None:
    """Peak dense matmul rate of a device by the name that PyTorch gives it, FLOP/s, for "bf16", "tf32" or "fp32".

    Only whole names count: a slice of a GPU (MIG), a laptop's GPU of the same number, any other GPU and a CPU have no entry,
    and their MFU is null rather than a guess.
    """
    peaks = _PEAK_TFLOPS.get(device_name.removeprefix("NVIDIA "))
    tflops = None if peaks is None else peaks[("bf16", "tf32", "fp32").index(dtype)]
    return None if tflops is None else tflops * 1e12
