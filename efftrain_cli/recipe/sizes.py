"""Shape, batch, learning rate and budget of a model by its size; docs/sizes.md has the rules and
their sources. No torch."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from efftrain_cli.foundation.errors import UsageError
from efftrain_cli.model.flops import inner_parameters
from efftrain_cli.recipe.recipe import EVALUATIONS, Recipe, flat_values
from efftrain_cli.recipe.sections import Model, config_of

BYTES_PER_TOKEN = 3
"""Of a text that is not tokenized yet: between "bpe:1024" on source code and "gpt2" on prose."""
GPT2_VOCABULARY = 50257
"""Tokens of GPT-2's tokenizer."""
LARGE_BATCH = 524_288
"""Tokens of a step from which on beta2 is 0.95."""
PASSES = 4
"""Times that a text is read at most."""
SMALL_LR = 4e-3
"""AdamW's best peak at 0.4M parameters, docs/evidence/baselines.md: the law's would be 15e-3."""
SMALLEST_FITTED = 5_000_000
"""Parameters of the smallest model that the learning rate's law was fitted to."""


class Sizes(NamedTuple):
    """What follows from the number of parameters and the budget."""

    tokens: int
    """Budget."""
    batch_tokens: int
    """Tokens of a step."""
    lr: float
    warmup_tokens: int
    beta2: float


def sizes_for(parameters: int, tokens_per_parameter: float = 20) -> Sizes:
    """Return budget, batch, peak learning rate, warmup and beta2 of AdamW by size.

    Args:
        parameters: all but tables of inputs; a head that shares its matrix counts.
        tokens_per_parameter: 20 in Hoffmann et al. 2022, arXiv 2203.15556.

    Source: Porian et al. 2024, arXiv 2406.19146, as in OLMo-core's
    model_ladder/wsds_chinchilla_run_configurator.py.
    """
    scale = parameters / 108e6
    tokens = round(tokens_per_parameter * parameters)
    batch_tokens = round(2048 * 160 * scale ** (2 / 3))
    return Sizes(
        tokens=tokens,
        batch_tokens=batch_tokens,
        lr=0.0047 * scale ** (-1 / 3) / 2,
        warmup_tokens=min(parameters, tokens // 10),
        beta2=0.95 if batch_tokens >= LARGE_BATCH else 0.99,
    )


def likely_vocabulary(tokenizer: str) -> int:
    """Return the tokens of a tokenizer by its name or file.

    If only preparing the data would tell, they are GPT-2's, the most that is usual. "bpe:N" may
    come out smaller on a small text.
    """
    if tokenizer.startswith("bpe:") and tokenizer[4:].isdigit():
        return int(tokenizer[4:])
    with suppress(OSError, ValueError, KeyError, TypeError):
        file = json.loads(Path(tokenizer).read_text(encoding="utf-8"))
        added = [token["content"] for token in file.get("added_tokens", [])]
        return len({*file["model"]["vocab"], *added})
    return GPT2_VOCABULARY


def scored_parameters(model: Model, vocab_size: int) -> int:
    """Count a model's parameters without tables of inputs, with its head."""
    config = config_of(model, vocab_size)
    return inner_parameters(config) + config.padded_vocab_size * config.n_embd


def shape_within(model: Model, vocab_size: int, parameters: int) -> Model:
    """Return the largest model of the ladder that `parameters` hold, else the smallest.

    Depth n has n heads and width 64 n, below a million parameters 16 n; what else `model` has
    stays.
    """
    head = 16 if parameters < 1_000_000 else 64
    depth = 1
    while scored_parameters(_rung(model, head, depth + 1), vocab_size) <= parameters:
        depth += 1
    return _rung(model, head, depth)


def _rung(model: Model, head: int, depth: int) -> Model:
    return replace(
        model,
        n_layer=depth,
        n_head=depth,
        n_embd=head * depth,
        n_kv_head=None,
        head_dim=None,
        d_ff=None,
    )


def parameters_for(
    recipe: Recipe, vocab_size: int, text_bytes: int, tokens_per_parameter: float
) -> int:
    """Return the parameters that a text is enough for when it is read `PASSES` times.

    At most those of the recipe's own model, and at least the smallest shape's.
    """
    own = scored_parameters(recipe.model, vocab_size)
    smallest = scored_parameters(shape_within(recipe.model, vocab_size, 0), vocab_size)
    tokens = PASSES * text_bytes / BYTES_PER_TOKEN
    return max(smallest, min(own, round(tokens / tokens_per_parameter)))


class Written(NamedTuple):
    """A line of a recipe, with the source of its value."""

    key: str
    value: object
    source: str


def written_sizes(
    recipe: Recipe, vocab_size: int, parameters: int, tokens_per_parameter: float
) -> Iterator[Written]:
    """Yield the keys that the size decides, at most `parameters`.

    Raises:
        UsageError: not even the smallest shape has so few parameters.
    """
    model = shape_within(recipe.model, vocab_size, parameters)
    count = scored_parameters(model, vocab_size)
    if count > parameters:
        raise UsageError(
            f"{parameters:,} parameters hold no model: the smallest has {count:,},"
            f" with {vocab_size:,} tokens in the vocabulary\n"
            f"  give --parameters {count} or more"
        )
    sizes = sizes_for(count, tokens_per_parameter)
    batch_size = max(1, round(sizes.batch_tokens / model.seq_len))
    step_tokens = batch_size * model.seq_len
    lr = float(f"{sizes.lr:.4g}")
    source = "arXiv 2406.19146"
    if count < SMALLEST_FITTED:
        lr = SMALL_LR
        source = "best at 0.4M: a start for a sweep"

    ladder = f"{count:,} parameters with the head"
    yield Written("model.n_layer", model.n_layer, ladder)
    yield Written("model.n_head", model.n_head, "one a block")
    yield Written("model.n_embd", model.n_embd, f"heads of {model.head_size}")
    for key in ("model.n_kv_head", "model.head_dim", "model.d_ff"):
        if key in flat_values(recipe):
            yield Written(key, False, "by the width")
    yield Written("optim.lr", lr, source)
    yield Written("optim.min_lr", float(f"{lr / 10:.4g}"), "a tenth: GPT-3, arXiv 2005.14165")
    warmup_steps = max(1, round(sizes.warmup_tokens / step_tokens))
    yield Written("optim.warmup_steps", warmup_steps, f"{sizes.warmup_tokens:,} tokens: OLMo-core")
    yield Written("optim.betas", [0.9, sizes.beta2], "OLMo-core: .95 from 524,288 tokens a step")
    yield Written("train.tokens", sizes.tokens, f"{tokens_per_parameter:g} a parameter: 2203.15556")
    yield Written("train.batch_size", batch_size, f"{step_tokens:,} tokens: arXiv 2406.19146")
    steps = sizes.tokens / step_tokens
    yield Written("eval.every", max(1, round(steps / EVALUATIONS)), "about twenty evaluations")
