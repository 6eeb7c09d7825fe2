"""How fast models were trained before: by `efftrain bench`, or by earlier runs. Touches small files only."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

from efftrain_cli.data.cache import cache_root
from efftrain_cli.foundation.errors import CheckpointError, EfftrainError
from efftrain_cli.foundation.files import open_to_write
from efftrain_cli.foundation.records import Part
from efftrain_cli.plan.cost import likely_vocabulary
from efftrain_cli.plan.plan import padded_vocab_size, token_flops
from efftrain_cli.recipe.recipe import Recipe, recipe_values
from efftrain_cli.run.directory import run_names, runs_root
from efftrain_cli.run.lines import Values
from efftrain_cli.run.metrics import last_row
from efftrain_cli.run.origin import read_origin
from efftrain_cli.run.small_files import read_recipe_values

_NEWEST = 200
"""Runs that are looked at."""
_FEWEST_STEPS = 10
"""Shorter runs say little: the first steps are the slowest."""
START_SECONDS = 5.0
"""What starting a process, importing PyTorch and opening the data takes, about: no row of metrics.jsonl counts it."""


class Rate(Part):
    """One measured rate of training; a line of bench.jsonl."""

    machine: str = os.uname().nodename
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
    """Keep a benchmark's rate for later estimates on this machine, if the cache can be written."""
    with contextlib.suppress(OSError, CheckpointError):
        cache_root().mkdir(parents=True, exist_ok=True)
        bench = open_to_write(cache_root() / "bench.jsonl", os.O_WRONLY | os.O_APPEND)
        with os.fdopen(bench, "a", encoding="utf-8") as file:
            file.write(f"{rate.model_dump_json()}\n")


def measured_rate(device: str, recipe: Recipe) -> Rate | None:
    """Return the measured rate to estimate the recipe's training time with, None if nothing was measured here.

    A run of the same number of blocks and width comes before everything else, then the nearest FLOPs per token, within
    a tenth the same blocks and width, then the newest.

    Args:
        device: as --device names it; "auto" takes any.
    """
    model = recipe.model
    per_token = _flops_per_token(recipe)

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


def seconds_left(
    recipe: Recipe, tokens: int, speeds: dict[tuple[object, int], float | None]
) -> float | None:
    """Return the wall time of `tokens` more of a recipe by `estimate_speed`, None if nothing was measured here.

    `speeds` keeps what was looked up.
    """
    key = (recipe.model, recipe.train.batch_size)
    if key not in speeds:
        speeds[key] = estimate_speed(recipe)
    speed = speeds[key]
    return None if speed is None else tokens / speed + START_SECONDS * (tokens > 0)


def estimate_speed(recipe: Recipe) -> float | None:
    """Return the tokens per second of wall time to expect of a recipe, None if nothing was measured here.

    It is the median of the runs of the same model and batch, whose time includes evaluation, checkpoints and
    preparing; without such a run it goes by `measured_rate` on any device, as `pretrain --plan`.
    """
    wanted = recipe_values(recipe.model), recipe.train.batch_size
    speeds = []
    for _, row, values in _newest_runs():
        with contextlib.suppress(ValueError, KeyError, TypeError):
            seconds = float(row["wall_seconds"])
            same = (values["model"], values["train"]["batch_size"]) == wanted
            if same and seconds > 0 and row["segment"] == 0:
                speeds.append(float(row["tokens"]) / seconds)
    if speeds:
        return median(speeds)
    rate = measured_rate("auto", recipe)
    return None if rate is None else rate.flops_per_second / _flops_per_token(recipe)


def _flops_per_token(recipe: Recipe) -> float:
    rows = padded_vocab_size(recipe, likely_vocabulary(recipe.data.tokenizer))
    return token_flops(recipe, rows, recipe.model.seq_len, recipe.model.n_layer).with_logits


def _is_cpu(device: str) -> bool:
    return not any(word in device for word in ("NVIDIA", "AMD Instinct", "cuda"))


def _benches() -> Iterator[Rate]:
    with contextlib.suppress(OSError):
        for line in (cache_root() / "bench.jsonl").read_text("utf-8").splitlines():
            with contextlib.suppress(ValueError):
                rate = Rate.model_validate_json(line)
                if rate.machine == os.uname().nodename:
                    yield rate


def _newest_runs() -> Iterator[tuple[Path, Values, Values]]:
    """Yield rows file, last row and recipe of the newest runs that can be read, the newest last."""
    paths = [runs_root() / name / "metrics.jsonl" for name in run_names()]
    paths = sorted(filter(Path.exists, paths), key=lambda path: path.stat().st_mtime)
    for path in paths[-_NEWEST:]:
        with contextlib.suppress(EfftrainError, OSError):
            yield path, last_row(path.parent), read_recipe_values(path.parent)


def _runs() -> Iterator[Rate]:
    for path, row, values in _newest_runs():
        with contextlib.suppress(
            EfftrainError, OSError, ValueError, TypeError, KeyError, ZeroDivisionError
        ):
            origin = read_origin(path.parent)
            model = values["model"]
            # The rate of several devices is not that of one.
            if row["step"] < _FEWEST_STEPS or origin.get("world_size", 1) != 1:
                continue
            written = datetime.fromtimestamp(path.stat().st_mtime, UTC)
            yield Rate(
                flops_per_second=float(row["total_flops"]) / float(row["train_seconds"]),
                flops_per_token=float(row["total_flops"]) / float(row["tokens"]),
                n_layer=int(model["n_layer"]),
                n_embd=int(model["n_embd"]),
                device=str(origin["device"]),
                source=f"run {path.parent.name}",
                time=written.isoformat(timespec="seconds"),
            )
