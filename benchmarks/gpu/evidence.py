"""What the pages of evidence count in FLOPs and steps, in seconds at GPT-2 117M size: short
sequences of a long context, fewer layers, larger batches. One machine and random tokens: it says
what a step costs, nothing about what it teaches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from benchmarks.gpu.measuring import (
    Bench,
    Figure,
    Part,
    figure,
    rate_figure,
    rates,
    recipe_for,
    training,
)
from efftrain_cli.methods.progressive_layer_drop import ProgressiveLayerDrop
from efftrain_cli.recipe.recipe import Recipe


def _per_token(rate: Figure) -> tuple[float, float]:
    """Seconds and FLOPs of a token."""
    seconds = 1 / float(str(rate["tokens_per_second"]))
    return seconds, seconds * float(str(rate["flops_per_second"]))


def long_contexts(bench: Bench) -> Iterator[Figure]:
    """docs/evidence/long-contexts.md: as many tokens a step in short sequences as in full ones."""
    full, short = (32, 8) if bench.smoke else (2048, 64)
    tokens = 2 * full if bench.smoke else 16 * full
    measured = []
    for length in (short, full):
        recipe = recipe_for(bench, micro_batches=1)
        recipe = replace(
            recipe,
            model=replace(recipe.model, seq_len=length),
            train=replace(recipe.train, batch_size=tokens // length, micro_batch_tokens=tokens),
        )
        rate = rates(bench, training(bench, recipe))
        measured.append(_per_token(rate))
        yield rate_figure(f"117M, sequences of {length}", rate)
    (short_time, short_flops), (full_time, full_flops) = measured
    note = f"{full_flops / short_flops:.2f} times the FLOPs"
    yield figure(f"a token at {full} / at {short}", full_time / short_time, "times the time", note)


def layers(bench: Bench) -> Iterator[Figure]:
    """docs/evidence/layer-dropping.md: all layers, half of them dropped at the end, and three
    quarters of them always."""
    dense = recipe_for(bench, micro_batches=4)
    n_layer = dense.model.n_layer
    kept = max(1, n_layer * 3 // 4)
    arms: dict[str, Recipe] = {
        f"{n_layer} layers": dense,
        "theta 0.5": replace(
            dense, progressive_layer_drop=ProgressiveLayerDrop(theta=0.5, steps=0)
        ),
        f"{kept} layers": replace(dense, model=replace(dense.model, n_layer=kept)),
    }
    measured = {}
    for name, recipe in arms.items():
        rate = rates(
            bench, training(bench, recipe), warmup=8
        )  # every shape of every pattern of blocks
        measured[name] = _per_token(rate)
        yield rate_figure(f"117M, {name}", rate)
    time, flops = measured.pop(f"{n_layer} layers")
    for name, (its_time, its_flops) in measured.items():
        yield figure(
            f"a token, {name} / {n_layer} layers",
            its_time / time,
            "of the time",
            f"{its_flops / flops:.1%} of the FLOPs",
        )


def batches(bench: Bench) -> Iterator[Figure]:
    """docs/evidence/simigrad.md: what a larger batch saves on one device."""
    for sequences in (2, 4) if bench.smoke else (2, 8, 32, 128):
        together = min(sequences, 32)
        recipe = recipe_for(bench, sequences=together, micro_batches=sequences // together)
        rate = rates(bench, training(bench, recipe))
        note = f"{rate['tokens_per_second']:,.0f} tokens/s"
        yield figure(
            f"117M, a step of {sequences} sequences",
            1000 * float(str(rate["seconds_per_step"])),
            "ms",
            note,
        )


PARTS = (
    Part("long contexts", long_contexts, 40),
    Part("layers", layers, 50),
    Part("batches", batches, 40),
)
