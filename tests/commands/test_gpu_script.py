"""benchmarks/gpu.py works: the script that measures on a GPU, run on a CPU with tiny shapes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY

SCRIPT = REPOSITORY / "benchmarks" / "gpu.py"
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(REPOSITORY)}


def gpu(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=1000, check=False)


@pytest.mark.slow
def test_every_piece_works_and_is_kept(tmp_path: Path) -> None:
    done = gpu("--smoke", "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    pieces = json.loads((tmp_path / "gpu.json").read_text())["pieces"]
    expected = ("device", "speed", "correctness", "reference", "lengths", "resume", "methods", "largest", "levers")
    assert tuple(pieces) == expected
    for name, piece in pieces.items():
        assert piece["status"] == "ok" and piece["figures"], (name, piece)
        wrong = [figure for figure in piece["figures"] if "WRONG" in figure["note"]]
        assert not wrong, (name, wrong)
    checked = [figure["name"] for figure in pieces["correctness"]["figures"] if figure["unit"] == "rel. error"]
    assert any("compiled whole" in name for name in checked) and any("attention" in name for name in checked)
    assert done.stdout.index("lengths seen") > done.stdout.index("levers: ok"), "the table comes last"

    before = (tmp_path / "gpu.json").read_bytes()
    again = gpu("--smoke", "--out", str(tmp_path))
    assert again.returncode == 0 and "lengths seen" in again.stdout
    assert (tmp_path / "gpu.json").read_bytes() == before, "what is measured already is not measured again"


def test_without_a_gpu_it_says_what_to_do(tmp_path: Path) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    done = gpu("--out", str(tmp_path))
    assert done.returncode == 1 and "--smoke" in done.stderr
