"""GPT-2 as `transformers` stores it: weights, configuration and tokenizer, both ways and without loss.

Parameter names are the same on both sides. What differs: transformers' linear layers are `Conv1D` with weights (in,
out) where ours are (out, in); its embedding has no padding rows; its names begin with "transformer." in files that it
writes itself and without it in the files OpenAI's weights were released in. Nothing here imports transformers: the
formats are safetensors and JSON.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from efftrain_cli.foundation import bounds
from efftrain_cli.foundation.console import say
from efftrain_cli.foundation.errors import CheckpointError, DiskError, UsageError
from efftrain_cli.foundation.files import made_beside
from efftrain_cli.foundation.records import parse_json, read_small_text
from efftrain_cli.model.config import GPTConfig
from efftrain_cli.model.flops import parameter_count
from efftrain_cli.model.gpt import GPT

CONV1D_WEIGHTS = (
    "attn.c_attn.weight",
    "attn.c_proj.weight",
    "mlp.c_fc.weight",
    "mlp.c_proj.weight",
)
"""Ends of the names whose matrices transformers stores transposed."""

READABLE = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
"""Types of tensors that are read as weights: others hold codes that need a scale."""

NOT_WEIGHTS = (".attn.bias", ".attn.masked_bias")
"""Ends of the names of causal masks that older files carry beside the weights."""

ARCHITECTURE: dict[str, tuple[Any, ...]] = {
    "model_type": ("gpt2",),
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
    "layer_norm_epsilon": (1e-5,),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "reorder_and_upcast_attn": (False,),
    "add_cross_attention": (False,),
    "tie_word_embeddings": (True,),
}
"""config.json's keys that must have one of these values, or be absent, for our GPT to compute the same function."""


LARGEST = {
    "n_layer": bounds.LAYERS,
    "n_head": bounds.HEADS,
    "n_embd": bounds.WIDTH,
    "n_positions": bounds.CONTEXT,
    "vocab_size": bounds.VOCABULARY,
}
"""config.json's sizes and the largest that are believed."""


def to_hf(model: GPT) -> dict[str, Tensor]:
    """The weights under transformers' names, fp32 on the CPU; the embedding is (vocab_size, n_embd), padding cut off. A
    scale of the logits becomes the last layer norm's.

    Raises:
        UsageError: transformers' GPT-2 cannot compute what this model computes.
    """
    if model.config.norm == "none":
        raise UsageError(
            'the model has no layer norms (model.norm = "none"), and the GPT-2 of transformers always normalizes before attention, MLP '
            "and head: no weights make it compute the same\nuse the run itself: efftrain sample, efftrain eval-zeroshot"
        )
    tensors = {}
    for name, parameter in model.named_parameters():
        tensor = parameter.detach().to("cpu", torch.float32)
        if name == "wte.weight":
            tensor = tensor[: model.config.vocab_size]
        elif name.endswith(CONV1D_WEIGHTS):
            tensor = tensor.t()
        elif name.startswith("ln_f."):
            tensor = tensor * model.config.logit_scale
        tensors[f"transformer.{name}"] = tensor.contiguous()
    return tensors


def from_hf(tensors: Mapping[str, Tensor], config: GPTConfig) -> dict[str, Tensor]:
    """The weights under our names and in our shapes, fp32; padding rows of the embedding are 0.

    Raises:
        CheckpointError: tensors are missing, left over or of another shape (all are named), or the output matrix is not
            the embedding.
    """
    given = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    head = given.pop("lm_head.weight", None)
    if head is not None and "wte.weight" in given and not torch.equal(head, given["wte.weight"]):
        tied = "this GPT-2 ties them, so it cannot hold these weights"
        raise CheckpointError(f"lm_head.weight differs from wte.weight: {tied}")
    with torch.device("meta"):
        expected = dict(GPT(config).named_parameters())
    problems = []
    converted = {}
    for name, parameter in expected.items():
        tensor = given.pop(name, None)
        if tensor is None:
            problems.append(f"{name} is missing")
            continue
        shape = tuple(parameter.shape)
        if name == "wte.weight":
            shape = (config.vocab_size, config.n_embd)
        elif name.endswith(CONV1D_WEIGHTS):
            shape = (shape[1], shape[0])
        if tuple(tensor.shape) != shape:
            problems.append(f"{name} is {tuple(tensor.shape)}, not {shape} as config.json says")
            continue
        if name == "wte.weight":
            padding = tensor.new_zeros(config.padded_vocab_size - config.vocab_size, config.n_embd)
            tensor = torch.cat([tensor, padding])
        elif name.endswith(CONV1D_WEIGHTS):
            tensor = tensor.t()
        converted[name] = tensor.contiguous()
    problems += [
        f"{name} has no place in GPT-2" for name in sorted(given) if not name.endswith(NOT_WEIGHTS)
    ]
    if problems:
        raise CheckpointError(
            "the weights are not those of a GPT-2 of this configuration: " + "; ".join(problems)
        )
    return converted


