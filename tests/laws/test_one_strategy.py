"""Loop and gradient stay short, and ask nowhere which strategy carries a run on several devices."""

from __future__ import annotations

import ast
import re

import pytest

from tests.conftest import REPOSITORY

TRAINING = REPOSITORY / "efftrain_cli" / "training"
STRATEGIES = ("devices.py", "replicated.py", "sharded.py", "rings.py", "strategy.py")
OTHERS = [path for path in sorted(TRAINING.glob("*.py")) if path.name not in STRATEGIES]


@pytest.mark.parametrize("path", OTHERS, ids=lambda path: path.stem)
def test_only_strategies_name_what_they_do(path):  # type: ignore[no-untyped-def]
    assert not re.findall(r"\b(?:rings?|shard|shards|sharded)\b", path.read_text())


@pytest.mark.parametrize(
    "file, name, most",
    [("trainer.py", "train", 75), ("gradient.py", "build_forward_backward", 110)],
)
def test_loop_and_gradient_stay_short(file, name, most):
    tree = ast.parse((TRAINING / file).read_text())
    (function,) = [
        node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name
    ]
    docstring = function.body[0]
    lines = function.end_lineno - function.lineno - docstring.end_lineno + docstring.lineno  # type: ignore[operator]
    assert 40 <= lines <= most


def test_training_rebinds_no_outer_name_and_seldom_asks_for_none():
    text = "".join(path.read_text() for path in TRAINING.glob("*.py"))
    assert "nonlocal" not in text
    assert len(re.findall(r"\bis (?:not )?None\b", text)) <= 110
