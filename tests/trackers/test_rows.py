"""Lines that are followed while they are written."""

from __future__ import annotations

import os

from efftrain_cli.run.lines import sealed
from efftrain_cli.run.metrics import last_row
from efftrain_cli.trackers.rows import _is_input_closed, follow_run
from tests.fake_runs import sealed_lines
from tests.trackers.follower import write_while_followed

ROWS = [{"step": step, "loss": 4.5} for step in (1, 2, 3, 4)]


def test_a_flipped_digit_is_not_sent_on(tmp_path, monkeypatch):
    """The line is still JSON; its check value says that it is not the one that was written."""
    lines = [sealed(row) for row in ROWS]
    lines[1] = lines[1].replace("4.5", "4.4")
    lines[3] = lines[3].replace("4.5", "4.6")
    (tmp_path / "metrics.jsonl").write_text("\n".join([*lines, ""]))
    write_while_followed(monkeypatch, tmp_path)
    assert list(follow_run(tmp_path)) == [ROWS[0], ROWS[2]]
    assert last_row(tmp_path) == ROWS[2]


def test_a_line_is_sent_once_it_is_whole(tmp_path, monkeypatch):
    text = sealed_lines(ROWS)
    write_while_followed(monkeypatch, tmp_path, text[:20], text[20:100], text[100:])
    assert list(follow_run(tmp_path)) == ROWS


def test_only_the_end_of_standard_input_ends_it(monkeypatch):
    reading, writing = os.pipe()
    with os.fdopen(reading) as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        assert not _is_input_closed(0.0)
        os.write(writing, b"a key was pressed")
        assert not _is_input_closed(0.0)
        os.close(writing)
        assert _is_input_closed(0.0)
    assert _is_input_closed(0.0), "a closed file cannot be read"
