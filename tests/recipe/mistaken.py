"""A small recipe, and what is wrong with another."""

from __future__ import annotations

from pathlib import Path

import pytest

from efftrain_cli.foundation.errors import Problem, RecipeError
from efftrain_cli.recipe.recipe import load_recipe

TINY = """
[model]
n_layer = 2
n_head = 2
n_embd = 64
seq_len = 64

[optim]
lr = 1e-3

[train]
tokens = 100_000
batch_size = 4
"""
STAGED = (
    TINY
    + """
[[stages]]
model = { n_layer = 1 }
switch = { rule = "steps", value = 10 }

[[stages]]
operators = ["depth"]
"""
)


def write_tiny(folder: Path) -> Path:
    """Write recipes/tiny.toml below a folder and return the folder."""
    (folder / "recipes").mkdir()
    write(folder, "tiny", TINY)
    return folder


def write(folder: Path, name: str, text: str) -> None:
    (folder / "recipes" / f"{name}.toml").write_text(text)


def problems(name: str, *overrides: str) -> dict[str, Problem]:
    with pytest.raises(RecipeError) as caught:
        load_recipe(name, overrides)
    return {problem.key: problem for problem in caught.value.problems}
