"""Numbers as people read them, tables and folded lines."""

from __future__ import annotations

from io import StringIO

import pytest

from efftrain_cli.foundation.console import (
    counted,
    folded,
    human,
    human_seconds,
    printable,
    table_lines,
)
from tests.conftest import python


@pytest.fixture
def terminal() -> StringIO:
    """A stream that is taken for a terminal."""
    stream = StringIO()
    stream.isatty = lambda: True  # type: ignore[method-assign]
    return stream


@pytest.mark.parametrize(
    "number, unit, shown",
    [
        (0, "", "0"),
        (999.96, "", "1,000"),
        (-8192, "", "-8,192"),
        (10_240, "", "10.2K"),
        (999_600, "", "1M"),
        (157_286_400_000, "", "157B"),
        (12, "FLOP", "12 FLOP"),
        (238_848, "FLOP", "239 kFLOP"),
        (1.33e20, "FLOP", "133 EFLOP"),
        (1_234_567, "B", "1.23 MB"),
    ],
)
def test_numbers(number, unit, shown):
    assert human(number, unit) == shown
    assert human(102_400, digits=4) == "102.4K"


def test_one_is_singular():
    assert [counted(n, "step") for n in (0, 1, 47_500)] == ["0 steps", "1 step", "47,500 steps"]


@pytest.mark.parametrize(
    "seconds, shown",
    [
        (0.2, "200 ms"),
        (59, "59 s"),
        (59.7, "1 min 00 s"),
        (3725, "1 h 02 min"),
        (3e6, "34.7 days"),
        (1e9, "32 years"),
    ],
)
def test_seconds(seconds, shown):
    assert human_seconds(seconds) == shown


def test_a_narrow_table_spares_a_column(terminal, monkeypatch):
    head = ("run", "recipe", "loss")
    rows = [("a-seed1", "a", "3.5"), ("b-seed1", "b", "13.4")]
    whole = ["run      recipe  loss", "a-seed1  a        3.5", "b-seed1  b       13.4"]
    monkeypatch.setenv("COLUMNS", "20")
    assert table_lines(head, rows, ("recipe",)) == whole, "as it is in a pipe"
    monkeypatch.setattr("sys.stdout", terminal)
    spared = ["run      loss", "a-seed1   3.5", "b-seed1  13.4"]
    assert table_lines(head, rows, ("recipe",)) == spared


def test_lines_break_between_words_and_never_in_a_command(terminal, monkeypatch):
    line = "run 'r' exists; continue it with `efftrain pretrain --resume r`, or give --name"
    monkeypatch.setenv("COLUMNS", "40")
    assert folded(line, 2, terminal).split("\n") == [
        "run 'r' exists; continue it with",
        "  `efftrain pretrain --resume r`, or",
        "  give --name",
    ]
    assert folded(line, 2, StringIO()) == line
    path = "/home/somebody/runs/a-run-with-a-name-longer-than-the-terminal"
    assert folded(f"written to {path} once", 2, terminal) == f"written to\n  {path}\n  once"
    shown = folded("    must divide model.n_embd; or set model.head_dim", 2, terminal)
    assert shown == "    must divide model.n_embd; or set\n    model.head_dim"


def test_a_model_s_text_cannot_steer_a_terminal():
    text = "one\ttwo\n\x1b]0;title\x07 é\u3000\u202e"
    assert printable(text, keep="\n\t") == "one\ttwo\n\\x1b]0;title\\x07 é\u3000\\u202e"


def test_a_full_stream_that_does_not_block_loses_text():
    """200 kB to a pipe of 64 kB that nobody reads."""
    code = """
import os
from efftrain_cli.foundation.console import steady_output
_, end = os.pipe()
os.set_blocking(end, False)
os.dup2(end, 1)
with steady_output():
    for _ in range(20):
        print("x" * 10_000, flush=True)
"""
    python(code)
