"""How `efftrain pretrain --plan` prints what a recipe costs."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from efftrain_cli.data.sources import find_sources
from efftrain_cli.foundation.console import (
    counted,
    human,
    human_seconds,
    print_folded,
    print_json,
    say,
)
from efftrain_cli.foundation.errors import DataError, UsageError
from efftrain_cli.foundation.step import Progress
from efftrain_cli.plan.cost import PlanCost, plan_cost
from efftrain_cli.plan.describe import LABEL, model_line, steps_line, text_line
from efftrain_cli.plan.devices import PlannedDevice
from efftrain_cli.plan.preview import csv_lines, staged_warnings
from efftrain_cli.plan.rates import measured_rate
from efftrain_cli.recipe.recipe import Recipe
from efftrain_cli.recipe.sizes import likely_vocabulary

if TYPE_CHECKING:
    from efftrain_cli.data.corpus import Corpus


def print_csv(recipe: Recipe, until: int | None, begun: Progress) -> None:
    """Print every step after `begun` as CSV."""
    # FLOPs only decide when a model grows.
    vocab_size = likely_vocabulary(recipe.data.tokenizer) if recipe.stages else None
    lines = csv_lines(recipe, until, vocab_size, begun)
    sys.stdout.writelines(f"{line}\n" for line in lines)


def print_plan(
    recipe: Recipe,
    name: str,
    until: int | None,
    form: str,
    device: PlannedDevice,
    kind: str,
    begun: Progress,
) -> None:
    """Print text, model, steps, costs, memory and disk, as lines or as JSON; what the recipe's
    methods assume goes to stderr.

    Args:
        name: the recipe's, as the command line named it.
        until: last step; None: the budget's end.
        kind: the device as --device names it, whose measured speeds count.
        begun: what a branch begins with: its costs are those of the steps after it.

    Raises:
        UsageError: the devices cannot share a step.
    """
    vocab_size = likely_vocabulary(recipe.data.tokenizer)
    corpus, text, shards = _find_text(recipe, vocab_size)
    if corpus is not None:
        vocab_size = corpus.vocab_size
    cost = plan_cost(recipe, device, vocab_size, until, begun)
    if cost.summary.smallest_batch < device.count:
        raise UsageError(
            f"a step of {counted(cost.summary.smallest_batch, 'sequence')} cannot be shared by"
            f" {counted(device.count, 'device')}\n"
            f"  assume at most {cost.summary.smallest_batch}, or raise train.batch_size"
        )
    epochs = None
    if corpus is not None:
        epochs = _epochs(recipe, corpus, cost)
        text = text_line(recipe, corpus.train.tokens, epochs)
    seconds, by = _time(recipe, cost, device, kind)
    for method in recipe.methods.values():
        for line in method.assumptions(recipe):
            say(f"assumed: {line}")
    for warning in staged_warnings(recipe, cost.summary.end):
        say(f"warning: {warning}")
    if form == "json":
        print_json(_as_json(recipe, cost, device, corpus, epochs, seconds))
        return
    lines = [
        text,
        f"{model_line(recipe, vocab_size)}, {cost.dtype}",
        steps_line(recipe, cost.summary),
        _cost_line(cost, seconds, by, name),
        _memory_line(cost, device),
        _disk_line(recipe, cost) + shards,
        *_sum_lines(recipe),
    ]
    if begun.step:
        lines.insert(0, f"branch  after step {begun.step:,}: {human(begun.tokens)} tokens")
    print_folded("\n".join(lines), indent=LABEL)


def _sum_lines(recipe: Recipe) -> Iterator[str]:
    """Yield, for each role of narrow sums, the mantissa bits that theory asks for."""
    section = recipe.chunked_accumulation
    if section is None:
        return
    from efftrain_cli.methods.variance_retention import needed_bits, product_bits

    lengths = section.longest_sums(recipe)
    for role, accumulator in section.roles.items():
        if accumulator is None:
            continue
        other = section.operands if role == "forward" else section.gradient_format
        bits = product_bits(section.operands, other)
        length = lengths[role]
        text = f"{role}: up to {length:,} products; by theory {needed_bits(bits, length)} bits"
        if accumulator.chunk:
            chunked = needed_bits(bits, length, accumulator.chunk)
            text += f", in chunks of {accumulator.chunk} {chunked}"
        yield f"{'sums':<{LABEL}}{text}"


def _find_text(recipe: Recipe, vocab_size: int) -> tuple[Corpus | None, str, str]:
    """Return the prepared text; if there is none, None, the line that says so, and the shards that
    preparing will write."""
    from efftrain_cli.data.corpus import dtype_for
    from efftrain_cli.data.prepare import limits_of, prepared_corpus

    try:
        corpus = prepared_corpus(recipe)
    except DataError as error:
        return None, f"text    missing: {error}", ""
    if corpus is not None:
        return corpus, "", ""
    line = f"text    {recipe.data.named_text}: not prepared"
    size = sum(source.size for source in find_sources(recipe.data).sources)
    if size:
        line += f", {human(size, 'B')}"
    # Of a dataset on the Hub preparing reads so many tokens.
    tokens: float | None = limits_of(recipe).train
    bound = "up to"
    if not tokens:
        # A token of a vocabulary of 256 has about 2 bytes of text, one of GPT-2's 4.
        tokens = size / (math.log2(vocab_size) / 4)
        bound = "about"
    shards = human(dtype_for(vocab_size).itemsize * tokens, "B")
    return None, line, f", {bound} {shards} of shards"


def _epochs(recipe: Recipe, corpus: Corpus, cost: PlanCost) -> float:
    """Return how often the steps read the prepared text.

    Raises:
        RecipeError: more than once, which the recipe does not allow.
    """
    from efftrain_cli.data.windows import Windows

    windows = Windows(corpus.train, recipe.model.seq_len, recipe.seed)
    return windows.check_budget(cost.summary.windows, recipe.data)


def _time(
    recipe: Recipe, cost: PlanCost, device: PlannedDevice, kind: str
) -> tuple[float | None, str]:
    """Return the seconds that training takes, None if nothing says so, and what says it."""
    peak = device.peak(cost.dtype)
    if peak is not None:
        by = f"{device.count} x {100 * device.share:g} % of {human(peak, 'FLOP')}/s"
        rate = device.count * device.share * peak
        return cost.flops / rate, f"{by} (assumed, no network)"
    measured = measured_rate(kind, recipe)
    if measured is None:
        return None, ""
    by = f"{human(measured.flops_per_second, 'FLOP')}/s by {measured.source}"
    shape = (measured.n_layer, measured.n_embd)
    if shape != (recipe.model.n_layer, recipe.model.n_embd):
        by += f", a model of {measured.n_layer} x {measured.n_embd}: a rough guess"
    return cost.flops / measured.flops_per_second, by


def _cost_line(cost: PlanCost, seconds: float | None, by: str, name: str) -> str:
    flops = f"costs   {human(cost.flops, 'FLOP')}s"
    if seconds is None:
        return f"{flops}; time unknown: `efftrain bench {name}`"
    return f"{flops}, about {human_seconds(seconds)}: {by}"


def _memory_line(cost: PlanCost, device: PlannedDevice) -> str:
    sequences, seq_len = cost.micro_batch
    needed = human(cost.memory_bytes, "B")
    batches = f"micro-batches of {sequences:,} x {seq_len:,}"
    if not device.memory:
        return f"memory  about {needed}, {batches}"
    memory = human(device.memory, "B")
    if cost.memory_bytes > device.memory:
        return f"memory  does not fit: about {needed}, the device has {memory}"
    return f"memory  about {needed} of {memory}, {batches}"


def _disk_line(recipe: Recipe, cost: PlanCost) -> str:
    checkpoints = counted(recipe.checkpoint.most, "checkpoint")
    return f"disk    {checkpoints} of {human(cost.checkpoint_bytes, 'B')}"


def _as_json(
    recipe: Recipe,
    cost: PlanCost,
    device: PlannedDevice,
    corpus: Corpus | None,
    epochs: float | None,
    seconds: float | None,
) -> dict[str, Any]:
    """Return the plan as plain values."""
    return {
        "schema_version": 2,
        "train_tokens": None if corpus is None else corpus.train.tokens,
        "epochs": epochs,
        "steps": cost.summary.steps,
        "tokens": cost.summary.tokens,
        "flops": cost.flops,
        "seconds": seconds,
        "parameters": cost.parameters,
        "vocab_size": cost.vocab_size,
        "dtype": cost.dtype,
        "devices": device.count,
        "memory_bytes": cost.memory_bytes,
        "disk_bytes": recipe.checkpoint.most * cost.checkpoint_bytes,
    }
