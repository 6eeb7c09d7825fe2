"""Each record is what the code still answers."""

from __future__ import annotations

import platform

import pytest

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
