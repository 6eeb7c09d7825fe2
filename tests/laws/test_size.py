"""The size of the package is a budget: a change that needs more raises it in the same commit.

`python -m tests.laws.test_size` prints a row per package. A token is a name, an operator, a number
or a string of `tokenize`; docstrings and comments are not counted. A code line holds a token.
"""

from __future__ import annotations

import io
import sys
import tokenize
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY

PACKAGE_BUDGET = 262_108
"""The most tokens that the package may have, counted under Python 3.11."""
TESTS_BEFORE = 229_984
"""Tokens of the tests when the budget was introduced; `main` prints the growth since then."""

COUNTED = (tokenize.NAME, tokenize.OP, tokenize.NUMBER, tokenize.STRING)


def size_of(folder: Path) -> tuple[int, int]:
    """Return the tokens and the code lines of all Python files below `folder`."""
    tokens = 0
    lines = 0
    for file in folder.rglob("*.py"):
        file_tokens, file_lines = size_of_source(file.read_text(encoding="utf-8"))
        tokens += file_tokens
        lines += file_lines
    return tokens, lines


def size_of_source(source: str) -> tuple[int, int]:
    """Return the tokens and the code lines of one Python source."""
    tokens = 0
    code_lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in COUNTED or is_docstring(token):
            continue
        tokens += 1
        code_lines.update(range(token.start[0], token.end[0] + 1))
    return tokens, len(code_lines)


def is_docstring(token: tokenize.TokenInfo) -> bool:
    return token.string.startswith('"""') and token.line.lstrip().startswith('"""')


def main() -> None:
    """Print tokens and tokens per code line of each package, of the whole, and of the tests."""
    package = REPOSITORY / "efftrain_cli"
    folders = sorted(folder for folder in package.iterdir() if any(folder.rglob("*.py")))
    for folder in [*folders, package, REPOSITORY / "tests"]:
        tokens, lines = size_of(folder)
        name = folder.relative_to(REPOSITORY)
        print(f"{name!s:28} {tokens:8,} tokens  {tokens / max(lines, 1):5.2f} a code line")
    print(f"{'budget of the package':28} {PACKAGE_BUDGET:8,} tokens")
    print(
        f"{'tests since the budget':28} {size_of(REPOSITORY / 'tests')[0] - TESTS_BEFORE:+8,}"
        " tokens"
    )


def test_tokens_and_lines_are_counted_without_docstrings_and_comments():
    source = '"""A docstring."""\n\n# a comment\nx = f(\n    1,\n)\ny = """text\nof two lines"""\n'
    assert size_of_source(source) == (7 + 3, 3 + 2)


@pytest.mark.skipif(
    sys.version_info[:2] != (3, 11), reason="from Python 3.12 on, an f-string is many tokens"
)
def test_the_package_keeps_to_its_budget():
    tokens, _ = size_of(REPOSITORY / "efftrain_cli")
    assert tokens <= PACKAGE_BUDGET, "cut elsewhere, or raise the budget and say why in the commit"


if __name__ == "__main__":
    main()
