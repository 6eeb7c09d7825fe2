"""Bounds on the similarity of gradients, a recipe with SimiGrad, and a step that measured one similarity."""

from __future__ import annotations

from efftrain_cli.foundation.step import StepResult
from efftrain_cli.methods.simigrad import SimiGrad
from efftrain_cli.recipe.recipe import Recipe
from efftrain_cli.recipe.sections import Model, Optim, Train

LOW, HIGH = 0.1, 0.9


def recipe(simigrad: SimiGrad | None, **train: int) -> Recipe:
    return Recipe(
        model=Model(n_layer=2, n_head=2, n_embd=32, seq_len=16),
        optim=Optim(lr=1e-2, warmup_steps=2),
        train=Train(
            **(
                {"tokens": 8 * 16 * 40, "batch_size": 8, "micro_batch_tokens": 32, "dtype": "fp32"}
                | train
            )
        ),
        seed=11,
        simigrad=simigrad,
    )


def measured(phi: float) -> StepResult:
    return StepResult(tokens=1, flops=0.0, simigrad_dots=(phi, 1.0, 1.0))
