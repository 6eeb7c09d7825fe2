"""Recipes at toy size, so that each command of a page or a help text runs in seconds.

Widths, batches, lengths and schedules shrink to a dozen steps. Methods stay on, and
all that decides their kind stays as it is.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from efftrain_cli.foundation.errors import UsageError
from efftrain_cli.recipe.recipe import Recipe
from efftrain_cli.recipe.sections import Data
from efftrain_cli.verify_resume import cut_recipe

STEPS = 12
SEQ_LEN = 32
SHORTEST = 8
"""Sequences that are longer become no shorter than this."""
HEAD_DIM = 16


def toy_recipe(recipe: Recipe, folder: Path, devices: int = 1) -> Recipe:
    """Return the recipe as a dozen steps of a tiny model on the text of `folder`, for a batch that
    `devices` can share.

    Raises:
        UsageError: it cannot be made so small.
    """
    seq_len = min(recipe.model.seq_len, SEQ_LEN)

    def narrow(model: Any) -> Any:
        """Return [model], or a stage's changes of it, with the same depth and heads."""
        width = model.n_head and HEAD_DIM * model.n_head
        return replace(model, n_embd=width, head_dim=None, d_ff=None)

    def shorten(length: int) -> int:
        return max(min(length, SHORTEST), length * seq_len // recipe.model.seq_len)

    stages = []
    for stage in recipe.stages:
        warmup = min(stage.rewarmup_steps, 2)
        stages.append(replace(stage, model=narrow(stage.model), rewarmup_steps=warmup))
    slw = recipe.seq_len_warmup
    if slw is not None:
        slw = replace(
            slw,
            start=shorten(slw.start),
            multiple=shorten(slw.multiple),
            lengths=tuple(map(shorten, slw.lengths)),
        )
    try:
        small = replace(
            recipe,
            model=replace(narrow(recipe.model), seq_len=seq_len),
            stages=tuple(stages),
            seq_len_warmup=slw,
            data=Data(
                train=str((folder / "text.txt").absolute()),
                valid=str((folder / "valid.txt").absolute()),
                tokenizer="bpe:300",
                allow_overlap=True,
            ),
            optim=replace(
                recipe.optim,
                warmup_steps=min(recipe.optim.warmup_steps, 3),
                decay_tokens=None,
                decay_steps=None,
            ),
        )
        cut = cut_recipe(small, STEPS // 2, devices)
        tokens = STEPS * cut.train.batch_size * seq_len
        train = replace(cut.train, tokens=tokens, dtype="fp32", compile="off")
        return replace(cut, train=train)
    except ValueError as error:
        raise UsageError(f"the recipe cannot be made so small: {error}") from None
