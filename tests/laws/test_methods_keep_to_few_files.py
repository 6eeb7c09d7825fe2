"""A method is its file, one field of the recipe and the places where the step asks it by name;
generic code asks `recipe.methods` (see `methods/method.py`). What names a method elsewhere must be
changed with it, so it is counted."""

from __future__ import annotations

import pytest

from efftrain_cli.recipe.check import methods_in
from efftrain_cli.recipe.recipe import Recipe
from tests.laws.test_floors import PACKAGE

MOST = {
    # tune-warmup's grid, the middle shape that is compiled, a recipe to begin with
    "seq_len_warmup": 9,
    "batch_size_warmup": 4,  # tune-warmup's grid
    "progressive_layer_drop": 4,
    # its progress and its measurement are values of a step; the shape that is compiled
    "simigrad": 6,
    "chunked_accumulation": 7,  # models that are read without it, and the bits that a plan predicts
    "ouroboros": 15,  # training on a ring of devices, which `bench` compares with others
    "standardization_loss": 9,  # what a model is shaped like, and a term that `compare` draws
    "staged_growth": 10,  # the command `grow`, and changing the model between stages
}
"""Section -> how many files of the package may name it; what those beyond method, recipe, plan and
gradient do."""


@pytest.mark.parametrize("section", methods_in(Recipe))
def test_a_method_is_named_in_few_files(section):
    files = [
        path
        for path in PACKAGE.rglob("*.py")
        if section in path.read_text(encoding="utf-8").lower()
    ]
    assert len(files) <= MOST[section], "\n".join(
        sorted(str(path.relative_to(PACKAGE)) for path in files)
    )
