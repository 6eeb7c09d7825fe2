"""Numbers as people read them, tables and folded lines."""

from __future__ import annotations

from io import StringIO
from types import SimpleNamespace

import pytest
from rich.console import Console

from efftrain_cli.foundation import progress
from efftrain_cli.foundation.console import (
    counted,
    folded,
    human,
    human_seconds,
    listed,
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


COUNTS = {
    0: "0",
    999.96: "1,000",
    -8192: "-8,192",
    9999: "9,999",
    9999.5: "10K",
    10_240: "10.2K",
    999_499: "999K",
    999_500: "1M",
    157_286_400_000: "157B",
    2e15: "2e+03T",
}


def test_numbers():
    assert [*map(human, COUNTS)] == [*COUNTS.values()]
    assert human(12, "FLOP") == "12 FLOP"
    assert human(238_848, "FLOP") == "239 kFLOP"
    assert human(1.33e20, "FLOP") == "133 EFLOP"


def test_one_is_singular():
    assert [counted(n, "step") for n in (0, 1, 47_500)] == ["0 steps", "1 step", "47,500 steps"]


def test_a_list_is_cut_after_four():
    assert listed(range(4)) == "0, 1, 2, 3"
    assert listed(range(6)) == "0, 1, 2, 3 and 2 more"
    assert listed(range(6), 5) == "0, 1, 2, 3, 4 and 1 more"


SECONDS = {
    0: "0 s",
    0.9994: "999 ms",
    0.9995: "1 s",
    59: "59 s",
    59.7: "1 min 00 s",
    3599: "59 min 59 s",
    3660: "1 h 01 min",
    172_799: "47 h 59 min",
    172_800: "2.0 days",
    3_002_399: "34.7 days",
    3_002_401: "34.8 days",
    94_607_999: "1,095.0 days",
    94_608_000: "3 years",
    994_064_399: "31 years",
    994_064_401: "32 years",
}


def test_seconds():
    """34.75 days are 3,002,400 s; 31.5 years of 365.25 days 994,064,400."""
    assert [*map(human_seconds, SECONDS)] == [*SECONDS.values()]


def test_plain_progress_is_a_line_every_ten_seconds_and_where_something_begins(monkeypatch):
    shown = StringIO()
    clock = iter([5.0, 14.9, 15.0, 15.0])
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    with progress.show_progress(Console(file=shown), "title", 10) as report:
        for what, done in (("rows", 1), ("rows", 2000), ("rows", 3000), ("end", 0)):
            report(what, done)
    assert shown.getvalue() == "title\nrows: 1\nrows: 3,000\nend\n"


def test_a_quiet_terminal_has_no_live_line(terminal, monkeypatch):
    """rich would take everything printed meanwhile to the console, which prints nothing."""
    monkeypatch.setattr("sys.stdout", terminal)
    with progress.show_progress(Console(quiet=True), "title", 10):
        print("a warning")
    assert terminal.getvalue() == "a warning\n"


def test_a_narrow_table_spares_a_column(terminal, monkeypatch):
    head = ("run", "recipe", "loss")
    rows = [("a-seed1", "a", "3.5"), ("b-seed1", "7", "13.4")]
    whole = ["run      recipe  loss", "a-seed1  a        3.5", "b-seed1  7       13.4"]
    monkeypatch.setenv("COLUMNS", "20")
    assert table_lines(head, rows, ("recipe",)) == whole, "as it is in a pipe"
    monkeypatch.setattr("sys.stdout", terminal)
    monkeypatch.setenv("COLUMNS", "21")
    assert table_lines(head, rows, ("recipe",)) == whole
    monkeypatch.setenv("COLUMNS", "20")
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
