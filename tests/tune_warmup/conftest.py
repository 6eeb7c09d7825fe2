"""A recipe whose probes take a moment."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import pytest
from typer.testing import CliRunner

from efftrain_cli.cli.app import app
from efftrain_cli.cli.commands import register
from efftrain_cli.foundation.errors import EfftrainError
from efftrain_cli.recipe.recipe import Recipe, load_recipe
from efftrain_cli.trials import runner
from efftrain_cli.tune_warmup import prober
from tests.trained_run import QUICK, write_text

SETTINGS = [
    *QUICK,
    "model.seq_len=32",
    "optim.warmup_steps=4",
    "optim.lr=1e-1",
    "train.tokens=8000",
    "train.batch_size=8",
    "checkpoint.every=2",
]


class Ended:
    """Stands for a child process that has ended."""

    def __init__(self, code: int) -> None:
        self.code = code

    def poll(self) -> int:
        return self.code


def train_here(arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> Ended:
    """Train a trial in this process, as a child would: PyTorch is imported once."""
    register()
    with pytest.MonkeyPatch.context() as patched:
        for name, value in environment.items():
            patched.setenv(name, value)
        result = CliRunner().invoke(app, list(arguments))
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text(result.output)
    if isinstance(result.exception, EfftrainError):
        return Ended(result.exception.exit_code)
    assert result.exception is None, result.exception
    return Ended(0)


@pytest.fixture
def overrides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(runner, "TICK", 0.0)
    monkeypatch.setattr(prober, "TrialRunner", partial(runner.TrialRunner, launch=train_here))
    return [write_text(tmp_path), *SETTINGS]


@pytest.fixture
def recipe(overrides: list[str]) -> Recipe:
    return load_recipe("small", overrides)


def lines(folder: Path) -> list[dict[str, str]]:
    with (folder / "receipts.csv").open(newline="") as file:
        return list(csv.DictReader(file))
