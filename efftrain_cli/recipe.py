"""A recipe: everything that decides what a run computes, as one frozen value.

The method sections are the methods themselves (`efftrain_cli/methods`); a section that is present is on. Below the
sections stand the rules between them, then reading, writing and comparing whole recipes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass, replace
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass

from efftrain_cli.errors import RecipeError
from efftrain_cli.methods.batch_size_warmup import BatchSizeWarmup
from efftrain_cli.methods.progressive_layer_drop import ProgressiveLayerDrop
from efftrain_cli.methods.seq_len_warmup import SeqLenWarmup
from efftrain_cli.methods.simigrad import SimiGrad
from efftrain_cli.methods.staged_growth import Stage, StagedGrowth, shapes_of_stages, stage_problems
from efftrain_cli.recipe_check import Check, UnknownValue, report
from efftrain_cli.recipe_file import Draft, read_recipe_file, recipe_names, toml_lines
from efftrain_cli.section import SECTION, Count, Every, Text

__all__ = [
    "Recipe",
    "RecipeError",
    "dump_recipe",
    "flat_values",
    "load_recipe",
    "method_names",
    "recipe_differences",
    "recipe_names",
    "recipe_values",
    "warnings_of",
]


@dataclass(frozen=True, kw_only=True, config=SECTION)
class Model:
    """Shape of the GPT."""

    n_layer: int = Field(ge=1)
    """Transformer blocks."""
    n_head: int = Field(ge=1)
    """Attention heads per block; divides n_embd."""
    n_embd: int = Field(ge=1)
    """Width of the residual stream."""
    seq_len: int = Field(ge=1, le=2**20)
    """Full context length, in tokens; validation is always measured at it."""
    vocab_multiple: int = Field(default=64, ge=1)
    """The vocabulary is padded to a multiple of this for the matmul; padding never enters a loss or a sample."""


@dataclass(frozen=True, kw_only=True, config=SECTION)
class Data:
    """Where the text comes from and how it becomes tokens."""

    train: Text | Annotated[tuple[Text, ...], Field(min_length=1)] = "stdlib"
    """Text to train on: "stdlib" (the running Python's standard library), files, folders or globs of .txt .jsonl .json.gz
    .parquet, or a Hugging Face dataset "owner/name"."""
    valid: Text | Annotated[tuple[Text, ...], Field(min_length=1)] | None = None
    """Text to validate on; without it, valid_fraction of train's documents is held out."""
    valid_fraction: float = Field(default=0.01, gt=0, lt=0.5)
    """Share of the documents held out for validation where `valid` is not given."""
    tokenizer: Text = "bpe:512"
    """"gpt2" (from the Hub), a tokenizer.json, a folder with GPT-2's vocabulary and merges, or "bpe:N": a byte-level BPE of N
    tokens trained on the corpus."""
    text_field: Text = "text"
    """Field or column that holds a document's text in .jsonl, .parquet and Hub datasets."""
    repeat: bool = False
    """Allow more than one epoch."""
    on_bad_document: Literal["error", "skip"] = "error"
    """A document that cannot be read: stop, or skip and count it; more than 0.1 % skipped is an error."""
    allow_overlap: bool = False
    """Allow documents that are in both the training and the validation text."""


@dataclass(frozen=True, kw_only=True, config=SECTION)
class Optim:
    """AdamW, gradient clipping and the learning-rate schedule."""

    lr: float = Field(gt=0)
    """Peak learning rate."""
    min_lr: float = Field(default=0.0, ge=0)
    """Learning rate at the end of the decay."""
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.95)
    """Adam's decay rates of the first and second moment."""
    eps: float = Field(default=1e-8, gt=0)
    """Adam's epsilon."""
    weight_decay: float = Field(default=0.1, ge=0)
    """Decoupled weight decay, on matrices except the position embeddings."""
    grad_clip: float = Field(default=1.0, ge=0)
    """Largest global l2 norm of the gradient; 0 clips nothing."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps of linear warmup."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """Decay after the warmup."""
    decay_tokens: Annotated[Count, Field(ge=1)] | None = None
    """Tokens at which min_lr is reached; default: train.tokens."""
    decay_steps: int | None = Field(default=None, ge=1)
    """Decay by steps instead: the step at which min_lr is reached."""

    def lr_at(self, step: int, tokens: int, warmup_tokens: int, decay_tokens: int) -> float:
        """Learning rate of 1-based `step`, whose own tokens are included in `tokens`.

        Linear warmup by steps, then cosine or linear decay by tokens between `warmup_tokens` (tokens trained when the
        warmup ended) and `decay_tokens`, or by steps where `decay_steps` is set. Megatron-LM, optimizer_param_scheduler.py.
        """
        if step <= self.warmup_steps:
            return self.lr * step / self.warmup_steps
        if self.schedule == "constant":
            return self.lr
        if self.decay_steps is not None:
            done, start, end = step, self.warmup_steps, self.decay_steps
        else:
            done, start, end = tokens, warmup_tokens, decay_tokens
        if done >= end:
            return self.min_lr
        ratio = (done - start) / (end - start)
        share = 0.5 * (1 + math.cos(math.pi * ratio)) if self.schedule == "cosine" else 1 - ratio
        return self.min_lr + (self.lr - self.min_lr) * share


@dataclass(frozen=True, kw_only=True, config=SECTION)
class Train:
    """Budget, batch and numerics."""

    tokens: Count = Field(ge=1)
    """Budget: training ends with the first step at which this many tokens have been trained on."""
    batch_size: int = Field(ge=1)
    """Sequences per optimizer step."""
    micro_batch_tokens: Count = Field(default=16384, ge=1)
    """Tokens that one forward pass may hold; a step is cut into as many micro-batches as that needs."""
    dtype: Literal["auto", "fp32", "bf16"] = "auto"
    """Compute type; master weights are fp32. "auto": bf16 where the device has bf16 matmuls, else fp32."""
    compile: Literal["auto", "on", "off"] = "auto"
    """torch.compile; "auto": on CUDA only."""
    deterministic: bool = False
    """Only deterministic kernels, so that runs on CUDA repeat bit for bit."""
    activation_checkpointing: bool = False
    """Recompute each block in the backward pass instead of storing its activations."""


@dataclass(frozen=True, kw_only=True, config=SECTION)
class Eval:
    """Validation at full length, all blocks, on a fixed set of windows."""

    every: int = Field(default=100, ge=1)
    """Steps between two evaluations; step 0 and the last step are evaluated too."""
    windows: int = Field(default=64, ge=1)
    """Validation windows, of seq_len tokens each."""


@dataclass(frozen=True, kw_only=True, config=SECTION)
class Checkpoint:
    """When checkpoints are written and how many are kept."""

    every: Every = "10min"
    """Steps, or a duration such as "10min"; the last step is always saved."""
    keep: int = Field(default=3, ge=1)
    """Newest checkpoints kept."""


@dataclass(frozen=True, kw_only=True, config=SECTION)
class Wandb:
    """Weights & Biases: a second reader of metrics.jsonl."""

    mode: Literal["off", "offline", "online"] = "off"
    """"off", "offline" or "online"."""
    project: str = "efftrain"
    """Project that the run is logged to."""


@dataclass(frozen=True, kw_only=True, config=SECTION)
class Recipe:
    """A whole recipe, resolved."""

    model: Model
    data: Data = Field(default_factory=Data)
    optim: Optim
    train: Train
    eval: Eval = Field(default_factory=Eval)
    checkpoint: Checkpoint = Field(default_factory=Checkpoint)
    wandb: Wandb = Field(default_factory=Wandb)
    seed: int = Field(default=1234, ge=0)
    """Seed of initialization, data order and every other random draw."""
    seq_len_warmup: SeqLenWarmup | None = None
    batch_size_warmup: BatchSizeWarmup | None = None
    progressive_layer_drop: ProgressiveLayerDrop | None = None
    simigrad: SimiGrad | None = None
    staged_growth: StagedGrowth | None = None
    stages: tuple[Stage, ...] = ()
    """Stages of staged training, in order; without any, [model] is trained from start to end."""

    def model_at(self, stage: int) -> Model:
        """The model that a stage (from 0) trains: [model] where there are no stages, and in the last."""
        if not self.stages:
            return self.model
        return replace(self.model, **shapes_of_stages(_shape(self.model), self.stages)[stage]._asdict())

    def optim_at(self, stage: int) -> Optim:
        """The optimizer's settings in a stage: those of [optim], with the stage's own peak learning rate."""
        if not self.stages or self.stages[stage].lr is None:
            return self.optim
        return replace(self.optim, lr=self.stages[stage].lr)

    @model_validator(mode="after")
    def _rules_between_sections(self) -> Recipe:
        found = [f"{key}: {rule}" for key, rule in breaches_between(vars(self))]
        if found:
            raise ValueError("\n".join(found))
        return self


METHODS = ("seq_len_warmup", "batch_size_warmup", "progressive_layer_drop", "simigrad", "staged_growth")
"""Sections that are methods: a recipe without any of them is a baseline."""


def _shape(model: Model) -> tuple[int, int, int]:
    return model.n_layer, model.n_head, model.n_embd


# --- rules between sections ------------------------------------------------------------------------------------------


def breaches_between(sections: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(dotted key, rule) of every combination that cannot work. A rule is skipped where a value it needs is itself wrong."""
    for rule in (_model_rules, _optim_rules, _warmup_rules, _batch_size_rules, _simigrad_rules, _stage_rules):
        found = rule(sections)
        with suppress(UnknownValue):
            yield from found


