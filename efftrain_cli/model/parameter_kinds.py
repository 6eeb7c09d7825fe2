"""Tell the kinds of a GPT's parameters by name: growth, weight decay and Muon treat them
differently. No torch."""

from __future__ import annotations

import re
from typing import Literal

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
        raise ValueError(
            f"the parameter {name!r} is not a GPT's: add its kind to model/parameter_kinds.py"
        )
    return by_end[end]
