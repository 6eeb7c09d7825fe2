"""Our GPT against GPT-2, Llama and Qwen3 of transformers: the same numbers, both ways, in the same
files."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import replace
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from efftrain_cli.data.tokenizer import train_tokenizer
from efftrain_cli.foundation.errors import CheckpointError, UsageError
from efftrain_cli.model.generate import GREEDY, generate
from efftrain_cli.model.gpt import GPT, GPTConfig
from tests.tiny import LLAMA_SHAPE, config_of, drawn
from tests.trained_run import random_gpt

transformers = pytest.importorskip("transformers")

from safetensors.torch import load_file, save_file  # noqa: E402

from efftrain_cli.model.hf import (  # noqa: E402
    hf_config,
    read_hf,
    read_hf_config,
    to_hf,
    write_hf,
)

CONFIG = config_of(n_layer=3, n_head=4, n_embd=32, seq_len=24, vocab_size=101)
LLAMA = config_of(n_head=4, n_embd=32, seq_len=48, vocab_size=101, **LLAMA_SHAPE)
SHAPES = {
    "gpt2": replace(CONFIG, norm_eps=1e-6, d_ff=20),
    "untied": replace(LLAMA, tied=False, rope_theta=5e5, norm_eps=1e-6),
    "groups": replace(LLAMA, n_kv_head=2, d_ff=40),
    "wide heads": replace(LLAMA, n_kv_head=1, head_dim=12),
    "qwen3": replace(LLAMA, qk_norm=True, n_kv_head=2, head_dim=16, n_head=6, tied=False),
    "qwen3 tied": replace(LLAMA, qk_norm=True, norm_eps=1e-6),
}


def random_model(config: GPTConfig = CONFIG) -> GPT:
    """Weights of trained size, gains around 1, and rubbish in the padding rows."""
    model = random_gpt(config, spread=0.2, seed=3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("weight") and parameter.dim() == 1:
                parameter += 1
        model.wte.weight[config.vocab_size :] = 9.0
        model.head_weight[config.vocab_size :] = 9.0
    return model


def keys_of(config: GPTConfig) -> dict[str, Any]:
    """The keys of an export's config.json."""
    return hf_config(config, eot_id=100).to_dict()


def tensors_of(model: GPT) -> dict[str, torch.Tensor]:
    """The tensors of an export's model.safetensors."""
    tensors = to_hf(model, 100).state_dict()
    if model.config.tied:
        del tensors["lm_head.weight"]
    return {name: tensor.contiguous() for name, tensor in tensors.items()}


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    """A directory with weights and config.json, without a tokenizer."""
    (tmp_path / "config.json").write_text(json.dumps(keys_of(CONFIG)))
    save_file(tensors_of(random_model()), tmp_path / "model.safetensors")
    return tmp_path


# --- both ways ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SHAPES)
def test_logits_weights_and_shape_survive_both_ways(tmp_path, name):
    config = SHAPES[name]
    ours = random_model(config)
    write_hf(ours, "{}", 100, tmp_path / "hf")
    assert read_hf_config(tmp_path / "hf") == config
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    family, tolerance = "LlamaForCausalLM", 1e-5
    if config.qk_norm:
        family = "Qwen3ForCausalLM"
    if config.positions == "learned":
        family, tolerance = "GPT2LMHeadModel", 1e-4
    assert type(theirs).__name__ == family
    tokens = drawn(101, 2, config.seq_len, seed=5)
    with torch.no_grad():
        found, expected = ours(tokens), theirs(tokens).logits
    assert found.shape == expected.shape == (2, config.seq_len, 101)
    assert (found - expected).abs().max() <= tolerance
    back = dict(read_hf(tmp_path / "hf").named_parameters())
    for weight, parameter in ours.named_parameters():
        table = weight in ("wte.weight", "lm_head.weight")
        rows = config.vocab_size if table else len(parameter)
        assert torch.equal(back[weight][:rows], parameter[:rows]), weight
        assert not back[weight][rows:].any()


def test_the_released_format_is_read(exported):
    """No "transformer." before the names, causal masks among the weights, fewer keys, and several
    files, as released with GPT-2."""
    tensors = load_file(exported / "model.safetensors")
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    tensors["h.0.attn.bias"] = torch.ones(1, 1, CONFIG.seq_len, CONFIG.seq_len).tril()
    (exported / "model.safetensors").unlink()
    weight_map = {}
    for part, names in enumerate((sorted(tensors)[:10], sorted(tensors)[10:])):
        file = f"model-{part}.safetensors"
        save_file({name: tensors[name] for name in names}, exported / file)
        weight_map |= dict.fromkeys(names, file)
    index = json.dumps({"metadata": {}, "weight_map": weight_map})
    (exported / "model.safetensors.index.json").write_text(index)
    keys = keys_of(CONFIG)
    for key in ("tie_word_embeddings", "scale_attn_weights", "n_inner"):
        del keys[key]
    (exported / "config.json").write_text(json.dumps(keys))
    model = read_hf(exported)
    assert model.config == CONFIG
    tokens = torch.arange(20)[None]
    assert torch.equal(model(tokens), random_model()(tokens))


