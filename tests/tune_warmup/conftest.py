"""A recipe whose probes take a moment."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from efftrain_cli.recipe.recipe import Recipe, load_recipe
from tests.trained_run import TEXT

SETTINGS = {
    "data.valid_fraction": "0.3",
    "data.tokenizer": '"bpe:300"',
    "data.repeat": "true",
    "model.n_layer": "1",
    "model.n_embd": "16",
    "model.n_head": "2",
    "model.seq_len": "32",
    "optim.warmup_steps": "4",
    "optim.lr": "1e-1",
    "train.tokens": "8000",
    "train.batch_size": "8",
    "eval.windows": "4",
    "checkpoint.every": "2",
}


@pytest.fixture
def overrides(tmp_path: Path) -> list[str]:
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    return [
        f"data.train={json.dumps(str(text))}",
        *(f"{key}={value}" for key, value in SETTINGS.items()),
    ]


@pytest.fixture
def recipe(overrides: list[str]) -> Recipe:
    return load_recipe("small", overrides)


def lines(folder: Path) -> list[dict[str, str]]:
    with (folder / "receipts.csv").open(newline="") as file:
        return list(csv.DictReader(file))
