"""docs/reliability.md: every promise names a test that exists, every fault has a row, and exit codes are the program's."""

from __future__ import annotations

import ast
import re

from efftrain_cli.foundation import errors
from tests.conftest import REPOSITORY

PAGE = (REPOSITORY / "docs" / "reliability.md").read_text(encoding="utf-8")


def test_every_named_test_exists() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE)
    assert len(named) > 50
    for path, name in named:
        tree = ast.parse((REPOSITORY / path).read_text(encoding="utf-8"))
        assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, f"{path}::{name}"


def test_every_fault_is_spoken_of() -> None:
    rest = PAGE.index("## Not promised yet")
    promised = faults(PAGE[:rest])
    elsewhere = {47, 48, 49, 50, 51}  # growth, export, comparison and search have pages of their own
    assert promised | elsewhere | faults(PAGE[rest:]) == set(range(1, 85))
    counted = re.search(r"F1 to F84 this page promises (\d+)", PAGE[rest:])
    assert int(counted[1]) == len(promised)


def faults(text: str) -> set[int]:
    """Numbers of the faults that `text` names: "F7", and "F80 to F84" with all between."""
    found = {int(number) for number in re.findall(r"\bF(\d+)\b", text)}
    for first, last in re.findall(r"\bF(\d+) to F(\d+)\b", text):
        if (first, last) != ("1", "84"):
            found |= set(range(int(first), int(last) + 1))
    return found


def test_exit_codes() -> None:
    codes = {int(code) for code in re.findall(r"^\| (\d+) \|", PAGE, re.MULTILINE)}
    raised = {kind.exit_code for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, Exception)}
    assert codes == raised | {0, 130}
