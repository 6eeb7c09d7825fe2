"""Which parameters an optimizer treats alike. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from efftrain_cli.model.parameter_kinds import ParameterKind


@dataclass(frozen=True, kw_only=True)
class GroupScale:
    """How one group of parameters departs from the recipe's optimizer settings."""

    lr: float = 1.0
    eps: float = 1.0
    weight_decay: float = 1.0


def decays(kind: ParameterKind) -> bool:
    """Return whether weight decay acts on a kind: on matrices, except the position embeddings.

    Rows that no short sequence reaches get no gradient, and decay alone would shrink them.
    """
    return kind in ("token_embedding", "head", "matrix", "fused_matrix")
