"""What layer norms and the standardization loss cost at 6 layers x 384: training steps and
decoding, in turns, in processor time.

    python benchmarks/speed/standardization_cost.py [--steps 6] [--tokens 64]

One micro-batch of 2,048 tokens a step, vocabulary 1024, fp32, one thread. Decoding: one sequence,
token by token with cached keys and values. Ratios are medians over turns, each relative to the
plain model in the same turn, so that a busy machine disturbs all alike.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from dataclasses import replace

import torch
from step_time import CPU, median_ratio, six_by_384, take_turns

from efftrain_cli.methods.standardization_loss import StandardizationLoss
from efftrain_cli.model.generate import GREEDY, generate
from efftrain_cli.recipe.recipe import Recipe
from efftrain_cli.training.build import build_state

VOCABULARY = 1024
LAYER_NORM, BARE = "layer norm", "no norm"


def recipes() -> dict[str, Recipe]:
    plain = six_by_384()
    bare = replace(plain, model=replace(plain.model, norm="none", init="unit"))
    found = {LAYER_NORM: plain, BARE: bare}
    for sites in ("preact", "ln_input", "all_linear"):
        found[f"loss at {sites}"] = replace(
            bare, standardization_loss=StandardizationLoss(weight=0.1, sites=sites)
        )
    return found


def decoding(recipe: Recipe) -> Iterator[torch.Tensor]:
    """Tokens that a fresh model writes, one after the other."""
    return generate(
        build_state(recipe, VOCABULARY, CPU).model.eval(),
        torch.zeros((1, 8), dtype=torch.int64),
        GREEDY,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=64)
    options = parser.parse_args()
    every = recipes()
    taken = take_turns(every, VOCABULARY, options.steps)
    print(f"training, {options.steps} steps of 2,048 tokens each")
    for name in every:
        seconds = statistics.median(step.seconds for step in taken[name])
        print(
            f"{name:28} {1000 * seconds:6.0f} ms a step  {2048 / seconds:7.0f} tokens/s "
            f" {median_ratio(taken[name], taken[BARE]):.3f} x {BARE}"
        )
    writers = {name: decoding(every[name]) for name in (LAYER_NORM, BARE)}
    spent: dict[str, list[float]] = {name: [] for name in writers}
    for turn in range(options.tokens + 4):
        for name, writer in writers.items():
            start = time.process_time()
            next(writer)
            if turn >= 4:
                spent[name].append(time.process_time() - start)
    ratio = statistics.median(a / b for a, b in zip(spent[BARE], spent[LAYER_NORM], strict=True))
    print(f"decoding, {options.tokens} tokens each")
    for name, seconds in spent.items():
        print(f"{name:28} {1 / statistics.median(seconds):6.0f} tokens/s")
    print(f"{BARE} takes {ratio:.3f} x the time of {LAYER_NORM}")


if __name__ == "__main__":
    main()
