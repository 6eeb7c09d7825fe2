"""Pages on methods: the commands run, the recipe in each page loads and is what the page says, and links lead
somewhere."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from efftrain_cli.recipe.draft import recipe_names
from efftrain_cli.recipe.recipe import load_recipe
from tests.conftest import REPOSITORY, Efftrain

PAGES = [
    REPOSITORY / "docs" / "methods" / f"{name}.md"
    for name in (
        "chunk-based-accumulation",
        "ouroboros",
        "progressive-layer-dropping",
        "simigrad",
        "standardization-loss",
        "optimizers",
    )
]
COMMANDS = [
    pytest.param(line.partition("#")[0].strip(), id=f"{page.stem}: {line}")
    for page in PAGES
    for block in re.findall(r"```sh\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    for line in block.splitlines()
    if re.match(r"efftrain (recipes|pretrain .*--plan)", line)
]


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_that_train_nothing_run(efftrain: Efftrain, command: str) -> None:
    done = efftrain(*shlex.split(command)[1:])
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_recipes_in_a_page_load_and_those_it_names_exist(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = page.read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    for block in re.findall(r"```toml\n(.*?)```", text, re.DOTALL):
        (tmp_path / "page.toml").write_text(block)
        load_recipe("./page.toml")
    for name in re.findall(r"`((?:small|gpt2|gpt3)-[\w.-]+)`", text):
        assert name in recipe_names()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_within_the_project_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\((?!https?://|#)([^)#]+)", page.read_text(encoding="utf-8")):
        assert (page.parent / link).exists(), link
