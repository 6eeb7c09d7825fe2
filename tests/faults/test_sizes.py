"""Sizes that no computer holds are refused before memory is taken for them: one message, in
seconds."""

from __future__ import annotations

import pytest

from efftrain_cli.foundation.errors import RecipeError
from efftrain_cli.recipe.recipe import load_recipe
from tests.faults.damage import call
from tests.launch import BASELINE


def test_numbers_on_the_command_line():
    """F97: a model too large for the machine is F26."""
    code, message = call("sweep", "small", "--seeds", "0..1000000000")
    assert code == 2 and "1,000,000,001 runs are more than the 10,000" in message
    code, message = call("pretrain", "small", "--plan", "--set", "model.n_embd=1000000000")
    assert code == 2 and "at most 131072" in message


def test_growth_factors(random_run):
    """F97: refused by the sizes that are believed; a model that no memory holds is F26."""
    for operator, message in (
        ("width:1000", "the stages grow model.n_head to 2000: input should be less"),
        (f"depth:{'9' * 5000}", "the factor must be a whole number"),
    ):
        code, said = call("grow", "r", "--operator", operator)
        assert code == 2 and message in said
    assert not (random_run.parent / "r-grown").exists()


def test_a_recipe_with_hundreds_of_mistakes(tmp_path):
    """F97: they are counted, and the first hundred told."""
    path = tmp_path / "many.toml"
    path.write_text(BASELINE + "".join(f"unknown_{i} = {i}\n" for i in range(300)))
    with pytest.raises(RecipeError) as raised:
        load_recipe(str(path))
    text = str(raised.value)
    assert "has 300 mistakes" in text and text.endswith("and 200 more")
    assert "checkpoint.unknown_99 " in text and "checkpoint.unknown_100 " not in text
    assert len(raised.value.problems) == 300
