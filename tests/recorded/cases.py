"""The small recipes whose training `bits` compares: a base and overrides, in a recipe's grammar."""

from __future__ import annotations

SIZE = (
    "model.n_layer=2",
    "model.n_head=2",
    "model.n_embd=32",
    "model.seq_len=32",
    "optim.warmup_steps=5",
    "train.batch_size=8",
    "train.micro_batch_tokens=100",
    "train.tokens=7_680",  # 30 steps
    "eval={every = 10, windows = 8, internals = 7}",
)
"""Overrides of every case; its own follow."""

WARMUP = "seq_len_warmup={start = 8, steps = 12}"
DROP = "progressive_layer_drop={theta = 0.5, steps = 4}"
SIMIGRAD = "simigrad={target = 0.6, min_batch_size = 4, max_batch_size = 16, quantum = 2}"
FOUR_BLOCKS = "model.n_layer=4"


def growth(before: str, operator: str) -> str:
    """Return the override of a run whose model grows at step 12."""
    return (
        f"stages=[{{model = {{{before}}}, switch = {{rule = 'steps', value = 12}}}},"
        f" {{operators = ['{operator}'], rewarmup_steps = 4}}]"
    )


CASES: dict[str, tuple[str, ...]] = {
    # name: the base, then overrides
    "small": ("small", "eval.positions=true"),
    "wsd": ("small-wsd",),
    "decay-steps": ("small", "optim.decay_tokens=false", "optim.decay_steps=20"),
    "z-loss": ("small", "optim.z_loss=1e-3"),
    "recompute": ("small", "train.activation_checkpointing=true"),
    "bf16": ("small", "train.dtype=bf16"),
    "compile": ("small", "train.compile=on"),
    "muon": ("small-muon",),
    "lion": ("small-lion",),
    "llama": ("small-llama", "model.n_kv_head=1", "model.qk_norm=true", "model.tied=false"),
    "slw-truncate": ("small-slw", WARMUP),
    "slw-reshape": ("small-slw", "seq_len_warmup={start = 8, steps = 12, mode = 'reshape'}"),
    "slw-tokens": ("small-slw", "seq_len_warmup={start = 8, steps = 12, batch = 'tokens'}"),
    "slw-compile": ("small", "train.compile=on", WARMUP),
    "batch-ramp": ("small", "batch_size_warmup={start = 2, increment = 2, sequences = 40}"),
    "pld": ("small-pld", DROP),
    "pld-compile": ("small-pld", "train.compile=on", DROP),
    "simigrad": ("small", SIMIGRAD),
    "simigrad-interval": (
        "small-simigrad",
        "simigrad={target = 0.6, min_batch_size = 4, max_batch_size = 16, interval = 2,"
        " window = 2}",
    ),
    "simigrad-pld": ("small-pld", DROP, SIMIGRAD),
    "standardization": ("small-standardization",),
    "standardization-ln": (
        "small-standardization",
        "standardization_loss={weight = 0.1, sites = 'ln_input'}",
    ),
    "accumulation": ("small-accumulation-9bit-c64",),
    "accumulation-inner": (
        "small",
        "model.n_layer=3",
        "chunked_accumulation={operands = 'fp8_e5m2', layers = 'inner',"
        " forward = {bits = 9, exponent_bits = 6, chunk = 16},"
        " grad_input = {bits = 9, exponent_bits = 6, chunk = 16},"
        " grad_weight = {bits = 9, exponent_bits = 6, chunk = 16}}",
    ),
    "ouroboros": ("small", FOUR_BLOCKS, "ouroboros={modules = 4}"),
    "ouroboros-warm": ("small", FOUR_BLOCKS, "ouroboros={modules = 3, warmup_steps = 6}"),
    "ouroboros-clip": (
        "small",
        FOUR_BLOCKS,
        "ouroboros={modules = 4, clip = 'module'}",
        "optim.grad_clip=0.1",
    ),
    "ouroboros-mean": (
        "small",
        FOUR_BLOCKS,
        "ouroboros={modules = 4, embedding_gradient = 'mean'}",
    ),
    "ouroboros-split": (
        "small",
        FOUR_BLOCKS,
        "ouroboros={modules = 4, split = [0, 2, 1, 1]}",
    ),
    "staged-depth": ("small", growth("n_layer = 1", "depth")),
    "staged-width": (
        "small",
        "stages=[{model = {n_head = 1, n_embd = 16}, switch = {rule = 'tokens', value = 3000}},"
        " {operators = ['width'], rewarmup_steps = 4}]",
    ),
    "staged-loss": (
        "small",
        "stages=[{model = {n_layer = 1}, switch = {rule = 'loss', value = 3.9}},"
        " {operators = ['depth'], rewarmup_steps = 4}]",
    ),
    "staged-pad": (
        "small-llama",
        "model.n_kv_head=2",
        growth("n_embd = 16, head_dim = 16, d_ff = 96, norm_eps = 2e-5", "pad:32"),
    ),
    "staged-d-ff": ("small", growth("d_ff = 64", "d_ff:128")),
    "staged-n-kv-head": (
        "small-llama",
        "model.n_kv_head=2",
        growth("n_head = 1, n_kv_head = 1, head_dim = 16", "n_kv_head:2"),
    ),
}
