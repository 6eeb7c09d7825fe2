"""docs/reliability.md: a test names each fault, and exit codes are the program's."""

from __future__ import annotations

import re

from efftrain_cli.cli.judged import FAILED, NOT_JUDGED
from efftrain_cli.foundation import errors
from tests.conftest import REPOSITORY
from tests.docs.pages import text_of

PAGE, _, NOT_PROMISED = text_of("reliability").partition("## Not promised")
GONE = {25, 71, 88, 92, 99, 100}
"""Numbers of faults of mechanisms that the package does not have."""


def test_each_fault_has_a_row_and_a_test_that_injects_it():
    rows = [row for row in PAGE.splitlines() if re.match(r"\| F\d+\b", row)]
    promised = faults("\n".join(rows))
    assert promised == set(range(1, 105)) - GONE - faults(NOT_PROMISED)
    tests = (REPOSITORY / "tests").rglob("test_*.py")
    assert promised <= set().union(*(faults(path.read_text("utf-8")) for path in tests))


def faults(text: str) -> set[int]:
    """Numbers of the faults that `text` names, as "F7"."""
    return {int(number) for number in re.findall(r"\bF(\d+)\b", text)}


def test_exit_codes():
    cells = re.findall(r"^\| ([\d, ]+) \|", PAGE, re.MULTILINE)
    raised = {
        kind.exit_code
        for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, errors.EfftrainError)
    }
    codes = {int(code) for code in re.findall(r"\d+", " ".join(cells))}
    assert codes == raised | {0, FAILED, NOT_JUDGED, 130}
