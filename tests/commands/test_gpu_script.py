"""benchmarks/gpu works: the script that measures on a GPU, run on a CPU with tiny shapes, in the calls that its users
make."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY, python

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
CALLS = (
    ("device", "speed", "correctness"),
    ("lengths", "reference", "resume"),
    ("largest", "levers", "methods"),
    ("evidence", "pair"),
)


def gpu(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(REPOSITORY / "benchmarks" / "gpu"), *arguments]
    return subprocess.run(
        command, env=ENVIRONMENT, capture_output=True, text=True, timeout=1000, check=False
    )


def pieces_of(folder: Path) -> dict[str, dict[str, dict[str, object]]]:
    return json.loads((folder / "gpu.json").read_text())["pieces"]


@pytest.mark.slow
def test_four_calls_measure_everything_and_a_fifth_prints_the_page(tmp_path: Path) -> None:
    earlier: list[str] = []
    for number, call in enumerate(CALLS):
        folder = tmp_path / str(number)  # as on a machine that keeps nothing of the last call
        done = gpu(*call, "--smoke", "--out", str(folder), *earlier)
        assert done.returncode == 0, done.stdout + done.stderr
        earlier = ["--earlier", str(folder / "gpu.json")]
    pieces = pieces_of(folder)
    assert tuple(pieces) == tuple(piece for call in CALLS for piece in call), (
        "earlier results are carried in"
    )
    for piece, parts in pieces.items():
        for part, record in parts.items():
            assert record["status"] == "ok" and record["figures"], (piece, part, record)
            wrong = [figure for figure in record["figures"] if "WRONG" in figure["note"]]  # type: ignore
            assert not wrong, (piece, part, wrong)
    assert "tensors that a skipped step changes" in str(pieces["correctness"])

    table = gpu("table", "--out", str(folder))
    assert table.returncode == 0 and "no figure means anything" in table.stdout, table.stderr
    row = next(line for line in table.stdout.splitlines() if "whole step as shipped" in line)
    assert "tokens/s" in row and "600,000" in row
    assert "device idle | unmeasured" in table.stdout, "a CPU has no such figure"

    before = (folder / "gpu.json").read_bytes()
    again = gpu("device", "speed", "--smoke", "--out", str(folder))
    assert again.returncode == 0 and "stability measures" in again.stdout
    assert json.loads((folder / "gpu.json").read_text()) == json.loads(before), (
        "what is measured is not measured again"
    )


@pytest.mark.slow
def test_what_a_part_measured_before_it_failed_is_kept_and_it_alone_runs_again(
    tmp_path: Path,
) -> None:
    code = f"""
import sys
sys.path[:0] = [{str(REPOSITORY)!r}, {str(REPOSITORY / "benchmarks")!r}]
from benchmarks.gpu import command
from benchmarks.gpu.measuring import Part, figure

def half(bench):
    yield figure("the first half", 1.0)
    raise RuntimeError("then it broke")

command.PIECES["device"] = (Part("whole", lambda bench: iter([figure("all", 2.0)]), 1), Part("half", half, 1))
sys.argv = ["gpu", "device", "--smoke", "--out", {str(tmp_path)!r}]
command.main("")
"""
    for _ in range(2):
        done = python(code)
        assert done.returncode == 1 and "then it broke" in done.stdout, done.stderr
        parts = pieces_of(tmp_path)["device"]
        assert parts["whole"]["status"] == "ok" and parts["half"]["status"] == "failed"
        assert [figure["name"] for figure in parts["half"]["figures"]] == ["the first half"]  # type: ignore
    assert (
        "device, half: failed" in done.stdout
        and "device, whole: ok, 0 s\ndevice" not in done.stdout
    )


def test_without_a_gpu_it_says_what_to_do(tmp_path: Path) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    done = gpu("device", "--out", str(tmp_path))
    assert done.returncode == 1 and "--smoke" in done.stderr
    done = gpu("table", "--out", str(tmp_path))
    assert done.returncode == 1 and "nothing was measured yet" in done.stderr
