"""What a method may see of a model: activations by name."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from efftrain_cli.model.gpt import GPT
from tests.tiny import config_of, drawn, init_weights

CONFIG = config_of(n_embd=8, seq_len=6, vocab_size=11, padded_vocab_size=16)


def made() -> tuple[GPT, Tensor]:
    model = GPT(CONFIG)
    init_weights(model, 3)
    return model, drawn(11, 2, 6, seed=0)


@pytest.mark.parametrize("recompute", [False, True], ids=["stored", "recomputed"])
def test_a_term_of_activations_is_added_up_once_and_has_a_gradient(recompute):
    model, tokens = made()
    names: list[str] = []

    def term(name: str, activation: Tensor) -> Tensor | None:
        names.append(name)
        return activation.square().mean() if name == "mlp.c_fc" else None

    plain = model.run_blocks(model.embed(tokens))
    for block in model.h:
        block.term = term
    terms: list[Tensor] = []
    x = model.run_blocks(model.embed(tokens), recompute=recompute, terms=terms)
    assert torch.equal(x, plain)
    attention = ["ln_1", "attn.c_attn", "attn.q", "attn.k", "attn.c_proj"]
    assert names == 2 * [*attention, "ln_2", "mlp.c_fc", "mlp.c_proj"]
    inside = model.h[1].mlp.c_fc(model.h[1].ln_2(_before_mlp(model, tokens)))
    assert len(terms) == 2 and terms[1].item() == pytest.approx(
        inside.square().mean().item(), rel=1e-6
    )
    torch.cat(terms).sum().backward()
    assert model.h[1].mlp.c_fc.weight.grad.abs().sum() > 0 and model.ln_f.weight.grad is None


def _before_mlp(model: GPT, tokens: Tensor) -> Tensor:
    """Input of the second block's second layer norm."""
    x = model.embed(tokens)
    for block in model.h:
        x = x + block.attn(block.ln_1(x))
        if block is model.h[1]:
            return x
        x = x + block.mlp(block.ln_2(x))
    raise AssertionError


def test_nothing_is_measured_where_no_gradient_is_wanted():
    model, tokens = made()
    for block in model.h:
        block.term = lambda name, activation: pytest.fail("measured")
    terms: list[Tensor] = []
    with torch.no_grad():
        model.run_blocks(model.embed(tokens), terms=terms)
    assert not terms
