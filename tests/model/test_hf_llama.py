"""Llama and Qwen3 of transformers: the same logits in fp32, both ways, bit for bit in the files."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from efftrain_cli.foundation.errors import CheckpointError, UsageError
from efftrain_cli.model.config import GPTConfig
from efftrain_cli.model.gpt import GPT
from tests.model.test_hf import keys_of
from tests.tiny import LLAMA_SHAPE, config_of, drawn

transformers = pytest.importorskip("transformers")

from efftrain_cli.model.hf import from_hf_config, read_hf, to_hf, write_hf  # noqa: E402

LLAMA = config_of(n_head=4, n_embd=32, seq_len=48, vocab_size=101, **LLAMA_SHAPE)
SHAPES = {
    "tied": LLAMA,
    "untied": replace(LLAMA, tied=False, rope_theta=5e5, norm_eps=1e-6),
    "groups": replace(LLAMA, n_kv_head=2, d_ff=40),
    "wide heads": replace(LLAMA, n_kv_head=1, head_dim=12),
    "qwen3": replace(LLAMA, qk_norm=True, n_kv_head=2, head_dim=16, n_head=6, tied=False),
    "qwen3 tied": replace(LLAMA, qk_norm=True, norm_eps=1e-6),
}
by_shape = pytest.mark.parametrize("config", SHAPES.values(), ids=SHAPES)


def random_model(config: GPTConfig) -> GPT:
    """Weights of trained size, gains around 1, and rubbish in the padding rows."""
    model = GPT(config)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            drawn = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(0.15 * drawn if parameter.dim() > 1 else 1 + 0.2 * drawn)
        model.wte.weight[config.vocab_size :] = 9.0
        model.head_weight[config.vocab_size :] = 9.0
    return model


@by_shape
def test_logits_are_transformers_own(config):
    ours = random_model(config)
    theirs = to_hf(ours, 100)
    name = "Qwen3" if config.qk_norm else "Llama"
    assert type(theirs).__name__ == f"{name}ForCausalLM"
    tokens = drawn(101, 2, 48, seed=5)
    with torch.no_grad():
        found, expected = ours(tokens), theirs(tokens).logits
    assert found.shape == expected.shape == (2, 48, 101)
    assert (found - expected).abs().max() <= 1e-5


PLAIN = config_of(n_layer=1, n_embd=8, seq_len=6, vocab_size=11)
GPT2 = {"gpt2": PLAIN, "gpt2 sizes": replace(PLAIN, norm_eps=1e-6, d_ff=20)}


@pytest.mark.parametrize("config", [*SHAPES.values(), *GPT2.values()], ids=[*SHAPES, *GPT2])
def test_weights_and_shape_survive_both_ways(config, tmp_path):
    ours = random_model(config)
    assert from_hf_config(keys_of(config)) == config
    write_hf(ours, "{}", 100, tmp_path / "hf")
    back = dict(read_hf(tmp_path / "hf").named_parameters())
    for name, parameter in ours.named_parameters():
        table = name in ("wte.weight", "lm_head.weight")
        rows = config.vocab_size if table else len(parameter)
        assert torch.equal(back[name][:rows], parameter[:rows]), name
        assert not back[name][rows:].any()


def test_what_transformers_saved_is_read(tmp_path):
    """By transformers' own class and names of keys, and of keys of before version 5."""
    settings = transformers.LlamaConfig(
        vocab_size=101,
        hidden_size=32,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=48,
        rope_parameters={"rope_type": "default", "rope_theta": 5e5},
    )
    theirs = transformers.LlamaForCausalLM(settings).eval()
    theirs.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    old = {k: v for k, v in written.items() if k != "rope_parameters"} | {"rope_theta": 5e5}
    tokens = torch.arange(40)[None]
    for config in (written, old):
        (tmp_path / "config.json").write_text(json.dumps(config))
        ours = read_hf(tmp_path)
        assert (ours.config.rope_theta, ours.config.tied) == (5e5, False)
        assert (ours(tokens) - theirs(tokens).logits).abs().max() <= 1e-5


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"mlp": "relu2"}, ['model.mlp = "relu2"', "Llama"]),
        ({"softcap": 15.0, "bias": True}, ["model.softcap = 15.0", "model.bias = true"]),
        ({"norm": "layernorm"}, ['model.norm = "layernorm"']),
        ({"n_head": 5, "head_dim": 6}, ["model.n_head = 5 (must divide n_embd without qk_norm)"]),
        ({"positions": "learned"}, ["GPT-2", 'model.norm = "rmsnorm"', 'model.mlp = "swiglu"']),
    ],
)
def test_what_transformers_cannot_say_is_refused_by_name(changes, words):
    with pytest.raises(UsageError) as error:
        to_hf(random_model(replace(LLAMA, **changes)), 0)  # type: ignore[arg-type]
    assert all(word in str(error.value) for word in words)


def test_a_gpt2_with_shared_keys_is_refused():
    with pytest.raises(UsageError, match=r"model\.n_kv_head = 1"):
        to_hf(GPT(replace(PLAIN, n_kv_head=1)), 0)


@pytest.mark.parametrize(
    "changed",
    [
        {"hidden_act": "gelu"},
        {"attention_bias": True},
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, "factor": 32}},
        {"rope_parameters": 3},
        {"rope_scaling": {"rope_type": "yarn"}},
        {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
        {"mlp_bias": True},
        {"pretraining_tp": 2},
        {"quantization_config": {"quant_method": "fp8"}},
        {"model_type": "mamba"},
        {"model_type": ["llama"]},
        {"num_key_value_heads": 3},
        {"head_dim": 7},
        {"num_hidden_layers": True},
        {"intermediate_size": None},
        {"rms_norm_eps": "x"},
        {"tie_word_embeddings": "yes"},
        {"layer_types": ["sliding_attention"]},
        {"layer_types": 1},
        {"layer_types": [["full_attention"]]},
    ],
    ids=str,
)
def test_what_this_model_cannot_compute_is_refused(changed):
    config = keys_of(LLAMA) | changed
    with pytest.raises(CheckpointError, match="describe"):
        from_hf_config(config)
