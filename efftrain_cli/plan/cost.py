"""What a recipe costs before anything is spent: FLOPs, memory and disk, by arithmetic. No torch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from efftrain_cli.model.config import GPTConfig
from efftrain_cli.model.flops import parameter_count
from efftrain_cli.plan.plan import model_config
from efftrain_cli.plan.preview import PlanSummary, summarize_plan
from efftrain_cli.recipe.recipe import Recipe

GPT2_VOCABULARY = 50257
"""Tokens of GPT-2's tokenizer."""


@dataclass(frozen=True, kw_only=True)
class PlanCost:
    """What a plan is expected to cost."""

    summary: PlanSummary
    vocab_size: int
    parameters: int
    """Of [model], embeddings included."""
    memory_bytes: int
    """Weights, gradients, moments and the activations of the largest micro-batch, by `training_bytes`."""
    dtype: str
    """What memory_bytes assumes: the recipe's, fp32 for "auto"."""
    checkpoint_bytes: int
    """One checkpoint of [model]: weights and AdamW's two moments, fp32."""


def vocabulary_of(tokenizer: str) -> int | None:
    """Tokens of a recipe's tokenizer, as far as its name or file says; "bpe:N" may come out smaller on a small text."""
    if tokenizer == "gpt2":
        return GPT2_VOCABULARY
    if tokenizer.startswith("bpe:") and tokenizer[4:].isdigit():
        return int(tokenizer[4:])
    try:
        found = json.loads(Path(tokenizer).read_text(encoding="utf-8"))
        return len(
            {
                *found["model"]["vocab"],
                *(token["content"] for token in found.get("added_tokens", [])),
            }
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def likely_vocabulary(tokenizer: str) -> int:
    """`vocabulary_of`, or where only preparing the data would tell GPT-2's, the largest that is usual."""
    return vocabulary_of(tokenizer) or GPT2_VOCABULARY


def plan_cost(recipe: Recipe, until: int | None = None) -> PlanCost | None:
    """What training `recipe` costs, to step `until` or its end; None where only preparing shows the vocabulary."""
    vocab_size = vocabulary_of(recipe.data.tokenizer)
    if vocab_size is None:
        return None
    config = model_config(recipe, vocab_size)
    summary = summarize_plan(recipe, None, vocab_size, until)
    parameters = parameter_count(config)
    dtype = "bf16" if recipe.train.dtype == "bf16" else "fp32"
    memory = training_bytes(
        config,
        *summary.largest_micro_batch,
        dtype=dtype,
        compiled=False,
        recompute=recipe.train.activation_checkpointing is True,
        gradients=gradient_copies(recipe),
    )
    in_flight = in_flight_bytes(recipe, config.padded_vocab_size)
    return PlanCost(
        summary=summary,
        vocab_size=vocab_size,
        parameters=parameters,
        memory_bytes=memory + in_flight,
        dtype=dtype,
        checkpoint_bytes=12 * parameters + in_flight,
    )


def in_flight_bytes(recipe: Recipe, padded_vocab_size: int) -> int:
    """Bytes of late gradients between two full steps, which each checkpoint holds too."""
    shape = model_config(recipe, padded_vocab_size, padded_vocab_size)
    return sum(
        method.in_flight_bytes(shape, recipe.train.batch_size) for method in recipe.methods.values()
    )


def gradient_copies(recipe: Recipe, ranks: int = 1) -> int:
    """Gradients of the whole model that one of so many ranks holds: methods' too, and lanes' that wait."""
    waiting = max(0, ((recipe.lanes or 0) // ranks).bit_length() - 1)
    return 1 + waiting + sum(method.gradients_held for method in recipe.methods.values())


def training_bytes(
    config: GPTConfig,
    sequences: int,
    seq_len: int,
    *,
    dtype: str,
    compiled: bool,
    recompute: bool,
    gradients: int = 1,
) -> int:
    """Bytes of device memory that training on micro-batches of (sequences, seq_len) tokens holds at its peak, by
    estimate.

    Weights, gradients and AdamW's two moments in fp32 (Muon's state is smaller), with autocast's copy of the weights.
    Per token and block, in elements of the compute type: the residual stream twice, both norms' outputs, q, k, v,
    attention's output, the MLP's hidden units, and what norms, rotation and shared heads keep beside them: 16 n_embd in
    GPT-2; and one fp32 log-sum-exp a head. The logits and their gradient once each.

    Args:
        dtype: "bf16" or "fp32".
        recompute: of each block only its input is kept; one block's activations exist at a time.
        gradients: copies of the gradient that exist at once, by `gradient_copies`.
    """
    parameters = parameter_count(config)
    element = 2 if dtype == "bf16" else 4
    state = parameters * (4 * (3 + gradients) + (element if dtype == "bf16" else 0))
    width, (q, k, v) = config.n_embd, config.qkv_rows
    hidden = {"gelu": 2, "relu2": 3, "swiglu": 4}[config.mlp]
    kept = 4 * width + q + k + v + config.attention_size + hidden * config.ff_size
    kept += (q + k) * ((config.positions == "rope") + config.qk_norm)
    kept += 2 * (q - k) if q > k else 0  # keys and values, repeated for every query head
    block = kept * element + 4 * config.n_head
    if config.norm_facts.keeps_fp32 and not compiled:
        block += 2 * 4 * width  # before the gain, in fp32
    elif dtype == "bf16" and not compiled:
        block += 4 * width  # uncompiled layer norms keep their inputs in fp32
    blocks = config.n_layer * width * element + block if recompute else config.n_layer * block
    logits = 2 * config.padded_vocab_size * element
    return state + sequences * seq_len * (blocks + logits)
