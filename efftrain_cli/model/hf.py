"""GPT-2, Llama and Qwen3 as transformers stores them, both ways and without loss.

transformers builds, writes and reads the models; here are the names of the weights, and what makes
two configurations compute the same. No table there has padding rows, and linear layers of GPT-2
have weights (in, out) where ours are (out, in). transformers is imported inside functions.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from efftrain_cli.foundation.console import say
from efftrain_cli.foundation.errors import CheckpointError, UsageError
from efftrain_cli.foundation.files import made_beside, make_folder
from efftrain_cli.foundation.records import read_json
from efftrain_cli.model.config import GPTConfig, pad_vocabulary, resize
from efftrain_cli.model.flops import parameter_count
from efftrain_cli.model.gpt import GPT

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

CONV1D_WEIGHTS = (
    "attn.c_attn.weight",
    "attn.c_proj.weight",
    "mlp.c_fc.weight",
    "mlp.c_proj.weight",
)
"""Ends of the names whose matrices GPT-2 of transformers stores transposed."""
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
GPT2_SHAPE: dict[str, Any] = {
    "norm": "layernorm",
    "mlp": "gelu",
    "positions": "learned",
    "bias": True,
    "tied": True,
    "qk_norm": False,
    "softcap": None,
}
LLAMA_SHAPE: dict[str, Any] = {
    "norm": "rmsnorm",
    "mlp": "swiglu",
    "positions": "rope",
    "bias": False,
    "softcap": None,
}
"""What the classes of transformers compute: fields of [model] that must have these values. Qwen3 is
Llama with norms of q and k."""
CHANGES_NOTHING = (
    "architectures attention_dropout attn_pdrop bos_token_id dtype embd_pdrop eos_token_id id2label"
    " initializer_range label2id max_window_layers n_ctx output_attentions output_hidden_states"
    " pad_token_id resid_pdrop return_dict sep_token_id sliding_window summary_activation"
    " summary_first_dropout summary_proj_to_labels summary_type summary_use_proj"
    " task_specific_params tokenizer_class torch_dtype transformers_version use_cache _name_or_path"
)
"""Keys of config.json that change no logits in evaluation."""
READABLE = ("F32", "F16", "BF16", "F64")
"""Types of tensors that are read as weights: others hold codes that need a scale."""
MASKS = (".attn.bias", ".attn.masked_bias")
"""Ends of the names of causal masks that older files carry beside the weights."""
EXPORTED_FROM = "efftrain.json"
"""File of an export that says which checkpoint it was."""


class Weight(NamedTuple):
    """One of our parameters, or a part of its rows, and its place there."""

    ours: str
    rows: slice
    theirs: str
    is_transposed: bool


def library() -> Any:
    """Return transformers, without its progress bars and remarks.

    Raises:
        UsageError: it is not installed.
    """
    try:
        import transformers
    except ImportError:
        raise UsageError(
            "import and export need transformers\n"
            "  in the folder of efftrain's source: `pip install '.[hf]'`"
        ) from None
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    return transformers


def weights_of(model: GPT) -> Iterator[Weight]:
    """Yield where each weight of a model is stored; padding rows of the tables are not."""
    config = model.config
    is_gpt2 = config.positions == "learned"
    for name in dict(model.named_parameters()):
        module, _, end = name.rpartition(".")
        prefix = ""
        if is_gpt2:
            places: tuple[str, ...] = (f"transformer.{module}",)
        else:
            if module.startswith("h."):
                _, layer, module = module.split(".", 2)
                prefix = f"model.layers.{layer}."
            places = LLAMA_NAMES[module]
        sizes: tuple[int | None, ...] = (None,)
        if module in ("wte", "lm_head"):
            sizes = (config.vocab_size,)
        elif len(places) > 1:
            sizes = config.qkv_rows
        is_transposed = is_gpt2 and name.endswith(CONV1D_WEIGHTS)
        start = 0
        for size, place in zip(sizes, places, strict=True):
            stop = None if size is None else start + size
            yield Weight(name, slice(start, stop), f"{prefix}{place}.{end}", is_transposed)
            start = stop or 0


def hf_config(config: GPTConfig, eot_id: int) -> PretrainedConfig:
    """Return the configuration of the class of transformers that computes what a model computes.

    Raises:
        UsageError: there is none; every field is named.
    """
    refuse_unsayable(config)
    transformers = library()
    common = {"vocab_size": config.vocab_size, "bos_token_id": eot_id, "eos_token_id": eot_id}
    if config.positions == "learned":
        return transformers.GPT2Config(
            **common,
            n_positions=config.seq_len,
            n_embd=config.n_embd,
            n_layer=config.n_layer,
            n_head=config.n_head,
            n_inner=config.d_ff,
            layer_norm_epsilon=config.norm_eps,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        )
    name = "Qwen3Config" if config.qk_norm else "LlamaConfig"
    return getattr(transformers, name)(
        **common,
        hidden_size=config.n_embd,
        intermediate_size=config.ff_size,
        num_hidden_layers=config.n_layer,
        num_attention_heads=config.n_head,
        num_key_value_heads=config.kv_heads,
        head_dim=config.head_size,
        max_position_embeddings=config.seq_len,
        rms_norm_eps=config.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
        tie_word_embeddings=config.tied,
    )


def refuse_unsayable(config: GPTConfig) -> None:
    """Raise a UsageError, naming every field, if no class of transformers computes what this model
    computes."""
    is_gpt2 = config.positions == "learned"
    shape = GPT2_SHAPE if is_gpt2 else LLAMA_SHAPE
    wrong = []
    for field, needed in shape.items():
        value = vars(config)[field]
        if value != needed:
            wrong.append(f"model.{field} = {json.dumps(value)} (must be {json.dumps(needed)})")
    if is_gpt2:
        if config.kv_heads != config.n_head:
            wrong.append(f"model.n_kv_head = {config.kv_heads} (must be n_head)")
        if config.attention_size != config.n_embd:
            wrong.append(f"model.head_dim = {config.head_size} (must be n_embd / n_head)")
    elif config.n_embd % config.n_head and not config.qk_norm:
        wrong.append(f"model.n_head = {config.n_head} (must divide n_embd without qk_norm)")
    if wrong:
        name = "GPT-2" if is_gpt2 else "Llama"
        model = "this model" if config.norm_facts.vectors else "a model with no layer norms"
        raise UsageError(
            f"the {name} of transformers cannot compute {model}: {'; '.join(wrong)}\n"
            "  use the run itself: efftrain sample, efftrain eval-zeroshot"
        )


def to_hf(model: GPT, eot_id: int) -> PreTrainedModel:
    """Return the model of transformers with a model's weights, fp32 on the CPU.

    A scale of the logits becomes the last norm's.

    Raises:
        UsageError: as `hf_config`.
    """
    settings = hf_config(model.config, eot_id)
    theirs = library().AutoModelForCausalLM.from_config(settings, dtype=torch.float32)
    ours = model.state_dict()
    weights = {}
    for weight in weights_of(model):
        tensor = ours[weight.ours][weight.rows].to("cpu", torch.float32)
        if weight.ours.startswith("ln_f."):
            tensor = tensor * model.config.logit_scale
        weights[weight.theirs] = tensor.t() if weight.is_transposed else tensor
    if model.config.tied:
        weights["lm_head.weight"] = ours["wte.weight"][: model.config.vocab_size]
    theirs.load_state_dict(weights)
    return theirs.eval()


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
        UsageError: the directory holds files already, or as `hf_config`.
    """
    check_empty(directory)
    theirs = to_hf(model, eot_id)
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
        "tokenizer_config.json": json_text(tokenizer_config),
        **(others or {}),
    }
    make_folder(directory.parent)
    with made_beside(directory) as partial:
        partial.mkdir()
        theirs.save_pretrained(partial)
        for name, text in texts.items():
            (partial / name).write_text(text, encoding="utf-8")
        mode = (partial / "tokenizer.json").stat().st_mode
        for path in partial.iterdir():
            path.chmod(mode)  # the library's files are for their owner alone


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
        keys = read_json(path, way)
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing\n  {way}") from None
    if not isinstance(keys, dict):
        raise CheckpointError(f"{path} is not a JSON object")
    return keys


