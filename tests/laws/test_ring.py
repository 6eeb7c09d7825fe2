"""Ouroboros's ring computes what one device computes, bit for bit; several rings share a batch."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.launch import run_ranks, start_efftrain, wait_until, write_recipe
from tests.laws.ranks_run import RINGS

pytestmark = pytest.mark.slow
WORLDS = (2, 3)
NOT_GATHERED = ("adam_sqrt_v_l1", "adam_sqrt_v_max")
"""Columns that no rank of a ring has: each holds the moments of its modules only."""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("ring")
    results = {}
    for world_size in WORLDS:
        out = folder / f"{world_size}.json"
        run_ranks("tests/laws/ranks_run.py", world_size, "rings", str(out))
        results[world_size] = json.loads(out.read_text())
        for case in results[world_size].values():
            for row, name in product([*case["ring"]["rows"], *case["one"]["rows"]], NOT_GATHERED):
                del row[name]
    return results


@pytest.mark.parametrize("modules, name", [(k, name) for k in (3, 4) for name in RINGS[k]])
def test_the_ring_has_the_bits_of_one_device(found, modules, name):
    """Losses, norms, validation losses, weights, moments, and what a checkpoint holds in flight."""
    both = found[modules - 1][f"K = {modules}, 1 x, {name}"]
    assert len(both["ring"]["rows"]) == 12
    assert both["ring"] == both["one"]


@pytest.mark.parametrize("name", RINGS[2])
@pytest.mark.parametrize("rings", [2, 3])
def test_rings_share_a_batch(found, rings, name):
    """K = 2: each ring is one rank. Sums over rings are taken in another order than one
    device's."""
    both = found[rings][f"K = 2, {rings} x, {name}"]
    for have, want in zip(both["ring"]["rows"], both["one"]["rows"], strict=True):
        assert have.keys() == want.keys()
        if rings == 3:  # they cut a step into other micro-batches, of which the last is another
            assert have.pop("accumulation_steps") != want.pop("accumulation_steps")
        for name, value in want.items():
            if value is None:
                assert have[name] is None, name
            else:
                assert have[name] == pytest.approx(value, rel=2e-4), name


def test_a_ring_that_was_killed_goes_on_from_its_checkpoint_as_one_device_would(tmp_path):
    """As a user does it: two processes, one of which is killed; continued by two, then by one."""
    long = ("train.tokens=1_000_000", "data.repeat=true", "eval.every=4")
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
