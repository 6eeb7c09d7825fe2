"""What a run says of the time that its devices spent on each other."""

from __future__ import annotations

from efftrain_cli.run.communication import communication
from tests.fake_runs import rows_of, write_run


def test_short_steps_that_the_network_has_bound_are_named(tmp_path):
    """Ten steps of a second: three at length 8 that add up for 0.8 s each, seven at 64 for 0.1 s;
    one waits for 1 s."""
    rows = rows_of(10, 0)
    for row in rows[1:]:
        short = row["step"] <= 3
        row |= {
            "seconds": 1.0,
            "comm_seconds": 0.8 if short else 0.1,
            "wait_seconds": float(row["step"] == 10),
            "seq_len": 8 if short else 64,
        }
    found = communication(write_run(tmp_path, "small", 0, rows=rows))
    assert found.startswith(
        "31% of the time went into adding up gradients, 10% into waiting for each other; "
    )
    assert "more than half of 3 of 10 steps, of up to 8 tokens a sequence" in found


def test_a_run_that_is_bound_by_computing_says_no_more_than_that(tmp_path):
    rows = rows_of(4, 0)
    for row in rows[1:]:
        row |= {"seconds": 1.0, "comm_seconds": 0.25, "wait_seconds": 0.0, "seq_len": 64}
    found = communication(write_run(tmp_path, "small", 0, rows=rows))
    assert found == "25% of the time went into adding up gradients, 0% into waiting for each other"


def test_nothing_is_said_of_one_device_or_of_shards(tmp_path):
    assert communication(write_run(tmp_path, "small", 0)) == ""
    rows = [row | {"comm_seconds": None, "wait_seconds": 0.1} for row in rows_of(4, 1)]
    assert communication(write_run(tmp_path, "small", 1, rows=rows)) == ""


def test_damaged_rows_are_left_out_because_the_run_has_ended_well(tmp_path):
    rows = rows_of(8, 0)
    for row in rows[1:]:
        row |= {"seconds": 1.0, "comm_seconds": 0.25, "wait_seconds": 0.5, "seq_len": 64}
    path = write_run(tmp_path, "small", 0, rows=rows)
    lines = (path / "metrics.jsonl").read_text().splitlines()
    for number in (2, 3, 4, 5):
        lines[number] = lines[number][:-10]
    (path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    assert (
        communication(path)
        == "25% of the time went into adding up gradients, 50% into waiting for each other"
    )
