"""A run directory with random weights, made in a moment: for tests of what reads runs."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from efftrain_cli.data.prepare import prepare
from efftrain_cli.foundation.step import Progress
from efftrain_cli.model.gpt import GPT, GPTConfig
from efftrain_cli.recipe.recipe import Recipe, dump_recipe, load_recipe
from efftrain_cli.run.directory import checkpoint_path, new_run, run_path
from efftrain_cli.training import dist
from efftrain_cli.training.checkpoint import write
from efftrain_cli.training.loading import read_progress
from efftrain_cli.training.state import TrainState
from tests.tiny import fresh

TEXT = "\n".join(
    f"{who} {did} the {thing} {where} and then walked home again, because the evening was already"
    " rather cold."
    for who in ("Anna", "The old captain", "My brother", "Nobody", "A neighbour")
    for did in ("found", "painted", "lost", "forgot")
    for thing in ("lantern", "ship", "letter", "garden")
    for where in ("near the harbour", "behind the house", "in the morning")
)


QUICK = [
    "data.valid_fraction=0.3",
    "data.tokenizer=bpe:300",
    "data.repeat=true",
    "model.n_layer=1",
    "model.n_embd=16",
    "model.n_head=2",
    "eval.windows=4",
]
"""Overrides of `small` with which a run on TEXT takes a moment."""


def write_text(folder: Path) -> str:
    """Write `folder`/text.txt and return the override that trains on it."""
    (folder / "text.txt").write_text(TEXT)
    return f"data.train={json.dumps(str(folder / 'text.txt'))}"


def make_run(
    folder: Path,
    name: str = "random",
    overrides: tuple[str, ...] = (),
    steps: tuple[int, ...] = (10,),
) -> Path:
    """Writes `folder`/text.txt and a run trained on it for no step at all. EFFTRAIN_RUNS must point
    where runs belong.

    Weights are drawn with a large spread, so that tokens differ clearly in probability.
    """
    recipe = load_recipe(
        "small",
        (
            write_text(folder),
            "data.valid_fraction=0.3",
            'data.tokenizer="bpe:300"',
            "model.n_layer=2",
            "model.n_embd=32",
            "model.n_head=2",
            "model.seq_len=64",
            *overrides,
        ),
    )
    corpus = prepare(recipe.data)
    origin = {"data": {"tokenizer_hash": corpus.tokenizer_sha256}}
    with new_run(name, dump_recipe(recipe), origin, corpus.tokenizer_path) as run:
        for step in steps:
            state = random_state(recipe, corpus.vocab_size, step)
            write_checkpoint(checkpoint_path(run.path, step), state, dump_recipe(recipe))
    return run_path(name)


def write_checkpoint(path: Path, state: TrainState, recipe_toml: str) -> None:
    """Write a state as a checkpoint, on rank 0; all ranks call it."""
    names = ("model.safetensors", "optimizer.safetensors", "method.safetensors")
    files = zip(names, state.whole(), strict=True)
    present = {name: tensors for name, tensors in files if tensors}
    if dist.is_main():
        write(path, state.progress, recipe_toml, present)


def read_checkpoint(
    path: Path,
) -> tuple[Progress, dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """Return the progress of a checkpoint, and its tensors: model, optimizer, in flight."""
    in_flight = {}
    if (path / "method.safetensors").exists():
        in_flight = load_file(path / "method.safetensors")
    model = load_file(path / "model.safetensors")
    optimizer = load_file(path / "optimizer.safetensors")
    return read_progress(path), model, optimizer, in_flight


def random_gpt(config: GPTConfig, spread: float, seed: int) -> GPT:
    """Weights far from their initialization, biases and norms included, so that a forgotten one
    shows. Padding rows hold rubbish: they must take no probability and never be written."""
    model = GPT(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * spread)
        model.wte.weight[config.vocab_size :] = 9.0
    return model


def random_state(recipe: Recipe, vocab_size: int, step: int) -> TrainState:
    """Random weights, another set for every step."""
    state = fresh(recipe, vocab_size)
    generator = torch.Generator().manual_seed(step)
    with torch.no_grad():
        for parameter in state.model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.15)
    state.progress = Progress(step=step, tokens=1000 * step)
    return state
