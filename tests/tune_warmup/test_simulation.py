"""Searches on simulated probes, small: benchmarks/simulations/simulate_tuning.py has them in full,
docs/tune-warmup.md its table."""

from __future__ import annotations

import importlib.util
from types import ModuleType

import numpy as np
import pytest

from tests.conftest import REPOSITORY

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def simulate() -> ModuleType:
    path = REPOSITORY / "benchmarks" / "simulations" / "simulate_tuning.py"
    spec = importlib.util.spec_from_file_location("simulate_tuning", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_more_seeds_find_durations_that_hold_on_a_new_one(simulate):
    """On gpt3-125m-slw, where longer warmups are unstable on more seeds."""
    one, three = (
        simulate.search_rates("gpt3-125m-slw", seeds, 8.0, 40, np.random.default_rng(5))
        for seeds in (1, 3)
    )
    assert one["found"] > 0.9 and one["within one"] > 0.7
    assert three["unstable"] < one["unstable"] < 0.45
    assert one["mean"] < three["mean"] < 0.4
