"""What the shell offers at TAB. Each function takes what is typed so far; none imports torch."""

from __future__ import annotations

from textwrap import shorten

_HELP_WIDTH = 45
"""Characters of a candidate's description; Typer breaks longer lines, which shells take for further
candidates."""


def recipe_names(incomplete: str) -> list[tuple[str, str]]:
    """List recipe names with what they are; none of a path, which the shell completes by itself."""
    from efftrain_cli.foundation.errors import RecipeError
    from efftrain_cli.recipe import draft

    found = []
    for name in draft.recipe_names():
        if name.startswith(incomplete):
            try:
                comment = draft.first_comment(draft.find_recipe(name))
            except RecipeError:
                comment = "unreadable"
            found.append((name, shorten(comment, _HELP_WIDTH, placeholder=" ...")))
    return found


def run_names(incomplete: str) -> list[str]:
    """List the runs in EFFTRAIN_RUNS, or in ./runs."""
    from efftrain_cli.run import directory as run

    return [name for name in run.run_names() if name.startswith(incomplete)]


def run_or_group_names(incomplete: str) -> list[str]:
    """List runs, then studies, races, sweeps and searches, which stand for their runs."""
    from efftrain_cli.run.names import run_groups

    groups = [group.name for group in run_groups() if group.name.startswith(incomplete)]
    return list(dict.fromkeys([*run_names(incomplete), *groups]))


def run_or_recipe_names(incomplete: str) -> list[str]:
    """List runs, studies and the like, then recipes: for commands that take any of them."""
    recipes = [name for name, _ in recipe_names(incomplete)]
    return list(dict.fromkeys([*run_or_group_names(incomplete), *recipes]))


def override_keys(incomplete: str) -> list[tuple[str, str]]:
    """List the dotted keys of a recipe, for --set; nothing once the value is being typed."""
    if "=" in incomplete:
        return []
    from efftrain_cli.recipe.check import known_keys
    from efftrain_cli.recipe.recipe import Recipe

    found = []
    for key, about in known_keys(Recipe).items():
        if key.startswith(incomplete) and about.section is None:
            description = shorten(about.description, _HELP_WIDTH, placeholder=" ...")
            found.append((f"{key}=", description))
    return found
