"""Each record is what the code still answers."""

from __future__ import annotations

import platform

import pytest

from tests.recorded.bits import compare_trees
from tests.recorded.parts import PARTS, differences


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(part.name, marks=[pytest.mark.slow] if part.slow else [])
        for part in PARTS.values()
    ],
)
def test_record_is_unchanged(name):
    assert PARTS[name].compare() == []


def test_differences_are_named():
    here = platform.python_version()
    recorded = {"a": 1, "b": [1.0, 2.0], "c": {"python": "3.0", "x": 1}, "d": 1, "e": True}
    now = {"a": 2, "b": [1.0 + 1e-8, 2.1], "c": {"python": here, "x": 2}, "e": 1, "f": None}
    assert list(differences(recorded, now, "part")) == [
        "part.a: 1 -> 2",
        "part.b[1]: 2.0 -> 2.1",
        "part.d: 1 -> missing",
        "part.e: true -> 1",
        "part.f: not recorded -> null",
    ]


def run_of(loss, weights="w", **columns):
    """A case of one step, as `bits` writes it."""
    rows = [{"step": 1, "loss": loss, **columns}]
    return {"weights": weights, "moments": "m", "in_flight": "f", "rows": rows}


@pytest.mark.parametrize(
    ("before", "now", "gone", "alike"),
    [
        ({"a": run_of(1.0)}, {"a": run_of(1.0, new=2), "b": run_of(1.0)}, set(), True),
        ({"a": run_of(1.0)}, {"a": run_of(1.0, weights="v")}, set(), False),
        ({"a": run_of(0.0)}, {"a": run_of(-0.0)}, set(), False),
        ({"a": run_of(1.0, norm=2.0)}, {"a": run_of(1.0)}, {"column norm"}, True),
        ({"a": run_of(1.0)}, {}, {"case b"}, False),
        ({"a": run_of(1.0)}, {}, {"case a"}, True),
    ],
)
def test_two_trees_are_alike_to_the_bit(before, now, gone, alike):
    assert compare_trees(before, now, gone) is alike
