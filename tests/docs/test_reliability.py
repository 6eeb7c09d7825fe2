"""docs/reliability.md: every fault has a row, and exit codes are the
program's."""

from __future__ import annotations

import re

from efftrain_cli.cli.judged import FAILED, NOT_JUDGED
from efftrain_cli.foundation import errors
from tests.conftest import REPOSITORY
from tests.docs.pages import text_of

PAGE = text_of("reliability")
UNMARKED = {
    ("F3", "tests/laws/test_methods.py"): "each_method_trains_and_resumes",
    ("F5", "tests/faults/test_resume.py"): "a_stop_and_a_resume_move_no_bit",
    ("F9", "tests/laws/test_ranks.py"): "losses_and_gradients_are_those_of_one_process",
    ("F15", "tests/faults/test_saves.py"): "a_save_survives_a_power_failure_at_any_moment",
    ("F24", "tests/run/test_stability.py"): "a_threefold_loss_is_noticed_at_once",
    ("F27", "tests/training/test_compiling.py"): "warmup_over_128_lengths_needs_two_graphs_at_most",
    (
        "F41",
        "tests/recipe/test_mistakes.py",
    ): "every_mistake_is_reported_at_once_with_its_place_and_meaning",
    ("F47", "tests/grow/test_grow.py"): "interrupted_growth_writes_nothing",
    ("F47", "tests/methods/test_staged_growth.py"): "growth_keeps_loss_and_logits",
    (
        "F51",
        "tests/tune_warmup/test_tune_warmup.py",
    ): "a_killed_search_goes_on_without_repeating_a_probe",
    ("F57", "tests/compare/test_cli.py"): "a_comparison_that_does_not_fit_leaves_the_earlier_file",
    ("F81", "tests/laws/test_ranks.py"): "stopping_and_continuing_moves_no_bit",
}
"""Tests that do not name the fault that they inject, by fault and file."""
GONE = {25, 52, 71, 88, 92, 99, 100}
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
    assert all("](../tests/" in row for row in rows), "and a row names its test"


def test_the_linked_file_tests_the_fault():
    """The file of a row names the fault; else UNMARKED names its test."""
    rows = [row for row in PAGE.splitlines() if re.match(r"\| F\d+\b", row)]
    for row in rows:
        beginning, *links = re.split(r"\]\(\.\./(tests/[\w/]+\.py)\)", row)
        head = re.match(r"\| (?:F\d+,? )+", beginning)
        assert head is not None and links, row
        for path in links[::2]:
            text = (REPOSITORY / path).read_text(encoding="utf-8")
            numbers = faults(head[0])
            if not numbers & faults(text):
                tests = [UNMARKED.get((f"F{number}", path)) for number in numbers]
                assert any(f"def test_{test}(" in text for test in tests), (head[0], path)


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
