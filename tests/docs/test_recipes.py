"""docs/recipes.md: its commands run, and its recipe loads."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from efftrain_cli.recipe.recipe import load_recipe
from tests.conftest import REPOSITORY, Efftrain

PAGE = (REPOSITORY / "docs" / "recipes.md").read_text(encoding="utf-8")
COMMANDS = [
    line.partition("#")[0].strip()
    for block in re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
    for line in block.splitlines()
    if line.strip()
]


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_run(efftrain: Efftrain, command: str) -> None:
    program, *arguments = shlex.split(command)
    assert program == "efftrain"
    done = efftrain(*arguments)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_the_recipe_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipes").mkdir()
    (block,) = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "recipes" / "wide.toml").write_text(block)
    recipe = load_recipe("wide")
    assert (recipe.model.n_embd, recipe.model.n_layer) == (256, load_recipe("small").model.n_layer)
    assert recipe.train.tokens == 4_000_000
    assert recipe.seq_len_warmup is not None
