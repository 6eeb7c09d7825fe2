"""GPT-2, Llama and Qwen3 as `transformers` stores them: weights, configuration and tokenizer, both
ways and without loss.

GPT-2's parameter names are ours. Its linear layers are `Conv1D` with weights (in, out) where ours
are (out, in), and its names begin with "transformer." in files that transformers writes and without
it in those that OpenAI's weights were released in. Llama has q, k and v apart. No table there has
padding rows. Nothing here imports transformers: the formats are safetensors and JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from efftrain_cli.foundation import bounds
from efftrain_cli.foundation.console import say
from efftrain_cli.foundation.errors import CheckpointError, UsageError
from efftrain_cli.foundation.files import made_beside
from efftrain_cli.foundation.records import parse_json, read_small_text
from efftrain_cli.foundation.section import Blocks, Channels, Heads
from efftrain_cli.foundation.tensors import Tensors, read_tensors, write_tensors
from efftrain_cli.model.config import GPTConfig, pad_vocabulary, resize
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

NOT_WEIGHTS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")
"""Ends of the names of causal masks and wavelengths that older files carry beside the weights."""

LLAMA_NAMES = {
    "wte": ("model.embed_tokens",),
    "ln_1": ("input_layernorm",),
    "attn.c_attn": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attn.q_norm": ("self_attn.q_norm",),
    "attn.k_norm": ("self_attn.k_norm",),
    "attn.c_proj": ("self_attn.o_proj",),
    "ln_2": ("post_attention_layernorm",),
    "mlp.c_fc": ("mlp.gate_proj",),
    "mlp.c_up": ("mlp.up_proj",),
    "mlp.c_proj": ("mlp.down_proj",),
    "ln_f": ("model.norm",),
    "lm_head": ("lm_head",),
}
"""Our modules -> those of LlamaForCausalLM and Qwen3ForCausalLM; of a block without
"model.layers.N."."""

SAYS: dict[str, dict[str, Any]] = {
    "GPT-2": {
        "norm": "layernorm",
        "mlp": "gelu",
        "positions": "learned",
        "bias": True,
        "tied": True,
        "qk_norm": False,
        "softcap": None,
    },
    "Llama": {
        "norm": "rmsnorm",
        "mlp": "swiglu",
        "positions": "rope",
        "bias": False,
        "softcap": None,
    },
}
"""What transformers' classes can compute: fields of [model] that must have these values. Qwen3 is
Llama with norms of q and k."""

Vocabulary = Annotated[int, Field(ge=1, le=bounds.VOCABULARY)]
Context = Annotated[int, Field(ge=1, le=bounds.CONTEXT)]
Positive = Annotated[float, Field(gt=0)]
Off = Literal[False] | None
"""A switch that must be off; None: it is absent, which is off too."""


class _HfConfig(BaseModel):
    """Keys of a config.json, with the values that our GPT can compute. Other keys change nothing
    that it computes."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)


class _Gpt2(_HfConfig):
    """Config of GPT2LMHeadModel; defaults are that class's."""

    model_type: Literal["gpt2"] = "gpt2"
    vocab_size: Vocabulary
    n_positions: Context
    n_embd: Channels
    n_layer: Blocks
    n_head: Heads
    n_inner: Channels | None = None
    activation_function: Literal["gelu_new", "gelu_pytorch_tanh"] = "gelu_new"
    layer_norm_epsilon: Positive = 1e-5
    scale_attn_weights: Literal[True] = True
    scale_attn_by_inverse_layer_idx: Off = None
    reorder_and_upcast_attn: Off = None
    add_cross_attention: Off = None
    tie_word_embeddings: Literal[True] = True

    def shape(self, rows: int) -> GPTConfig:
        """Return the model's shape, its table padded to `rows`."""
        d_ff = self.n_inner
        if d_ff == 4 * self.n_embd:
            d_ff = None
        return GPTConfig(
            n_layer=self.n_layer,
            n_head=self.n_head,
            n_embd=self.n_embd,
            seq_len=self.n_positions,
            vocab_size=self.vocab_size,
            padded_vocab_size=rows,
            norm_eps=self.layer_norm_epsilon,
            d_ff=d_ff,
        )


class _Rope(_HfConfig):
    rope_type: Literal["default"] = "default"
    rope_theta: Positive | None = None
    partial_rotary_factor: Annotated[float, Field(ge=1, le=1)] | None = None


