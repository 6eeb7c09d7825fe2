"""A reader follows a step on a few pages: how many calls it makes, in how many files, and how many
modules each of them knows."""

from __future__ import annotations

import sys
from collections import Counter
from types import FrameType

import numpy as np
import pytest

from efftrain_cli.recipe.recipe import load_recipe
from efftrain_cli.training.loop import train
from tests.conftest import REPOSITORY
from tests.laws.test_floors import imports_of, module_names
from tests.tiny import fresh, windows_of

PACKAGE = str(REPOSITORY / "efftrain_cli")
WIDE = ("pretrain", "training.loop", "training.logbook", "training.session")
"""Modules in which many things meet."""


def test_a_step_of_quickstart_makes_few_calls_in_few_files(tmp_path):
    """One micro-batch in fp32, `next` of `train`, no evaluation."""
    recipe = load_recipe(
        "quickstart", ["train.dtype=fp32", "train.batch_size=4", "train.tokens=1_000_000"]
    )
    data = windows_of(tmp_path, np.zeros(20_000), recipe.model.seq_len, seed=1)
    steps = train(fresh(recipe), recipe, data, data.validation(1))
    for _ in range(3):
        next(steps)
    calls = Counter[str]()

    def count(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            calls[frame.f_code.co_filename.removeprefix(f"{PACKAGE}/")] += 1

    sys.setprofile(count)
    try:
        next(steps)
    finally:
        sys.setprofile(None)
    outside = {file: number for file, number in calls.items() if not file.startswith("model/")}
    assert sum(calls.values()) <= 215
    assert sum(outside.values()) <= 80 and len(outside) <= 20, outside


@pytest.mark.parametrize(
    "module", ["pretrain", *(name for name in module_names() if name.startswith("training."))]
)
def test_a_module_knows_few_others(module):
    known = {name for name, _ in imports_of(module)}
    assert len(known) <= (19 if module in WIDE else 15), sorted(known)
