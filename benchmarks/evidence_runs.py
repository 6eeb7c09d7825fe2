"""Short training runs for the evidence pages: one row of a CSV file per run, and runs whose row exists are not repeated."""

from __future__ import annotations

import csv
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

import torch

from efftrain_cli.recipe.recipe import load_recipe
from efftrain_cli.training.session import fresh_state, prepare_session
from efftrain_cli.training.trainer import read_records, train

COLUMNS = (
    "arm", "seed", "val_loss", "steps", "tokens", "flops", "cpu_seconds", "mean_batch_size", "last_batch_size",
    "mean_blocks", "max_loss_ratio", "date", "torch",
)  # fmt: skip


def run_arms(
    path: Path, base: str, common: Sequence[str], arms: Mapping[str, Sequence[str]], seeds: Sequence[int]
) -> list[dict[str, str]]:
    """Trains every arm (recipe overrides) at every seed that `path` does not hold yet; returns all rows, arms in order."""
    rows = read_rows(path)
    for seed in seeds:
        for arm, overrides in arms.items():
            if any(row["arm"] == arm and row["seed"] == str(seed) for row in rows):
                continue
            row = run_arm(base, [*common, *overrides, f"seed={seed}"])
            append_row(path, {"arm": arm, "seed": seed, **row})
            rows = read_rows(path)
            print(f"{arm}, seed {seed}: validation loss {row['val_loss']:.4f}, {row['cpu_seconds']:.0f} CPU s", flush=True)
    return in_order(rows, arms)


def in_order(rows: Sequence[dict[str, str]], arms: Mapping[str, Sequence[str]]) -> list[dict[str, str]]:
    """The rows of these arms, in the arms' order and by seed."""
    order = list(arms)
    return sorted((row for row in rows if row["arm"] in arms), key=lambda row: (order.index(row["arm"]), row["seed"]))


def run_arm(base: str, overrides: Sequence[str]) -> dict[str, float | int | str]:
    """One training run on one thread."""
    torch.set_num_threads(1)
    recipe = load_recipe(base, overrides)
    session = prepare_session(recipe, torch.device("cpu"))
    state = fresh_state(session)
    start = time.process_time()
    rows = []
    for record in train(state, recipe, session.train_data, session.val_windows):
        rows += read_records(state, recipe, [record])
    cpu_seconds = time.process_time() - start
    steps = rows[1:]
    return {
        "val_loss": rows[-1]["val_loss"],
        "steps": state.progress.step,
        "tokens": state.progress.tokens,
        "flops": state.progress.flops,
        "cpu_seconds": cpu_seconds,
        "mean_batch_size": state.progress.sequences / state.progress.step,
        "last_batch_size": steps[-1]["batch_size"],
        "mean_blocks": statistics.mean(row.get("pld_blocks", recipe.model.n_layer) for row in steps),
        "max_loss_ratio": max(row["loss_ratio"] or 0.0 for row in steps),
        "date": datetime.now(UTC).date().isoformat(),
        "torch": torch.__version__,
    }  # type: ignore[return-value]


def read_rows(path: Path) -> list[dict[str, str]]:
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def append_row(path: Path, row: Mapping[str, object]) -> None:
    new = not path.exists()
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        if new:
            writer.writeheader()
        writer.writerow(row)


T_975 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}
"""97.5 % quantile of Student's t by degrees of freedom."""


def table(rows: Sequence[Mapping[str, str]], baseline: str) -> str:
    """A Markdown table: each arm's means over the seeds, and its validation loss less the baseline's, paired by seed, with a
    95 % t interval."""
    lines = [
        "| arm | seeds | tokens | FLOPs | steps | mean batch | CPU s | validation loss | less the baseline's |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    base = {row["seed"]: float(row["val_loss"]) for row in rows if row["arm"] == baseline}
    for arm in dict.fromkeys(row["arm"] for row in rows):
        own = [row for row in rows if row["arm"] == arm]
        losses = [float(row["val_loss"]) for row in own]
        pairs = [float(row["val_loss"]) - base[row["seed"]] for row in own if row["seed"] in base]
        if arm == baseline or not pairs:
            difference = "–"
        elif len(pairs) == 1:
            difference = f"{pairs[0]:+.4f} (one seed: no claim)"
        else:
            half = T_975[len(pairs) - 1] * statistics.stdev(pairs) / math.sqrt(len(pairs))
            difference = f"{statistics.mean(pairs):+.4f} ± {half:.4f}"

        def mean(column: str, own: Sequence[Mapping[str, str]] = own) -> float:
            return statistics.mean(float(row[column]) for row in own)

        spread = f" (sd {statistics.stdev(losses):.4f})" if len(losses) > 1 else ""
        lines.append(
            f"| {arm} | {len(own)} | {mean('tokens'):,.0f} | {mean('flops'):.3e} | {mean('steps'):.0f} | "
            f"{mean('mean_batch_size'):.1f} | {mean('cpu_seconds'):.0f} | {statistics.mean(losses):.4f}{spread} | {difference} |"
        )
    return "\n".join(lines)