class _Llama(_HfConfig):
    """Config of LlamaForCausalLM and Qwen3ForCausalLM; defaults are LlamaForCausalLM's."""

    model_type: Literal["llama", "qwen3"]
    vocab_size: Vocabulary
    hidden_size: Channels
    intermediate_size: Channels
    num_hidden_layers: Blocks
    num_attention_heads: Heads
    num_key_value_heads: Heads | None = None
    head_dim: Channels | None = None
    hidden_act: Literal["silu"] = "silu"
    max_position_embeddings: Context = 2048
    rms_norm_eps: Positive = 1e-6
    rope_parameters: _Rope = _Rope()
    rope_theta: Positive = 10_000.0
    """Where older versions of transformers write it."""
    rope_scaling: None = None
    tie_word_embeddings: bool = False
    attention_bias: Literal[False] = False
    mlp_bias: Off = None
    use_sliding_window: Off = None
    layer_types: list[Literal["full_attention"]] | None = None
    pretraining_tp: Literal[1] | None = None

    def shape(self, rows: int) -> GPTConfig:
        """Return the model's shape, its table padded to `rows`."""
        heads = self.num_attention_heads
        width = self.hidden_size
        shape = GPTConfig(
            n_layer=self.num_hidden_layers,
            n_head=heads,
            n_embd=width,
            seq_len=self.max_position_embeddings,
            vocab_size=self.vocab_size,
            padded_vocab_size=rows,
            tied=self.tie_word_embeddings,
            norm_eps=self.rms_norm_eps,
            rope_theta=self.rope_parameters.rope_theta or self.rope_theta,
            qk_norm=self.model_type == "qwen3",
            **SAYS["Llama"],
        )
        return resize(
            shape,
            n_head=heads,
            n_embd=width,
            kv_heads=self.num_key_value_heads or heads,
            head_size=self.head_dim or max(1, width // heads),
            ff_size=self.intermediate_size,
        )


QWEN3 = {
    "num_key_value_heads": 32,
    "head_dim": 128,
    "max_position_embeddings": 32768,
}
"""Defaults of Qwen3ForCausalLM that are not Llama's."""


def is_llama(config: GPTConfig) -> bool:
    """Return whether the model is stored as Llama or Qwen3; else as GPT-2."""
    return config.position_facts.rotates


def refuse_unsayable(config: GPTConfig) -> None:
    """Raise a UsageError, naming every field, if no class of transformers computes what this model
    computes."""
    name = "GPT-2"
    if is_llama(config):
        name = "Llama"
    wrong = []
    for field, needed in SAYS[name].items():
        value = vars(config)[field]
        if value != needed:
            wrong.append(f"model.{field} = {json.dumps(value)} (must be {json.dumps(needed)})")
    if name == "GPT-2":
        if config.kv_heads != config.n_head:
            wrong.append(f"model.n_kv_head = {config.kv_heads} (must be n_head)")
        if config.attention_size != config.n_embd:
            wrong.append(f"model.head_dim = {config.head_size} (must be n_embd / n_head)")
    elif config.n_embd % config.n_head and not config.qk_norm:
        wrong.append(f"model.n_head = {config.n_head} (must divide n_embd without qk_norm)")
    if wrong:
        model = "this model"
        if not config.norm_facts.vectors:
            model = "a model with no layer norms"
        raise UsageError(
            f"the {name} of transformers cannot compute {model}: {'; '.join(wrong)}\n"
            "use the run itself: efftrain sample, efftrain eval-zeroshot"
        )


def hf_names(name: str, config: GPTConfig) -> tuple[str, ...]:
    """Return the names of one of our parameters there, in the order of its rows: three of Llama's
    q, k and v."""
    if not is_llama(config):
        return (name,)
    module, _, end = name.rpartition(".")
    prefix = ""
    if module.startswith("h."):
        _, number, module = module.split(".", 2)
        prefix = f"model.layers.{number}."
    return tuple(f"{prefix}{theirs}.{end}" for theirs in LLAMA_NAMES[module])


def hf_rows(name: str, parameter: Tensor, config: GPTConfig) -> list[int]:
    """Return the rows of a parameter that are stored, for each of its `hf_names`."""
    if name in ("wte.weight", "lm_head.weight"):
        return [config.vocab_size]
    if is_llama(config) and "attn.c_attn." in name:
        return list(config.qkv_rows)
    return [len(parameter)]


def _is_transposed(name: str, config: GPTConfig) -> bool:
    return not is_llama(config) and name.endswith(CONV1D_WEIGHTS)


def to_hf(model: GPT) -> Tensors:
    """Return the weights under transformers' names, fp32 on the CPU.

    Tables are (vocab_size, n_embd), padding cut off. A scale of the logits becomes the last norm's.

    Raises:
        UsageError: no class of transformers computes what this model computes.
    """
    config = model.config
    refuse_unsayable(config)
    tensors = {}
    for name, parameter in model.named_parameters():
        tensor = parameter.detach().to("cpu", torch.float32)
        if name.startswith("ln_f."):
            tensor = tensor * config.logit_scale
        rows = hf_rows(name, parameter, config)
        parts = tensor[: sum(rows)].split(rows)
        for theirs, part in zip(hf_names(name, config), parts, strict=True):
            if _is_transposed(name, config):
                part = part.t()
            if not is_llama(config):
                theirs = f"transformer.{theirs}"
            # Parts of one tensor share its memory, which safetensors refuses.
            tensors[theirs] = part.clone(memory_format=torch.contiguous_format)
    return tensors


def from_hf(tensors: Tensors, config: GPTConfig) -> Tensors:
    """Return the weights in our names and shapes, fp32; padding rows of the embedding are 0.

    Raises:
        CheckpointError: tensors are missing, left over or of another shape (all are named), or the
            output matrix is not the embedding.
    """
    given = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    if config.tied:
        table = hf_names("wte.weight", config)[0]
        head = given.pop("lm_head.weight", None)
        if head is not None and table in given and not torch.equal(head, given[table]):
            tied = "this model ties them, so it cannot hold these weights"
            raise CheckpointError(f"lm_head.weight differs from {table}: {tied}")
    with torch.device("meta"):
        expected = dict(GPT(config).named_parameters())
    problems = []
    converted = {}
    for name, parameter in expected.items():
        transposed = _is_transposed(name, config)
        parts = []
        rows = hf_rows(name, parameter, config)
        for theirs, count in zip(hf_names(name, config), rows, strict=True):
            shape: tuple[int, ...] = (count, *parameter.shape[1:])
            if transposed:
                shape = shape[::-1]
            tensor = given.pop(theirs, None)
            if tensor is None:
                problems.append(f"{theirs} is missing")
                continue
            given_shape = tuple(tensor.shape)
            if given_shape != shape:
                problems.append(f"{theirs} is {given_shape}, not {shape} as config.json says")
                continue
            if transposed:
                tensor = tensor.t()
            parts.append(tensor)
        if len(parts) < len(rows):
            continue
        if sum(rows) < len(parameter):
            padding = len(parameter) - sum(rows)
            parts.append(parts[0].new_zeros(padding, *parameter.shape[1:]))
        converted[name] = torch.cat(parts).contiguous()
    problems += [f"{name} has no place in this model" for name in sorted(given)]
    if problems:
        raise CheckpointError(
            "the weights are not those of a model of this configuration: " + "; ".join(problems)
        )
    return converted


def to_hf_config(config: GPTConfig, eot_id: int) -> dict[str, Any]:
    """Return the config.json of a class of transformers that computes what this model computes,
    without dropout."""
    keys = _gpt2_keys(config)
    if is_llama(config):
        keys = _llama_keys(config)
    return {
        **keys,
        "initializer_range": 0.02,
        "bos_token_id": eot_id,
        "eos_token_id": eot_id,
        "torch_dtype": "float32",
        "use_cache": True,
    }


def _gpt2_keys(config: GPTConfig) -> dict[str, Any]:
    described = _Gpt2(
        vocab_size=config.vocab_size,
        n_positions=config.seq_len,
        n_embd=config.n_embd,
        n_layer=config.n_layer,
        n_head=config.n_head,
        layer_norm_epsilon=config.norm_eps,
    )
    return {
        "architectures": ["GPT2LMHeadModel"],
        **described.model_dump(exclude_none=True),
        "n_ctx": config.seq_len,
        "n_inner": config.d_ff,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    }


def _llama_keys(config: GPTConfig) -> dict[str, Any]:
    """Return every key that has a default there, as the classes' defaults differ."""
    architecture = "LlamaForCausalLM"
    own: dict[str, Any] = {"model_type": "llama", "mlp_bias": False}
    if config.qk_norm:
        architecture = "Qwen3ForCausalLM"
        own = {
            "model_type": "qwen3",
            "use_sliding_window": False,
            "layer_types": ["full_attention"] * config.n_layer,
        }
    described = _Llama(
        **own,
        vocab_size=config.vocab_size,
        hidden_size=config.n_embd,
        intermediate_size=config.ff_size,
        num_hidden_layers=config.n_layer,
        num_attention_heads=config.n_head,
        num_key_value_heads=config.kv_heads,
        head_dim=config.head_size,
        max_position_embeddings=config.seq_len,
        rms_norm_eps=config.norm_eps,
        rope_parameters=_Rope(rope_theta=config.rope_theta),
        rope_theta=config.rope_theta,
        tie_word_embeddings=config.tied,
    )
    return {
        "architectures": [architecture],
        **described.model_dump(exclude_none=True),
        "attention_dropout": 0.0,
        "pad_token_id": None,
    }


def from_hf_config(hf_config: Mapping[str, Any], vocab_multiple: int = 64) -> GPTConfig:
    """Return the model's shape in a config.json, its vocabulary a multiple of `vocab_multiple`.

    Raises:
        CheckpointError: it describes another function than this GPT computes. Every key that is
            wrong by itself is named, or every size that does not fit the others.
    """
    given = {key: value for key, value in hf_config.items() if value is not None}
    family = given.get("model_type", "gpt2")
    hf_class: type[_Gpt2] | type[_Llama] = _Llama
    if family == "gpt2":
        hf_class = _Gpt2
    elif family == "qwen3":
        given = QWEN3 | given
    elif family != "llama":
        named = json.dumps(family)[:100]
        raise CheckpointError(
            f"config.json describes a model of model_type {named}:"
            " efftrain reads gpt2, llama and qwen3"
        )
    try:
        described = hf_class.model_validate(given)
    except ValidationError as error:
        problems = [_problem(entry) for entry in error.errors(include_url=False)]
    else:
        config = described.shape(pad_vocabulary(described.vocab_size, vocab_multiple))
        problems = [f"{field} {rule}" for field, rule in config.validation_errors()]
        if not problems:
            return config
    raise CheckpointError(
        f"config.json does not describe a model that efftrain can compute: {'; '.join(problems)}"
    )


def _problem(entry: Any) -> str:
    """Format one of pydantic's errors: key, value and rule."""
    key = ".".join(map(str, entry["loc"]))
    if entry["type"] == "missing":
        return f"{key} is missing"
    value = json.dumps(entry["input"], default=str)[:100]
    rule = entry["msg"].replace("Input should", "must")
    return f"{key} = {value} ({rule})"


EXPORTED_FROM = "efftrain.json"
"""File of an export that says which checkpoint it was."""


def check_empty(directory: Path) -> None:
    """Refuse, by a UsageError, a directory that holds files."""
    is_empty = directory.is_dir() and not any(directory.iterdir())
    if directory.exists() and not is_empty:
        raise UsageError(f"{directory} exists and is not an empty directory\n  name another one")


def write_hf(
    model: GPT,
    tokenizer_json: str,
    eot_id: int,
    directory: Path,
    others: Mapping[str, str] | None = None,
) -> None:
    """Write a directory that `AutoModelForCausalLM` and `AutoTokenizer` load without network.

    `tokenizer_json` is the text of a `tokenizers` file; it is stored as it is, so that both sides
    split text alike.

    Args:
        others: texts of further files by name.

    Raises:
        UsageError: the directory holds files already.
    """
    check_empty(directory)
    added = json.loads(tokenizer_json).get("added_tokens", [])
    eot = {token["id"]: token["content"] for token in added}.get(eot_id)
    tokenizer_config = {
        # The plain class takes tokenizer.json as it is; GPT2Tokenizer would build its own from
        # vocabulary and merges.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": model.config.seq_len,
        "clean_up_tokenization_spaces": False,
    }
    if eot is not None:
        tokenizer_config |= {"bos_token": eot, "eos_token": eot, "unk_token": eot}
    texts = {
        "tokenizer.json": tokenizer_json,
        "config.json": json_text(to_hf_config(model.config, eot_id)),
        "generation_config.json": json_text(
            {"bos_token_id": eot_id, "eos_token_id": eot_id, "_from_model_config": True}
        ),
        "tokenizer_config.json": json_text(tokenizer_config),
        **(others or {}),
    }
    directory.parent.mkdir(parents=True, exist_ok=True)
    with made_beside(directory) as partial:
        partial.mkdir()
        write_tensors(partial / "model.safetensors", to_hf(model), {"format": "pt"})
        for name, text in texts.items():
            (partial / name).write_text(text, encoding="utf-8")


def json_text(content: Mapping[str, Any]) -> str:
    """Format the JSON of an export's file."""
    return json.dumps(content, indent=2) + "\n"


def read_hf_config(directory: Path) -> dict[str, Any]:
    """Read a directory's config.json.

    Raises:
        CheckpointError: it is missing, unreadable or no JSON object.
    """
    path = directory / "config.json"
    way = "name a directory as transformers' save_pretrained writes it"
    try:
        hf_config = parse_json(path, read_small_text(path, way), way)
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing\n  {way}") from None
    if not isinstance(hf_config, dict):
        raise CheckpointError(f"{path} is not a JSON object")
    return hf_config


def read_hf(directory: Path, vocab_multiple: int = 64) -> GPT:
    """Read the GPT in a directory with config.json and model.safetensors (whole or in shards).

    Raises:
        CheckpointError: a file is missing or unreadable, or holds a model that this GPT cannot
            compute.
    """
    config = from_hf_config(read_hf_config(directory), vocab_multiple)
    tensors = read_hf_tensors(directory)
    _check_size(config, tensors, directory / "config.json")
    doubles = sum(tensor.dtype == torch.float64 for tensor in tensors.values())
    if doubles:
        say(f"note: {doubles} of {len(tensors)} tensors are float64 and are rounded to fp32")

    weights = {}
    for name, tensor in tensors.items():
        if not name.endswith(NOT_WEIGHTS):
            weights[name] = _as_fp32(tensor, f"{directory}: {name}")
    model = GPT(config)
    model.load_state_dict(from_hf(weights, config))
    return model


def _as_fp32(tensor: Tensor, name: str) -> Tensor:
    """Return a weight in fp32.

    Raises:
        CheckpointError: it is of a type that is no weight, or not finite in fp32; the message
            begins with `name`.
    """
    if tensor.dtype not in READABLE:
        raise CheckpointError(
            f"{name} is {str(tensor.dtype).removeprefix('torch.')}, which no weight is read from;"
            " nothing was imported\n  save the model in fp32 or bf16 and import that"
        )
    weight = tensor.to(torch.float32)
    if not weight.isfinite().all():
        what = "NaN or infinity"
        if tensor.isfinite().all():
            what = "numbers beyond fp32"
        raise CheckpointError(f"{name}: the weights hold {what}; nothing was imported")
    return weight


def _check_size(config: GPTConfig, tensors: Tensors, path: Path) -> None:
    """Refuse a shape that the weights do not have before anything of that size is made."""
    layers = set()
    for name in tensors:
        layers |= set(re.findall(r"(?:^|\.)(?:h|layers)\.(\d+)\.", name)[:1])
    if len(layers) != config.n_layer:
        raise CheckpointError(
            f"{path} says n_layer = {config.n_layer}, the weights have {len(layers)} layers"
        )
    described = parameter_count(replace(config, padded_vocab_size=config.vocab_size))
    held = sum(tensor.numel() for tensor in tensors.values())
    if described > 2 * held:
        raise CheckpointError(
            f"{path} describes a model of {described:,} parameters, the weights are {held:,}"
        )


def read_hf_tensors(directory: Path) -> Tensors:
    """Read every tensor of model.safetensors, or of the shards in model.safetensors.index.json.

    Raises:
        CheckpointError: there are none, or one is damaged. Pickled weights (pytorch_model.bin) are
            never opened: loading a pickle can run code.
    """
    index = directory / "model.safetensors.index.json"
    names = ["model.safetensors"]
    if not (directory / names[0]).exists() and index.exists():
        way = "download it again"
        try:
            weight_map = parse_json(index, read_small_text(index, way), way)["weight_map"]
            names = sorted(set(weight_map.values()))
        except (KeyError, AttributeError, TypeError) as error:
            raise CheckpointError(f"{index} is not an index of weights: {error!r}") from None
        for name in names:
            if not isinstance(name, str) or Path(name).name != name:
                raise CheckpointError(f"{index} names files outside its directory")
    tensors: Tensors = {}
    for name in names:
        path = directory / name
        if not path.is_file():
            way_out = ""
            if (directory / "pytorch_model.bin").exists():
                way_out = (
                    "; pytorch_model.bin is a pickle, which is never opened here:"
                    " convert it with transformers'"
                    " AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(NEW_DIR)"
                )
            raise CheckpointError(f"{path} is missing{way_out}")
        tensors |= read_tensors(path)
    return tensors
