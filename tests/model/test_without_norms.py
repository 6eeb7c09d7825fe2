"""GPTs without layer norms, and the initialization that goes with them."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch.nn.functional import linear

from efftrain_cli.model.flops import flops_per_token, parameter_count
from efftrain_cli.model.gpt import GPT, GPTConfig
from efftrain_cli.model.hf import to_hf
from tests.tiny import config_of, drawn, init_weights

GPT2 = config_of(n_layer=3)
BARE = replace(GPT2, norm="none", init="unit")


def made(config: GPTConfig) -> GPT:
    model = GPT(config)
    init_weights(model, 5)
    return model


def test_without_norms_four_vectors_a_block_and_two_at_the_end_are_gone():
    model = made(BARE)
    kinds = model.parameter_kinds()
    assert not [name for name in kinds if ".ln_" in f".{name}"]
    count = 64 * 16 + 32 * 16 + 3 * (12 * 256 + 9 * 16)
    assert model.parameter_count == parameter_count(BARE) == count
    assert parameter_count(GPT2) - count == 3 * 4 * 16 + 2 * 16
    expected = 6 * (count - 32 * 16) + 12 * 3 * 16 * 8
    assert flops_per_token(BARE, 8, 3).with_logits == expected


def test_unit_initialization_keeps_the_variance_near_one_at_every_depth():
    config = replace(
        BARE, n_layer=12, n_embd=256, n_head=4, seq_len=64, vocab_size=509, padded_vocab_size=512
    )
    model = made(config)
    seen: dict[str, list[float]] = {}

    def term(name: str, activation: torch.Tensor) -> None:
        seen.setdefault(name, []).append(float(activation.detach().var()))

    for block in model.h:
        block.term = term
    x = model.run_blocks(model.embed(drawn(509, 8, 64, seed=0)))
    assert seen["ln_1"][0] == pytest.approx(1, rel=0.05), "the embedding's output"
    for name in ("ln_1", "attn.c_attn", "mlp.c_fc"):
        assert min(seen[name]) > 0.8 and max(seen[name]) < 2.2
    logits = model.head(x).detach()
    assert float(logits.std()) < 2
    expected = linear(x, model.wte.weight)[..., :509] / 16
    assert torch.allclose(logits, expected, atol=1e-5)
    assert not model.wte.weight[509:].any()


def test_the_defaults_are_gpt2():
    """Drawn here by hand, in the order of the parameters."""
    model = made(GPT2)
    generator = torch.Generator().manual_seed(5)
    for name, parameter in model.named_parameters():
        expected = torch.full_like(parameter, 0.0 if name.endswith("bias") else 1.0)
        if parameter.dim() == 2:
            std = 0.02 / math.sqrt(6) if name.endswith("c_proj.weight") else 0.02
            expected = torch.randn(parameter.shape, generator=generator) * std
        if name == "wte.weight":
            expected[61:] = 0.0
        assert torch.equal(parameter, expected), name
    x = model.hidden(drawn(61, 2, 9, seed=2))
    assert torch.equal(model.head(x), linear(model.ln_f(x), model.wte.weight)[..., :61])


def test_export_folds_the_scale_of_the_logits_into_the_last_norm():
    pytest.importorskip("transformers")
    scaled = made(replace(GPT2, init="unit"))
    torch.nn.init.normal_(scaled.ln_f.bias)
    tokens = drawn(61, 2, 9, seed=2)
    with torch.no_grad():
        logits = to_hf(scaled, 0)(tokens).logits
        assert torch.allclose(logits, scaled(tokens), atol=1e-6)
