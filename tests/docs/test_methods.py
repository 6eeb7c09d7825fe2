"""docs/methods/README.md: what its table says of two sections is what a recipe with both does."""

from __future__ import annotations

import re
from contextlib import nullcontext

import pytest

from efftrain_cli.foundation.errors import RecipeError
from efftrain_cli.recipe.recipe import load_recipe
from tests.docs.pages import text_of

SETTINGS = {
    "seq_len_warmup": ["seq_len_warmup.start=32", "seq_len_warmup.steps=50"],
    "batch_size_warmup": [
        "batch_size_warmup.start=8",
        "batch_size_warmup.increment=4",
        "batch_size_warmup.sequences=400",
    ],
    "progressive_layer_drop": [
        "progressive_layer_drop.theta=0.5",
        "progressive_layer_drop.steps=9",
    ],
    "simigrad": [
        "simigrad.target=0.2",
        "simigrad.min_batch_size=8",
        "simigrad.max_batch_size=64",
        "simigrad.quantum=2",
    ],
    "stages": [
        'stages=[{model={n_layer=2},switch={rule="tokens",value=1000000}},{operators=["depth"]}]'
    ],
    "chunked_accumulation": ["chunked_accumulation.forward={bits=9,chunk=64}"],
    "standardization_loss": ["standardization_loss.weight=0.1"],
    "ouroboros": ["ouroboros.modules=4"],
    'optim.name = "muon"': ["optim.name=muon", "optim.muon_lr=0.02"],
    'optim.name = "lion"': ["optim.name=lion"],
    "optim.z_loss": ["optim.z_loss=1e-4"],
    'parallel.strategy = "shard"': ["parallel.strategy=shard"],
}
COLUMNS = list(SETTINGS)[:8]
CELLS = [
    (row, column, cell.strip())
    for row, cells in re.findall(
        r"^\| `([^`]+)` \|(.*)\|$", text_of("methods/README"), re.MULTILINE
    )
    for column, cell in zip(COLUMNS, cells.split("|"), strict=False)
    if row in SETTINGS and cell.strip()
]


def test_each_pair_is_taken_as_the_table_says():
    assert len(CELLS) == 7 * 8 // 2 + 4 * 8
    for row, column, cell in CELLS:
        says_no = pytest.raises(RecipeError) if cell == "no" else nullcontext()
        with says_no:
            load_recipe("small", SETTINGS[column] + SETTINGS[row])


@pytest.mark.parametrize(
    "changes",
    [
        [*SETTINGS["batch_size_warmup"], "seq_len_warmup.batch=tokens"],
        [*SETTINGS["simigrad"], "seq_len_warmup.batch=tokens"],
        [
            "model.norm=none",
            "model.init=unit",
            'stages=[{model={n_embd=64,n_head=2},switch={rule="tokens",value=9e5}},'
            '{operators=["width"]}]',
        ],
    ],
)
def test_what_the_notes_exclude_fails(changes):
    with pytest.raises(RecipeError):
        load_recipe("small", [*SETTINGS["seq_len_warmup"], *changes])