def _model_rules(sections: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    model: Model | None = sections.get("model")
    if model and model.n_embd % model.n_head:
        yield "model.n_head", f"must divide model.n_embd = {model.n_embd}: every head has n_embd / n_head channels"


def _optim_rules(sections: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    optim: Optim | None = sections.get("optim")
    if optim is None:
        return
    if optim.decay_tokens is not None and optim.decay_steps is not None:
        yield (
            "optim.decay_steps",
            f"optim.decay_tokens = {optim.decay_tokens:_} schedules the same decay; keep one and set the other to false",
        )
    if optim.decay_steps is not None and optim.decay_steps <= optim.warmup_steps:
        yield "optim.decay_steps", f"must lie beyond optim.warmup_steps = {optim.warmup_steps}, where the decay begins"
    if optim.min_lr > optim.lr:
        yield "optim.min_lr", f"must not exceed optim.lr = {optim.lr:g}, the peak that the decay starts from"


def _warmup_rules(sections: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    model: Model | None = sections.get("model")
    train: Train | None = sections.get("train")
    slw: SeqLenWarmup | None = sections.get("seq_len_warmup")
    ramp: BatchSizeWarmup | None = sections.get("batch_size_warmup")
    simigrad: SimiGrad | None = sections.get("simigrad")
    if model and train and slw:
        # Under SimiGrad only the smallest batch is known; the tokens are then a lower bound.
        batch_size = simigrad.lowest if simigrad else train.batch_size
        for name, rule in slw.problems(model.seq_len, batch_size, train.tokens):
            yield f"seq_len_warmup.{name}", rule
    if model and train and ramp:
        for name, rule in ramp.problems(train.batch_size, model.seq_len, train.tokens):
            yield f"batch_size_warmup.{name}", rule


def _batch_size_rules(sections: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if sections.get("batch_size_warmup") is None:
        return
    if sections.get("seq_len_warmup") is not None:
        yield (
            "batch_size_warmup",
            "cannot be combined with seq_len_warmup: both take tokens from the early steps, which would shrink them twice; "
            "set one of the two to false",
        )
    if sections.get("simigrad") is not None:
        yield (
            "batch_size_warmup",
            "cannot be combined with simigrad: both decide the batch size; set one of the two to false",
        )


def _simigrad_rules(sections: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    train: Train | None = sections.get("train")
    simigrad: SimiGrad | None = sections.get("simigrad")
    if train is None or simigrad is None:
        return
    if train.batch_size % simigrad.quantum:
        yield "train.batch_size", f"must be a multiple of simigrad.quantum = {simigrad.quantum}: SimiGrad starts from it"
    elif not simigrad.lowest <= train.batch_size <= simigrad.highest:
        yield (
            "train.batch_size",
            f"must lie within SimiGrad's bounds, {simigrad.lowest} to {simigrad.highest} sequences: SimiGrad starts from it",
        )


def _stage_rules(sections: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    model: Model | None = sections.get("model")
    stages = sections.get("stages")
    if model and stages:
        yield from (("stages", rule) for rule in stage_problems(_shape(model), stages))
    optim: Optim | None = sections.get("optim")
    if optim and stages:
        for index, stage in enumerate(stages):
            if stage.lr is not None and stage.lr < optim.min_lr:
                rule = f"stage {index}: lr = {stage.lr:g} must not be less than optim.min_lr = {optim.min_lr:g}, where its decay ends"
                yield "stages", rule


def warnings_of(recipe: Recipe) -> list[str]:
    """What is legal and probably not meant, one sentence each; `pretrain` prints them before step 1."""
    found = []
    model, optim, train, slw = recipe.model, recipe.optim, recipe.train, recipe.seq_len_warmup
    step_tokens = train.batch_size * model.seq_len
    steps = math.ceil(train.tokens / step_tokens)
    if train.tokens < step_tokens:
        found.append(f"train.tokens = {train.tokens:_} is less than one full step, {step_tokens:_} tokens")
    if train.micro_batch_tokens < model.seq_len:
        found.append(
            f"train.micro_batch_tokens = {train.micro_batch_tokens:_} is less than one sequence of {model.seq_len} tokens: "
            "a forward pass holds one sequence all the same"
        )
    varies = slw or recipe.batch_size_warmup or recipe.simigrad  # steps is then only a lower bound
    if optim.warmup_steps >= steps and not varies:
        found.append(
            f"optim.warmup_steps = {optim.warmup_steps}, but the budget ends after {steps} steps: "
            "the learning rate never reaches its peak"
        )
    if optim.schedule == "constant" and not (optim.decay_tokens is None and optim.decay_steps is None):
        found.append('optim.schedule = "constant" does not decay: decay_tokens and decay_steps have no effect')
    elif optim.decay_tokens is not None and optim.decay_tokens > train.tokens:
        found.append(
            f"optim.decay_tokens = {optim.decay_tokens:_} lies beyond the budget, train.tokens = {train.tokens:_}: "
            "the learning rate never reaches min_lr"
        )
    elif optim.decay_steps is not None and optim.decay_steps > steps and not varies:
        found.append(
            f"optim.decay_steps = {optim.decay_steps} lies beyond the budget's {steps} steps: "
            "the learning rate never reaches min_lr"
        )
    if optim.schedule != "constant" and optim.decay_steps is not None and recipe.simigrad:
        found.append(
            "optim.decay_steps decays by steps, and SimiGrad makes their number unknown; decay by tokens instead "
            "(decay_steps = false)"
        )
    elif optim.schedule != "constant" and optim.decay_steps is not None and (slw or recipe.batch_size_warmup):
        found.append(
            "optim.decay_steps decays by steps while early steps hold fewer tokens: the learning rate falls too early; "
            "decay by tokens instead (decay_steps = false)"
        )
    if recipe.simigrad:
        found += recipe.simigrad.warnings(train.batch_size)
        if slw:
            found.append(
                "simigrad with seq_len_warmup: the similarity rises with the tokens in a sequence, so the batch will first grow "
                "and then shrink as sequences lengthen; run each alone before combining them"
            )
    if recipe.progressive_layer_drop:
        found += recipe.progressive_layer_drop.warnings(None if varies else steps)
    return found


# --- whole recipes ---------------------------------------------------------------------------------------------------


def load_recipe(name_or_path: str, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe of that name or path, with what it inherits and with `key=value` overrides.

    Raises:
        RecipeError: it is not found or breaks any rule; the message lists every breach at once.
    """
    return check_draft(read_recipe_file(name_or_path, overrides))


def check_draft(draft: Draft) -> Recipe:
    """The recipe that a draft describes.

    Raises:
        RecipeError: it breaks any rule; the message lists every breach at once.
    """
    check = Check(draft, Recipe)
    sections = check.result()
    known = {**check.partial, **sections}
    for key, rule in breaches_between(known):
        section, _, name = key.partition(".")
        check.add(key, rule, getattr(known[section], name) if name else None)
    if check.problems:
        raise RecipeError(report(draft.name, check.problems), check.problems)
    return Recipe(**sections)


def method_names(recipe: Recipe) -> list[str]:
    """Names of the method sections that are present."""
    # [[stages]] alone are staged training too, with the operators' defaults
    return [
        name for name in METHODS if getattr(recipe, name) is not None or (name == "staged_growth" and recipe.stages)
    ]


def recipe_values(section: Any) -> dict[str, Any]:
    """A recipe (or section) as nested dicts in the order of its fields, without what is absent."""

    def plain(value: Any) -> Any:
        if is_dataclass(value):
            return recipe_values(value)
        return [plain(item) for item in value] if isinstance(value, tuple) else value

    values = {field.name: plain(getattr(section, field.name)) for field in fields(section)}
    if not values.get("stages", True):
        del values["stages"]  # `stages = []` would only puzzle the readers of every other recipe
    return {name: value for name, value in values.items() if value is not None}


def flat_values(recipe: Recipe) -> dict[str, Any]:
    """Dotted key -> value of every key that is present; keys of the n-th [[section]] are numbered, from 0."""
    return dict(_flat(recipe_values(recipe), ""))


def _flat(values: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, list) and any(isinstance(item, dict) for item in value):
            value = {str(index): item for index, item in enumerate(value)}
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def dump_recipe(recipe: Recipe, comments: Mapping[str, str] | None = None) -> str:
    """The recipe as TOML, every default written out; `load_recipe` reads it back to an equal Recipe.

    Args:
        comments: dotted key -> a comment to stand after its value.
    """
    return "\n".join(toml_lines(recipe_values(recipe), comments)) + "\n"


def recipe_differences(a: Recipe, b: Recipe) -> list[tuple[str, Any, Any]]:
    """(dotted key, value in a, value in b) of exactly the keys that differ; None where a key is absent."""
    in_a, in_b = flat_values(a), flat_values(b)
    keys = [*in_a, *(key for key in in_b if key not in in_a)]
    return [(key, in_a.get(key), in_b.get(key)) for key in keys if in_a.get(key) != in_b.get(key)]
