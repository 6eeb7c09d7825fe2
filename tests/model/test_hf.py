"""Our GPT against transformers' GPT-2: the same numbers, both ways, in the same files."""

from __future__ import annotations

import dataclasses
import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from efftrain_cli.foundation.errors import CheckpointError, UsageError
from efftrain_cli.model.generate import GREEDY, generate
from efftrain_cli.model.gpt import GPT, GPTConfig
from tests.tiny import config_of, drawn
from tests.trained_run import random_gpt

transformers = pytest.importorskip("transformers")

from efftrain_cli.model.hf import (  # noqa: E402
    CONV1D_WEIGHTS,
    from_hf_config,
    hf_config,
    read_hf,
    to_hf,
    write_hf,
)

CONFIG = config_of(n_layer=3, n_head=4, n_embd=32, seq_len=24, vocab_size=101)


def random_ours(config: GPTConfig = CONFIG) -> GPT:
    return random_gpt(config, spread=0.2, seed=3)


def keys_of(config: GPTConfig) -> dict[str, Any]:
    """The keys of an export's config.json."""
    return hf_config(config, eot_id=100).to_dict()


def tensors_of(model: GPT) -> dict[str, torch.Tensor]:
    """The tensors of an export's model.safetensors."""
    tensors = to_hf(model, 100).state_dict()
    if model.config.tied:
        del tensors["lm_head.weight"]
    return {name: tensor.contiguous() for name, tensor in tensors.items()}


@pytest.fixture(scope="module")
def pair():
    """(our GPT, transformers' GPT-2 with the same weights)."""
    ours = random_ours()
    return ours, to_hf(ours, 100)


def test_logits_loss_and_gradients_agree(pair):
    ours, theirs = pair
    tokens = drawn(CONFIG.vocab_size, 2, CONFIG.seq_len + 1, seed=5)
    inputs, targets = tokens[:, :-1], tokens[:, 1:]

    logits = ours(inputs)
    reference = theirs(inputs).logits
    assert logits.shape == reference.shape == (2, CONFIG.seq_len, CONFIG.vocab_size)
    assert torch.allclose(logits, reference, atol=1e-4)

    loss = ours.loss_sum(inputs, targets) / targets.numel()
    reference_loss = torch.nn.functional.cross_entropy(reference.flatten(0, 1), targets.flatten())
    assert abs(loss.item() - reference_loss.item()) < 1e-4
    # transformers shifts labels itself: its loss over all the tokens leaves out the one target it
    # has no input for.
    own_shift = theirs(inputs, labels=inputs).loss
    assert (
        abs(
            own_shift.item()
            - (ours.loss_sum(inputs[:, :-1], inputs[:, 1:]) / inputs[:, 1:].numel()).item()
        )
        < 1e-4
    )

    ours.zero_grad()
    theirs.zero_grad()
    loss.backward()
    reference_loss.backward()
    gradients = {name: parameter.grad for name, parameter in theirs.transformer.named_parameters()}
    assert gradients.keys() == dict(ours.named_parameters()).keys()
    for name, parameter in ours.named_parameters():
        expected = gradients[name].t() if name.endswith(CONV1D_WEIGHTS) else gradients[name]
        found = parameter.grad[: CONFIG.vocab_size] if name == "wte.weight" else parameter.grad
        assert expected.abs().max() > 0, name
        assert torch.allclose(found, expected, atol=1e-4), name
    assert not ours.wte.weight.grad[CONFIG.vocab_size :].any()  # padding gets no gradient


def test_the_released_format_is_read(tmp_path):
    """No "transformer." before the names, causal masks among the weights, as in the files released
    with GPT-2."""
    from safetensors.torch import save_file

    ours = random_ours()
    tensors = {
        name.removeprefix("transformer."): tensor for name, tensor in tensors_of(ours).items()
    }
    tensors["h.0.attn.bias"] = torch.ones(1, 1, CONFIG.seq_len, CONFIG.seq_len).tril()
    save_file(tensors, tmp_path / "model.safetensors")
    config = keys_of(CONFIG)
    for key in (
        "tie_word_embeddings",
        "scale_attn_weights",
        "n_inner",
    ):  # absent from the released config.json
        del config[key]
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = read_hf(tmp_path)
    assert model.config == CONFIG
    tokens = torch.arange(20)[None]
    assert torch.equal(model(tokens), ours(tokens))


def test_shards_are_read(tmp_path):
    from safetensors.torch import save_file

    tensors = tensors_of(random_ours())
    names = sorted(tensors)
    for i, part in enumerate((names[:10], names[10:])):
        save_file({name: tensors[name] for name in part}, tmp_path / f"model-{i}.safetensors")
    weight_map = {name: f"model-{int(i >= 10)}.safetensors" for i, name in enumerate(names)}
    (tmp_path / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )
    (tmp_path / "config.json").write_text(json.dumps(keys_of(CONFIG)))
    model = read_hf(tmp_path)
    assert torch.equal(model.wpe.weight, tensors["transformer.wpe.weight"])


def test_what_is_no_gpt2_is_refused_with_every_reason(tmp_path):
    wrong = {
        "activation_function": "relu",
        "scale_attn_weights": False,
        "quantization_config": {},
        "scale_attn_by_inverse_layer_idx": True,
        "reorder_and_upcast_attn": True,
        "add_cross_attention": True,
        "tie_word_embeddings": False,
        "a_key_of_a_later_release": 1,
    }
    with pytest.raises(CheckpointError) as error:
        from_hf_config(keys_of(CONFIG) | wrong)
    for words in (
        "activation_function = 'relu' (must be 'gelu_new')",
        "scale_attn_weights = False (must be True)",
        *(f"{key} = " for key in wrong),
    ):
        assert words in str(error.value)
    with pytest.raises(CheckpointError, match=r"n_head must divide model\.n_embd = 32"):
        from_hf_config(keys_of(CONFIG) | {"n_head": 5})


