"""A study of two tiny recipes in a folder of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from efftrain_cli.study.file import StudyFile
from efftrain_cli.study.phases import Tuned
from tests.trials.conftest import folder as two_recipes  # noqa: F401  a fixture

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


def choose(file: StudyFile, **rates: str) -> list[Tuned]:
    """What tuning chose, if it chose these learning rates for the arms in every block."""
    return [Tuned(arm, file.seeds, (f"optim.lr={rate}",)) for arm, rate in rates.items()]


@pytest.fixture
def folder(two_recipes: Path) -> Path:  # noqa: F811  the same
    """study.toml, its two recipes and their text; the folder of runs is beside them."""
    (two_recipes / "study.toml").write_text(STUDY)
    return two_recipes
