"""A recipe: everything that decides what a run computes, as one frozen value; reading, writing and
comparing whole recipes.

The method sections are the methods themselves (`efftrain_cli/methods`); a section that is present
is on. The other sections are in `sections.py` and `optim.py`, the rules between them in `rules.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from pydantic import Field, TypeAdapter, model_validator
from pydantic.dataclasses import dataclass

from efftrain_cli.foundation.errors import Breaches
from efftrain_cli.foundation.section import SECTION
from efftrain_cli.methods.batch_size_warmup import BatchSizeWarmup
from efftrain_cli.methods.chunked_accumulation import ChunkedAccumulation
from efftrain_cli.methods.method import Method
from efftrain_cli.methods.ouroboros import Ouroboros
from efftrain_cli.methods.progressive_layer_drop import ProgressiveLayerDrop
from efftrain_cli.methods.seq_len_warmup import SeqLenWarmup
from efftrain_cli.methods.simigrad import SimiGrad
from efftrain_cli.methods.staged_growth import StagedGrowth
from efftrain_cli.methods.stages import Stage, shapes_of_stages
from efftrain_cli.methods.standardization_loss import StandardizationLoss
from efftrain_cli.recipe.check import methods_in, validated
from efftrain_cli.recipe.draft import Draft, read_recipe_file
from efftrain_cli.recipe.optim import Optim
from efftrain_cli.recipe.rules import rules_between
from efftrain_cli.recipe.sections import (
    Checkpoint,
    Data,
    Eval,
    Model,
    Parallel,
    Train,
    Wandb,
)
from efftrain_cli.recipe.toml import flatten, toml_lines

EVALUATIONS = 20
"""Evaluations of a run whose recipe does not say how often."""


@dataclass(frozen=True, kw_only=True, config=SECTION)
class Recipe:
    """A whole recipe, resolved."""

    model: Model
    data: Data = Field(default_factory=Data)
    optim: Optim
    train: Train
    eval: Eval = Field(default_factory=Eval)
    checkpoint: Checkpoint = Field(default_factory=Checkpoint)
    wandb: Wandb = Field(default_factory=Wandb)
    parallel: Parallel | None = None
    seed: int = Field(default=1234, ge=0)
    """Seed of initialization, data order and every other random draw."""
    seq_len_warmup: SeqLenWarmup | None = None
    batch_size_warmup: BatchSizeWarmup | None = None
    progressive_layer_drop: ProgressiveLayerDrop | None = None
    simigrad: SimiGrad | None = None
    chunked_accumulation: ChunkedAccumulation | None = None
    ouroboros: Ouroboros | None = None
    standardization_loss: StandardizationLoss | None = None
    staged_growth: StagedGrowth | None = None
    stages: tuple[Stage, ...] = ()
    """Stages of staged training, in order; without any, [model] is trained from start to end."""

    def model_at(self, stage: int | None) -> Model:
        """Return the model that stage `stage`, counted from 0, trains: [model] itself if the recipe
        has no stages or if `stage` is None."""
        if stage is None or not self.stages:
            return self.model
        return shapes_of_stages(self.model, self.stages)[stage]

    def optim_at(self, stage: int) -> Optim:
        """Return the optimizer's settings in a stage: those of [optim], with the stage's own peak
        learning rate."""
        lr = self.stages[stage].lr if self.stages else None
        if lr is None:
            return self.optim
        return replace(self.optim, lr=lr)

    @property
    def is_sharded(self) -> bool:
        """Whether each of several devices holds a share of the model."""
        return self.parallel is not None and self.parallel.strategy == "shard"

    @property
    def delayed_gradients(self) -> Ouroboros | None:
        """The method that delays gradients; None if none does."""
        if self.ouroboros is None or self.ouroboros.modules == 1:
            return None
        return self.ouroboros

    @cached_property
    def methods(self) -> dict[str, Method]:
        """The methods that are on, by the name of their section. A recipe without any is a
        baseline."""
        return methods_among(vars(self))

    @cached_property
    def varies(self) -> frozenset[str]:
        """What differs from step to step, by all methods together: see `Method.varies`."""
        return frozenset().union(*(method.varies for method in self.methods.values()))

    @property
    def full_steps(self) -> int | None:
        """Steps of the budget where each is a full one; None where a method makes them shorter or
        of unknown number."""
        if self.varies & {"length", "batch", "steps"}:
            return None
        return math.ceil(self.train.tokens / (self.train.batch_size * self.model.seq_len))

    @model_validator(mode="after")
    def _default_of_evaluations(self) -> Recipe:
        if self.eval.every == 0:
            steps = self.train.tokens / (self.train.batch_size * self.model.seq_len)
            resolved = replace(self.eval, every=max(1, round(steps / EVALUATIONS)))
            object.__setattr__(self, "eval", resolved)
        return self

    @model_validator(mode="after")
    def _rules_between_sections(self) -> Recipe:
        breaches = list(rules_between(self))
        if breaches:
            raise Breaches(breaches)
        return self


def methods_among(sections: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sections that are methods and present, by name; [[stages]] alone are staged
    training too."""
    methods = {}
    for name in methods_in(Recipe):
        if sections.get(name) is not None:
            methods[name] = sections[name]
    if sections.get("stages"):
        methods.setdefault("staged_growth", StagedGrowth())
    return methods


def load_recipe(name_or_path: str, overrides: Sequence[str] = ()) -> Recipe:
    """Load a recipe by name or path, with what it inherits and with `key=value` overrides.

    Raises:
        RecipeError: it is not found, or breaks rules as `check_draft` lists them.
    """
    return check_draft(read_recipe_file(name_or_path, overrides))


def check_draft(draft: Draft) -> Recipe:
    """Return the recipe that a draft describes.

    Raises:
        RecipeError: it breaks rules. The message lists all wrong keys, else all wrong combinations.
    """
    return validated(draft, Recipe)


def recipe_values(section: Any) -> dict[str, Any]:
    """Return a recipe (or section) as nested dicts in field order, without what is absent."""
    values = TypeAdapter(type(section)).dump_python(section, mode="json", exclude_none=True)
    if values.get("stages") == []:
        del values["stages"]  # `stages = []` would only puzzle the readers of every other recipe
    return values


def flat_values(recipe: Recipe) -> dict[str, Any]:
    """Map the dotted key of every value that is present to it; keys of the n-th [[section]] are
    numbered, from 0."""
    return flatten(recipe_values(recipe))


def dump_recipe(recipe: Recipe, comments: Mapping[str, str] = {}) -> str:
    """Format the recipe as TOML, every default written out; `load_recipe` reads it back to an equal
    Recipe.

    Args:
        comments: dotted key -> a comment to stand after its value.
    """
    return "\n".join(toml_lines(recipe_values(recipe), comments)) + "\n"


def recipe_differences(a: Recipe, b: Recipe) -> list[tuple[str, Any, Any]]:
    """Return (dotted key, value in a, value in b) of exactly the keys that differ; None if a key is
    absent."""
    in_a = flat_values(a)
    in_b = flat_values(b)
    differences = []
    for key in in_a | in_b:
        pair = in_a.get(key), in_b.get(key)
        if pair[0] != pair[1]:
            differences.append((key, *pair))
    return differences
