"""What the tests of comparisons share."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder of runs."""
    monkeypatch.setenv("EFFTRAIN_RUNS", str(tmp_path))
    return tmp_path
