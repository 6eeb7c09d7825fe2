"""docs/methods/staged-training.md: its recipe loads, and those that it names exist."""

from __future__ import annotations

from efftrain_cli.recipe.recipe import load_recipe
from tests.docs.pages import blocks_of

PAGE = "methods/staged-training"
KINDS = ("depth", "width", "both")


def test_the_recipe_shown_is_a_recipe_and_equals_the_shipped_one_but_for_what_it_spells_out(
    tmp_path,
):
    (written,) = blocks_of(PAGE, "toml")
    path = tmp_path / "page.toml"
    path.write_text(written)
    page, shipped = load_recipe(str(path)), load_recipe("small-staged-depth")
    assert (page.model, page.optim, page.train) == (shipped.model, shipped.optim, shipped.train)
    assert page.model_at(0) == shipped.model_at(0)
    assert page.stages[1].operators == shipped.stages[1].operators


def test_recipes_on_the_page_exist():
    for name in ("small-staged-depth", *(f"gpt2-117m-staged-{kind}" for kind in KINDS)):
        assert load_recipe(name).stages
    assert not load_recipe("gpt2-117m-staged-scratch").stages
