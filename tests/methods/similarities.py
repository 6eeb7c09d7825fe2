"""Bounds on the similarity of gradients, a recipe with SimiGrad, and a step that measured one
similarity."""

from __future__ import annotations

from dataclasses import replace

from efftrain_cli.foundation.step import StepResult
from efftrain_cli.methods.simigrad import SimiGrad
from efftrain_cli.recipe.recipe import Recipe
from tests.tiny import tiny_recipe

LOW, HIGH = 0.1, 0.9


def recipe(simigrad: SimiGrad | None, **train: int) -> Recipe:
    settings = [f"train.{key}={value}" for key, value in train.items()]
    base = ["model.n_embd=32", "optim.warmup_steps=2", "train.tokens=5120", "seed=11"]
    return replace(tiny_recipe(*base, *settings), simigrad=simigrad)


def measured(phi: float) -> StepResult:
    return StepResult(tokens=1, flops=0.0, simigrad_dots=(phi, 1.0, 1.0))
