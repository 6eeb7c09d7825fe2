"""What the shell offers at TAB. Each function takes what is typed so far; none imports torch."""

from __future__ import annotations


def recipe_names(incomplete: str) -> list[tuple[str, str]]:
    """Recipe names with their first comment."""
    from efftrain_cli import recipe_file

    names = [name for name in recipe_file.recipe_names() if name.startswith(incomplete)]
    return [(name, recipe_file.first_comment(recipe_file.find_recipe(name))) for name in names]


def run_names(incomplete: str) -> list[str]:
    """Names of the runs in EFFTRAIN_RUNS, or in ./runs."""
    from efftrain_cli import run

    return [name for name in run.run_names() if name.startswith(incomplete)]


def run_or_recipe_names(incomplete: str) -> list[str]:
    """Runs, then recipes: for commands that take either."""
    return list(dict.fromkeys([*run_names(incomplete), *(name for name, _ in recipe_names(incomplete))]))


def override_keys(incomplete: str) -> list[tuple[str, str]]:
    """Dotted keys of a recipe, for --set; nothing once the value is being typed."""
    if "=" in incomplete:
        return []
    from efftrain_cli.recipe import Recipe
    from efftrain_cli.recipe_check import known_keys

    return [(f"{key}=", doc.split("\n")[0]) for key, doc in known_keys(Recipe).items() if key.startswith(incomplete)]
