"""How fast models were trained before: by `efftrain bench`, or by earlier runs. Touches small files only."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

from efftrain_cli.data.cache import cache_root
from efftrain_cli.foundation.errors import CheckpointError, EfftrainError
from efftrain_cli.foundation.files import open_to_write
from efftrain_cli.plan.cost import likely_vocabulary
from efftrain_cli.plan.plan import padded_vocab_size, token_flops
from efftrain_cli.recipe.recipe import Recipe, recipe_values
from efftrain_cli.run.directory import run_names, runs_root
from efftrain_cli.run.metrics import last_row
from efftrain_cli.run.origin import read_origin
from efftrain_cli.run.small_files import read_recipe_values

_NEWEST = 200
"""Runs that are looked at."""
_FEWEST_STEPS = 10
"""Shorter runs say little: the first steps are the slowest."""
START_SECONDS = 5.0
"""What starting a process, importing PyTorch and opening the data takes, about: no row of metrics.jsonl counts it."""


@dataclass(frozen=True, kw_only=True)
class Rate:
    """One measured rate of training."""

    flops_per_second: float
    """Logits included, over whole steps."""
    n_layer: int
    n_embd: int
    device: str
    """As `bench` or the run's origin names it."""
    source: str
    """What measured it, for people: "bench of small", "run small-seed1234"."""
    time: str
    """ISO 8601, UTC."""
    flops_per_token: float
    """Logits included, mean of the steps."""


def remember_bench(rate: Rate) -> None:
    """Keeps a benchmark's rate for later estimates on this machine, where the cache can be written."""
    with contextlib.suppress(OSError, CheckpointError):
        cache_root().mkdir(parents=True, exist_ok=True)
        bench = open_to_write(cache_root() / "bench.jsonl", os.O_WRONLY | os.O_APPEND)
        with os.fdopen(bench, "a", encoding="utf-8") as file:
            file.write(json.dumps({"machine": os.uname().nodename, **asdict(rate)}) + "\n")


def measured_rate(device: str, recipe: Recipe) -> Rate | None:
    """Return the measured rate to estimate the recipe's training time with, None if nothing was measured here.

    A run of the same number of blocks and width comes before everything else, then the nearest FLOPs per token, within
    a tenth the same blocks and width, then the newest.

    Args:
        device: as --device names it; "auto" takes any.
    """
    model, per_token = recipe.model, _flops_per_token(recipe)

    def rank(is_run: bool, rate: Rate) -> tuple[bool, float, bool, str]:
        same = (rate.n_layer, rate.n_embd) == (model.n_layer, model.n_embd)
        distance = abs(math.log(rate.flops_per_token / per_token))
        return is_run and same, -round(distance, 1), same, rate.time

    ranked = []
    for is_run, rates in ((True, _runs()), (False, _benches())):
        for rate in rates:
            if device == "auto" or (device == "cpu") == _is_cpu(rate.device):
                ranked.append((rank(is_run, rate), rate))
    return max(ranked, key=lambda entry: entry[0])[1] if ranked else None


def estimated_speed(recipe: Recipe) -> float | None:
    """Return the tokens per second that `measured_rate` lets expect on any device, None if nothing was measured."""
    rate = measured_rate("auto", recipe)
    return None if rate is None else rate.flops_per_second / _flops_per_token(recipe)


def seconds_left(
    recipe: Recipe, tokens: int, speeds: dict[tuple[object, int], float | None]
) -> float | None:
    """Return the wall time of `tokens` more of a recipe, None if nothing was measured here. It goes by `speed_of`, or
    without a finished run by the nearest measurement, as `pretrain --plan`. `speeds` keeps what was looked up."""
    key = (recipe.model, recipe.train.batch_size)
    if key not in speeds:
        speeds[key] = speed_of(recipe) or estimated_speed(recipe)
    speed = speeds[key]
    return None if speed is None else tokens / speed + START_SECONDS * (tokens > 0)


def speed_of(recipe: Recipe) -> float | None:
    """Tokens per second of wall time of the finished runs of the same model and batch in the folder of runs, their
    median; None where there is none. Evaluation, checkpoints and preparing are part of the time."""
    wanted = {"model": recipe_values(recipe.model), "batch_size": recipe.train.batch_size}
    speeds = []
    for name in run_names():
        path = runs_root() / name
        try:
            found = read_recipe_values(path)
            if {"model": found["model"], "batch_size": found["train"]["batch_size"]} != wanted:
                continue
            row = last_row(path)
            seconds = float(row["wall_seconds"])
            if seconds > 0 and row["segment"] == 0:
                speeds.append(float(row["tokens"]) / seconds)
        except (EfftrainError, OSError, ValueError, KeyError, TypeError):
            continue  # a run that cannot be read is not a measurement
    return median(speeds) if speeds else None


def _flops_per_token(recipe: Recipe) -> float:
    rows = padded_vocab_size(recipe, likely_vocabulary(recipe.data.tokenizer))
    return token_flops(recipe, rows, recipe.model.seq_len, recipe.model.n_layer).with_logits


def _is_cpu(device: str) -> bool:
    return not any(word in device for word in ("NVIDIA", "AMD Instinct", "cuda"))


def _benches() -> Iterator[Rate]:
    with contextlib.suppress(OSError):
        for line in (cache_root() / "bench.jsonl").read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(ValueError, TypeError, AttributeError):
                values = json.loads(line)
                if values.pop("machine") == os.uname().nodename:
                    yield Rate(**values)


def _runs() -> Iterator[Rate]:
    paths = [runs_root() / name / "metrics.jsonl" for name in run_names()]
    for path in sorted(filter(Path.exists, paths), key=lambda path: path.stat().st_mtime)[
        -_NEWEST:
    ]:
        with contextlib.suppress(
            EfftrainError, OSError, ValueError, TypeError, KeyError, ZeroDivisionError
        ):
            row = last_row(path.parent)
            if row["step"] < _FEWEST_STEPS:
                continue
            origin, model = read_origin(path.parent), read_recipe_values(path.parent)["model"]
            if origin.get("world_size", 1) != 1:
                continue  # a rate of several devices
            yield Rate(
                flops_per_second=float(row["total_flops"]) / float(row["train_seconds"]),
                flops_per_token=float(row["total_flops"]) / float(row["tokens"]),
                n_layer=int(model["n_layer"]),
                n_embd=int(model["n_embd"]),
                device=str(origin["device"]),
                source=f"run {path.parent.name}",
                time=datetime.fromtimestamp(path.stat().st_mtime, UTC).isoformat(
                    timespec="seconds"
                ),
            )
