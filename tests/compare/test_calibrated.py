"""Training seconds by calibrated steps: sums and errors by hand, and every reason to judge
nothing."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from efftrain_cli.compare.calibrated import (
    calibration_sd,
    cumulate_seconds,
    describe_seconds,
    with_seconds,
)
from efftrain_cli.compare.groups import Group, Timing
from efftrain_cli.compare.measures import is_same_budget
from efftrain_cli.compare.reading import read_numbers
from efftrain_cli.compare.tables import answers
from efftrain_cli.run.calibrations import digest_of_recipe, read_calibrations
from efftrain_cli.study.file import Arm, Primary, Study, StudyFile
from tests.compare.calibrations import STEP, arm, calibrated
from tests.compare.known_runs import SLW, of, values, verdict_of
from tests.fake_runs import rows_of, write_run
from tests.study.test_judge import judge

PAIR = ("small", "small-slw")


def write_timed(root: Path, clock: float = 1.0, **more: Any) -> None:
    """Two recipes of three seeds; the second learns 1.3 times as fast, and its clock runs `clock`
    times as long."""
    for seed in range(3):
        write_run(root, "small", seed)
        rows = rows_of(100, seed, 1.3)
        rows = [row | {"train_seconds": row["train_seconds"] * clock} for row in rows]
        write_run(root, "small-slw", seed, rows=rows, more=SLW, **more)


def seconds_text(key: str = "seconds_to_match") -> str:
    return verdict_of(key, calibrations=read_calibrations()).text


def run_of(root: Path, flops: Sequence[float], spent: Sequence[float] = ()) -> Any:
    """A run evaluated at every second step, of steps with these FLOPs; `spent` of the whole run up
    to each."""
    rows = rows_of(len(flops), 0, every=2)
    for row, own in zip(rows[1:], flops, strict=True):
        row["flops"] = own
    for i, row in enumerate(rows):
        row["total_flops"] = spent[i] if spent else sum(flops[:i])
    return read_numbers(write_run(root, "r", 0, rows=rows, steps=len(flops)))


def test_seconds_are_the_steps_times_added_up(root):
    """200 FLOPs lie half-way between 100 in 1 s and 300 in 2 s; 600 take twice as long as 300."""
    run = run_of(root, [100, 100, 300, 200, 600, 50])
    seconds = cumulate_seconds(run, arm({100.0: [1.0], 300.0: [2.0]}))
    assert seconds[0].tolist() == pytest.approx([0, 2, 5.5, 10])
    assert seconds[1].tolist() == pytest.approx([0, 2, 5.5, 10])


def test_blocks_are_averaged_by_their_logarithm(root):
    run = run_of(root, [100, 100])
    seconds = cumulate_seconds(run, arm({100.0: [1.0, 4.0]}))
    assert seconds[:, -1].tolist() == pytest.approx([4.0, 2.0, 8.0])


def test_steps_that_measure_have_times_of_their_own(root):
    rows = rows_of(4, 0, every=2)
    for row in rows:
        row["simigrad_similarity"] = 0.5 if row["step"] == 3 else None
    run = read_numbers(write_run(root, "r", 0, rows=rows, steps=4))
    both = arm({STEP: [1.0]})
    both = both.model_copy(update={"steps": [*both.steps, *arm({STEP: [5.0]}, kind=1).steps]})
    assert cumulate_seconds(run, both)[0].tolist() == pytest.approx([0, 2, 8])


def test_abandoned_steps_cost_as_much_as_the_others(root):
    """By the second evaluation 400 FLOPs have rows and 800 were spent."""
    run = run_of(root, [100, 100, 100, 100], [0, 100, 200, 700, 800])
    assert cumulate_seconds(run, arm({100.0: [1.0]}))[0].tolist() == pytest.approx([0, 2, 8])


def timed(*blocks: float) -> Group:
    return Group("g", (), timing=Timing("", blocks))


def test_the_error_of_few_blocks_is_that_of_student_s_t():
    """Log ratios 0, ln 2, 2 ln 2: sd ln 2, of the mean ln 2 / sqrt 3; t of two degrees is 4.3027,
    the normal 1.9600."""
    sd = calibration_sd(timed(1, 1, 1), timed(1, 2, 4))
    assert sd == pytest.approx(math.log(2) / math.sqrt(3) * 4.30265 / 1.95996, rel=1e-4)
    assert calibration_sd(timed(1, 1, 1), timed(2, 2, 2)) == 0
    assert calibration_sd(timed(), timed(1, 2, 4)) == 0
    # That is 0.8785, and e^0.8785 = 2.407. Groups without runs spent the same.
    assert (
        describe_seconds(timed(1, 1, 1), timed(1, 2, 4))
        == "calibrated, g takes 1x the seconds of g (standard deviation 140 %); by the runs'"
        " own clocks 1x"
    )


def test_every_run_of_a_group_has_calibrated_seconds(root):
    runs = [read_numbers(write_run(root, "small", seed)) for seed in range(2)]
    group = with_seconds(
        Group("small", tuple(runs), timing=Timing("")),
        {digest_of_recipe(runs[0].recipe): arm({STEP: [0.1, 0.2]})},
    )
    assert group.timing.blocks == pytest.approx((10, 20))
    assert [run.evaluated["seconds"][-1] for run in group.runs] == pytest.approx([200**0.5] * 2)
    assert [run.seconds for run in group.runs] == pytest.approx([5, 5])


def test_calibrated_seconds_are_judged(root):
    """By the clocks both steps take 0.05 s; by the calibration 0.05 and 0.0505: seconds to match
    are tokens' / 1.01."""
    write_timed(root)
    calibrated(root, {"small": [0.05, 0.05, 0.0501], "small-slw": [0.0505, 0.0506, 0.0505]})
    comparison = of(*PAIR, calibrations=read_calibrations())
    found = comparison.verdict("seconds_to_match", "small-slw")
    tokens = comparison.verdict("tokens_to_match", "small-slw")
    assert found.text == "better"
    ratio = (0.0505**2 * 0.0506) ** (1 / 3) / (0.05**2 * 0.0501) ** (1 / 3)
    assert found.estimate.mean == pytest.approx(tokens.estimate.mean / ratio)
    # Log ratios 0.00995, 0.01193 and 0.00795: their sd is 0.00199.
    assert found.shared_sd == pytest.approx(0.00199 / math.sqrt(3) * 2.1953, rel=0.01)
    assert found.estimate.se == pytest.approx(math.hypot(tokens.estimate.se, found.shared_sd))
    # The error of the log ratio is 0.00252: 100 (e^0.00252 - 1) = 0.25 %.
    assert (
        found.note
        == "calibrated, small-slw takes 1.01x the seconds of small (standard deviation 0.25 %); by"
        " the runs' own clocks 1x"
    )
    assert f"seconds to match: {found.note}." in answers(comparison).note
    clocks = values(comparison, "train_seconds", "small-slw")
    assert list(clocks.values()) == pytest.approx([5.0] * 3)