def from_hf_config(keys: Mapping[str, Any], vocab_multiple: int = 64) -> GPTConfig:
    """Return the model's shape in a config.json, its vocabulary a multiple of `vocab_multiple`.

    Raises:
        CheckpointError: it describes another function than this GPT computes. Every key that
            differs from those of our model of that shape is named.
    """
    family = keys.get("model_type", "gpt2")
    if family not in ("gpt2", "llama", "qwen3"):
        named = json.dumps(family)[:100]
        raise CheckpointError(
            f"config.json describes a model of model_type {named}:"
            " efftrain reads gpt2, llama and qwen3"
        )
    try:
        given = library().AutoConfig.for_model(**{**keys, "model_type": family})
        shape = _shape_of(given, vocab_multiple)
        wrong = [f"{field} {rule}" for field, rule in shape.validation_errors()]
        if not wrong:
            wrong = _differences(given, hf_config(shape, 0))
    except Exception as error:  # transformers raises classes of several libraries
        reason = " ".join(str(error).split())[:500]
        wrong = [reason]
    if wrong:
        raise CheckpointError(
            f"config.json does not describe a model that efftrain can compute: {'; '.join(wrong)}"
        )
    return shape


def _shape_of(given: Any, vocab_multiple: int) -> GPTConfig:
    """Return the shape that a configuration's sizes say, whatever its other keys."""
    size = {
        "n_layer": given.num_hidden_layers,
        "n_head": given.num_attention_heads,
        "n_embd": given.hidden_size,
        "seq_len": given.max_position_embeddings,
        "vocab_size": given.vocab_size,
        "padded_vocab_size": pad_vocabulary(given.vocab_size, vocab_multiple),
    }
    if given.model_type == "gpt2":
        d_ff = given.n_inner
        if d_ff == 4 * given.n_embd:
            d_ff = None
        return GPTConfig(**size, d_ff=d_ff, norm_eps=given.layer_norm_epsilon)
    shape = GPTConfig(
        **size,
        **LLAMA_SHAPE,
        tied=given.tie_word_embeddings,
        norm_eps=given.rms_norm_eps,
        rope_theta=given.rope_parameters["rope_theta"],
        qk_norm=given.model_type == "qwen3",
    )
    return resize(
        shape,
        n_head=shape.n_head,
        n_embd=shape.n_embd,
        kv_heads=given.num_key_value_heads,
        head_size=given.head_dim,
        ff_size=given.intermediate_size,
    )


