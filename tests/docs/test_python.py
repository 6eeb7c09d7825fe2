"""docs/python.md: its session runs, on made-up runs of the two recipes that it names."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

import pandas as pd
import pytest

import efftrain_cli as efftrain
from efftrain_cli.foundation.errors import UsageError
from tests.conftest import REPOSITORY
from tests.fake_runs import rows_of, write_run

PAGE = REPOSITORY / "docs" / "python.md"
WARMUP = "\n[seq_len_warmup]\nstart = 8\nsteps = 10\n"


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three seeds of each recipe."""
    monkeypatch.setenv("EFFTRAIN_RUNS", str(tmp_path))
    for seed in range(3):
        write_run(tmp_path, "quickstart", seed)
        write_run(tmp_path, "quickstart-slw", seed, speed=1.3, more=WARMUP)
    return tmp_path


def test_the_session_on_the_page_runs(root):
    options = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
    with pd.option_context("display.width", 120, "display.max_columns", 20):
        found = doctest.testfile(str(PAGE), module_relative=False, optionflags=options)
    assert (found.failed, found.attempted > 8) == (0, True)


def test_the_api_is_what_the_page_lists():
    headings = "".join(re.findall("^## .*", PAGE.read_text(encoding="utf-8"), re.MULTILINE))
    assert sorted(re.findall(r"`(\w+)\(", headings)) == efftrain.__all__


def test_metrics_are_the_rows_of_the_file(root):
    frame = efftrain.metrics("quickstart-seed1")
    rows = rows_of(100, 1)
    assert list(frame.step) == list(range(101)) and frame.step.dtype == "int64"
    assert list(frame.loss[1:]) == [row["loss"] for row in rows[1:]]
    assert pd.isna(frame.loss[0]), "step 0 is evaluated, not trained"
    assert frame.val_loss.dropna().tolist() == [
        row["val_loss"] for row in rows if row["val_loss"] is not None
    ]
    with pytest.raises(UsageError, match="3 runs"):
        efftrain.metrics("quickstart-slw")