def test_without_a_calibration_the_reason_names_the_command(root):
    write_timed(root)
    command = "efftrain calibrate small-seed0 small-seed1 small-seed2 small-slw-seed0"
    assert command in seconds_text()
    assert seconds_text().startswith("not judged: no calibration")
    assert seconds_text("tokens_to_match") == "better"


@pytest.mark.parametrize(
    ("change", "origin", "judged"),
    [
        ({}, {}, True),
        ({"device": "Another CPU"}, {}, False),
        ({"threads": 1}, {}, False),
        ({"torch": "2.12"}, {}, False),
        ({"efftrain": "0.0.1"}, {}, True),
        ({"threads": 1}, {"device_kind": "cuda"}, False),
        ({"threads": 1, "device_kind": "cuda"}, {}, True),
    ],
)
def test_a_calibration_is_of_the_runs_own_machine(root, change, origin, judged):
    write_timed(root, origin=origin)
    calibrated(root, {"small": [0.05] * 3, "small-slw": [0.05, 0.0501, 0.05]}, **change)
    text = seconds_text()
    assert text == "better" if judged else text.startswith("not judged: no calibration")


def test_a_calibration_of_other_settings_does_not_hold(root):
    write_timed(root)
    calibrated(root, {"small": [0.05] * 3, "small-slw": [0.05, 0.0501, 0.05]})
    for seed in range(3):
        toml = root / f"small-slw-seed{seed}" / "recipe.toml"
        toml.write_text(toml.read_text().replace("steps = 10", "steps = 11"))
    assert seconds_text().startswith("not judged: no calibration")
    for seed in range(3):
        toml = root / f"small-slw-seed{seed}" / "recipe.toml"
        toml.write_text(
            toml.read_text().replace("steps = 11", "steps = 10") + "[checkpoint]\nkeep = 9\n"
        )
    assert seconds_text() == "better"


def test_clocks_that_disagree_are_shown_with_both_ratios(root):
    """Its machine was 1.05 times slower while it trained."""
    write_timed(root, clock=1.05)
    calibrated(root, {"small": [0.05] * 3, "small-slw": [0.05, 0.0501, 0.05]})
    assert (
        seconds_text()
        == "not judged: small-slw took 1.05x the seconds of small by the runs' own clocks and 1x by"
        " calibrated steps, more than 2 % apart"
    )


@pytest.mark.parametrize(
    ("ratio", "same"),
    [(1.02, True), (1.0201, False), (1 / 1.02, True), (0.98, False), (0.0, False)],
)
def test_budgets_are_the_same_within_2_percent_either_way(ratio, same):
    """1 / 0.98 is 1.0204."""
    assert is_same_budget(ratio) == same


