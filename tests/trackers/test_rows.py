"""Lines that are followed while they are written."""

from __future__ import annotations

from efftrain_cli.run.lines import sealed
from efftrain_cli.run.metrics import last_row
from efftrain_cli.trackers import rows as tracker_rows
from efftrain_cli.trackers.rows import follow_run


def test_a_flipped_digit_is_not_sent_on(tmp_path, monkeypatch):
    """The line is still JSON; its check value says that it is not the one that was written."""
    rows = [{"step": step, "loss": 4.5} for step in (1, 2, 3, 4)]
    lines = [sealed(row) for row in rows]
    lines[1] = lines[1].replace("4.5", "4.4")
    lines[3] = lines[3].replace("4.5", "4.6")
    (tmp_path / "metrics.jsonl").write_text("\n".join([*lines, ""]))
    monkeypatch.setattr(tracker_rows, "_is_input_closed", lambda seconds: True)
    assert list(follow_run(tmp_path)) == [rows[0], rows[2]]
    assert last_row(tmp_path) == rows[2]
