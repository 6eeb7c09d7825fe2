"""Describe the shape of a GPT as numbers, and its parameters by name.

No torch, so that plans can be costed without it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

Mlp = Literal["gelu", "swiglu", "relu2"]
Norm = Literal["layernorm", "rmsnorm", "none"]
Positions = Literal["learned", "rope"]
Init = Literal["gpt2", "unit", "hf"]


@dataclass(frozen=True, kw_only=True)
class MlpFacts:
    """Properties of one kind of MLP."""

    kept_arrays: int
    """Arrays of d_ff values per token kept for the backward pass (for memory estimates)."""
    is_gated: bool = False
    """Whether `c_up` multiplies the activation of `c_fc`."""
    has_slope_at_zero: bool = False
    """Whether the gradient at a hidden layer of zeros is not zero: growth by "identity" begins
    there."""


MLPS: dict[str, MlpFacts] = {
    "gelu": MlpFacts(kept_arrays=2, has_slope_at_zero=True),
    "swiglu": MlpFacts(kept_arrays=4, is_gated=True),
    "relu2": MlpFacts(kept_arrays=3),
}


@dataclass(frozen=True, kw_only=True)
class PositionFacts:
    """Properties of one way to tell positions apart."""

    has_table: bool = False
    """Whether a learned vector per position is added to the embedding."""
    rotates: bool = False
    """Whether queries and keys are rotated by `Rope`, in pairs of channels."""


POSITIONS: dict[str, PositionFacts] = {
    "learned": PositionFacts(has_table=True),
    "rope": PositionFacts(rotates=True),
}


@dataclass(frozen=True, kw_only=True)
class InitFacts:
    """Properties of one initialization; biases are 0, norms and scales 1."""

    std: float | None = 0.02
    """Standard deviation of matrices and tables. None: activations and logits of variance 1 without
    norms."""
    shrinks_projections: bool = True
    """Whether projections into the residual stream are divided by sqrt(2 n_layer)."""


INITS: dict[str, InitFacts] = {
    "gpt2": InitFacts(),
    "unit": InitFacts(std=None),
    "hf": InitFacts(shrinks_projections=False),
}


@dataclass(frozen=True, kw_only=True)
class NormFacts:
    """Properties of one kind of norm."""

    vectors: tuple[str, ...]
    """Its parameters, each with an entry per channel: "weight", and "bias" if linear layers have
    biases."""
    is_centered: bool = False
    """Whether it subtracts the mean. Growth by "pad" refuses it: the zero channels that pad adds
    change the mean."""
    keeps_fp32: bool = False
    """Whether eager mode keeps the normalized value in fp32 for the backward pass (for memory
    estimates)."""


NORMS: dict[str, NormFacts] = {
    "layernorm": NormFacts(vectors=("weight", "bias"), is_centered=True),
    "rmsnorm": NormFacts(vectors=("weight",), keeps_fp32=True),
    "none": NormFacts(vectors=()),
}


class Dimensions:
    """Derive sizes that are not given, for `GPTConfig` and a recipe's [model]: head_dim from n_embd
    / n_head, ..."""

    n_layer: int
    n_head: int
    n_embd: int
    n_kv_head: int | None
    head_dim: int | None
    d_ff: int | None
    mlp: Mlp
    positions: Positions
    norm: Norm
    norm_eps: float
    init: Init

    @property
    def norm_facts(self) -> NormFacts:
        """Properties of the norms."""
        return NORMS[self.norm]

    @property
    def mlp_facts(self) -> MlpFacts:
        """Properties of the MLPs."""
        return MLPS[self.mlp]

    @property
    def position_facts(self) -> PositionFacts:
        """Properties of the positions."""
        return POSITIONS[self.positions]

    @property
    def init_facts(self) -> InitFacts:
        """Properties of the initialization."""
        return INITS[self.init]

    def validation_errors(self) -> Iterator[tuple[str, str]]:
        """Yield (field, rule) of each size that does not fit the others."""
        heads = self.n_head
        width = self.n_embd
        if self.head_dim is None and width % heads:
            rule = f"must divide model.n_embd = {width}: every head has n_embd / n_head channels"
            yield "n_head", f"{rule}; or set model.head_dim"
        if heads % self.kv_heads:
            rule = (
                f"must divide model.n_head = {heads}:"
                " each head of keys and values serves as many query heads"
            )
            yield "n_kv_head", rule
        if self.position_facts.rotates and self.head_size % 2:
            rule = (
                f'must be even with model.positions = "{self.positions}",'
                f" which turns channels in pairs, not {self.head_size}"
            )
            yield "head_dim", f"{rule}; set it, or change model.n_head"

    @property
    def kv_heads(self) -> int:
        """Key and value heads; default: as many as query heads."""
        return self.n_kv_head or self.n_head

    @property
    def head_size(self) -> int:
        """Channels of a head; default: n_embd / n_head."""
        return self.head_dim or self.n_embd // self.n_head

    @property
    def attention_size(self) -> int:
        """Channels of all query heads together; n_embd in GPT-2."""
        return self.n_head * self.head_size

    @property
    def qkv_rows(self) -> tuple[int, int, int]:
        """Rows of q, k and v in the fused matrix."""
        keys = self.kv_heads * self.head_size
        return self.attention_size, keys, keys

    @property
    def ff_size(self) -> int:
        """Hidden units of the MLP; default: 4 n_embd, or 8/3 n_embd rounded up to a multiple of 32
        with a gate."""
        if self.d_ff is not None:
            return self.d_ff
        if self.mlp_facts.is_gated:
            return -(-(8 * self.n_embd // 3) // 32) * 32
        return 4 * self.n_embd


S = TypeVar("S", bound=Dimensions)


def resize(shape: S, changes: Mapping[str, int]) -> S:
    """Return the shape with some of the sizes n_head, kv_heads, head_size, n_embd and ff_size
    changed; a size that follows from others is not given."""
    sizes = {
        "n_head": shape.n_head,
        "kv_heads": shape.kv_heads,
        "head_size": shape.head_size,
        "n_embd": shape.n_embd,
        "ff_size": shape.ff_size,
        **changes,
    }
    n_head = sizes["n_head"]
    n_embd = sizes["n_embd"]
    plain = replace(  # type: ignore[type-var]
        shape, n_head=n_head, n_embd=n_embd, n_kv_head=None, head_dim=None, d_ff=None
    )
    given = {}
    if sizes["kv_heads"] != n_head:
        given["n_kv_head"] = sizes["kv_heads"]
    if n_head * sizes["head_size"] != n_embd:
        given["head_dim"] = sizes["head_size"]
    if sizes["ff_size"] != plain.ff_size:
        given["d_ff"] = sizes["ff_size"]
    return replace(plain, **given)  # type: ignore[type-var]


def pad_vocabulary(vocab_size: int, multiple: int) -> int:
    """Round a number of token ids up to rows of the embedding matrix."""
    return -(-vocab_size // multiple) * multiple


@dataclass(frozen=True, kw_only=True)
class GPTConfig(Dimensions):
    """Shape of a GPT; fields without a description are those of a recipe's [model]."""

    n_layer: int
    n_head: int
    n_embd: int
    seq_len: int
    """Positions, in tokens."""
    vocab_size: int
    """Token ids that exist."""
    padded_vocab_size: int
    """Rows of the embedding matrix: vocab_size rounded up for the matmul. The rest never reaches a
    loss or a sample."""
    norm: Norm = "layernorm"
    init: Init = "gpt2"
    n_kv_head: int | None = None
    head_dim: int | None = None
    mlp: Mlp = "gelu"
    d_ff: int | None = None
    norm_eps: float = 1e-5
    positions: Positions = "learned"
    rope_theta: float = 10_000.0
    qk_norm: bool = False
    bias: bool = True
    tied: bool = True
    softcap: float | None = None

    @property
    def logit_scale(self) -> float:
        """Factor on the product with the vocabulary."""
        if self.init_facts.std is None:
            return 1 / math.sqrt(self.n_embd)
        return 1.0


