"""GPT-2, Llama and Qwen3 as transformers stores them, both ways and without loss.

transformers builds, writes and reads the models; here are the names of the weights, and what makes
two configurations compute the same. No table there has padding rows, and linear layers of GPT-2
have weights (in, out) where ours are (out, in). transformers is imported inside functions.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from efftrain_cli.foundation.errors import CheckpointError, UsageError
from efftrain_cli.foundation.files import made_beside, make_folder
from efftrain_cli.foundation.records import read_json
from efftrain_cli.model.config import GPTConfig, pad_vocabulary, resize
from efftrain_cli.model.flops import parameter_count
from efftrain_cli.model.gpt import GPT

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

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
FAMILIES = ("gpt2", "llama", "qwen3")
"""Values of model_type that are read."""
LLAMA_SHAPE: dict[str, Any] = {
    "norm": "rmsnorm",
    "mlp": "swiglu",
    "positions": "rope",
    "bias": False,
}
"""What Llama computes beside its sizes. Qwen3 is Llama with norms of q and k."""
ALWAYS_SAID = ("d_ff", "init", "padded_vocab_size", "rope_theta")
"""Fields of [model] that every class has, or that change nothing in a trained model."""
NOT_COMPARED = (
    "architectures attention_dropout attn_pdrop bos_token_id dtype embd_pdrop eos_token_id id2label"
    " initializer_range label2id max_window_layers n_ctx n_inner output_attentions"
    " output_hidden_states pad_token_id resid_pdrop return_dict sep_token_id sliding_window"
    " summary_activation summary_first_dropout summary_proj_to_labels summary_type summary_use_proj"
    " task_specific_params tokenizer_class torch_dtype transformers_version use_cache _name_or_path"
)
"""Keys of config.json that change no logits in evaluation, and n_inner, which is read as d_ff."""
READABLE = ("F32", "F16", "BF16")
"""Types of tensors that are read as weights. Others would be rounded, or need a scale."""
MASKS = (".attn.bias", ".attn.masked_bias")
"""Ends of the names of causal masks that older files carry beside the weights."""


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
    for name, parameter in model.named_parameters():
        module, _, end = name.rpartition(".")
        in_block = module.startswith("h.")
        prefix = ""
        if is_gpt2:
            places: tuple[str, ...] = (f"transformer.{module}",)
        else:
            if in_block:
                _, layer, module = module.split(".", 2)
                prefix = f"model.layers.{layer}."
            places = LLAMA_NAMES[module]
        sizes: tuple[int, ...] = (len(parameter),)
        if module in ("wte", "lm_head"):
            sizes = (config.vocab_size,)
        elif len(places) > 1:
            sizes = config.qkv_rows
        start = 0
        for size, place in zip(sizes, places, strict=True):
            rows = slice(start, start + size)
            is_transposed = is_gpt2 and in_block and parameter.dim() == 2
            yield Weight(name, rows, f"{prefix}{place}.{end}", is_transposed)
            start += size


def hf_config(config: GPTConfig, eot_id: int) -> PretrainedConfig:
    """Return the configuration of the class of transformers that computes what a model computes.

    Raises:
        UsageError: there is none; every field is named.
    """
    transformers = library()
    from huggingface_hub.errors import StrictDataclassError

    settings: dict[str, Any] = {
        "vocab_size": config.vocab_size,
        "bos_token_id": eot_id,
        "eos_token_id": eot_id,
        "hidden_size": config.n_embd,
        "num_hidden_layers": config.n_layer,
        "num_attention_heads": config.n_head,
        "max_position_embeddings": config.seq_len,
    }
    if config.positions == "learned":
        family = "gpt2"
        settings |= {
            "n_inner": config.d_ff,
            "layer_norm_epsilon": config.norm_eps,
            **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
        }
    else:
        family = "qwen3" if config.qk_norm else "llama"
        settings |= {
            "intermediate_size": config.ff_size,
            "num_key_value_heads": config.kv_heads,
            "head_dim": config.head_size,
            "rms_norm_eps": config.norm_eps,
            "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
            "tie_word_embeddings": config.tied,
        }
    wrong = []
    try:
        made = transformers.AutoConfig.for_model(family, **settings)
        computed = asdict(_shape_of(made, 1))
    except StrictDataclassError as error:  # a size that the class refuses
        wrong.append(" ".join(str(error).split()))
    else:
        for field, value in asdict(resize(config, {})).items():
            if value != computed[field] and field not in ALWAYS_SAID:
                must = json.dumps(computed[field])
                wrong.append(f"model.{field} = {json.dumps(value)} (must be {must})")
    if wrong:
        raise UsageError(
            f"{family} of transformers cannot compute this model: {'; '.join(wrong)}\n"
            "  use the run itself: efftrain sample, efftrain eval-zeroshot"
        )
    return made


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
        **dict.fromkeys(("bos_token", "eos_token", "unk_token"), eot),
    }
    texts = {
        "tokenizer.json": tokenizer_json,
        "tokenizer_config.json": json.dumps(tokenizer_config, indent=2),
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


def read_hf_config(directory: Path, vocab_multiple: int = 64) -> GPTConfig:
    """Return the shape of a directory's model, its vocabulary a multiple of `vocab_multiple`.

    Raises:
        CheckpointError: config.json is missing or unreadable, or describes another function than
            this GPT computes. Every key that differs from those of our model of that shape is
            named.
    """
    transformers = library()
    path = directory / "config.json"
    try:
        given = transformers.AutoConfig.for_model(**read_json(path))
        wrong = [f"model_type = {given.model_type!r}, not one of {', '.join(FAMILIES)}"]
        if given.model_type in FAMILIES:
            shape = _shape_of(given, vocab_multiple)
            wrong = [f"{field} {rule}" for field, rule in shape.validation_errors()]
        if not wrong:
            ignored = NOT_COMPARED.split()
            wanted = hf_config(shape, 0).to_dict()
            for key, value in given.to_dict().items():
                if key not in ignored and value != wanted.get(key):
                    wrong.append(f"{key} = {value!r} (must be {wanted.get(key)!r})")
    except Exception as error:  # transformers raises classes of several libraries
        wrong = [" ".join(str(error).split())[:500]]
    if wrong:
        raise CheckpointError(
            f"{path} does not describe a model that efftrain can compute:"
            f" {'; '.join(wrong)}\n"
            "  name a GPT-2, Llama or Qwen3 as transformers' save_pretrained writes it"
        )
    return shape


def _shape_of(given: Any, vocab_multiple: int) -> GPTConfig:
    """Return the shape that a configuration's sizes say, whatever its other keys."""
    sizes: dict[str, Any] = {
        "n_layer": given.num_hidden_layers,
        "n_head": given.num_attention_heads,
        "n_embd": given.hidden_size,
        "seq_len": given.max_position_embeddings,
        "vocab_size": given.vocab_size,
        "padded_vocab_size": pad_vocabulary(given.vocab_size, vocab_multiple),
    }
    kinds: dict[str, Any] = {}
    if given.model_type == "gpt2":
        sizes |= {"d_ff": given.n_inner, "norm_eps": given.layer_norm_epsilon}
    else:
        sizes |= {
            "d_ff": given.intermediate_size,
            "n_kv_head": given.num_key_value_heads,
            "head_dim": given.head_dim,
            "norm_eps": given.rms_norm_eps,
            "rope_theta": given.rope_parameters["rope_theta"],
        }
        kinds = {
            **LLAMA_SHAPE,
            "tied": given.tie_word_embeddings,
            "qk_norm": given.model_type == "qwen3",
        }
    for field, size in sizes.items():
        if isinstance(size, bool):  # older releases of transformers let it pass
            raise ValueError(f"{field} is {size}, not a number")
    return resize(GPTConfig(**sizes, **kinds), {})


