"""GPTs without layer norms, and the initialization that goes with them: sizes, scales, growth,
export, and that nothing moved."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from efftrain_cli.foundation.errors import UsageError
from efftrain_cli.methods.stages import Stage, StageModel, Switch
from efftrain_cli.model.flops import block_parameters, flops_per_token, parameter_count
from efftrain_cli.model.gpt import GPT, GPTConfig
from efftrain_cli.model.hf import to_hf, write_hf
from efftrain_cli.plan.plan import model_config
from tests.tiny import config_of, drawn, fresh, init_weights, tiny_recipe

GPT2 = config_of(n_layer=3)
BARE = replace(GPT2, norm="none", init="unit")
RECIPE = tiny_recipe("model.norm=none", "model.init=unit", "train.batch_size=4")


def made(config: GPTConfig) -> GPT:
    model = GPT(config)
    init_weights(model, 5)
    return model


def tokens(batch: int = 2, length: int = 9) -> torch.Tensor:
    return drawn(61, batch, length, seed=2)


def test_without_norms_four_vectors_a_block_and_two_at_the_end_are_gone():
    model = made(BARE)
    assert not [
        name for name, _ in model.named_parameters() if ".ln_" in name or name.startswith("ln_")
    ]
    assert set(model.parameter_kinds().values()) == {
        "token_embedding",
        "position_embedding",
        "matrix",
        "fused_matrix",
        "vector",
        "fused_vector",
    }
    assert made(GPT2).parameter_count - model.parameter_count == 3 * 4 * 16 + 2 * 16
    assert (
        model.parameter_count
        == parameter_count(model.config)
        == 64 * 16 + 32 * 16 + 3 * (12 * 256 + 9 * 16)
    )
    assert block_parameters(GPT2) - block_parameters(model.config) == 4 * 16
    expected = 6 * (model.parameter_count - 32 * 16) + 12 * 3 * 16 * 8
    assert flops_per_token(model.config, 8, 3).with_logits == expected
    built = fresh(RECIPE).model
    assert parameter_count(model_config(RECIPE, 64)) == built.parameter_count


def test_unit_initialization_keeps_the_variance_near_one_at_every_depth():
    config = replace(
        BARE, n_layer=12, n_embd=256, n_head=4, seq_len=64, vocab_size=509, padded_vocab_size=512
    )
    model = made(config)
    ids = drawn(509, 8, 64, seed=0)
    seen: dict[str, list[float]] = {}

    def term(name: str, activation: torch.Tensor) -> None:
        seen.setdefault(name, []).append(float(activation.detach().var()))

    for block in model.h:
        block.term = term
    x = model.run_blocks(model.embed(ids))
    assert seen["ln_1"][0] == pytest.approx(1, rel=0.05), "the embedding's output"
    assert all(
        0.8 < variance < 2.2 for variance in seen["ln_1"] + seen["attn.c_attn"] + seen["mlp.c_fc"]
    )
    assert float(x.var()) < 2.5
    assert not model.wte.weight[509:].any()
    logits = model.head(x)
    assert float(logits.std()) < 2
    assert torch.allclose(logits, (x @ model.wte.weight.t())[..., :509] / 16, atol=1e-5)


def test_the_defaults_are_gpt2():
    """Drawn here by hand, in the order of the parameters."""
    model, generator = made(GPT2), torch.Generator().manual_seed(5)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            std = 0.02 / math.sqrt(6) if name.endswith("c_proj.weight") else 0.02
            drawn = torch.randn(parameter.shape, generator=generator) * std
            assert (
                torch.equal(parameter[:61], drawn[:61])
                if name == "wte.weight"
                else torch.equal(parameter, drawn)
            )
        else:
            assert torch.equal(
                parameter, torch.full_like(parameter, 0.0 if name.endswith("bias") else 1.0)
            )
    x = model.hidden(tokens())
    assert torch.equal(
        model.head(x), torch.nn.functional.linear(model.ln_f(x), model.wte.weight)[..., :61]
    )
    assert list(model.state_dict()) == [name for name, _ in model.named_parameters()]


def test_export_refuses_what_transformers_cannot_compute_and_folds_what_it_can(tmp_path):
    pytest.importorskip("transformers")
    with pytest.raises(UsageError, match="no layer norms"):
        write_hf(made(BARE), "{}", 0, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    scaled = made(replace(GPT2, init="unit"))
    torch.nn.init.normal_(scaled.ln_f.bias)
    plain = made(GPT2)
    exported = to_hf(scaled, 0).state_dict()
    weights = {name.removeprefix("transformer."): tensor for name, tensor in exported.items()}
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            tensor = (
                weights[name].t()
                if parameter.dim() == 2 and not name.startswith("w")
                else weights[name]
            )
            parameter[: tensor.shape[0]].copy_(tensor)
        assert torch.allclose(plain(tokens()), scaled(tokens()), atol=1e-6)


@pytest.mark.parametrize("change", [{"norm": "none"}, {"init": "unit"}], ids=["norm", "init"])
def test_growth_in_width_is_refused(change):
    recipe = tiny_recipe()
    stages = (
        Stage(model=StageModel(n_head=1, n_embd=8), switch=Switch(rule="steps", value=2)),
        Stage(operators=("width",)),
    )
    assert replace(recipe, stages=stages)
    with pytest.raises(ValueError, match="operator width does not keep the loss"):
        replace(recipe, stages=stages, model=replace(recipe.model, **change))
