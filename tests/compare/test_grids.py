"""Grids of settings: the best, its edge, and how they are shown."""

from __future__ import annotations

from efftrain_cli.compare.arms import group_runs
from efftrain_cli.compare.figures import rates_plot
from efftrain_cli.compare.grids import NOTE, edge_notes, grid_frame, grid_lines
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


def test_the_best_is_the_lowest_mean_among_settings_that_all_finished():
    frame = grid_frame(groups(), [LR])
    best = frame[frame.best]
    assert dict(zip(best.arm, best[LR], strict=True)) == {"a": 2e-3, "b": 2e-3}
    assert list(frame[frame.arm == "a"].loss.round(9)) == [4.5, 4.1, 4.2]
    assert all(not edge for edge in frame.edge)


def test_one_key_is_a_table_of_values_and_recipes():
    head, a, b, note = grid_lines(grid_frame(groups(), [LR], "tuning"))[1:]
    assert head.split()[:5] == ["tuning", LR, "0.001", "0.002", "0.004"]
    assert head.endswith("nats/token, mean of 2 seeds")
    assert a.split() == ["a", "4.5000", "4.1000*", "4.2000"]
    assert b.split() == ["b", "4.4000", "4.0000*", "failed"] and note == NOTE


def test_a_best_value_at_an_edge_is_marked_and_widened():
    """Of 1e-3 and 2e-3 the best is the last: the next is as far away again."""
    two = [group for group in groups() if group.first.settings[LR] < 3e-3]
    frame = grid_frame(two, [LR])
    assert edge_notes(frame) == [
        "a: best at the edge of its grid; add optim.lr=0.004",
        "b: best at the edge of its grid; add optim.lr=0.004",
    ]
    assert grid_lines(frame)[2].endswith("4.1000*!")
    drawn = rates_plot(frame).curves
    assert list(drawn.x) == [1e-3, 2e-3] * 2 and list(drawn.y.round(9)) == [4.5, 4.1, 4.4, 4.0]


def test_arms_with_grids_of_their_own_are_lines():
    runs = make_arm("a", [4.0, 4.2], **{LR: 1e-3})
    runs += make_arm("b", [3.9, 4.1], **{"optim.warmup_steps": 9})
    keys = [LR, "optim.warmup_steps"]
    lines = grid_lines(grid_frame(group_runs(runs), keys))
    assert [line.split()[:4] for line in lines[2:4]] == [
        ["a", "0.001", "-", "4.1000*"],
        ["b", "-", "9.0", "4.0000*"],
    ]
    assert "b" not in "".join(grid_lines(grid_frame(group_runs(runs), [LR]))[2:-1])
