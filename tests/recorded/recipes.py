"""Every shipped recipe with its bases and defaults filled in, as a run stores it."""

from __future__ import annotations

from typing import Any

from efftrain_cli.recipe.draft import shipped_recipes
from efftrain_cli.recipe.recipe import dump_recipe, load_recipe


def record() -> dict[str, Any]:
    """Return the lines of each recipe's resolved text, by its name."""
    paths = sorted(shipped_recipes().glob("*.toml"))
    return {path.stem: dump_recipe(load_recipe(str(path))).splitlines() for path in paths}