def test_what_transformers_saved_is_read(tmp_path):
    """By transformers' own class and names of keys, and of keys of before version 5; bf16 weights
    as they are."""
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
    theirs = transformers.LlamaForCausalLM(settings).bfloat16().eval()
    theirs.save_pretrained(tmp_path)
    theirs.float()
    written = json.loads((tmp_path / "config.json").read_text())
    old = {k: v for k, v in written.items() if k != "rope_parameters"} | {"rope_theta": 5e5}
    tokens = torch.arange(40)[None]
    for config in (written, old):
        (tmp_path / "config.json").write_text(json.dumps(config))
        ours = read_hf(tmp_path)
        assert (ours.config.rope_theta, ours.config.tied) == (5e5, False)
        assert (ours(tokens) - theirs(tokens).logits).abs().max() <= 1e-5


def test_an_export_loads_in_transformers_offline(tmp_path, monkeypatch):
    """F48: equal ids, logits and greedy text, with the Hub switched off."""
    tokenizer = train_tokenizer(300, ["the cat sat on the mat, the dog on the log. "] * 20)
    ours = random_model(config_of(seq_len=96, vocab_size=tokenizer.vocab_size))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    text = tokenizer.backend.to_str()
    write_hf(ours, text, tokenizer.eot_id, tmp_path / "export")
    settings = (tmp_path / "export/tokenizer_config.json").read_text()
    assert '\n  "model_max_length": 96,\n' in settings

    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "export").eval()
    their_tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "export")
    for text in ("the dog sat", " and\n\tthe  mat .", "Übergröße 猫"):
        ids = their_tokenizer(text)["input_ids"]
        assert ids == tokenizer.encode([text])[0].tolist()
        assert their_tokenizer.decode(ids) == tokenizer.decode(ids)
    assert their_tokenizer.eos_token_id == tokenizer.eot_id
    tokens = torch.tensor([tokenizer.encode(["the cat sat on the log"])[0].tolist()])
    assert torch.allclose(ours(tokens), theirs(tokens).logits, atol=1e-4)
    written = theirs.generate(
        tokens, max_new_tokens=64, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    ours_written = [int(token) for token in islice(generate(ours, tokens, GREEDY), 64)]
    assert written[0, tokens.shape[1] :].tolist() == ours_written
    with pytest.raises(UsageError, match="empty"):
        write_hf(ours, text, tokenizer.eot_id, tmp_path / "export")


# --- what an export cannot say --------------------------------------------------------------------

OTHER_VALUES = {
    "vocab_size": 102,
    "init": "hf",
    "n_kv_head": 2,
    "head_dim": 6,
    "d_ff": 40,
    "norm": "none",
    "mlp": "relu2",
    "positions": "rope",
    "bias": False,
    "tied": False,
    "qk_norm": True,
    "softcap": 5.0,
}
"""Other values than `CONFIG`'s; twice its own for any other field."""


@pytest.mark.parametrize("field", sorted(set(vars(CONFIG)) - {"padded_vocab_size", "rope_theta"}))
def test_every_field_of_a_shape_is_in_the_export_or_refused(field):
    """Also a field that a later version adds: none is left out of an export without a word."""
    value = vars(CONFIG)[field]
    other = OTHER_VALUES[field] if field in OTHER_VALUES else 2 * value
    changed = dataclasses.replace(CONFIG, **{field: other})
    try:
        tensors, config = tensors_of(GPT(changed)), keys_of(changed)
    except UsageError as error:
        assert f"model.{field}" in str(error) or field == "positions"
        return
    # The weights hold what an initialization drew.
    assert field == "init" or config != keys_of(CONFIG)
    assert set(tensors) - set(tensors_of(GPT(CONFIG))) == set() or field == "n_layer"


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"softcap": 15.0, "bias": True}, ["model.softcap = 15.0", "model.bias = true"]),
        ({"n_head": 5, "head_dim": 6}, ["not a multiple of the number of attention heads"]),
        ({"positions": "learned"}, ["gpt2", 'model.norm = "rmsnorm"', 'model.mlp = "swiglu"']),
    ],
)
def test_what_transformers_cannot_say_is_refused_by_name(changes, words):
    with pytest.raises(UsageError) as error:
        to_hf(random_model(replace(LLAMA, **changes)), 0)  # type: ignore[arg-type]
    assert all(word in str(error.value) for word in words)


