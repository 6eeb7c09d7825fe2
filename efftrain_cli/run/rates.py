"""How fast models were trained before: by `efftrain bench`, or by earlier runs. Touches small files only."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from efftrain_cli.data.cache import cache_root
from efftrain_cli.foundation.errors import EfftrainError
from efftrain_cli.run.directory import run_names, runs_root
from efftrain_cli.run.metrics import last_row
from efftrain_cli.run.origin import read_origin
from efftrain_cli.run.rows import read_recipe_values

_NEWEST = 20
"""Runs that are looked at."""
_FEWEST_STEPS = 10
"""Shorter runs say little: the first steps are the slowest."""


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


def remember_bench(rate: Rate) -> None:
    """Keeps a benchmark's rate for later estimates on this machine, where the cache can be written."""
    with contextlib.suppress(OSError):
        cache_root().mkdir(parents=True, exist_ok=True)
        with (cache_root() / "bench.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps({"machine": os.uname().nodename, **asdict(rate)}) + "\n")


def measured_rate(device: str, n_layer: int, n_embd: int) -> Rate | None:
    """The rate to estimate a model's training time with: the newest benchmark on this machine, else the newest run; one
    of the same shape before all others. `device` is as --device names it; "auto" takes any."""

    for found in (_benches(), _runs()):
        rates = [
            rate for rate in found if device == "auto" or (device == "cpu") == _is_cpu(rate.device)
        ]
        if rates:
            return sorted(
                rates,
                key=lambda rate: ((rate.n_layer, rate.n_embd) == (n_layer, n_embd), rate.time),
            )[-1]
    return None


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
                n_layer=int(model["n_layer"]),
                n_embd=int(model["n_embd"]),
                device=str(origin["device"]),
                source=f"run {path.parent.name}",
                time=datetime.fromtimestamp(path.stat().st_mtime, UTC).isoformat(
                    timespec="seconds"
                ),
            )
