"""A folder with two recipes that can be trained in a second, and no waiting between two looks at a
process."""

from __future__ import annotations

from pathlib import Path

import pytest

from efftrain_cli.trials import runner
from tests.trials.stubs import TINY


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two recipes that can be trained in a second, and the folder of runs; nothing was measured on
    this machine yet."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EFFTRAIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(runner, "TICK", 0.0)
    (tmp_path / "plain.toml").write_text(TINY)
    (tmp_path / "warm.toml").write_text(
        'base = "plain.toml"\n[seq_len_warmup]\nstart = 8\nsteps = 4\n'
    )
    words = [f"word{i % 97} and line{i % 31}" for i in range(4000)]
    (tmp_path / "text.txt").write_text("\n".join(words))
    (tmp_path / "valid.txt").write_text("\n".join(reversed(words[:800])))
    return tmp_path
