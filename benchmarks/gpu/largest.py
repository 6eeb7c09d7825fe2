"""GPT-2 1.5B on one device, activations stored or computed again as the recipe's "auto" decides."""

from __future__ import annotations

from benchmarks.gpu.measuring import Bench, rate_part, recipe_for
from efftrain_cli.recipe.recipe import Recipe


def _recipe(bench: Bench) -> Recipe:
    return recipe_for(bench, "gpt2-1.5b", sequences=16, micro_batches=2)


PARTS = (rate_part("1.5B, 16 x 1024", _recipe, 120),)
