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


# Dense matmul peaks, FLOP/s, from the vendors' data sheets (no sparsity): (bf16, tf32, fp32).
_PEAK_FLOPS: dict[str, tuple[float, float, float]] = {
    "H200": (989.5e12, 494.7e12, 67e12),
    "H100 PCIe": (756e12, 378e12, 51e12),
    "H100 NVL": (835e12, 417.5e12, 60e12),
    "H100": (989.5e12, 494.7e12, 67e12),
    "GH200": (989.5e12, 494.7e12, 67e12),
    "A100": (312e12, 156e12, 19.5e12),
    "A30": (165e12, 82e12, 10.3e12),
    "A10G": (70e12, 35e12, 35e12),
    "L40S": (362e12, 183e12, 91.6e12),
    "L4": (121e12, 60e12, 30.3e12),
    "V100": (125e12, 15.7e12, 15.7e12),  # fp16 tensor cores; V100 has neither bf16 nor TF32
}


def peak_flops(device_name: str, dtype: str) -> float | None:
    """Peak dense matmul rate of a device by its CUDA name, FLOP/s; None where the device is not in the table.

    A CPU or an unknown GPU has no entry, and its MFU is then null rather than a guess.
    """
    matches = [name for name in _PEAK_FLOPS if name in device_name]
    if not matches:
        return None
    return _PEAK_FLOPS[max(matches, key=len)][("bf16", "tf32", "fp32").index(dtype)]
