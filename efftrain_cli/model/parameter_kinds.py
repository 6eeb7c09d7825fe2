"""What each parameter of a GPT is, by its name: growth, weight decay and Muon treat the kinds differently. No torch."""

from __future__ import annotations

import re
from typing import Literal

ParameterKind = Literal[
    "token_embedding",  # (vocabulary, n_embd), also the output head
    "position_embedding",  # (seq_len, n_embd)
    "matrix",  # (out, in), of a block
    "fused_matrix",  # (3 n_embd, n_embd): the projections to q, k and v, one below the other
    "vector",  # a bias, a layer norm or another scale and shift of a block
    "fused_vector",  # (3 n_embd): the biases of q, k and v
    "last_norm",  # the layer norm before the head, or the scale and shift in its place
]

# Module -> the kinds of its weight and of its bias.
_OUTSIDE: dict[str, tuple[ParameterKind, ...]] = {
    "wte": ("token_embedding",),
    "wpe": ("position_embedding",),
    "ln_f": ("last_norm", "last_norm"),
}
_IN_BLOCK: dict[str, tuple[ParameterKind, ...]] = {
    "ln_1": ("vector", "vector"),
    "attn.c_attn": ("fused_matrix", "fused_vector"),
    "attn.c_proj": ("matrix", "vector"),
    "ln_2": ("vector", "vector"),
    "mlp.c_fc": ("matrix", "vector"),
    "mlp.c_proj": ("matrix", "vector"),
    "attn.c_attn_affine": ("fused_vector", "fused_vector"),
    "attn.c_proj_affine": ("vector", "vector"),
    "mlp.c_fc_affine": ("vector", "vector"),
    "mlp.c_proj_affine": ("vector", "vector"),
}


def parameter_kind(name: str) -> ParameterKind:
    """The kind of a GPT's parameter, such as "h.3.mlp.c_fc.weight".

    Raises:
        ValueError: GPT-2 has no such parameter.
    """
    module, _, end = name.rpartition(".")
    number = re.match(r"h\.\d+\.", module)
    kinds = _IN_BLOCK.get(module[number.end() :], ()) if number else _OUTSIDE.get(module, ())
    found = dict(zip(("weight", "bias"), kinds, strict=False))
    if end not in found:
        raise ValueError(
            f"the parameter {name!r} is not GPT-2's: add its kind to model/parameter_kinds.py"
        )
    return found[end]
