"""The sections of a recipe that are neither methods nor the optimizer: model, data, budget,
evaluation, checkpoints, wandb."""

from __future__ import annotations

import json
import math
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass

from efftrain_cli.foundation.section import (
    SECTION,
    Blocks,
    Channels,
    Count,
    Every,
    Heads,
    Text,
    parse_duration,
    with_implied,
)
from efftrain_cli.model.config import (
    Dimensions,
    GPTConfig,
    Init,
    Mlp,
    Norm,
    Positions,
    pad_vocabulary,
)

FIRST_SAVE = 60.0
"""Seconds after which a new run is saved for the first time."""
LLAMA = {
    "norm": "rmsnorm",
    "mlp": "swiglu",
    "positions": "rope",
    "bias": False,
}
"""Values of [model] with arch = "llama" that are not GPT-2's."""


@dataclass(frozen=True, kw_only=True, config=SECTION)
class Model(Dimensions):
    """Shape of the GPT."""

    arch: Literal["gpt2", "llama"] = "gpt2"
    """What keys that are not given default to: GPT-2, or Llama: norm = "rmsnorm", mlp = "swiglu",
    positions = "rope", bias = false. A key that is given wins."""
    n_layer: Blocks
    """Transformer blocks."""
    n_head: Heads
    """Attention heads per block; divides n_embd, unless head_dim is given."""
    n_embd: Channels
    """Width of the residual stream."""
    seq_len: int = Field(ge=1, le=1 << 20)
    """Full context length, in tokens; validation is always measured at it."""
    vocab_multiple: int = Field(default=64, ge=1, le=1 << 24)
    """The vocabulary is padded to a multiple of this for the matmul; padding never enters a loss or
    a sample."""
    norm: Norm = "layernorm"
    """Norms before attention, MLP and head: GPT-2's layer norms, RMS norms, or none."""
    init: Init = "gpt2"
    """Initialization: GPT-2's, N(0, 0.02) with projections over sqrt(2 n_layer); "hf", N(0, 0.02)
    throughout; or "unit" variance throughout (embeddings, fan-in matrices, projections over sqrt(2
    n_layer), logits over sqrt(n_embd)), for models without norms."""
    n_kv_head: Heads | None = None
    """Heads of keys and values, each for as many query heads; divides n_head. Default: n_head."""
    head_dim: Channels | None = None
    """Channels of a head; default: n_embd / n_head."""
    mlp: Mlp = "gelu"
    """The MLP: GELU, SwiGLU (a gate beside the hidden units), or squared ReLU."""
    d_ff: Channels | None = None
    """Hidden units of the MLP; default: 4 n_embd, with SwiGLU 8/3 n_embd rounded up to a multiple
    of 32."""
    norm_eps: float = Field(default=1e-5, gt=0)
    """Added to the variance, or mean square, inside each norm."""
    positions: Positions = "learned"
    """Positions: a learned table, or rotary embedding of queries and keys."""
    rope_theta: float = Field(default=10_000.0, gt=0)
    """Base of the rotary embedding's wavelengths."""
    qk_norm: bool = False
    """RMS norm of each head's queries and keys, before the rotation."""
    bias: bool = True
    """Biases of linear layers and layer norms."""
    tied: bool = True
    """The head is the embedding matrix; false gives it a matrix of its own."""
    softcap: float | None = Field(default=None, gt=0)
    """Logits are c tanh(logits / c) with this c; default: not capped."""

    @model_validator(mode="before")
    @classmethod
    def _defaults_of_arch(cls, given: Any) -> Any:
        return with_implied(given, "arch", "llama", LLAMA)


_SHARED_FIELDS = frozenset(GPTConfig.__dataclass_fields__)


def config_of(model: Model, vocab_size: int) -> GPTConfig:
    """Return the shape of a [model] with that vocabulary, padded as the section says."""
    shared = {name: value for name, value in vars(model).items() if name in _SHARED_FIELDS}
    rows = pad_vocabulary(vocab_size, model.vocab_multiple)
    return GPTConfig(vocab_size=vocab_size, padded_vocab_size=rows, **shared)


def model_overrides(config: GPTConfig) -> list[str]:
    """List overrides that give any recipe's [model] this shape, the vocabulary apart."""
    fields = vars(config)
    arch = "gpt2"
    if all(fields[key] == value for key, value in LLAMA.items()):
        arch = "llama"
    overrides = [f"model.arch={arch}"]
    for name in Model.__dataclass_fields__:
        if name not in _SHARED_FIELDS:
            continue
        value = fields[name]
        if value is None:
            value = False
        overrides.append(f"model.{name}={json.dumps(value)}")
    return overrides


@dataclass(frozen=True, kw_only=True, config=SECTION)
class TextSource:
    """One of several texts that are mixed."""

    path: Text
    """As data.train: "stdlib", a file, folder or glob, or a Hugging Face dataset "owner/name"."""
    weight: float = Field(default=1.0, gt=0)
    """Share of the training windows, relative to the other sources' weights."""
    text_field: Text | None = None
    """Field or column of the text; default: data.text_field."""


Texts = Annotated[tuple[Text, ...], Field(min_length=1)]


