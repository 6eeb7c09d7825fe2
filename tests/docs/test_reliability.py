"""docs/reliability.md: every fault has a row, and exit codes are the
program's."""

from __future__ import annotations

import re

from efftrain_cli.foundation import errors
from tests.docs.pages import text_of

PAGE = text_of("reliability")


def test_every_fault_is_counted():
    rest = PAGE.index("## Counted")
    table = PAGE[rest:].split("\n## ")[0]
    promised, others = faults(PAGE[:rest]), faults(table)
    assert promised | others == set(range(1, 105)) and not promised & others
    counts = [int(count) for count in re.findall(r"^\| .* \| (\d+) \|$", table, re.MULTILINE)]
    assert counts[0] == len(promised) and sum(counts) == 104
    rows = [row for row in PAGE[:rest].splitlines() if re.match(r"\| F\d+\b", row)]
    assert faults("\n".join(rows)) == promised, "a fault that is promised has a row"
    assert all("](../tests/" in row for row in rows), "and a row names its test"


def faults(text: str) -> set[int]:
    """Numbers of the faults that `text` names, as "F7"."""
    return {int(number) for number in re.findall(r"\bF(\d+)\b", text)}


def test_exit_codes():
    codes = {int(code) for code in re.findall(r"^\| (\d+) \|", PAGE, re.MULTILINE)}
    raised = {
        kind.exit_code
        for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, Exception)
    }
    assert codes == raised | {0, 130}
