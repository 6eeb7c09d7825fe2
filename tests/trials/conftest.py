"""A folder with two recipes that can be trained in a second, and no waiting between two looks at a
process."""

from __future__ import annotations

from pathlib import Path

import pytest

from efftrain_cli.trials import runner
from tests.trials.stubs import write_recipes


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two recipes that can be trained in a second, and the folder of runs; nothing was measured on
    this machine yet."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EFFTRAIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(runner, "TICK", 0.0)
    write_recipes(tmp_path)
    return tmp_path
