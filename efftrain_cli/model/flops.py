"""What a step costs and how well the device is used. Plain arithmetic: no torch, so that plans can be costed without
it.

Convention (reported with every figure): (6 N + 12 n_layer n_embd seq_len) FLOPs per trained token over the blocks that
ran, forward and backward together, N counting the tied embedding matrix once and no position table. The logit matmul
is 6 * vocabulary rows * n_embd of it; figures exist with and without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

CHANNELS = {
    "ln_1": 1,
    "attn.c_attn": 3,
    "attn.c_proj": 1,
    "ln_2": 1,
    "mlp.c_fc": 4,
    "mlp.c_proj": 1,
    "ln_f": 1,
}
"""Channels of the activations that have a name, in n_embd, in the order in which a model computes them: what a layer
norm takes in, what a linear layer puts out. All but "ln_f" are in every block."""


class Shape(Protocol):
    """What costs and sizes go by: a `GPTConfig`."""

    @property
    def n_layer(self) -> int: ...
    @property
    def n_embd(self) -> int: ...
    @property
    def seq_len(self) -> int: ...
    @property
    def padded_vocab_size(self) -> int: ...


NEWTON_SCHULZ_ITERATIONS = 5
"""Of Muon, by which it brings a matrix close to an orthogonal one."""


class FlopsPerToken(NamedTuple):
    """FLOPs per trained token, forward and backward."""

    with_logits: float
    without_logits: float


def block_parameters(n_embd: int, norm: str = "layernorm", affine: Sequence[str] = ()) -> int:
    """Parameters of one GPT-2 block: four matrices (12 n_embd^2), their biases (9 n_embd) and two layer norms (4
    n_embd), which are absent with norm = "none"; and a scale and shift for each of its activations in `affine`."""
    vectors = (
        9
        + (4 if norm == "layernorm" else 0)
        + sum(2 * CHANNELS[name] for name in affine if name != "ln_f")
    )
    return 12 * n_embd * n_embd + vectors * n_embd


def block_matrices(n_embd: int) -> tuple[tuple[int, int], ...]:
    """Return (rows, columns) of a block's matrices as Muon takes them: q, k and v are three matrices."""
    square = (n_embd, n_embd)
    return (square, square, square, square, (4 * n_embd, n_embd), (n_embd, 4 * n_embd))


def newton_schulz_flops(n_layer: int, n_embd: int) -> float:
    """Return the FLOPs of Muon's Newton-Schulz iterations in one optimizer step of a whole model.

    On a matrix X of sides s <= l an iteration computes X X^T (2 s^2 l), its square (2 s^3) and that times X (2 s^2 l).
    """
    total = 0.0
    for matrix in block_matrices(n_embd):
        short, long = sorted(matrix)
        total += NEWTON_SCHULZ_ITERATIONS * (4 * short**2 * long + 2 * short**3)
    return n_layer * total


def last_norm_parameters(n_embd: int, norm: str = "layernorm", affine: Sequence[str] = ()) -> int:
    """Parameters between the last block and the head: scale and shift of the final layer norm, or of what stands in its
    place."""
    return 2 * n_embd if norm == "layernorm" or "ln_f" in affine else 0


def parameter_count(
    n_layer: int,
    n_embd: int,
    seq_len: int,
    vocab_rows: int,
    norm: str = "layernorm",
    affine: Sequence[str] = (),
) -> int:
    """Parameters of a GPT: embedding of `vocab_rows` rows (tied head), positions, blocks, final layer norm. `norm` and
    `affine` are those of `GPTConfig`."""
    blocks = n_layer * block_parameters(n_embd, norm, affine)
    return (
        vocab_rows * n_embd + seq_len * n_embd + blocks + last_norm_parameters(n_embd, norm, affine)
    )


def flops_per_token(
    n_embd: int,
    seq_len: int,
    vocab_rows: int,
    blocks: float,
    norm: str = "layernorm",
    affine: Sequence[str] = (),
) -> FlopsPerToken:
    """FLOPs per token at `seq_len`, where `blocks` blocks were executed (an average may be fractional)."""
    in_blocks = blocks * (6.0 * block_parameters(n_embd, norm, affine) + 12.0 * n_embd * seq_len)
    # The final layer norm's parameters belong to N.
    without_logits = in_blocks + 6.0 * last_norm_parameters(n_embd, norm, affine)
    return FlopsPerToken(without_logits + 6.0 * vocab_rows * n_embd, without_logits)


# Dense matmul peaks in TFLOP/s from the vendors' data sheets and white papers, without sparsity: (bf16 with fp32
# accumulation, TF32, fp32). None: bf16 would be emulated, or PyTorch has no such mode there. Names are PyTorch's,
# without "NVIDIA " before.
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

    Only whole names count: a slice of a GPU (MIG), a laptop's GPU of the same number, any other GPU and a CPU have no
    entry, and their MFU is null rather than a guess.
    """
    peaks = _PEAK_TFLOPS.get(device_name.removeprefix("NVIDIA "))
    tflops = None if peaks is None else peaks[("bf16", "tf32", "fp32").index(dtype)]
    return None if tflops is None else tflops * 1e12
