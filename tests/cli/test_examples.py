"""Every example of every `--help` is run: its plan with the recipes that are shipped, all of it
with tiny ones."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path

import pytest

from efftrain_cli.recipe.recipe import dump_recipe, load_recipe
from tests.cli.test_help import commands, examples_of, help_of, known_options
from tests.conftest import REPOSITORY, cli
from tests.launch import Zygote, made_text
from tests.tiny import changed
from tests.toy import toy_recipe

EXAMPLES = [example for path in commands() for example in examples_of(help_of(*path))]
RECIPES = ("small", "small-slw", "unstable", "unstable-slw", "gpt2-117m-slw")
NEEDS_THE_HUB = (
    "efftrain import openai-community/gpt2",
    "efftrain eval-zeroshot small-seed1234 --tasks gpt2",
    "efftrain eval-zeroshot small-seed1234 --data-dir sets --limit 100",
    "efftrain eval-zeroshot small-seed1234 --tasks blimp,my_task.yaml",
)
"""Examples that download something; tests of the same commands with made data stand elsewhere."""
MANY_RUNS = ("efftrain tune-warmup unstable --duration optim.warmup_steps=15,60",)
"""Examples that train many runs: tests/tune_warmup searches learning rates."""
AT_TOY_LENGTH = {
    "train.tokens=4M": "train.tokens=4K",
    "train.tokens=2M": "train.tokens=4K",
    "cuda": "cpu",
    "train.compile=on": "train.compile=off",
    "gpt2-117m": "small",
    "online": "offline",
    "small-seed1234@400": "small-seed1234@12",
}


def test_the_examples_that_are_not_run_are_examples():
    assert {*NEEDS_THE_HUB, *MANY_RUNS} <= {*EXAMPLES}


def has_plan(example: str) -> bool:
    words = shlex.split(example)[1:]
    is_planned = {"--recipe", "--plan"} <= known_options(words)
    return is_planned and not {"--resume", "--from", "--devices"} & {*words}


@pytest.mark.parametrize("example", filter(has_plan, EXAMPLES))
def test_examples_with_a_plan_can_be_planned(example, tmp_path):
    (tmp_path / "my.txt").write_text(made_text())
    words = shlex.split(example)[1:]
    if "--plan" not in words:
        words.append("--plan")
    cli(*words)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, zygote: Zygote) -> Path:
    """A folder with tiny recipes under the names of shipped ones, runs of them, a text, a study,
    and a GPT-2."""
    folder = tmp_path_factory.mktemp("home")
    (folder / "recipes").mkdir()
    for name in ("my", "text", "valid"):
        (folder / f"{name}.txt").write_text(made_text())
    for name in (*RECIPES, "quickstart", "quickstart-slw"):
        recipe = toy_recipe(load_recipe(name), folder, devices=4)
        recipe = changed(recipe, "eval.every=2")
        (folder / "recipes" / f"{name}.toml").write_text(dump_recipe(recipe))
    shutil.copy(REPOSITORY / "docs" / "studies" / "length-warmup.toml", folder / "study.toml")
    rows = [f"{arm},{seed},{3 + seed / 7 + len(arm) / 9}" for arm in ("a", "bb") for seed in (0, 1)]
    (folder / "runs.csv").write_text("\n".join(["arm,seed,eval/loss", *rows]))
    for name in ("small", "small-slw", "quickstart", "quickstart-slw"):
        run(zygote, folder, "pretrain", name)
    run(zygote, folder, "pretrain", "small", "--set", "model.n_layer=2", "--name", "shallow")
    run(zygote, folder, "pretrain", "unstable", "--name", "try-1")
    run(zygote, folder, "bench", "--recipe", "small")
    run(zygote, folder, "export", "small-seed1234", "--out", "gpt2")
    return folder


def run(zygote: Zygote, folder: Path, *words: str) -> None:
    process = zygote.start(*words, cwd=folder, out=folder / "out", err=folder / "err")
    assert process.wait(300) == 0, process.said()


@pytest.mark.slow
@pytest.mark.parametrize("example", sorted({*EXAMPLES} - {*NEEDS_THE_HUB, *MANY_RUNS}))
def test_examples_work_at_toy_length(example, home, tmp_path, zygote):
    words = [AT_TOY_LENGTH.get(word, word) for word in shlex.split(example)[1:]]
    if words[0] == "race" or "--jobs" in words:
        words.append("--plan")  # tests/study and tests/trials conduct them
    shutil.copytree(home, tmp_path, dirs_exist_ok=True)
    if words[0] == "pretrain" and not {"--resume", "--from"} & {*words}:
        shutil.rmtree(tmp_path / "runs" / "small-seed1234")
    if words[:2] == ["runs", "rm"]:
        words.append("--yes")  # a terminal would ask
    run(zygote, tmp_path, *words)