def read_hf(directory: Path, vocab_multiple: int = 64) -> GPT:
    """Read the GPT in a directory that transformers wrote; pickles are never opened.

    Raises:
        CheckpointError: a file is missing or damaged, or holds what this GPT cannot compute.
    """
    config = read_hf_config(directory, vocab_multiple)
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
        theirs, info = library().AutoModelForCausalLM.from_pretrained(
            directory,
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
        fault = "; ".join(faults)[:1000]
        raise CheckpointError(f"{directory}: the weights do not fit config.json: {fault}")
    given = theirs.state_dict()
    for name, tensor in given.items():
        if not tensor.isfinite().all():
            raise CheckpointError(
                f"{directory}: {name}: the weights hold NaN or infinity; nothing was imported"
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

    for path in files:
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118  # it is no mapping
                kind = file.get_slice(name).get_dtype()
                if kind not in READABLE and not name.endswith(MASKS):
                    raise CheckpointError(
                        f"{path.parent}: {name} is {kind}, which no weight is read from\n"
                        "  save the model in fp32 or bf16 and import that"
                    )
                if name == "lm_head.weight" and embedding is not None:
                    if not torch.equal(file.get_tensor(name).to(embedding.dtype), embedding):
                        raise CheckpointError(
                            f"{path}: lm_head.weight differs from the embedding:"
                            " this model ties them, so it cannot hold these weights"
                        )
