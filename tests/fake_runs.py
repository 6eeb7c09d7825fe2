"""Run directories made without training, for tests of what reads them. Rows follow the format of
metrics.jsonl."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from efftrain_cli.run.lines import sealed

TOKENS_PER_STEP = 1024

ORIGIN: dict[str, Any] = {
    "schema_version": 1,
    "command": ["pretrain"],
    "started": "2026-01-02T03:04:05+00:00",
    "torch": "2.13.0+cpu",
    "device": "Some CPU",
    "device_kind": "cpu",
    "data": {
        "train_hash": "a" * 64,
        "valid_hash": "b" * 64,
        "tokenizer_hash": "c" * 64,
        "vocab_size": 512,
        "valid_windows": 64,
        "seq_len": 128,
        "valid_bytes_per_token": 2.5,
    },
}

RECIPE = """\
seed = {seed}

[model]
n_layer = 2
n_head = 2
n_embd = 64
seq_len = 128

[optim]
lr = {lr}

[train]
tokens = {tokens}
batch_size = 8
{more}"""


def without_times(row: dict[str, Any]) -> dict[str, Any]:
    """Return what two equal runs have in common of a row."""
    timed = {"seconds", "tokens_per_second", "mfu", "segment", "check"}
    return {key: row[key] for key in row if key not in timed and not key.endswith("_seconds")}


def val_loss(step: int, seed: int, speed: float, floor: float = 3.0) -> float:
    """A made-up validation loss, nats per token, that falls faster at a higher `speed`."""
    noise = random.Random(f"{seed}").uniform(-0.02, 0.02) + random.Random(
        f"{seed} {speed}"
    ).uniform(-0.004, 0.004)
    return floor + 3.0 * math.exp(-speed * step / 40) + noise


def rows_of(
    steps: int,
    seed: int,
    speed: float = 1.0,
    every: int = 10,
    segment: int = 0,
    first: int = 0,
    **changed: Any,
) -> list[dict[str, Any]]:
    """The rows of one segment from step `first` to `steps`; `changed` replaces columns of every
    row."""
    rows: list[dict[str, Any]] = []
    draw = random.Random(f"{seed} {segment} {speed}")
    best = None
    for step in range(first, steps + 1):
        measured = val_loss(step, seed, speed) if step % every == 0 or step == steps else None
        row: dict[str, Any] = {
            "step": step,
            "segment": segment,
            "tokens": step * TOKENS_PER_STEP,
            "total_flops": step * TOKENS_PER_STEP * 6e5,
            "val_loss": measured,
            "eval_seconds": 0.25 if measured is not None else 0.0,
        }
        if step:
            loss = val_loss(step, seed, speed) + draw.gauss(0, 0.05)
            row |= {
                "seq_len": 128,
                "batch_size": 8,
                "lr": 1e-3 * min(1, step / 10),
                "loss": loss,
                "loss_ratio": None if best is None else loss / best,
                "grad_norm": 1.0 + draw.random(),
                "adam_sqrt_v_l1": 100.0 + draw.random(),
                "adam_sqrt_v_max": 0.1 + 0.01 * draw.random(),
                "nonfinite": False,
                "seconds": 0.05,
                "tokens_per_second": TOKENS_PER_STEP / 0.05,
                "flops": TOKENS_PER_STEP * 6e5,
                "mfu": None,
            }
            best = loss if best is None else min(best, loss)
        row["train_seconds"] = step * 0.05
        rows.append(row | changed)
    return rows


def write_run(
    root: Path,
    recipe: str,
    seed: int,
    *,
    name: str | None = None,
    steps: int = 100,
    budget: int | None = None,
    speed: float = 1.0,
    lr: float = 1e-3,
    more: str = "",
    rows: list[dict[str, Any]] | None = None,
    events: list[dict[str, Any]] | None = None,
    origin: dict[str, Any] | None = None,
    data: dict[str, Any] | None = None,
) -> Path:
    """Writes `root`/<name> and returns it. `budget` is train.tokens; without it the run is
    finished."""
    path = root / (name or f"{recipe}-seed{seed}")
    path.mkdir(parents=True)
    tokens = budget if budget is not None else steps * TOKENS_PER_STEP
    (path / "recipe.toml").write_text(RECIPE.format(seed=seed, lr=lr, tokens=tokens, more=more))
    whole = ORIGIN | {"recipe": recipe} | (origin or {})
    whole["data"] = ORIGIN["data"] | (data or {})
    (path / "origin.json").write_text(json.dumps(whole))
    rows = rows_of(steps, seed, speed) if rows is None else rows
    write_sealed(path / "metrics.jsonl", rows)
    write_sealed(path / "events.jsonl", events or [{"event": "start", "time": "T"}])
    return path


def write_jsonl(path: Path, rows: Iterable[object]) -> None:
    """Write each row as a line of JSON."""
    path.write_text("".join(json.dumps(row, allow_nan=False) + "\n" for row in rows))


def sealed_lines(rows: Iterable[dict[str, Any]]) -> str:
    """Return each row as a line of JSON with its check value, as pretrain writes it."""
    return "".join(f"{sealed(row)}\n" for row in rows)


def write_sealed(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Write rows as pretrain does."""
    path.write_text(sealed_lines(rows))


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Read each line of JSON."""
    return [json.loads(line) for line in path.read_text().splitlines()]
