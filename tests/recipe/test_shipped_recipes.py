"""The recipes that ship: each loads, and the published ones say what was published."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
import zipfile
from dataclasses import replace

import pytest

from efftrain_cli.recipe.draft import first_comment
from efftrain_cli.recipe.recipe import Recipe, dump_recipe, load_recipe
from efftrain_cli.recipe.rules import warnings_of
from tests.conftest import REPOSITORY

FILES = sorted((REPOSITORY / "recipes").glob("*.toml"))


@pytest.mark.parametrize(
    ("name", "base", "method"),
    [
        ("quickstart-slw", "quickstart", "seq_len_warmup"),
        ("small-slw", "small", "seq_len_warmup"),
        ("small-simigrad", "small", "simigrad"),
        ("unstable-slw", "unstable", "seq_len_warmup"),
    ],
)
def test_a_recipe_named_after_a_method_differs_in_it_alone(name, base, method):
    recipe = load_recipe(name)
    assert list(recipe.methods) == [method]
    assert replace(recipe, **{method: None}) == load_recipe(base)  # type: ignore[arg-type]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_recipe_loads_says_what_it_is_and_survives_being_written(path, tmp_path):
    recipe = load_recipe(path.stem)
    warnings = warnings_of(recipe)
    if "-staged-" in path.stem:
        # The published schedule ends long after the point at which its runs are compared.
        warnings = [warning for warning in warnings if "never reaches min_lr" not in warning]
    assert warnings == []
    assert 20 <= len(first_comment(path)) <= 130, "the file's first line, for `recipes list`"
    base = tomllib.loads(path.read_text()).get("base", path.stem)
    assert base in {other.stem for other in FILES}, "shipped recipes build on shipped ones"
    (tmp_path / "copy.toml").write_text(dump_recipe(recipe), encoding="utf-8")
    assert load_recipe("copy.toml") == recipe


def parameters(recipe: Recipe, vocab_size: int) -> int:
    """Parameters of a GPT-2: embeddings, 12 d^2 + 13 d per block (two layer norms, four matrices,
    biases), final norm."""
    d, model = recipe.model.n_embd, recipe.model
    return (vocab_size + model.seq_len) * d + model.n_layer * (12 * d * d + 13 * d) + 2 * d


def test_gpt2_sizes_are_the_released_ones():
    """Parameter counts of OpenAI's released gpt2 and gpt2-xl checkpoints."""
    assert parameters(load_recipe("gpt2-117m"), 50257) == 124_439_808
    assert parameters(load_recipe("gpt2-1.5b"), 50257) == 1_557_611_200


@pytest.mark.parametrize(
    "name, steps, batch_size, lr",
    [
        ("gpt2-117m", 300_000, 512, 1.5e-4),
        ("gpt2-117m-large-batch", 37_500, 4096, 6e-4),
        ("gpt2-1.5b", 300_000, 512, 1.5e-4),
    ],
)
def test_gpt2_recipes_are_the_published_baselines(name, steps, batch_size, lr):
    """arXiv 2108.06084: the same 157 billion tokens at each batch size."""
    recipe = load_recipe(name)
    optim = recipe.optim
    assert (recipe.train.batch_size, optim.lr) == (batch_size, lr)
    assert recipe.train.tokens == optim.decay_tokens == steps * batch_size * 1024
    assert (optim.min_lr, optim.warmup_steps, optim.weight_decay) == (1e-5, 3000, 0.01)
    assert (optim.betas, optim.grad_clip) == ((0.9, 0.999), 1.0)


def test_gpt3_warms_up_over_its_published_tokens():
    """375 million tokens of learning-rate warmup and 4 billion of batch size warmup, in the units
    that the recipe uses."""
    recipe = load_recipe("gpt3-125m")
    ramp = recipe.batch_size_warmup
    assert ramp is not None
    sequences = step = 0
    while sequences * 2048 < 375e6:
        sequences += ramp.batch_size_at(sequences, 2048 * sequences, recipe.train.batch_size)
        step += 1
    assert step == recipe.optim.warmup_steps
    assert ramp.sequences * 2048 == 4_000_000_000
    assert (ramp.start, recipe.train.batch_size) == (16, 256)
    assert (recipe.train.tokens, recipe.optim.decay_tokens) == (300_000_000_000, 260_000_000_000)


@pytest.mark.slow
def test_recipes_are_found_in_a_wheel(tmp_path):
    """Installed without its repository, the program still knows its recipes."""
    source = tmp_path / "source"
    source.mkdir()
    for name in ("efftrain_cli", "recipes"):
        shutil.copytree(REPOSITORY / name, source / name)
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(REPOSITORY / name, source)
    pip = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--wheel-dir", tmp_path, source], check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "installed")
    shutil.rmtree(source)
    shown = subprocess.run(
        [sys.executable, "-m", "efftrain_cli", "recipes", "list"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path / "installed"), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    assert [line.split()[0] for line in shown] == sorted(path.stem for path in FILES)
