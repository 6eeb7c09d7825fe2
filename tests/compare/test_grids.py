"""Grids of settings: the best, its edge, and how they are shown."""

from __future__ import annotations

import pytest

from efftrain_cli.compare.arms import group_runs
from efftrain_cli.compare.figures import rates_figure
from efftrain_cli.compare.grids import beyond, edge_notes, grid_frame
from efftrain_cli.compare.show import grid_lines
from tests.compare.runs import make_arm, make_run

LR = "optim.lr"


def groups():
    """Means 4.5, 4.1 and 4.2 of `a`; 4.4 and 4.0 of `b`, one of whose runs at 4e-3 diverged."""
    runs = []
    for rate, finals in ((1e-3, [4.4, 4.6]), (2e-3, [4.0, 4.2]), (4e-3, [4.1, 4.3])):
        runs += make_arm("a", finals, **{LR: rate})
    for rate, finals in ((1e-3, [4.3, 4.5]), (2e-3, [3.9, 4.1])):
        runs += make_arm("b", finals, **{LR: rate})
    runs.append(make_run("b", 0, [6.0, 7.0], status="diverged", **{LR: 4e-3}))
    runs.append(make_run("b", 1, [6.0, 3.0], **{LR: 4e-3}))
    return group_runs(runs)


def test_best_setting_has_the_lowest_mean_if_all_runs_finished():
    lines = [line.split() for line in grid_lines(grid_frame(groups(), [LR]))[1:]]
    assert lines[:4] == [
        [LR, "a", "b"],
        ["0.001", "4.5000", "4.4000"],
        ["0.002", "4.1000*", "4.0000*"],
        ["0.004", "4.2000", "failed"],
    ]
    assert " ".join(lines[4]).startswith("nats/token, mean of 2 seeds; *: best")


def test_a_best_value_at_an_edge_is_marked_and_widened():
    """Of 1e-3 and 2e-3 the best is the last: the next is as far away again."""
    two = [group for group in groups() if group.first.settings[LR] < 3e-3]
    frame = grid_frame(two, [LR])
    assert edge_notes(frame) == [
        "a: best at the edge of its grid; add optim.lr=0.004",
        "b: best at the edge of its grid; add optim.lr=0.004",
    ]
    assert grid_lines(frame)[3].endswith("4.0000*!")
    lines = rates_figure(frame, {"a": "C0", "b": "C1"}).axes[0].get_lines()
    assert [list(line.get_xdata()) for line in lines] == [[1e-3, 2e-3]] * 2
    assert [list(line.get_ydata().round(9)) for line in lines] == [[4.5, 4.1], [4.4, 4.0]]


@pytest.mark.parametrize(
    ("best", "tried", "text"),
    [
        (1, (8, 2, 1), "k=0.5"),
        (2, (8, 2, 1), ""),
        (8, (8, 2, 1), "k=32"),
        (8, (8,), ""),
        (0.1, (0, 0.1), ""),
        (True, (False, True), ""),
    ],
)
def test_a_grid_is_widened_by_the_ratio_of_its_last_values(best, tried, text):
    assert beyond({"k": best}, [{"k": value} for value in tried], ["none", "k"]) == text


def test_arms_with_grids_of_their_own_have_rows_of_their_own():
    runs = make_arm("a", [4.0, 4.2], **{LR: 1e-3})
    runs += make_arm("b", [3.9, 4.1], **{"optim.warmup_steps": 9})
    frame = grid_frame(group_runs(runs), [LR, "optim.warmup_steps"])
    lines = [line.split() for line in grid_lines(frame)[2:4]]
    assert lines == [["0.001", "-", "4.1000*"], ["-", "9.0", "4.0000*"]]
