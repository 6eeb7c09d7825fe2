"""What each parameter of a GPT is, by its name: growth, weight decay and Muon treat the kinds differently. No torch."""

from __future__ import annotations

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

_OUTSIDE: dict[str, ParameterKind] = {
    "wte.weight": "token_embedding",
    "wpe.weight": "position_embedding",
    "ln_f.weight": "last_norm",
    "ln_f.bias": "last_norm",
}
_IN_BLOCK: dict[str, ParameterKind] = {
    "ln_1.weight": "vector",
    "ln_1.bias": "vector",
    "attn.c_attn.weight": "fused_matrix",
    "attn.c_attn.bias": "fused_vector",
    "attn.c_proj.weight": "matrix",
    "attn.c_proj.bias": "vector",
    "ln_2.weight": "vector",
    "ln_2.bias": "vector",
    "mlp.c_fc.weight": "matrix",
    "mlp.c_fc.bias": "vector",
    "mlp.c_proj.weight": "matrix",
    "mlp.c_proj.bias": "vector",
    "attn.c_attn_affine.weight": "fused_vector",
    "attn.c_attn_affine.bias": "fused_vector",
    "attn.c_proj_affine.weight": "vector",
    "attn.c_proj_affine.bias": "vector",
    "mlp.c_fc_affine.weight": "vector",
    "mlp.c_fc_affine.bias": "vector",
    "mlp.c_proj_affine.weight": "vector",
    "mlp.c_proj_affine.bias": "vector",
}


def parameter_kind(name: str) -> ParameterKind:
    """The kind of a GPT's parameter, such as "h.3.mlp.c_fc.weight".

    Raises:
        ValueError: GPT-2 has no such parameter.
    """
    kind = _OUTSIDE.get(name)
    if kind is None and name.startswith("h."):
        kind = _IN_BLOCK.get(name.split(".", 2)[-1])
    if kind is None:
        raise ValueError(f"the parameter {name!r} is not GPT-2's: add its kind to model/parameter_kinds.py")
    return kind
