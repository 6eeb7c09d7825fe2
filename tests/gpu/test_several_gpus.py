"""Several GPUs: the laws of ranks over NCCL. Run `pytest -m gpu` where there are two or more."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from tests.conftest import REPOSITORY, sets, typed
from tests.launch import start_efftrain

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.device_count() < 2, reason="needs two CUDA devices; this PyTorch sees fewer"
    ),
]
SETTINGS = (
    "train={tokens = 40_000, batch_size = 16, micro_batch_tokens = 1024, dtype = 'fp32'}",
    "train.deterministic=true",
    "model.seq_len=64",
    "eval.every=5",
)


def losses(folder: Path, run: str) -> list[float]:
    lines = (folder / "runs" / run / "metrics.jsonl").read_text().splitlines()
    return [row["loss"] for row in map(json.loads, lines) if row.get("loss") is not None]


def efftrain(folder: Path, line: str, *words: str, **env: str) -> None:
    process = start_efftrain(folder, *typed(line, *words), **env)
    out, err = process.communicate(timeout=600)
    assert process.returncode == 0, out + err


def train(folder: Path, name: str, line: str = "", **env: str) -> None:
    efftrain(folder, f"pretrain small --name {name} --no-probe {line}", *sets(*SETTINGS), **env)


def test_two_gpus_give_the_losses_of_one(tmp_path):
    train(tmp_path, "one")
    train(tmp_path, "two", "--devices 2")
    one = losses(tmp_path, "one")
    assert len(one) == 40 and losses(tmp_path, "two") == pytest.approx(one, rel=1e-4)


def test_a_sum_beside_the_backward_pass_moves_no_bit(tmp_path):
    """In small buckets, of which some are sent early."""
    patch = "import efftrain_cli.training.dist as dist\ndist.BUCKET = 1 << 16\n"
    after = (
        "begin = dist.GradientSum.begin\n"
        "def late(self, losses):\n    self.overlaps = False\n    begin(self, losses)\n"
        "dist.GradientSum.begin = late\n"
    )
    for name, code in (("beside", patch), ("after", patch + after)):
        (tmp_path / name).mkdir()
        indented = "".join(f"    {line}\n" for line in code.splitlines())
        (tmp_path / name / "sitecustomize.py").write_text(
            f"import os\nif 'RANK' in os.environ:\n{indented}"
        )
        path = f"{tmp_path / name}{os.pathsep}{REPOSITORY}"
        train(tmp_path, name, "--devices 2", PYTHONPATH=path)
    assert losses(tmp_path, "beside") == losses(tmp_path, "after")


def test_two_gpus_resume_exactly(tmp_path):
    train(tmp_path, "whole", "--devices 2")
    train(tmp_path, "cut", "--devices 2 --steps 17")
    efftrain(tmp_path, "pretrain --resume cut --no-probe --devices 2")
    assert losses(tmp_path, "cut") == losses(tmp_path, "whole")
