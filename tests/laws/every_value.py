"""Every value of every `Literal` of a recipe, read from the annotations: a new value is tried by
itself."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, get_args, get_origin, get_type_hints

from efftrain_cli.recipe.recipe import Recipe
from efftrain_cli.recipe.schedules import DECAY_SHAPES
from tests.tiny import FOUR_BLOCKS

NOT_TRAINING = ("data", "wandb")
"""Sections whose values the tests of data and wandb try."""
COMPANIONS = {
    "model.init=unit": ["model.norm=none"],
    "optim.name=muon": ["optim.muon_lr=0.02"],
    "optim.muon_scale=original": ["optim.name=muon", "optim.muon_lr=0.02"],
    "optim.muon_scale=match_rms_adamw": ["optim.name=muon"],
    "optim.schedule=wsd": ["optim.decay_share=0.5"],
    **{
        f"optim.decay_shape={shape}": ["optim.schedule=wsd", "optim.decay_share=0.5"]
        for shape in DECAY_SHAPES
    },
    "seq_len_warmup.pacing=discrete": [
        "seq_len_warmup.steps=false",
        "seq_len_warmup.lengths=[8, 16]",
        "seq_len_warmup.until=[3]",
    ],
    "chunked_accumulation.fidelity=hardware": ["chunked_accumulation.operands=fp8_e4m3"],
    "chunked_accumulation.layers=inner": ["model.n_layer=3"],
}
"""Settings without which a value is refused."""
SECTIONS = {
    "seq_len_warmup": "{start = 8, steps = 4}",
    "progressive_layer_drop": "{theta = 0.5, steps = 4}",
    "simigrad": "{target = 0.9, min_batch_size = 4, max_batch_size = 8, quantum = 4}",
    "chunked_accumulation": "{}",
    "ouroboros": "{modules = 4}",
    "standardization_loss": "{weight = 0.3}",
    "parallel": "{}",
}
STAGES = """stages=[{model={n_layer=1, n_head=1, n_embd=8}, switch={rule="steps", value=2}},
    {operators=["depth", "width"]}]"""


def values_of(annotation: Any) -> list[str]:
    """Return the strings that an annotation allows one by one."""
    if get_origin(annotation) is Literal:
        return [value for value in get_args(annotation) if isinstance(value, str)]
    return [value for part in get_args(annotation) for value in values_of(part)]


def every_value() -> list[str]:
    """Return every "section.key=value"."""
    found = []
    for section, annotation in get_type_hints(Recipe, include_extras=True).items():
        for part in (annotation, *get_args(annotation)):
            if not dataclasses.is_dataclass(part) or section in NOT_TRAINING:
                continue
            for key, kind in get_type_hints(part, include_extras=True).items():
                found += [f"{section}.{key}={value}" for value in values_of(kind)]
    return found


def overrides_of(value: str) -> list[str]:
    """Return the overrides of the recipe `small` with which a value can be trained."""
    section = value.partition(".")[0]
    given = [f"{section}={SECTIONS[section]}"] if section in SECTIONS else []
    if section == "staged_growth":
        given = [STAGES]
    small = ["model.n_layer=2", "train.tokens=256"]
    return [*FOUR_BLOCKS, *small, *given, *COMPANIONS.get(value, []), value]


VALUES = every_value()
OF_MODEL = [value for value in VALUES if value.startswith("model.")]
OF_TRAINING = [value for value in VALUES if value.startswith(("model.", "optim."))]
