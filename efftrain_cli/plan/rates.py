"""How fast models were trained on this machine: lines of bench.jsonl, which `bench` and `pretrain`
write."""

from __future__ import annotations

import math
import os
from contextlib import suppress
from pathlib import Path

from pydantic import Field

from efftrain_cli.foundation.environment import cache_root, planned_device
from efftrain_cli.foundation.files import make_folder
from efftrain_cli.foundation.records import Part, utc_now
from efftrain_cli.model.flops import flops_per_token
from efftrain_cli.plan.plan import model_config
from efftrain_cli.recipe.recipe import Recipe
from efftrain_cli.recipe.sizes import likely_vocabulary

FEWEST_STEPS = 10
"""Shorter runs say little: the first steps are the slowest."""
START_SECONDS = 5.0
"""What starting a process, importing PyTorch and opening the data takes, about: no row of
metrics.jsonl counts it."""


class Rate(Part):
    """One measured rate of training on one device; a line of bench.jsonl."""

    machine: str = Field(default_factory=lambda: os.uname().nodename)
    time: str = Field(default_factory=utc_now)
    """ISO 8601, UTC."""
    device: str
    """Its name, for people."""
    device_kind: str
    """"cpu" or "cuda"."""
    source: str
    """What measured it, for people: "bench of small", "run small-seed1234"."""
    n_layer: int
    n_embd: int
    flops_per_second: float = Field(gt=0)
    """Logits included, over whole steps: evaluation, checkpoints and preparing excluded."""
    flops_per_token: float = Field(gt=0)
    """Logits included, mean of the steps."""
    train_share: float = 0.0
    """Of a run: training's share of its wall time. 0 of a benchmark."""


def remember_rate(rate: Rate) -> None:
    """Keep a rate for later estimates on this machine, if the cache can be written."""
    with suppress(OSError):
        make_folder(cache_root())
        with _path().open("a", encoding="utf-8") as file:
            file.write(f"{rate.model_dump_json()}\n")


def _path() -> Path:
    return cache_root() / "bench.jsonl"


def measured_rate(device: str, recipe: Recipe) -> Rate | None:
    """Return the measured rate to estimate the recipe's training time with, None if nothing was
    measured here.

    The same number of blocks and width comes first, of these a run, then the nearest FLOPs per
    token, then the newest.

    Args:
        device: as --device names it.
    """
    model = recipe.model
    per_token = _flops_per_token(recipe)

    def rank(rate: Rate) -> tuple[bool, bool, float, str]:
        same = (rate.n_layer, rate.n_embd) == (model.n_layer, model.n_embd)
        is_run = rate.train_share > 0
        distance = abs(math.log(rate.flops_per_token / per_token))
        return same, same and is_run, -distance, rate.time

    return max(_rates_on(device), key=rank, default=None)


def seconds_left(recipe: Recipe, tokens: int) -> float | None:
    """Return the wall time of `tokens` more of a recipe by `measured_rate`, None if nothing was
    measured here."""
    rate = measured_rate("auto", recipe)
    if rate is None:
        return None
    start = START_SECONDS if tokens else 0.0
    train_seconds = tokens * _flops_per_token(recipe) / rate.flops_per_second
    return start + train_seconds / (rate.train_share or 1)


def _flops_per_token(recipe: Recipe) -> float:
    config = model_config(recipe, likely_vocabulary(recipe.data.tokenizer))
    return flops_per_token(config, config.seq_len, config.n_layer).with_logits


def _rates_on(device: str) -> list[Rate]:
    """Return this machine's rates of a kind of device; "auto" is CUDA if any was measured."""
    lines = []
    with suppress(OSError):
        lines = _path().read_bytes().splitlines()
    rates = []
    for line in lines:
        with suppress(ValueError):
            rate = Rate.model_validate_json(line)
            if rate.machine == os.uname().nodename:
                rates.append(rate)
    kind = planned_device(device).partition(":")[0]
    if kind == "auto":
        kind = "cpu"
        if any(rate.device_kind == "cuda" for rate in rates):
            kind = "cuda"
    return [rate for rate in rates if rate.device_kind == kind]
