"""The size of the package is a budget: a ceiling per folder and file of its top, which only falls.

`python -m tests.laws.test_size` prints a row each; with `--lower` it also lowers the ceilings in
size_ceilings.txt to the sizes of today. A new folder's row is written by hand. A token is a name,
an operator, a number or a string of `tokenize`, counted under Python 3.11; docstrings and comments
are not counted. A code line holds a token.
"""

from __future__ import annotations

import io
import sys
import tokenize
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY

CEILINGS = Path(__file__).with_name("size_ceilings.txt")
PACKAGE = REPOSITORY / "efftrain_cli"
COUNTED = (tokenize.NAME, tokenize.OP, tokenize.NUMBER, tokenize.STRING)


def size_of(place: Path) -> tuple[int, int]:
    """Return the tokens and the code lines of a Python file, or of all files below a folder."""
    tokens = 0
    lines = 0
    for file in place.rglob("*.py") if place.is_dir() else [place]:
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


def package_sizes() -> dict[str, int]:
    """Return the tokens of each folder and file at the package's top that has any, by name."""
    sizes = {}
    for place in sorted(PACKAGE.iterdir()):
        if place.is_dir() or place.suffix == ".py":
            sizes[place.name] = size_of(place)[0]
    return {name: tokens for name, tokens in sizes.items() if tokens}


def read_ceilings() -> dict[str, int]:
    """Return the most tokens that each folder and file at the package's top may have."""
    rows = [line.split() for line in CEILINGS.read_text().splitlines()]
    return {name: int(tokens) for name, tokens in rows}


def write_ceilings(ceilings: dict[str, int]) -> None:
    rows = [f"{name:24} {ceilings[name]:7}\n" for name in sorted(ceilings)]
    CEILINGS.write_text("".join(rows))


def main(lower: bool) -> None:
    """Print tokens and tokens per code line of each row, of the whole, and of the tests."""
    ceilings = read_ceilings()
    sizes = package_sizes()
    if lower:
        ceilings = {
            name: min(tokens, sizes[name]) for name, tokens in ceilings.items() if name in sizes
        }
        write_ceilings(ceilings)
    for place in [*(PACKAGE / name for name in sizes), PACKAGE, REPOSITORY / "tests"]:
        tokens, lines = size_of(place)
        row = (
            f"{place.relative_to(REPOSITORY)!s:36} {tokens:8,} tokens {tokens / lines:6.2f} a line"
        )
        if place.name in sizes:
            row += f"  at most {ceilings.get(place.name, 0):7,}"
        print(row)


def test_tokens_and_lines_are_counted_without_docstrings_and_comments():
    source = '"""A docstring."""\n\n# a comment\nx = f(\n    1,\n)\ny = """text\nof two lines"""\n'
    assert size_of_source(source) == (7 + 3, 3 + 2)


@pytest.mark.skipif(
    sys.version_info[:2] != (3, 11), reason="from Python 3.12 on, an f-string is many tokens"
)
def test_package_keeps_to_its_ceilings():
    ceilings = read_ceilings()
    sizes = package_sizes()
    over = {
        name: f"{tokens} tokens, at most {ceilings.get(name, 0)}"
        for name, tokens in sizes.items()
        if tokens > ceilings.get(name, 0)
    }
    assert not over, "cut elsewhere, or raise the ceiling and say why in the commit"
    assert not ceilings.keys() - sizes.keys(), "rows without a folder or file: run with --lower"


if __name__ == "__main__":
    main(lower="--lower" in sys.argv)
