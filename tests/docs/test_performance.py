"""The page on performance names what exists: scripts, their pieces, functions."""

from __future__ import annotations

import re

import pytest

from benchmarks.gpu.figures import FIGURES
from tests.conftest import REPOSITORY
from tests.docs.pages import text_of

PAGE = text_of("performance")


def test_scripts_and_tests_exist():
    named = set(re.findall(r"(?:benchmarks|tests)/\w+(?:/\w+)*\.py|benchmarks/gpu\b", PAGE))
    assert "benchmarks/gpu" in named
    assert all((REPOSITORY / name).exists() for name in named), named


def test_figures_exist():
    table = PAGE.split("| lever |")[1]
    named = set(re.findall(r"`(\w+)`", " ".join(re.findall(r"[^|]*\|$", table, re.MULTILINE))))
    assert named <= FIGURES.keys() and len(named) >= 6, named - FIGURES.keys()


MODULES = "compiling|kernels|adamw|loop|cross_entropy|memory"


@pytest.mark.parametrize("name", re.findall(rf"`({MODULES})\.(\w+)`", PAGE), ids=".".join)
def test_functions_exist(name):
    module, attribute = name
    text = next((REPOSITORY / "efftrain_cli").rglob(f"{module}.py")).read_text(encoding="utf-8")
    assert re.search(rf"\b(def|class) {attribute}\b", text)
