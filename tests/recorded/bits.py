"""Bits of training: `write_bits` trains this tree's cases, `compare_with` compares two trees.

Bits differ between processors, so both trees train here and now, on one thread; each runs its own
tests/recorded, in a process of its own.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import efftrain_cli
from efftrain_cli.data.windows import Windows
from efftrain_cli.recipe.recipe import Recipe, load_recipe
from tests.recorded.cases import CASES, SIZE

TREE = Path(__file__).resolve().parents[2]
GONE = Path(__file__).with_name("gone.txt")
VOCAB_SIZE = 60
TOKENS = 40_000
STATES = ("weights", "moments", "in_flight")
TIMED = {"seconds", "tokens_per_second", "mfu", "segment"}
"""Columns that two runs of one tree may differ in, with those that end in "_seconds"."""


def train(recipe: Recipe, windows: Windows) -> dict[str, Any]:
    """Train a recipe to its end on the CPU; return the rows and digests of the tensors.

    The only function here that knows where the package keeps its training: a commit that moves that
    moves this.
    """
    from efftrain_cli.training.build import build_state
    from efftrain_cli.training.record import StepRecord, read_records
    from efftrain_cli.training.stages import train_stages

    state = build_state(recipe, VOCAB_SIZE, torch.device("cpu"))
    rows = []
    for record in train_stages(state, recipe, windows, windows.validation(recipe.eval.windows)):
        if isinstance(record, StepRecord):
            rows += map(untimed, read_records(state, recipe, [record]))
    return {
        "weights": digest(state.weights()),
        "moments": digest(state.optimizer.tensors()),
        "in_flight": digest(state.in_flight),
        "rows": rows,
    }


class MadeTokens:
    """What windows read of a corpus: 40,000 tokens of one text, of which 80 % follow from the one
    before."""

    parts = ()
    tokens = TOKENS + 1

    def __init__(self) -> None:
        generator = np.random.Generator(np.random.Philox(7))
        noise = generator.integers(0, VOCAB_SIZE - 1, TOKENS)
        follows = generator.random(TOKENS) < 0.8
        ids = np.zeros(TOKENS + 1, dtype=np.uint32)
        for i in range(1, TOKENS):
            ids[i] = (ids[i - 1] * 7 + 3) % (VOCAB_SIZE - 1) if follows[i] else noise[i]
        ids[TOKENS] = VOCAB_SIZE - 1  # end of text
        self.ids = ids

    def read(self, starts: Iterable[int], length: int) -> np.ndarray:
        return np.stack([self.ids[start : start + length] for start in starts]).astype(np.int64)


def digest(tensors: Mapping[str, Tensor]) -> str:
    """Return the sha256 of named tensors' names and bytes."""
    sha = hashlib.sha256()
    for name in sorted(tensors):
        flat = tensors[name].detach().contiguous().reshape(-1)
        sha.update(name.encode() + flat.view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()


def untimed(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row's columns that two runs of one tree must agree in."""
    return {key: row[key] for key in row if key not in TIMED and not key.endswith("_seconds")}


def write_bits(out: Path, names: Sequence[str]) -> None:
    """Train the cases named, or all, and write digests and rows as JSON."""
    torch.set_num_threads(1)
    trained = {}
    for name in names or CASES:
        base, *overrides = CASES[name]
        recipe = load_recipe(base, [*SIZE, *overrides])
        trained[name] = train(recipe, Windows(MadeTokens(), recipe.model.seq_len, recipe.seed))
        print(f"{name:20} {trained[name]['rows'][-1]['step']:4} steps", flush=True)
    package = str(Path(efftrain_cli.__file__).parent)
    out.write_text(json.dumps({"package": package, "cases": trained}))


def run_tree(tree: Path, out: Path, names: Sequence[str]) -> dict[str, Any]:
    """Train the cases of a tree in a process that imports that tree, and return what it wrote."""
    environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.recorded", "bits", "--out", str(out), *names]
    subprocess.run(command, cwd=tree, env=environment, check=True)
    written = json.loads(out.read_text())
    print(f"trained with {written['package']}", flush=True)
    return written


def read_gone() -> set[str]:
    """Return what gone.txt names: "column NAME" and "case NAME", each with a reason after a
    colon."""
    lines = [line for line in GONE.read_text().splitlines() if line and line[0] != "#"]
    for line in lines:
        if not line.partition(": ")[2]:
            raise SystemExit(f"{GONE.name}: no reason in the line {line!r}")
    return {line.partition(": ")[0] for line in lines}


def row_faults(before: Mapping[str, Any], now: Mapping[str, Any], gone: set[str]) -> Iterator[str]:
    """Yield each column of a row of the older tree that the newer lacks, or has otherwise."""
    for key, value in before.items():
        if key not in now:
            if f"column {key}" not in gone:
                yield f"{key} missing"
        # As text: NaN is equal to itself, and -0.0 differs from 0.0.
        elif json.dumps(value) != json.dumps(now[key]):
            yield f"{key} of step {before['step']}: {value} -> {now[key]}"


def case_faults(before: Mapping[str, Any], now: Mapping[str, Any], gone: set[str]) -> list[str]:
    """Return what of a case differs between two trees."""
    faults = [name for name in STATES if before[name] != now[name]]
    if len(before["rows"]) != len(now["rows"]):
        return [*faults, f"{len(before['rows'])} rows -> {len(now['rows'])}"]
    for row, row_now in zip(before["rows"], now["rows"], strict=True):
        faults += row_faults(row, row_now, gone)
    return faults


def compare_trees(before: Mapping[str, Any], now: Mapping[str, Any], gone: set[str]) -> bool:
    """Print a row for each case of the older tree; return whether all are equal or named as
    gone."""
    alike = True
    for name, run in before.items():
        if name not in now:
            named = f"case {name}" in gone
            print(f"{name:20} gone" + " " * named + "as gone.txt says" * named)
            alike &= named
            continue
        faults = case_faults(run, now[name], gone)
        alike &= not faults
        verdict = f"{len(faults)} differ: {'; '.join(faults[:3])}" if faults else "equal"
        print(f"{name:20} {run['rows'][-1]['step']:4} steps  {verdict}")
    for name in now.keys() - before.keys():
        print(f"{name:20} new")
    return alike


def compare_with(commit: str, names: Sequence[str]) -> int:
    """Train this tree and a worktree of `commit`, print what differs, return the exit code."""
    with tempfile.TemporaryDirectory(prefix="bits-") as folder:
        other = Path(folder) / "tree"
        git = ["git", "-C", str(TREE), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(other), commit], check=True)
        try:
            before = run_tree(other, Path(folder) / "before.json", names)
            now = run_tree(TREE, Path(folder) / "now.json", names)
        finally:
            subprocess.run([*git, "remove", "--force", str(other)], check=True)
    if before["package"] == now["package"]:
        print("both trees imported one package")
        return 1
    return int(not compare_trees(before["cases"], now["cases"], read_gone()))
