"""A recipe whose probes take a moment."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from efftrain_cli.foundation.errors import EfftrainError
from efftrain_cli.trials import runner
from efftrain_cli.tune_warmup import prober
from tests.conftest import invoke
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


def train_here(arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> Any:
    """Train a trial in this process, as a child would: PyTorch is imported once."""
    result = invoke("", *arguments, env={**environment})
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text(result.output)
    error = result.exception
    if isinstance(error, EfftrainError):
        return SimpleNamespace(poll=lambda: error.exit_code)
    assert error is None, error
    return SimpleNamespace(poll=lambda: 0)


def probe_here(folder: Path, patch: pytest.MonkeyPatch) -> list[str]:
    """Let a search train in this process; return overrides of a recipe with a text in `folder`."""
    patch.setattr(runner, "TICK", 0.0)
    patch.setattr(prober, "TrialRunner", partial(runner.TrialRunner, launch=train_here))
    return [write_text(folder), *SETTINGS]


def lines(folder: Path) -> list[dict[str, str]]:
    with (folder / "receipts.csv").open(newline="") as file:
        return list(csv.DictReader(file))