def _differences(given: PretrainedConfig, ours: PretrainedConfig) -> list[str]:
    """List the keys in which a configuration differs from that of our model of the same shape."""
    ignored = CHANGES_NOTHING.split()
    wanted = ours.to_dict()
    if given.model_type == "gpt2" and given.n_inner is not None:
        wanted["n_inner"] = wanted["n_inner"] or 4 * wanted["n_embd"]
    differences = []
    for key, value in given.to_dict().items():
        if key not in ignored and value != wanted.get(key):
            differences.append(f"{key} = {value!r} (must be {wanted.get(key)!r})")
    return differences


def read_hf(directory: Path, vocab_multiple: int = 64) -> GPT:
    """Read the GPT in a directory that transformers wrote; pickles are never opened.

    Raises:
        CheckpointError: a file is missing or damaged, or holds what this GPT cannot compute.
    """
    keys = read_hf_config(directory)
    config = from_hf_config(keys, vocab_multiple)
    transformers = library()
    settings = transformers.AutoConfig.for_model(**{"model_type": "gpt2", **keys})
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise CheckpointError(
            f"{directory}: there are no weights in *.safetensors\n"
            "  save them by transformers' save_pretrained: a pickle (.bin) is never opened"
        )
    size = sum(path.stat().st_size for path in files)
    described = parameter_count(replace(config, padded_vocab_size=config.vocab_size))
    # A weight has two bytes at least.
    if 2 * described > size:
        raise CheckpointError(
            f"{directory}: config.json describes {described:,} weights, and the files have"
            f" {size:,} bytes"
        )
    try:
        theirs, info = transformers.AutoModelForCausalLM.from_pretrained(
            directory,
            config=settings,
            dtype=torch.float32,
            use_safetensors=True,
            local_files_only=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    except Exception as error:  # transformers, safetensors and pydantic raise a dozen classes
        raise CheckpointError(f"{directory} cannot be read by transformers: {error}") from None
    faults = [f"{name}: {sorted(map(str, wrong))}" for name, wrong in info.items() if wrong]
    if faults:
        raise CheckpointError(
            f"{directory}: the weights do not fit config.json: {'; '.join(faults)[:1000]}"
        )
    given = theirs.state_dict()
    for name, tensor in given.items():
        if not tensor.isfinite().all():
            raise CheckpointError(
                f"{directory}: {name}: the weights hold NaN or infinity, or numbers beyond fp32;"
                " nothing was imported"
            )
    _check_files(files, theirs.get_input_embeddings().weight if config.tied else None)
    model = GPT(config)
    weights = {name: torch.zeros_like(tensor) for name, tensor in model.named_parameters()}
    for weight in weights_of(model):
        tensor = given[weight.theirs]
        weights[weight.ours][weight.rows] = tensor.t() if weight.is_transposed else tensor
    model.load_state_dict(weights)
    return model


def _check_files(files: list[Path], embedding: torch.Tensor | None) -> None:
    """Check that all tensors are of types that hold weights, and that the output matrix is the
    embedding, if the model ties them.

    Raises:
        CheckpointError: one is not.
    """
    from safetensors import safe_open

    doubles = 0
    for path in files:
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118  # it is no mapping
                kind = file.get_slice(name).get_dtype()
                doubles += kind == "F64"
                if kind not in READABLE and not name.endswith(MASKS):
                    raise CheckpointError(
                        f"{path.parent}: {name} is {kind}, which no weight is read from;"
                        " nothing was imported\n"
                        "  save the model in fp32 or bf16 and import that"
                    )
                if name == "lm_head.weight" and embedding is not None:
                    if not torch.equal(file.get_tensor(name).to(embedding.dtype), embedding):
                        raise CheckpointError(
                            f"{path}: lm_head.weight differs from the embedding:"
                            " this model ties them, so it cannot hold these weights"
                        )
    if doubles:
        say(f"note: {doubles} tensors are float64 and are rounded to fp32")
