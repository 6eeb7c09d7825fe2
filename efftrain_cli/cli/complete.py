"""What the shell offers at TAB. Each function takes what is typed so far; none imports torch."""

from __future__ import annotations


def recipes(incomplete: str) -> list[tuple[str, str]]:
    """Recipe names with their first comment."""
    from efftrain_cli.recipe_file import find_recipe, first_comment, recipe_names

    return [(name, first_comment(find_recipe(name))) for name in recipe_names() if name.startswith(incomplete)]


def runs(incomplete: str) -> list[str]:
    """Names of the runs in EFFTRAIN_RUNS, or in ./runs."""
    from efftrain_cli.run import run_names

    return [name for name in run_names() if name.startswith(incomplete)]


def runs_and_recipes(incomplete: str) -> list[str]:
    """Runs, then recipes: for commands that take either."""
    return list(dict.fromkeys([*runs(incomplete), *(name for name, _ in recipes(incomplete))]))


def overrides(incomplete: str) -> list[tuple[str, str]]:
    """Dotted keys of a recipe, for --set; nothing once the value is being typed."""
    if "=" in incomplete:
        return []
    from efftrain_cli.recipe import Recipe
    from efftrain_cli.recipe_check import known_keys

    return [(f"{key}=", doc.split("\n")[0]) for key, doc in known_keys(Recipe).items() if key.startswith(incomplete)]