@dataclass(frozen=True, kw_only=True, config=SECTION)
class Data:
    """Where the text comes from and how it becomes tokens."""

    train: Text | Texts | None = "stdlib"
    """Text to train on: "stdlib" (the running Python's standard library), files, folders or globs
    of .txt .jsonl .json.gz .parquet .md .csv, or a Hugging Face dataset "owner/name"."""
    sources: tuple[TextSource, ...] | None = None
    """Several texts in place of `train`, mixed by weight: [[data.sources]] with path, weight and
    text_field."""
    valid: Text | Texts | None = None
    """Text to validate on; without it, valid_fraction of train's documents is held out."""
    valid_fraction: float = Field(default=0.01, gt=0, lt=0.5)
    """Share of the documents held out for validation where `valid` is not given."""
    tokenizer: Text = "bpe:512"
    """"gpt2" or "owner/name" (from the Hub), a tokenizer.json, a folder with GPT-2's vocabulary and
    merges, or "bpe:N": a byte-level BPE of N tokens trained on the corpus."""
    text_field: Text = "text"
    """Field or column that holds a document's text in .jsonl, .json, .csv, .parquet and Hub
    datasets."""
    format: Literal["auto", "txt", "jsonl", "json", "csv", "parquet"] = "auto"
    """How files are read. "auto": by their names; anything else is taken for every file that is
    named."""
    split: Text | None = None
    """Split of a Hub dataset to train on; default "train"."""
    revision: Text | None = None
    """Revision (branch, tag or commit) of Hub datasets; the same as "owner/name@revision"."""
    max_tokens: Count | None = None
    """Training tokens to prepare at most, but for the rest of the last document; default: all local
    text, and of Hub datasets what the budget needs."""
    repeat: bool = False
    """Allow more than one epoch."""
    on_bad_document: Literal["error", "skip"] = "error"
    """A document that cannot be read: stop, or skip and count it; more than 0.1 % skipped is an
    error."""
    allow_overlap: bool = False
    """Allow documents that are in both the training and the validation text."""

    @property
    def named_text(self) -> str:
        """The training text as the recipe names it."""
        if self.sources is not None:
            return ", ".join(source.path for source in self.sources)
        text = self.train or "stdlib"
        if isinstance(text, str):
            return text
        return ", ".join(text)


@dataclass(frozen=True, kw_only=True, config=SECTION)
class Train:
    """Budget, batch and numerics."""

    tokens: Count
    """Budget: training ends with the first step at which this many tokens have been trained on."""
    batch_size: int = Field(ge=1)
    """Sequences per optimizer step."""
    micro_batch_tokens: Count = 16384
    """Tokens that one forward pass may hold; a step is cut into as many micro-batches as that
    needs."""
    dtype: Literal["auto", "fp32", "tf32", "bf16"] = "auto"
    """Compute type; master weights are fp32. "auto": bf16 where the device has bf16 matmuls, else
    fp32. "tf32": fp32 whose matrix products round their factors to 10 bits on CUDA, and fp32
    elsewhere."""
    compile: Literal["auto", "on", "off"] = "auto"
    """torch.compile; "auto": on CUDA only."""
    deterministic: bool = False
    """Only deterministic kernels, so that runs on CUDA repeat bit for bit."""
    activation_checkpointing: bool | Literal["auto"] = "auto"
    """Recompute each block in the backward pass instead of storing its activations; "auto": on
    CUDA, where a full micro-batch would not fit otherwise, by estimate."""


@dataclass(frozen=True, kw_only=True, config=SECTION)
class Parallel:
    """Training on several devices."""

    strategy: Literal["replicate", "shard"] = "replicate"
    """"replicate": every device holds the whole model. "shard": each holds a share of weights,
    gradients and moments, and gathers a block's weights when it computes it; for models that do not
    fit otherwise, at the price of more traffic."""


@dataclass(frozen=True, kw_only=True, config=SECTION)
class Eval:
    """Validation at full length, all blocks, on a fixed set of windows."""

    every: int = Field(default=0, ge=0)
    """Steps between two evaluations; step 0 and the last step are evaluated too. 0, the default:
    a twentieth of the budget."""
    windows: int = Field(default=64, ge=1)
    """Validation windows, of seq_len tokens each."""
    positions: bool = False
    """Report the validation loss by position too, as columns val_loss_from_POSITION; doubles what
    evaluation costs."""
    internals: int = Field(default=0, ge=0)
    """Steps between two looks inside of the model, as columns by block: RMS of the residual stream,
    largest attention logit, gradient norm, and size of the update relative to the weights; 0: none.
    It changes nothing of the training."""
    sample: str | None = None
    """Show what the model writes after this text at each evaluation; it changes nothing of the
    training."""

    def measures_internals(self, step: int) -> bool:
        """Return whether the row of 1-based `step` says what is inside of the model."""
        return self.internals > 0 and step % self.internals == 0


@dataclass(frozen=True, kw_only=True, config=SECTION)
class Checkpoint:
    """When checkpoints are written and how many are kept."""

    every: Every = "10min"
    """Steps, or a duration such as "10min"; the last step is always saved."""
    keep: int = Field(default=3, ge=1)
    """Newest checkpoints kept."""
    at: tuple[Annotated[int, Field(ge=1)], ...] | None = None
    """Further steps that are saved; their checkpoints are kept beside the newest."""

    @property
    def most(self) -> int:
        """Checkpoints that a finished run has at most."""
        return self.keep + len(self.at or ())

    def seconds_to_save(self, is_first: bool) -> float:
        """Return the seconds from one save to the next, inf if `every` counts steps; the first save
        of a run is a minute after its start, or earlier."""
        seconds = math.inf
        if isinstance(self.every, str):
            seconds = parse_duration(self.every)
        return min(seconds, FIRST_SAVE) if is_first else seconds


@dataclass(frozen=True, kw_only=True, config=SECTION)
class Wandb:
    """Weights & Biases: a second reader of metrics.jsonl."""

    mode: Literal["off", "offline", "online"] = "off"
    """"off", "offline" or "online"."""
    project: str = "efftrain"
    """Project that the run is logged to; WANDB_PROJECT wins."""
    tensorboard: bool = False
    """Write the same curves for TensorBoard too, into the run's folder tensorboard (extra:
    tensorboard)."""
