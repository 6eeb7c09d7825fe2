"""Check the messages about a recipe: cases of overrides and, indented, of whole messages."""

from __future__ import annotations

from efftrain_cli.foundation.errors import RecipeError
from tests.tiny import tiny_recipe


def check_messages(text: str) -> None:
    """Compare each case of `text`, overrides of `tiny_recipe`, with the messages about it.

    Its 640 tokens are 5 steps of 8 sequences of 16, two in a micro-batch.
    """
    for case in text.strip().split("\n\n"):
        overrides = []
        expected = []
        for line in case.splitlines():
            part = expected if line.startswith(" ") else overrides
            part.append(line.strip())
        assert " ".join(messages_about(overrides)) == " ".join(expected), case


def messages_about(overrides: list[str]) -> list[str]:
    """Return the mistakes of a recipe, or what its methods assume and warn of."""
    try:
        recipe = tiny_recipe(*overrides)
    except RecipeError as error:
        return [f"{problem.key}: {problem.rule}" for problem in error.problems]
    assumptions = []
    warnings = []
    for method in recipe.methods.values():
        assumptions += [f"assumed: {line}" for line in method.assumptions(recipe)]
        warnings += [f"warning: {line}" for line in method.warnings(recipe)]
    return assumptions + warnings
