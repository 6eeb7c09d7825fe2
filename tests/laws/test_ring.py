"""Ouroboros's ring computes what one device computes, bit for bit; several rings share a batch."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import REPOSITORY
from tests.laws.ring_run import CASES

pytestmark = pytest.mark.slow
WORLDS = (2, 3)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    folder, results = tmp_path_factory.mktemp("ring"), {}
    for world_size in WORLDS:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        out = folder / f"{world_size}.json"
        processes = []
        for rank in range(world_size):
            environment = {
                **os.environ,
                "PYTHONPATH": str(REPOSITORY),
                "OMP_NUM_THREADS": "1",
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(world_size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
            }
            command = [sys.executable, str(REPOSITORY / "tests" / "laws" / "ring_run.py"), str(out)]
            processes.append(subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True))
        errors = [process.communicate(timeout=600)[1] for process in processes]
        assert all(process.returncode == 0 for process in processes), "\n".join(errors)[-3000:]
        results[world_size] = json.loads(Path(out).read_text())
    return results


@pytest.mark.parametrize(("modules", "name"), [(k, name) for k in (3, 4) for name in CASES[k]])
def test_the_ring_has_the_bits_of_one_device(found: dict[int, dict[str, Any]], modules: int, name: str) -> None:
    """Losses, norms, validation losses, weights, moments, and what a checkpoint holds in flight."""
    both = found[modules - 1][f"K = {modules}, 1 x, {name}"]
    assert len(both["ring"]["rows"]) == 12
    assert both["ring"] == both["one"]


@pytest.mark.parametrize("name", CASES[2])
@pytest.mark.parametrize("rings", [2, 3])
def test_rings_share_a_batch(found: dict[int, dict[str, Any]], rings: int, name: str) -> None:
    """K = 2: each ring is one rank. Sums over rings are taken in another order than one device's."""
    both = found[rings][f"K = 2, {rings} x, {name}"]
    for have, want in zip(both["ring"]["rows"], both["one"]["rows"], strict=True):
        assert have == pytest.approx(want, rel=2e-4)