ParameterKind = Literal[
    "token_embedding",  # (vocabulary, n_embd), also the head if tied
    "head",  # (vocabulary, n_embd), the untied head
    "position_embedding",  # (seq_len, n_embd)
    "matrix",  # (out, in), of a block
    "fused_matrix",  # (rows of q, k and v, n_embd): their projections, one below the other
    "vector",  # a bias, a norm or another scale and shift of a block
    "fused_vector",  # (rows of q, k and v): their biases
    "head_norm",  # (head_dim): the gains of the norm of q or k, alike in all heads
    "last_norm",  # the norm before the head, or the scale and shift in its place
]
"""What growth, weight decay and Muon treat differently."""

# Module -> the kinds of its weight and of its bias.
_OUTSIDE: dict[str, tuple[ParameterKind, ...]] = {
    "wte": ("token_embedding",),
    "wpe": ("position_embedding",),
    "ln_f": ("last_norm", "last_norm"),
    "lm_head": ("head",),
}
_IN_BLOCK: dict[str, tuple[ParameterKind, ...]] = {
    "ln_1": ("vector", "vector"),
    "attn.c_attn": ("fused_matrix", "fused_vector"),
    "attn.q_norm": ("head_norm",),
    "attn.k_norm": ("head_norm",),
    "attn.c_proj": ("matrix", "vector"),
    "ln_2": ("vector", "vector"),
    "mlp.c_fc": ("matrix", "vector"),
    "mlp.c_up": ("matrix", "vector"),
    "mlp.c_proj": ("matrix", "vector"),
}


def parameter_kind(name: str) -> ParameterKind:
    """Return the kind of a GPT's parameter, such as "h.3.mlp.c_fc.weight".

    Raises:
        ValueError: a GPT has no such parameter.
    """
    module, _, end = name.rpartition(".")
    kinds = _OUTSIDE.get(module, ())
    if number := re.match(r"h\.\d+\.", module):
        kinds = _IN_BLOCK.get(module[number.end() :], ())
    by_end = dict(zip(("weight", "bias"), kinds, strict=False))
    if end not in by_end:
        raise ValueError(f"the parameter {name!r} is not a GPT's: add its kind to model/config.py")
    return by_end[end]
