"""docs/models.md: its table of defaults is the program's."""

from __future__ import annotations

import pytest

from efftrain_cli.recipe.recipe import load_recipe
from tests.docs.pages import text_of

PAGE = text_of("models")


@pytest.mark.parametrize("column", [1, 2], ids=["gpt2", "llama"])
def test_defaults_are_the_programs(column):
    arch = ("gpt2", "llama")[column - 1]
    model = load_recipe("small", [f"model.arch={arch}"]).model
    rows = [line.split("|")[1:] for line in PAGE.splitlines() if line.startswith("| `")]
    told = {row[0].strip(" `"): row[column].strip() for row in rows if len(row) == 5}
    for key in ("norm", "mlp", "positions", "init"):
        assert told[key].split(",")[0].strip('`"') == vars(model)[key]
    for key in ("bias", "qk_norm", "tied"):
        assert told[key].strip("`") == str(vars(model)[key]).lower()
    assert float(told["norm_eps"]) == model.norm_eps
