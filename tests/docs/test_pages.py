"""What holds for several pages: commands run, recipes load, named tests exist."""

from __future__ import annotations

import ast
import re
import shlex

import pytest

from efftrain_cli.recipe.draft import recipe_names
from efftrain_cli.recipe.recipe import load_recipe
from tests.conftest import REPOSITORY
from tests.docs.pages import blocks_of, commands_of, text_of

METHODS = [
    f"methods/{name}"
    for name in (
        "chunk-based-accumulation",
        "ouroboros",
        "progressive-layer-dropping",
        "simigrad",
        "standardization-loss",
        "optimizers",
    )
]
TRAINS_NOTHING = re.compile(r"efftrain (recipes|pretrain .*--plan)")
COMMANDS = [
    *((page, line) for page in ("models", "recipes") for line in commands_of(page)),
    *(("methods/staged-training", line) for line in commands_of("methods/staged-training")),
    *((page, line) for page in METHODS for line in commands_of(page) if TRAINS_NOTHING.match(line)),
]


@pytest.mark.parametrize("page, command", COMMANDS)
def test_commands_run(efftrain, page, command):
    program, *arguments = shlex.split(command)
    assert program == "efftrain"
    assert efftrain(*arguments).stdout.strip()


@pytest.mark.parametrize("page", METHODS)
def test_recipes_in_a_page_load_and_those_it_names_exist(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for block in blocks_of(page, "toml"):
        (tmp_path / "page.toml").write_text(block)
        load_recipe("./page.toml")
    for name in re.findall(r"`((?:small|gpt2|gpt3)-[\w.-]+)`", text_of(page)):
        assert name in recipe_names()


def test_every_named_test_exists():
    named = re.findall(r"\[([\w ]+)\]\(\.\./(tests/[\w/]+\.py)\)", text_of("devices"))
    assert len(named) >= 6
    for words, path in named:
        name = f"test_{words.replace(' ', '_')}"
        tree = ast.parse((REPOSITORY / path).read_text(encoding="utf-8"))
        names = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        assert name in names, f"{path}::{name}"
