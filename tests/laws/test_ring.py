"""Ouroboros's ring computes what one device computes; it has a device less than modules."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.launch import run_ranks, start_efftrain, wait_until, write_recipe
from tests.laws.ranks_run import RINGS

pytestmark = pytest.mark.slow
WORLDS = (1, 2, 4)
CASES = [(modules, name) for modules in RINGS for name in RINGS[modules]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("ring")
    results = {}
    for world_size in WORLDS:
        out = folder / f"{world_size}.json"
        run_ranks("tests/laws/ranks_run.py", world_size, "rings", str(out))
        results[world_size] = json.loads(out.read_text())
    return results


@pytest.mark.parametrize("modules, name", CASES)
def test_the_ring_computes_what_one_device_does(found, modules, name):
    """Weights, moments and what a checkpoint holds in flight, bit for bit if no norm over all
    modules is clipped."""
    case = f"K = {modules}, {name}"
    ring, one = (found[ranks][case] for ranks in (modules - 1, 1))
    assert len(ring["rows"]) == 12
    if "optim.grad_clip=0" in RINGS[modules][name]:
        assert ring["digests"] == one["digests"]
    # Muon orthogonalizes in bf16, which makes more of a last bit.
    rel = 1e-5
    if "muon" in name:
        rel = 5e-3
    for have, want in zip(ring["rows"], one["rows"], strict=True):
        assert have.keys() == want.keys()
        for column, value in want.items():
            assert have[column] == (value if value is None else pytest.approx(value, rel=rel)), (
                column
            )


@pytest.mark.parametrize("modules, name", CASES)
def test_stopping_and_continuing_moves_no_bit(found, modules, name):
    for ranks in (1, modules - 1):
        whole = found[ranks][f"K = {modules}, {name}"]
        resumed = found[ranks][f"K = {modules}, {name}, resumed"]
        assert resumed["rows"] == whole["rows"]
        assert resumed["digests"] == whole["digests"]


@pytest.mark.parametrize("modules", RINGS)
def test_each_rank_holds_its_modules_only(found, modules):
    """Rank 0 has the first and the last; they share the tied matrix."""
    ring, one = (found[ranks][f"K = {modules}, plain"] for ranks in (modules - 1, 1))
    assert sum(ring["held"]) == one["held"][0]
    assert max(ring["held"]) < 0.65 * one["held"][0]


def test_a_ring_that_was_killed_goes_on_from_its_checkpoint_as_one_device_would(tmp_path):
    """As a user does it: two processes, one of which is killed; continued by two, then by one."""
    long = ("train.tokens=1_000_000", "data.repeat=true", "eval.every=4", "optim.grad_clip=0")
    write_recipe(tmp_path, *long, "ouroboros.modules=3")
    environment = {"EFFTRAIN_CACHE": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}

    def start(*arguments: str) -> subprocess.Popen[str]:
        return start_efftrain(tmp_path, "pretrain", "--no-probe", *arguments, **environment)

    def done(*arguments: str) -> None:
        process = start(*arguments)
        _, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors

    process = start("--recipe", "r.toml", "--name", "ring", "--devices", "2")
    rows = tmp_path / "runs" / "ring" / "metrics.jsonl"
    wait_until(
        lambda: rows.exists() and rows.read_text().count("\n") >= 8, process
    )  # step 0 and seven more
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(children[-1]), signal.SIGKILL)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 128 + signal.SIGKILL, errors
    saved = int(
        sorted((tmp_path / "runs" / "ring" / "checkpoints").iterdir())[-1].name.removeprefix(
            "step-"
        )
    )
    assert saved % 5 == 0 and saved > 0
    done("--resume", "ring", "--devices", "2", "--steps", str(saved + 3))
    done("--resume", "ring", "--steps", str(saved + 6))
    done("--recipe", "r.toml", "--name", "one", "--steps", str(saved + 6))
    for file in ("model", "optimizer", "method"):
        path = Path("checkpoints") / f"step-{saved + 6:08d}" / f"{file}.safetensors"
        have, want = (load_file(tmp_path / "runs" / name / path) for name in ("ring", "one"))
        assert have.keys() == want.keys() and all(
            torch.equal(have[name], want[name]) for name in want
        ), file
