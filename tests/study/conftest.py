"""A study of two tiny recipes in a folder of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from efftrain_cli.sweep import runner
from tests.sweep.crew import TINY

STUDY = """\
question = "Is warm worse than plain?"
seeds = "10..14"
looks = 2
baseline = "plain"

[[primary]]
measure = "final_loss"
direction = "different"

[tuning]
seeds = "0..1"
grid = { "optim.lr" = [1e-3, 2e-3, 4e-3] }

[[arms]]
name = "plain"
recipe = "plain.toml"

[[arms]]
name = "warm"
recipe = "warm.toml"
set = ["seq_len_warmup.start=16"]
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """study.toml, its two recipes and their text; the folder of runs is beside them."""
    monkeypatch.setenv("EFFTRAIN_RUNS", str(tmp_path / "runs"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(runner, "TICK", 0.0)
    (tmp_path / "plain.toml").write_text(TINY)
    (tmp_path / "warm.toml").write_text('base = "plain.toml"\n[seq_len_warmup]\nstart = 8\nsteps = 4\n')
    (tmp_path / "study.toml").write_text(STUDY)
    words = [f"word{i % 97} and line{i % 31}" for i in range(4000)]
    (tmp_path / "text.txt").write_text("\n".join(words))
    (tmp_path / "valid.txt").write_text("\n".join(reversed(words[:800])))
    return tmp_path