@pytest.mark.parametrize(
    "change, words",
    [
        ({"transformer.ln_f.bias": None}, "missing_keys: .*ln_f.bias"),
        ({"transformer.wpe.weight": torch.zeros(3, 32)}, "mismatched_keys: .*wpe.weight"),
        ({"transformer.surprise": torch.zeros(1)}, "unexpected_keys: .*surprise"),
        ({"lm_head.weight": torch.ones(101, 32)}, "ties them"),
        ({"transformer.ln_f.bias": torch.ones(32, dtype=torch.int8)}, "ln_f.bias is I8"),
    ],
    ids=["missing", "other shape", "left over", "not tied", "int8"],
)
def test_weights_that_do_not_fit_are_refused_by_name(exported, change, words):
    from safetensors.torch import load_file, save_file

    tensors = load_file(exported / "model.safetensors") | change
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, exported / "model.safetensors")
    with pytest.raises(CheckpointError, match=words):
        read_hf(exported)


def test_a_pickle_is_never_opened(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(keys_of(CONFIG)))
    (tmp_path / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch canary'\ntR.")
    with pytest.raises(CheckpointError, match="pickle"):
        read_hf(tmp_path)


@pytest.fixture(scope="module")
def tokenizer_json() -> str:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(
        ["the cat sat on the mat, and the dog sat on the log. "] * 20, trainer
    )
    return tokenizer.to_str()


def test_an_export_loads_in_transformers_offline(tmp_path, tokenizer_json, monkeypatch):
    """F48: equal logits and equal greedy text, with the Hub switched off."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(tokenizer_json)
    size = tokenizer.get_vocab_size()
    eot_id = tokenizer.token_to_id("<|endoftext|>")
    config = config_of(seq_len=96, vocab_size=size)
    ours = random_ours(config)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    write_hf(ours, tokenizer_json, eot_id, tmp_path / "export")

    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "export").eval()
    their_tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "export")
    for text in ("the dog sat", " and\n\tthe  mat ", "Übergröße 猫", "x<|endoftext|>y"):
        assert (
            their_tokenizer(text)["input_ids"]
            == tokenizer.encode(text, add_special_tokens=False).ids
        )
        ids = their_tokenizer(text)["input_ids"]
        assert their_tokenizer.decode(ids) == tokenizer.decode(ids, skip_special_tokens=False)
    assert their_tokenizer.eos_token_id == eot_id
    tokens = torch.tensor([tokenizer.encode("the cat sat on the log").ids])
    assert torch.allclose(ours(tokens), theirs(tokens).logits, atol=1e-4)

    # Greedy text of both, each with its own loop and cache.
    written = theirs.generate(
        tokens, max_new_tokens=64, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    ours_written = [int(token) for token in islice(generate(ours, tokens, GREEDY), 64)]
    assert written[0, tokens.shape[1] :].tolist() == ours_written

    with pytest.raises(UsageError, match="empty"):
        write_hf(ours, tokenizer_json, eot_id, tmp_path / "export")
    model = read_hf(tmp_path / "export")
    assert torch.equal(model(tokens), ours(tokens))


# --- hostile or broken directories ----------------------------------------------------------------


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    """A directory with weights and config.json, without a tokenizer."""
    from safetensors.torch import save_file

    (tmp_path / "config.json").write_text(json.dumps(keys_of(CONFIG)))
    save_file(tensors_of(random_ours()), tmp_path / "model.safetensors")
    read_hf(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "changed",
    [
        {"n_layer": 10**9},
        {"n_layer": 2},
        {"n_layer": True},
        {"n_embd": 32 * 10**6},
        {"n_positions": 10**12},
        {"vocab_size": 3 * 10**9},
        {"n_embd": None},
        {"n_head": [4]},
        {"activation_function": ["gelu_new"]},
        {"n_inner": "x"},
    ],
    ids=str,
)
def test_a_hostile_config_is_refused_before_anything_of_its_size_is_made(exported, changed):
    """F74: exit 3."""
    config = json.loads((exported / "config.json").read_text())
    (exported / "config.json").write_text(json.dumps(config | changed))
    with pytest.raises(CheckpointError):
        read_hf(exported)


@pytest.mark.parametrize("content", ["[]", "null", "3", "[" * 100_000, "", "\ufffe"])
@pytest.mark.parametrize("file", ["config.json", "model.safetensors.index.json"])
def test_a_file_that_is_no_config_and_no_index(exported, file, content):
    """F74."""
    if file != "config.json":
        (exported / "model.safetensors").rename(exported / "part.safetensors")
    (exported / file).write_text(content, encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"config\.json|cannot be read"):
        read_hf(exported)


@pytest.mark.parametrize(
    "names", [["a", ["b"]], [3], [None], ["../model.safetensors"], [{}]], ids=str
)
def test_an_index_that_names_no_files(exported, names):
    """F74."""
    (exported / "model.safetensors").rename(exported / "part.safetensors")
    index = {"weight_map": {str(number): name for number, name in enumerate(names)}}
    (exported / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError):
        read_hf(exported)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_not_imported(exported, value):
    """F75: the tensor is named."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(exported / "model.safetensors")
    name = next(name for name in tensors if "h.1.mlp.c_fc.bias" in name)
    tensors[name][3] = value
    save_file(tensors, exported / "model.safetensors")
    with pytest.raises(
        CheckpointError, match=r"h\.1\.mlp\.c_fc\.bias: the weights hold NaN or infinity"
    ):
        read_hf(exported)


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
