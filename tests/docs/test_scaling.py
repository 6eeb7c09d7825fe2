"""docs/scaling.md: its snippet gives the cell of its table."""

from __future__ import annotations

import pytest

from tests.docs.pages import blocks_of, text_of


@pytest.mark.slow
def test_the_snippet_gives_its_cell(capsys):
    (snippet,) = blocks_of("scaling", "python")
    exec(snippet, {})
    seconds, efficiency, gigabytes = map(float, capsys.readouterr().out.split())
    cell = f"{1e3 * seconds:.0f} ms, {efficiency:.0%}, {gigabytes:.1f} GB".replace("%", " %")
    (row,) = [
        line for line in text_of("scaling").splitlines() if line.startswith("| `gpt2-117m`, 64")
    ]
    assert row.endswith(f"| {cell} |")
