"""What a method may see of a model: activations by name."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from efftrain_cli.model.gpt import GPT
from tests.tiny import config_of, drawn, init_weights


@pytest.mark.parametrize("recompute", [False, True], ids=["stored", "recomputed"])
def test_a_term_of_activations_is_added_up_once_and_has_a_gradient(recompute):
    model = GPT(config_of())
    init_weights(model, 3)
    tokens = drawn(61, 2, 6, seed=0)
    names: list[str] = []
    squares: list[float] = []

    def term(name: str, activation: Tensor) -> Tensor | None:
        names.append(name)
        return activation.square().mean() if name == "mlp.c_fc" else None

    def note(module: torch.nn.Module, args: object, out: Tensor) -> None:
        squares.append(float(out.detach().square().mean()))

    hooks = [block.mlp.c_fc.register_forward_hook(note) for block in model.h]
    plain = model.run_blocks(model.embed(tokens))
    for hook in hooks:
        hook.remove()
    for block in model.h:
        block.term = term
    terms: list[Tensor] = []
    with torch.no_grad():
        model.run_blocks(model.embed(tokens), terms=terms)
    assert names == terms == [], "nothing is measured where no gradient is wanted"

    x = model.run_blocks(model.embed(tokens), recompute=recompute, terms=terms)
    assert torch.equal(x, plain)
    attention = ["ln_1", "attn.c_attn", "attn.q", "attn.k", "attn.c_proj"]
    assert names == 2 * [*attention, "ln_2", "mlp.c_fc", "mlp.c_proj"]
    assert torch.cat(terms).tolist() == pytest.approx(squares, rel=1e-6)
    torch.cat(terms).sum().backward()
    assert model.h[1].mlp.c_fc.weight.grad.any() and model.ln_f.weight.grad is None