def test_clocks_that_stood_still_are_not_judged(root):
    write_timed(root, clock=0.0)
    calibrated(root, {"small": [0.05] * 3, "small-slw": [0.05, 0.0501, 0.05]})
    assert seconds_text() == "not judged: the training seconds of a run are unknown"


@pytest.mark.parametrize(
    ("more", "word"),
    [
        ({"origin": {"device": "GPU"}}, "different device"),
        ({"origin": {"jobs": 2}}, "different number of runs side by side"),
        ({"origin": {"world_size": 2}}, "different number of devices"),
        (
            {"events": [{"event": "start", "threads": 2}, {"event": "resume", "threads": 4}]},
            "small-slw-seed0 ran with threads 2 and 4",
        ),
        (
            {"origin": {"grown_from": {"run": "p", "checkpoint": "step-00000010"}}},
            "grown from another run",
        ),
    ],
)
def test_one_calibration_cannot_hold_for_other_conditions(root, more, word):
    write_timed(root, **more)
    calibrated(root, {"small": [0.05] * 3, "small-slw": [0.05, 0.0501, 0.05]})
    assert seconds_text().startswith("not judged: ") and word in seconds_text()


def test_runs_on_several_devices_are_not_judged(root):
    for seed in range(3):
        for name, more in zip(PAIR, ("", SLW), strict=True):
            write_run(root, name, seed, more=more, origin={"world_size": 2})
    assert "steps are timed on one device" in seconds_text()


def test_the_newest_calibration_of_all_recipes_counts(root):
    write_timed(root)
    calibrated(root, {"small": [0.05] * 3, "small-slw": [0.06] * 3})
    assert "1.2x by calibrated steps" in seconds_text()
    newer = {"small": [0.05] * 3, "small-slw": [0.05, 0.0501, 0.05]}
    calibrated(root, newer, time="2026-11-23T09:00:00+00:00")
    # One recipe alone holds for no pair.
    calibrated(root, {"small": [9.0] * 3}, time="2026-11-23T10:00:00+00:00")
    assert seconds_text() == "better"
    found = of(*PAIR, calibrations=read_calibrations()).verdict("seconds_to_match", PAIR[1])
    assert "calibrated by the newest of 2 calibrations, small-slw takes" in found.note


def test_a_damaged_calibration_is_left_out_with_a_warning(root):
    write_timed(root)
    path = calibrated(root, {"small": [0.05] * 3, "small-slw": [0.05, 0.0501, 0.05]})
    path.write_text(path.read_text().replace("0.0501", "0.0701"))
    comparison = of(*PAIR, calibrations=read_calibrations())
    warning = next(label.text for label in comparison.labels if "calibration" in label.text)
    assert warning.startswith(f"a calibration is left out: {path} is damaged")
    assert seconds_text().startswith("not judged: no calibration")
    values = json.loads(path.read_text())
    del values["sha256"]
    path.write_text(json.dumps(values | {"threads": "two"}))
    assert "threads" in read_calibrations().faults[0]


def test_equal_seconds_are_calibrated(root):
    """The second recipe trains twice the tokens in steps of half the time."""
    for seed in range(3):
        write_run(root, "small", seed, steps=50)
        rows = [row | {"train_seconds": row["step"] * 0.025} for row in rows_of(100, seed, 2.0)]
        write_run(root, "long", seed, rows=rows, steps=100, more=SLW)
    before = verdict_of("final_loss", "long", equal="seconds")
    assert before.text.startswith("not judged: no calibration")
    calibrated(root, {"small": [0.05] * 3, "long": [0.025] * 3})
    after = verdict_of("final_loss", "long", equal="seconds", calibrations=read_calibrations())
    assert after.text == "better"


def test_a_study_judges_calibrated_seconds(root):
    write_timed(root)
    calibrated(root, {"small": [0.05] * 3, "small-slw": [0.05, 0.0501, 0.05]})
    arms = (Arm(name="small", recipe="small"), Arm(name="small-slw", recipe="small-slw"))
    primary = Primary(measure="seconds_to_target", direction="better", target=3.5)
    file = StudyFile(
        root / "s.toml", Study(seeds="0..2", baseline="small", primary=(primary,), arms=arms)
    )
    assert file.study.is_about_seconds
    runs = {}
    for name in PAIR:
        runs[name] = {seed: read_numbers(root / f"{name}-seed{seed}") for seed in range(3)}
    (without,) = judge(file, runs).verdicts
    assert without.text.startswith("not judged: no calibration") and without.p == 1
    (found,) = judge(file, runs, calibrations=read_calibrations().valid).verdicts
    assert found.outcome == "better"
    assert "calibrated, small-slw takes 1x the seconds of small" in found.note
