"""What holds for several pages: commands run, recipes load, what they name exists."""

from __future__ import annotations

import ast
import re

import pytest

from efftrain_cli.recipe.draft import recipe_names
from efftrain_cli.recipe.recipe import load_recipe
from tests.conftest import REPOSITORY, cli
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
def test_commands_run(page, command):
    assert cli(command.removeprefix("efftrain ")).output.strip()


@pytest.mark.parametrize("page", METHODS)
def test_recipes_in_a_page_load_and_those_it_names_exist(page, tmp_path):
    for block in blocks_of(page, "toml"):
        (tmp_path / "page.toml").write_text(block)
        load_recipe("./page.toml")
    for name in re.findall(r"`((?:small|gpt2|gpt3)-[\w.-]+)`", text_of(page)):
        assert name in recipe_names()


def test_the_recipes_of_a_table_are_what_the_pages_say(tmp_path):
    """The recipe of docs/recipes.md, and that of staged training, which the shipped one equals but
    for what it spells out."""
    loaded = []
    for page in ("recipes", "methods/staged-training"):
        (block,) = blocks_of(page, "toml")
        (tmp_path / "page.toml").write_text(block)
        loaded.append(load_recipe(str(tmp_path / "page.toml")))
    wide, page = loaded
    assert (wide.model.n_embd, wide.model.n_layer) == (256, load_recipe("small").model.n_layer)
    assert wide.train.tokens == 4_000_000 and wide.seq_len_warmup is not None
    shipped = load_recipe("small-staged-depth")
    assert (page.model, page.optim, page.train) == (shipped.model, shipped.optim, shipped.train)
    assert page.model_at(0) == shipped.model_at(0)
    assert page.stages[1].operators == shipped.stages[1].operators


@pytest.mark.parametrize("column, arch", [(1, "gpt2"), (2, "llama")])
def test_defaults_of_models_are_the_program_s(column, arch):
    model = load_recipe("small", [f"model.arch={arch}"]).model
    rows = [line.split("|")[1:] for line in text_of("models").splitlines() if line[:3] == "| `"]
    told = {row[0].strip(" `"): row[column].strip() for row in rows if len(row) == 5}
    for key in ("norm", "mlp", "positions", "init"):
        assert told[key].split(",")[0].strip('`"') == vars(model)[key]
    for key in ("bias", "qk_norm", "tied"):
        assert told[key].strip("`") == str(vars(model)[key]).lower()
    assert float(told["norm_eps"]) == model.norm_eps


def test_what_pages_name_exists():
    """Files on the page of architecture, tests on that of devices, scripts and figures on that of
    performance."""
    files = set(re.findall(r"`((?:\w+/)+\w+\.py)`", text_of("architecture")))
    places = [REPOSITORY / folder for folder in ("", "efftrain_cli", "tests")]
    missing = {name for name in files if not any((place / name).is_file() for place in places)}
    assert len(files) > 15 and not missing
    named = re.findall(r"\[([\w ]+)\]\(\.\./(tests/[\w/]+\.py)\)", text_of("devices"))
    assert len(named) >= 6
    for words, path in named:
        text = (REPOSITORY / path).read_text(encoding="utf-8")
        assert f"def test_{words.replace(' ', '_')}(" in text
    page = text_of("performance")
    for name in re.findall(r"(?:benchmarks|tests)/\w+(?:/\w+)*\.py|benchmarks/gpu\b", page):
        assert (REPOSITORY / name).exists(), name
    table = "\n".join(re.findall(r"[^|]*\|$", page.split("| lever |")[1], re.MULTILINE))
    script = (REPOSITORY / "benchmarks" / "gpu" / "figures.py").read_text()
    figures = set(re.findall(r'^    "(\w+)": \1,$', script, re.MULTILINE))
    assert set() < set(re.findall(r"`(\w+)`", table)) <= figures


@pytest.mark.slow
def test_scripts_that_no_test_runs_find_what_they_import():
    for path in (REPOSITORY / "benchmarks").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and "efftrain_cli" in str(node.module):
                exec(ast.unparse(node))