def to_hf_config(config: GPTConfig, eot_id: int) -> dict[str, Any]:
    """config.json of a GPT2LMHeadModel that computes what this GPT computes. Dropout is 0: there is none in
    training."""
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": config.vocab_size,
        "n_positions": config.seq_len,
        "n_ctx": config.seq_len,
        "n_embd": config.n_embd,
        "n_layer": config.n_layer,
        "n_head": config.n_head,
        "n_inner": None,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "initializer_range": 0.02,
        "scale_attn_weights": True,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "tie_word_embeddings": True,
        "bos_token_id": eot_id,
        "eos_token_id": eot_id,
        "torch_dtype": "float32",
        "use_cache": True,
    }


def from_hf_config(hf_config: Mapping[str, Any], vocab_multiple: int = 64) -> GPTConfig:
    """The GPT's shape in a config.json, the vocabulary padded to a multiple of `vocab_multiple`.

    Raises:
        CheckpointError: it describes another function than this GPT computes; every such key is named.
    """
    problems = [
        f"{key} = {json.dumps(hf_config[key])} (must be {' or '.join(json.dumps(value) for value in allowed)})"
        for key, allowed in ARCHITECTURE.items()
        if key in hf_config and not any(hf_config[key] == value for value in allowed)
    ]
    sizes: dict[str, int] = {}
    for key, largest in LARGEST.items():
        value = hf_config.get(key)
        if isinstance(value, int) and not isinstance(value, bool) and 0 < value <= largest:
            sizes[key] = value
        else:
            problems.append(
                f"{key} = {json.dumps(value)[:100]} (must be a whole number from 1 to {largest:,})"
            )
    if hf_config.get("n_inner") not in (None, 4 * sizes.get("n_embd", 0)):
        problems.append(f"n_inner = {hf_config['n_inner']} (must be 4 x n_embd or null)")
    if "n_embd" in sizes and "n_head" in sizes and sizes["n_embd"] % sizes["n_head"]:
        problems.append(f"n_head = {sizes['n_head']} (must divide n_embd = {sizes['n_embd']})")
    if problems:
        raise CheckpointError(
            "config.json does not describe a GPT-2 that efftrain can compute: "
            + "; ".join(problems)
        )
    return GPTConfig(
        n_layer=sizes["n_layer"],
        n_head=sizes["n_head"],
        n_embd=sizes["n_embd"],
        seq_len=sizes["n_positions"],
        vocab_size=sizes["vocab_size"],
        padded_vocab_size=-(-sizes["vocab_size"] // vocab_multiple) * vocab_multiple,
    )


EXPORTED_FROM = "efftrain.json"
"""File of an export that says which checkpoint it was."""


def write_hf(
    model: GPT,
    tokenizer_json: str,
    eot_id: int,
    directory: Path,
    *,
    card: str | None = None,
    exported_from: Mapping[str, Any] | None = None,
) -> None:
    """Writes a directory that `AutoModelForCausalLM` and `AutoTokenizer` load without network.

    `tokenizer_json` is the text of a `tokenizers` file; it is stored as it is, so that both sides split text alike.

    Args:
        card: README.md, the model card.
        exported_from: content of efftrain.json.

    Raises:
        UsageError: the directory holds files already.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise UsageError(f"{directory} exists and is not an empty directory; name another one")
    names = {
        token["id"]: token["content"]
        for token in json.loads(tokenizer_json).get("added_tokens", [])
    }
    eot = names.get(eot_id)
    tokenizer_config = {
        # The plain class takes tokenizer.json as it is; GPT2Tokenizer would build its own from vocabulary and merges.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": model.config.seq_len,
        "clean_up_tokenization_spaces": False,
    }
    if eot is not None:
        tokenizer_config |= {"bos_token": eot, "eos_token": eot, "unk_token": eot}
    texts = {
        "tokenizer.json": tokenizer_json,
        "config.json": _json_text(to_hf_config(model.config, eot_id)),
        "generation_config.json": _json_text(
            {"bos_token_id": eot_id, "eos_token_id": eot_id, "_from_model_config": True}
        ),
        "tokenizer_config.json": _json_text(tokenizer_config),
    }
    if exported_from is not None:
        texts[EXPORTED_FROM] = _json_text(exported_from)
    if card is not None:
        texts["README.md"] = card
    # safetensors writes with the modes of a temporary file; what is exported is meant to be read as other new files
    # are.
    umask = os.umask(0)
    os.umask(umask)
    directory.parent.mkdir(parents=True, exist_ok=True)
    with made_beside(directory) as partial:
        partial.mkdir()
        weights = partial / "model.safetensors"
        try:
            save_file(to_hf(model), weights, metadata={"format": "pt"})
        except SafetensorError as error:
            raise DiskError(
                f"{directory / weights.name} cannot be written: {error}\n  make room, and export again"
            ) from None
        weights.chmod(0o666 & ~umask)
        for name, text in texts.items():
            (partial / name).write_text(text, encoding="utf-8")


def _json_text(content: Mapping[str, Any]) -> str:
    return json.dumps(content, indent=2) + "\n"


def read_hf(directory: Path, vocab_multiple: int = 64) -> tuple[GPT, dict[str, Any]]:
    """The GPT in a directory with config.json and model.safetensors (whole or in shards), and its config.json.

    Raises:
        CheckpointError: a file is missing or unreadable, or holds another model than this GPT-2.
    """
    path = directory / "config.json"
    way = "name a directory as transformers' save_pretrained writes it"
    try:
        hf_config = parse_json(path, read_small_text(path, way), way)
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing\n  {way}") from None
    if not isinstance(hf_config, dict):
        raise CheckpointError(f"{path} is not a JSON object")
    config = from_hf_config(hf_config, vocab_multiple)
    tensors = read_hf_tensors(directory)
    _check_size(config, tensors, path)
    doubles = sum(tensor.dtype == torch.float64 for tensor in tensors.values())
    if doubles:
        say(f"note: {doubles} of {len(tensors)} tensors are float64 and are rounded to fp32")
    tensors = {
        name: _as_fp32(tensor, f"{directory}: {name}")
        for name, tensor in tensors.items()
        if not name.endswith(NOT_WEIGHTS)
    }
    model = GPT(config)
    model.load_state_dict(from_hf(tensors, config))
    return model, hf_config


def _as_fp32(tensor: Tensor, name: str) -> Tensor:
    """Return a weight in fp32.

    Raises:
        CheckpointError: it is of a type that is no weight, or not finite in fp32; the message begins with `name`.
    """
    if tensor.dtype not in READABLE:
        raise CheckpointError(
            f"{name} is {str(tensor.dtype).removeprefix('torch.')}, which no weight is read from; nothing was imported\n"
            "  save the model in fp32 or bf16 and import that"
        )
    weight = tensor.to(torch.float32)
    if not weight.isfinite().all():
        beyond = bool(tensor.isfinite().all())
        what = "numbers beyond fp32" if beyond else "NaN or infinity"
        raise CheckpointError(f"{name}: the weights hold {what}; nothing was imported")
    return weight


def _check_size(config: GPTConfig, tensors: Mapping[str, Tensor], path: Path) -> None:
    """Refuses a shape that the weights do not have before anything of that size is made."""
    layers = {found[1] for name in tensors if (found := re.search(r"(?:^|\.)h\.(\d+)\.", name))}
    if len(layers) != config.n_layer:
        raise CheckpointError(
            f"{path} says n_layer = {config.n_layer}, the weights have {len(layers)} layers"
        )
    described = parameter_count(replace(config, padded_vocab_size=config.vocab_size))
    there = sum(tensor.numel() for tensor in tensors.values())
    if described > 2 * there:
        raise CheckpointError(
            f"{path} describes a model of {described:,} parameters, the weights are {there:,}"
        )


def read_hf_tensors(directory: Path) -> dict[str, Tensor]:
    """Every tensor of model.safetensors, or of the shards that model.safetensors.index.json names.

    Raises:
        CheckpointError: there are none, or one is damaged. Pickled weights (pytorch_model.bin) are never opened:
            loading a pickle can run code.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    index = directory / "model.safetensors.index.json"
    names = ["model.safetensors"]
    if not (directory / names[0]).exists() and index.exists():
        way = "download it again"
        try:
            weight_map = parse_json(index, read_small_text(index, way), way)["weight_map"]
            names = sorted(set(weight_map.values()))
        except (KeyError, AttributeError, TypeError) as error:
            raise CheckpointError(f"{index} is not an index of weights: {error!r}") from None
        if any(not isinstance(name, str) or Path(name).name != name for name in names):
            raise CheckpointError(f"{index} names files outside its directory")
    tensors: dict[str, Tensor] = {}
    for name in names:
        path = directory / name
        if not path.is_file():
            way_out = (
                "; pytorch_model.bin is a pickle, which is never opened here: convert it with transformers' "
                "AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(NEW_DIR)"
            )
            raise CheckpointError(
                f"{path} is missing{way_out if (directory / 'pytorch_model.bin').exists() else ''}"
            )
        try:
            tensors |= load_file(path)
        except (SafetensorError, OSError, KeyError, AttributeError) as error:
            raise CheckpointError(f"{path} cannot be read as safetensors: {error}") from None
    return tensors
