"""Count parameters and FLOPs of a step, and the peak rates of devices. No torch, so that plans can
be costed.

Convention (reported with every figure): (6 N + 12 n_layer n_head head_dim seq_len) FLOPs per
trained token over the blocks that ran, forward and backward together. N counts norms and biases,
and of the embeddings only the one that makes the logits; GPT-2's n_head head_dim is n_embd. The
logit matmul adds 6 * vocabulary rows * n_embd; figures exist with and without it. That attention is
causal is not counted: with it the second term would be half.
"""

from __future__ import annotations

from typing import NamedTuple

from efftrain_cli.model.config import Dimensions, GPTConfig

NEWTON_SCHULZ_ITERATIONS = 5
"""Iterations that Muon takes to bring a matrix close to an orthogonal one."""


class FlopsPerToken(NamedTuple):
    """FLOPs per trained token, forward and backward."""

    with_logits: float
    without_logits: float


def channels(config: Dimensions) -> dict[str, int]:
    """Return the channels of the activations that have a name, in the order in which a model
    computes them.

    They are inputs of norms and outputs of linear layers. All but "ln_f" are in every block.
    """
    width = config.n_embd
    return {
        "ln_1": width,
        "attn.c_attn": sum(config.qkv_rows),
        "attn.c_proj": width,
        "ln_2": width,
        "mlp.c_fc": config.ff_size,
        "mlp.c_proj": width,
        "ln_f": width,
    }


def norm_parameters(config: GPTConfig) -> int:
    """Count the parameters of one norm: a scale for each channel, and a layer norm's shift."""
    vectors = [name for name in config.norm_facts.vectors if name != "bias" or config.bias]
    return config.n_embd * len(vectors)


def block_matrices(config: Dimensions) -> list[tuple[int, int]]:
    """Return (rows, columns) of a block's matrices as Muon takes them: q, k and v are three."""
    width = config.n_embd
    units = config.ff_size
    outputs = [*config.qkv_rows, units]
    if config.mlp_facts.is_gated:
        outputs.append(units)
    matrices = [(rows, width) for rows in outputs]
    return [*matrices, (width, config.attention_size), (width, units)]


def newton_schulz_flops(config: Dimensions) -> float:
    """Return the FLOPs of Muon's Newton-Schulz iterations in one optimizer step of a whole model.

    On a matrix X of sides s <= l an iteration computes X X^T (2 s^2 l), its square (2 s^3) and that
    times X (2 s^2 l).
    """
    total = 0.0
    for matrix in block_matrices(config):
        short, long = sorted(matrix)
        iteration = 4 * short**2 * long + 2 * short**3
        total += NEWTON_SCHULZ_ITERATIONS * iteration
    return config.n_layer * total


def block_parameters(config: GPTConfig) -> int:
    """Count the parameters of one block.

    They are the matrices of attention and MLP, their biases, two norms, and the gains of q and k.
    """
    total = 2 * norm_parameters(config)
    for rows, columns in block_matrices(config):
        total += rows * columns
        if config.bias:
            total += rows
    if config.qk_norm:
        total += 2 * config.head_size
    return total


def inner_parameters(config: GPTConfig) -> int:
    """Count the parameters without tables: blocks and final norm."""
    return config.n_layer * block_parameters(config) + norm_parameters(config)


def parameter_count(config: GPTConfig) -> int:
    """Count the parameters: table of tokens, table of positions if learned, blocks, final norm,
    head if untied."""
    rows = config.padded_vocab_size
    if not config.tied:
        rows += config.padded_vocab_size
    if config.position_facts.has_table:
        rows += config.seq_len
    return rows * config.n_embd + inner_parameters(config)


def flops_per_token(
    config: GPTConfig,
    seq_len: int,
    blocks: float,
) -> FlopsPerToken:
    """Return FLOPs per token at `seq_len` if `blocks` blocks were executed (an average may be
    fractional)."""
    attention = 12.0 * config.attention_size * seq_len
    block = 6.0 * block_parameters(config) + attention
    without_logits = blocks * block + 6.0 * norm_parameters(config)
    logits = 6.0 * config.padded_vocab_size * config.n_embd
    return FlopsPerToken(
        with_logits=without_logits + logits,
        without_logits=without_logits,
    )


# Dense matmul peaks in TFLOP/s from the vendors' data sheets and white papers, without sparsity (a
# sparse peak is halved, a system's divided by its GPUs): (bf16 with fp32 accumulation, TF32, fp32).
# None: bf16 would be emulated, or PyTorch has no such mode there. Names are PyTorch's, without
# "NVIDIA " before.
_PEAK_TFLOPS: dict[str, tuple[float | None, float | None, float]] = {
    "GB200": (2500, 1250, 80),  # a seventy-second of a GB200 NVL72
    "B300 SXM6 AC": (2250, 1125, 75),  # an eighth of an HGX B300
    "B200": (2250, 1100, 75),
    "H100 80GB HBM3, H200, H800, GH200 480GB": (989.5, 494.7, 67),
    "H100 NVL, H200 NVL": (835.5, 417.5, 60),
    "H100 PCIe, H800 PCIe": (756, 378, 51),
    "H20": (148, 74, 44),
    "A100-SXM4-40GB, A100-SXM4-80GB, A100-PCIE-40GB, A100 80GB PCIe": (312, 156, 19.5),
    "A40": (149.7, 74.8, 37.4),
    "A30": (165, 82, 10.3),
    "A10": (125, 62.5, 31.2),
    "A10G": (70, 35, 35),
    "L40S": (362, 183, 91.6),
    "L40": (181, 90.5, 90.5),
    "L4": (121, 60, 30.3),
    "RTX PRO 6000 Blackwell Workstation Edition": (503.8, 251.9, 126),
    "RTX A6000": (154.8, 77.4, 38.7),
    "GeForce RTX 5090": (209.5, 104.8, 104.8),
    "GeForce RTX 4090": (165.2, 82.6, 82.6),
    "GeForce RTX 3090": (71, 35.6, 35.6),
    "Tesla T4": (None, 8.1, 8.1),  # neither bf16 nor TF32, which is then plain fp32
    "Tesla V100-SXM2-16GB, Tesla V100-SXM2-32GB": (None, 15.7, 15.7),
    "Tesla V100-PCIE-16GB, Tesla V100-PCIE-32GB": (None, 14, 14),
    "AMD Instinct MI300X": (1307.4, None, 163.4),
}


def peak_flops(device_name: str, dtype: str) -> float | None:
    """Return the peak dense matmul rate of a device by PyTorch's name for it, FLOP/s, for "bf16",
    "tf32" or "fp32".

    Only whole names count: a slice of a GPU (MIG), a laptop's GPU of the same number, any other GPU
    and a CPU have no entry, and their MFU is null rather than a guess.
    """
    name = device_name.removeprefix("NVIDIA ")
    for names, peaks in _PEAK_TFLOPS.items():
        tflops = peaks[("bf16", "tf32", "fp32").index(dtype)]
        if name in names.split(", ") and tflops is not None:
            return tflops * 1e12
    return None
