"""docs/reliability.md: every fault has a row, and exit codes are the
program's."""

from __future__ import annotations

import re
from pathlib import Path

from efftrain_cli.cli.judged import FAILED, NOT_JUDGED
from efftrain_cli.foundation import errors
from tests.conftest import REPOSITORY
from tests.docs.pages import text_of

PAGE = text_of("reliability")
UNMARKED = {
    3: "laws/test_methods.py::test_each_method_trains_and_resumes",
    5: "faults/test_resume.py::test_a_stop_and_a_resume_move_no_bit",
    6: "faults/test_resume.py::test_a_stop_and_a_resume_move_no_bit",
    9: "laws/test_ranks.py::test_losses_and_gradients_are_those_of_one_process",
    27: "training/test_compiling.py::test_warmup_over_128_lengths_needs_two_graphs_at_most",
    41: "recipe/test_mistakes.py::test_every_mistake_is_reported_at_once_with_its_place",
    47: "methods/test_staged_growth.py::test_growth_keeps_loss_and_logits",
    81: "laws/test_ranks.py::test_stopping_and_continuing_moves_no_bit",
}
"""Tests that do not name the fault that they inject."""
GONE = {25, 71, 88, 92, 99, 100}
"""Numbers of faults of mechanisms that the package does not have."""


def test_every_fault_is_counted():
    rest = PAGE.index("## Counted")
    table = PAGE[rest:].split("\n## ")[0]
    promised, others = faults(PAGE[:rest]), faults(table)
    assert promised | others == set(range(1, 105)) - GONE
    assert not promised & others
    counts = [int(count) for count in re.findall(r"^\| .* \| (\d+) \|$", table, re.MULTILINE)]
    assert counts[0] == len(promised) and sum(counts) == 104 - len(GONE)
    rows = [row for row in PAGE[:rest].splitlines() if re.match(r"\| F\d+\b", row)]
    assert faults("\n".join(rows)) == promised, "a fault that is promised has a row"


def test_a_test_injects_each_fault():
    """A test names the fault; else UNMARKED names the test."""
    files = [path for path in (REPOSITORY / "tests").rglob("test_*.py") if path != Path(__file__)]
    named = set().union(*(faults(path.read_text(encoding="utf-8")) for path in files))
    for fault in faults(PAGE[: PAGE.index("## Counted")]) - named:
        file, _, test = UNMARKED[fault].partition("::")
        text = (REPOSITORY / "tests" / file).read_text(encoding="utf-8")
        assert f"def {test}(" in text, (fault, test)


def faults(text: str) -> set[int]:
    """Numbers of the faults that `text` names, as "F7"."""
    return {int(number) for number in re.findall(r"\bF(\d+)\b", text)}


def test_exit_codes():
    codes = {int(code) for code in re.findall(r"^\| (\d+) \|", PAGE, re.MULTILINE)}
    raised = {
        kind.exit_code
        for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, errors.EfftrainError)
    }
    assert codes == raised | {0, FAILED, NOT_JUDGED, 130}
