"""What runs still cost together, in words."""

from __future__ import annotations

from efftrain_cli.trials import costs
from efftrain_cli.trials.costs import total_lines, total_of

ROWS = [
    {"state": "new", "tokens_left": 1_000_000, "seconds_left": 90.0, "disk_bytes": 2_000_000},
    {"state": "unfinished", "tokens_left": 500_000, "seconds_left": 60.0, "disk_bytes": 2_000_000},
    {"state": "finished", "tokens_left": 0, "seconds_left": 0.0, "disk_bytes": 1_000_000},
]


def test_a_total_says_what_is_left_and_how_long_it_takes(monkeypatch):
    monkeypatch.setattr(costs, "free_bytes", lambda folder: 9_000_000)
    time = "about 2 min 30 s one run after the other, "
    time += "by the nearest measurements here, scaled by FLOPs"
    assert total_lines(ROWS, jobs=1) == [
        f"2 of 3 runs to train, at most 1.5M tokens, {time}",
        "disk: 5.0 MB needed at most, 9.0 MB free",
    ]
    assert total_lines(ROWS[2:], jobs=1) == ["0 of 1 runs to train"]
    shared = "--jobs 2 divides the processor among as many runs"
    assert total_lines(ROWS, jobs=2)[0].endswith(f"{time}; {shared}")


def test_a_disk_that_is_too_small_is_a_warning(monkeypatch):
    monkeypatch.setattr(costs, "free_bytes", lambda folder: 4_000_000)
    assert total_lines(ROWS, jobs=1)[-1].startswith("warning: that does not fit; ")


def test_one_unknown_time_makes_the_sum_unknown():
    unknown = [*ROWS, ROWS[0] | {"seconds_left": None}]
    assert total_of(unknown) == {
        "runs": 4,
        "done": 1,
        "tokens_left": 2_500_000,
        "seconds_left": None,
        "disk_bytes": 7_000_000,
    }
    assert "; time unknown: nothing was measured here yet" in total_lines(unknown, jobs=1)[0]
