"""GPT-2 1.5B on one device, activations stored and computed again."""

from __future__ import annotations

from benchmarks.gpu.measuring import Bench, Part, rate_part, recipe_for
from efftrain_cli.recipe.recipe import Recipe


def _part(sequences: int, checkpointing: str) -> Part:
    def recipe(bench: Bench) -> Recipe:
        setting = f"train.activation_checkpointing={checkpointing}"
        return recipe_for(bench, "gpt2-1.5b", sequences=sequences, micro_batches=2, sets=[setting])

    kept = {"false": "activations stored", "true": "activations computed again", '"auto"': "auto"}[
        checkpointing
    ]
    return rate_part(f"1.5B, {sequences} x 1024, {kept}", recipe, 110)


PARTS = (
    _part(16, '"auto"'),
    _part(16, "true"),
    _part(16, "false"),
    _part(32, "true"),
    _part(8, "false"),
)
