"""What SimiGrad's measurement costs: whole training steps at a fixed batch, with and without it.

    python benchmarks/speed/simigrad_overhead.py [--steps 30] [--vocab 512]

A step that measures needs two micro-batches. So it is compared with a baseline of two micro-batches
(what the measurement costs) and with one of a single micro-batch (what it costs where the batch
would have fitted into one). The three dot products, nearly all of the measurement's cost, are also
timed alone: their share is below the noise of whole steps. n_layer 6, n_embd 384, seq_len 256,
batch 8.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import replace

import torch
from step_time import CPU, median_ratio, six_by_384, take_turns

from efftrain_cli.methods.simigrad import SimiGrad, half_dots
from efftrain_cli.recipe.recipe import Recipe
from efftrain_cli.training.build import build_state


def dot_seconds(recipe: Recipe, vocab_size: int) -> float:
    """CPU seconds of the dot products of two gradients of the recipe's model, median of 20."""
    shapes = [
        parameter.shape for parameter in build_state(recipe, vocab_size, CPU).model.parameters()
    ]
    a, b = ([torch.randn(shape) for shape in shapes] for _ in range(2))
    seconds = []
    for _ in range(20):
        start = time.process_time()
        half_dots(a, b, 4, 4)
        seconds.append(time.process_time() - start)
    return statistics.median(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--vocab", type=int, default=512)
    arguments = parser.parse_args()
    fixed = SimiGrad(target=0.5, min_batch_size=8, max_batch_size=8)
    recipes = {
        "1 micro-batch": six_by_384(2048),
        "2 micro-batches": six_by_384(1024),
        "measuring": replace(six_by_384(1024), simigrad=fixed),
    }
    taken = take_turns(recipes, arguments.vocab, arguments.steps)
    print(
        f"vocabulary {arguments.vocab}, {arguments.steps} steps each, 1 thread; median ratios of"
        " steps taken in turns"
    )
    for name, steps in taken.items():
        print(
            f"{name:16} {statistics.median(step.seconds for step in steps) * 1e3:8.1f} ms CPU per"
            " step"
        )
    dots = dot_seconds(recipes["measuring"], arguments.vocab)
    step_seconds = statistics.median(step.seconds for step in taken["2 micro-batches"])
    print(f"dot products alone {dots * 1e3:.1f} ms: {dots / step_seconds:.2%} of a step")
    for name in ("2 micro-batches", "1 micro-batch"):
        print(f"measuring / {name}: {median_ratio(taken['measuring'], taken[name]) - 1:+.2%}")


if __name__ == "__main__":
    main()
