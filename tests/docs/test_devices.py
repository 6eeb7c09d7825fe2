"""docs/devices.md: every promise names a test that exists, and its commands have the options that they show."""

from __future__ import annotations

import ast
import re

from tests.conftest import REPOSITORY

PAGE = (REPOSITORY / "docs" / "devices.md").read_text(encoding="utf-8")


def test_every_named_test_exists() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE)
    assert len(named) == 16
    for path, name in named:
        tree = ast.parse((REPOSITORY / path).read_text(encoding="utf-8"))
        assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, (
            f"{path}::{name}"
        )
