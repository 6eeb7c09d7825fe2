"""--devices of the commands beside pretrain."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.launch import BASELINE, made_text

pytestmark = pytest.mark.slow
Efftrain = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    (tmp_path / "text.txt").write_text(made_text())
    (tmp_path / "r.toml").write_text(BASELINE.replace("TEXT", str(tmp_path / "text.txt")))
    return "r.toml"


def test_bench_says_what_two_devices_spend_on_each_other(efftrain: Efftrain, recipe: str) -> None:
    done = efftrain("bench", "--recipe", recipe, "--devices", "2", "--steps", "4", "--format", "json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["devices"] == 2 and list(found["phases"]) == ["work", "sum", "exchange", "wait"]
    assert found["phases"]["sum"] > 0 and found["phases"]["exchange"] > 0
    assert sum(found["phases"].values()) < 2 * found["seconds_per_step_high"]


def test_resuming_on_two_devices_is_verified(efftrain: Efftrain, recipe: str) -> None:
    done = efftrain("verify-resume", "--recipe", recipe, "--devices", "2", "--steps", "2", timeout=300)
    assert done.returncode == 0, done.stderr
    assert "continued in a new process to step 4 on 2 devices" in done.stdout and "bit for bit" in done.stdout