# --- what this model cannot compute ---------------------------------------------------------------

BROKEN = {
    "gpt2": [
        {"n_layer": 10**9},
        {"n_layer": 2},
        {"n_positions": 10**12},
        {"n_embd": None},
        {"n_head": 5},
        {"activation_function": ["gelu_new"]},
    ],
    "llama": [
        {"hidden_act": "gelu"},
        {"attention_bias": True},
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, "factor": 32}},
        {"rope_scaling": {"rope_type": "yarn"}},
        {"rope_parameters": 3},
        {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
        {"pretraining_tp": 2},
        {"quantization_config": {"quant_method": "fp8"}},
        {"model_type": "mamba"},
        {"num_key_value_heads": 3},
        {"rms_norm_eps": 1000 * "x"},
        {"layer_types": ["sliding_attention"]},
    ],
}


@pytest.mark.parametrize("family", BROKEN)
def test_a_config_of_another_model_is_refused_before_anything_of_its_size_is_made(exported, family):
    """F74: exit 3."""
    keys = keys_of(CONFIG if family == "gpt2" else LLAMA)
    for changed in BROKEN[family]:
        (exported / "config.json").write_text(json.dumps(keys | changed))
        with pytest.raises(CheckpointError):
            read_hf(exported)
        if family == "llama":
            with pytest.raises(CheckpointError, match=r"config\.json does not describe") as refused:
                read_hf_config(exported)
            assert len(str(refused.value)) < len(str(exported)) + 700, "foreign words are cut"


def test_a_size_that_is_true_is_refused_though_transformers_takes_it(exported, monkeypatch):
    """As releases up to 5.6 do."""
    keys = keys_of(LLAMA) | {"num_hidden_layers": True}
    library = transformers.AutoConfig
    monkeypatch.setattr(library, "for_model", lambda **given: SimpleNamespace(**given))
    (exported / "config.json").write_text(json.dumps(keys))
    with pytest.raises(CheckpointError, match="n_layer is True, not a number"):
        read_hf_config(exported)


def test_every_reason_is_named(exported):
    wrong = {
        "activation_function": "relu",
        "scale_attn_weights": False,
        "quantization_config": {},
        "reorder_and_upcast_attn": True,
        "add_cross_attention": True,
        "tie_word_embeddings": False,
        "a_key_of_a_later_release": 1,
    }
    (exported / "config.json").write_text(json.dumps(keys_of(CONFIG) | wrong))
    with pytest.raises(CheckpointError) as error:
        read_hf(exported)
    assert "activation_function = 'relu' (must be 'gelu_new')" in str(error.value)
    assert all(f"{key} = " in str(error.value) for key in wrong)


@pytest.mark.parametrize(
    "change, words",
    [
        ({"transformer.ln_f.bias": None}, "missing_keys: .*ln_f.bias"),
        ({"transformer.wpe.weight": torch.zeros(3, 32)}, "mismatched_keys: .*wpe.weight"),
        ({"transformer.surprise": torch.zeros(1)}, "unexpected_keys: .*surprise"),
        ({"lm_head.weight": torch.ones(101, 32)}, "ties them"),
        ({"transformer.ln_f.bias": torch.ones(32, dtype=torch.int8)}, "ln_f.bias is I8"),
        ({"transformer.ln_f.bias": torch.ones(32).double()}, "ln_f.bias is F64"),
        ({"transformer.ln_f.bias": torch.full((32,), torch.inf)}, "ln_f.bias: .* NaN or infinity"),
    ],
    ids=["missing", "shape", "left over", "not tied", "int8", "fp64", "infinity"],
)
def test_weights_that_do_not_fit_are_refused_by_name(exported, change, words):
    """F75, F87."""
    tensors = load_file(exported / "model.safetensors") | change
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, exported / "model.safetensors")
    with pytest.raises(CheckpointError, match=words):
        read_hf(exported)


def test_a_pickle_is_never_opened(exported):
    (exported / "model.safetensors").unlink()
    (exported / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch canary'\ntR.")
    with pytest.raises(CheckpointError, match="pickle"):
        read_hf(exported)


def test_a_file_that_is_no_config_and_no_index(exported):
    """F74."""
    (exported / "model.safetensors").rename(exported / "part.safetensors")
    index = exported / "model.safetensors.index.json"
    for content in ("null", "[" * 100_000, '{"weight_map": {"a": ["b"]}}', "\ufffe"):
        index.write_text(content, encoding="utf-8")
        with pytest.raises(CheckpointError, match="cannot be read"):
            read_hf(exported)
    for content in ("[]", "[" * 100_000, "\ufffe"):
        (exported / "config.json").write_text(content, encoding="utf-8")
        with pytest.raises(CheckpointError, match=r"config\.json"):
            read_hf(exported)
