"""docs/recipes.md: its recipe loads."""

from __future__ import annotations

from efftrain_cli.recipe.recipe import load_recipe
from tests.docs.pages import blocks_of


def test_the_recipe_loads(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipes").mkdir()
    (block,) = blocks_of("recipes", "toml")
    (tmp_path / "recipes" / "wide.toml").write_text(block)
    recipe = load_recipe("wide")
    assert (recipe.model.n_embd, recipe.model.n_layer) == (256, load_recipe("small").model.n_layer)
    assert recipe.train.tokens == 4_000_000
    assert recipe.seq_len_warmup is not None
