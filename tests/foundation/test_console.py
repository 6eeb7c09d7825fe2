"""Numbers as people read them: one way of writing each, everywhere."""

from __future__ import annotations

from io import StringIO

import pytest

from efftrain_cli.foundation.console import (
    block_lines,
    counted,
    folded,
    harmless,
    human_count,
    human_flops,
    human_seconds,
    table_lines,
)


@pytest.fixture
def terminal() -> StringIO:
    """A stream that is taken for a terminal."""
    stream = StringIO()
    stream.isatty = lambda: True  # type: ignore[method-assign]
    return stream


@pytest.mark.parametrize(
    "number, shown",
    [
        (0, "0"),
        (1, "1"),
        (0.5, "0.5"),
        (12.3456, "12.35"),
        (999.94, "999.9"),
        (999.96, "1,000"),
        (8192, "8,192"),
        (-8192, "-8,192"),
        (9999.6, "10,000"),
        (10_240, "10.2K"),
        (999_400, "999K"),
        (999_600, "1M"),
        (1_234_567, "1.23M"),
        (157_286_400_000, "157B"),
        (1e13, "10T"),
    ],
)
def test_counts(number, shown):
    assert human_count(number) == shown


def test_counts_with_more_digits():
    assert human_count(102_400, 4) == "102.4K"


@pytest.mark.parametrize(
    "number, shown",
    [
        (238_848, "239 kFLOP"),
        (1.01e10, "10.1 GFLOP"),
        (3.8e12, "3.8 TFLOP"),
        (999.6e9, "1 TFLOP"),
        (1.33e20, "133 EFLOP"),
        (12, "12 FLOP"),
    ],
)
def test_flops(number, shown):
    assert human_flops(number) == shown


def test_one_is_singular():
    assert [counted(n, "step") for n in (0, 1, 2, 47_500)] == [
        "0 steps",
        "1 step",
        "2 steps",
        "47,500 steps",
    ]


@pytest.mark.parametrize(
    "seconds, shown",
    [
        (0.0, "0 s"),
        (0.2, "200 ms"),
        (59, "59 s"),
        (61, "1 min 01 s"),
        (59.7, "1 min 00 s"),
        (419.9, "7 min 00 s"),
        (3725, "1 h 02 min"),
        (3e6, "34.7 days"),
        (1e9, "32 years"),
    ],
)
def test_seconds(seconds, shown):
    assert human_seconds(seconds) == shown


def test_a_table_too_wide_for_the_terminal_is_stacked(terminal, monkeypatch):
    """No line is wider than the terminal, no word is broken, and a row goes on below its first
    cell."""
    rows = [
        ("final loss", "4.1", "not judged: no baseline"),
        ("", "4.2", "-"),
        ("cost", "1.30x", "better"),
    ]
    head = ("question", "mean", "verdict")
    wide = ["question     mean  verdict", "final loss    4.1  not judged: no baseline"]
    monkeypatch.setenv("COLUMNS", "24")
    assert table_lines(head, rows)[:2] == wide, "as it is in a pipe"
    monkeypatch.setattr("sys.stdout", terminal)
    assert table_lines(head, rows) == [
        "final loss",
        "  mean 4.1",
        "  verdict not judged: no",
        "    baseline",
        "  mean 4.2",
        "cost",
        "  mean 1.30x",
        "  verdict better",
    ]
    monkeypatch.setenv("COLUMNS", "80")
    assert table_lines(head, rows)[:2] == wide


def test_a_number_in_the_first_cell_follows_its_title():
    rows = [("8", "10"), ("", "20"), ("r8", "30")]
    shown = block_lines(("start", "steps"), rows, 60)
    assert shown == ["start 8", "  steps 10", "  steps 20", "r8", "  steps 30"]


def test_cells_below_one_without_a_title_are_indented():
    rows = [("loss", "A", "3.5", "-"), ("", "B", "3.4", "2")]
    shown = block_lines(("", "", "mean", "0.01"), rows, 60)
    assert shown == ["loss", "  A", "    mean 3.5", "  B", "    mean 3.4", "    0.01: 2"]


def test_an_interval_is_not_broken(terminal, monkeypatch):
    monkeypatch.setenv("COLUMNS", "36")
    shown = folded("better in final loss: -0.13 [-0.14, -0.12] nats", 0, terminal)
    assert shown == "better in final loss: -0.13\n[-0.14, -0.12] nats"


def test_an_item_of_a_list_goes_on_below_its_text(terminal, monkeypatch):
    monkeypatch.setenv("COLUMNS", "30")
    assert folded("  - the validation text differs: a in b", 2, terminal) == (
        "  - the validation text\n    differs: a in b"
    )


def test_lines_break_between_words_and_never_in_a_command(terminal, monkeypatch):
    line = "run 'r' exists; continue it with `efftrain pretrain --resume r`, or give --name"
    monkeypatch.setenv("COLUMNS", "40")
    pipe = StringIO()
    assert folded(line, 2, terminal).split("\n") == [
        "run 'r' exists; continue it with",
        "  `efftrain pretrain --resume r`, or",
        "  give --name",
    ]
    assert folded(line, 2, pipe) == line
    path = "/home/somebody/runs/a-run-with-a-name-longer-than-the-terminal"
    assert folded(f"written to {path} once", 2, terminal) == f"written to\n  {path}\n  once"


def test_a_broken_line_goes_on_below_its_first_word(terminal, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    shown = folded("    must divide model.n_embd; or set model.head_dim", 2, terminal)
    assert shown == "    must divide model.n_embd; or set\n    model.head_dim"


def test_a_broken_line_goes_on_below_the_text_of_its_label(terminal, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    shown = folded("looks      2, at nominal levels 0.017, 0.037", 2, terminal)
    assert shown == "looks      2, at nominal levels 0.017,\n           0.037"


def test_a_narrow_table_drops_what_it_can_spare_before_it_becomes_blocks(terminal, monkeypatch):
    monkeypatch.setattr("sys.stdout", terminal)
    head, rows = ("run", "recipe", "loss"), [("a-seed1", "a", "3.5"), ("b-seed1", "b", "3.4")]
    dropped = ["run      loss", "a-seed1   3.5", "b-seed1   3.4"]
    for columns, lines in (("21", 3), ("20", 3), ("13", 3), ("12", 4)):
        monkeypatch.setenv("COLUMNS", columns)
        shown = table_lines(head, rows, ("recipe",))
        assert len(shown) == lines
        assert (shown == dropped) == (columns in ("20", "13"))


def test_a_long_word_stays_beside_its_label(terminal, monkeypatch):
    monkeypatch.setenv("COLUMNS", "20")
    assert folded("saved      runs/quickstart/recipe.toml", 11, terminal).count("\n") == 0


def test_a_model_s_text_cannot_steer_a_terminal():
    assert harmless("one\ttwo\n\x1b]0;title\x07 é \x0b") == "one\ttwo\n�]0;title� é �"
