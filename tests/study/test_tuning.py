"""Tuning: grids that grow where a best rate is at their edge, the optimum between points, and best
of k."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from efftrain_cli.compare.picture import draw_in_terminal
from efftrain_cli.compare.sensitivity import Curve
from efftrain_cli.foundation.errors import RecipeError, UsageError
from efftrain_cli.run.directory import run_path
from efftrain_cli.study import main
from efftrain_cli.study.file import StudyFile
from efftrain_cli.study.judge import judge_runs
from efftrain_cli.study.load import read_study
from efftrain_cli.study.main import conduct
from efftrain_cli.study.phases import (
    all_trials,
    expected_best,
    expected_lowest,
    widest,
    with_tuning,
)
from efftrain_cli.study.records import study_folder
from efftrain_cli.study.registration import register
from efftrain_cli.study.text import as_json
from efftrain_cli.trials.curves import optimum
from efftrain_cli.trials.pictures import best_of_k_plot
from efftrain_cli.trials.screen import curve_lines
from efftrain_cli.trials.trial import Trial, recipe_of
from tests.fake_runs import read_jsonl, write_sealed
from tests.study.conftest import all_tuning, choose, make_runner, write_losses, write_study
from tests.trials.stubs import Pretrain


def write_tuning(file: StudyFile, optima: dict[str, float]) -> StudyFile:
    """Write the tuning runs with losses that are lowest at each arm's optimum."""
    write_losses(
        all_tuning(file),
        lambda arm, trial: 3 + math.log(recipe_of(trial).optim.lr / optima[arm]) ** 2,
    )
    return with_tuning(file)


def growing(folder: Path, grow: int, *changes: tuple[str, str]) -> StudyFile:
    return write_study(folder, ("[tuning]", f"[tuning]\ngrow = {grow}"), *changes)


@pytest.mark.parametrize(
    ("grow", "plain", "warm", "rates"),
    [
        (2, 2e-3, 2e-3, [1, 2, 4]),
        (2, 4e-3, 2e-3, [1, 2, 4, 8]),
        pytest.param(2, 8e-3, 2e-3, [1, 2, 4, 8, 16], marks=pytest.mark.slow),
        (1, 8e-3, 2e-3, [1, 2, 4, 8]),
        pytest.param(2, 1e-3, 4e-3, [0.5, 1, 2, 4, 8], marks=pytest.mark.slow),
        (2, 2.5e-4, 2e-3, [0.25, 0.5, 1, 2, 4]),
        (0, 8e-3, 8e-3, [1, 2, 4]),
    ],
)
def test_all_grids_grow_where_one_arm_is_at_the_edge(folder, grow, plain, warm, rates):
    file = growing(folder, grow)
    for _ in range(4):
        file = write_tuning(file, {"plain": plain, "warm": warm})
    for arm in file.study.arms:
        grid = sorted(file.grid_of(arm, file.blocks[0].grown)["optim.lr"])
        assert grid == pytest.approx([1e-3 * rate for rate in rates])
    assert len(all_tuning(file)) == 2 * 2 * len(rates)
    if grow == 2:
        (setting,) = file.tuned[0].settings
        assert float(setting.removeprefix("optim.lr=")) == plain


def test_no_grid_grows_to_a_rate_that_a_recipe_refuses(folder):
    file = growing(folder, 2, ("looks = 2", 'looks = 2\nset = ["optim.min_lr=4e-4"]'))
    arm = file.study.arms[0]
    assert sorted(file.grid_of(arm, widest(file).blocks[0].grown)["optim.lr"]) == [
        5e-4,
        1e-3,
        2e-3,
        4e-3,
        8e-3,
        1.6e-2,
    ]
    for _ in range(3):
        file = write_tuning(file, {"plain": 1e-4, "warm": 2e-3})
    grid = file.grid_of(arm, file.blocks[0].grown)
    assert sorted(grid["optim.lr"]) == [5e-4, 1e-3, 2e-3, 4e-3]


def test_given_tuning_seeds_keep_the_grid_as_it_is_written(folder, file):
    assert file.grow == 0 and len(all_tuning(widest(file))) == 12
    assert write_study(folder, ('seeds = "0..1"\n', "")).grow == 2


def test_growing_grids_get_two_points_at_either_end(folder):
    """Seven rates, two arms, two tuning seeds."""
    trials = all_tuning(widest(growing(folder, 2)))
    names = {each.trial.name for each in trials}
    assert len(names) == len(trials) == 7 * 2 * 2
    assert "study-plain-lr0.00025-tune-seed0" in names and "study-warm-lr0.016-tune-seed1" in names


def test_a_study_trains_what_its_grids_have_grown(folder):
    """The stubs' losses do not depend on the rate: the lowest, which comes first, is taken, and one
    below it tried."""
    file = growing(folder, 2)
    register(file, allow=False)
    chosen = choose(widest(file), plain="0.001", warm="0.001")
    launch = Pretrain([each.trial for each in all_trials(chosen)])
    state = conduct(file, make_runner(file, launch))
    assert launch.calls[12:16] == [
        f"study-{arm}-lr0.0005-tune-seed{seed}" for seed in (0, 1) for arm in ("plain", "warm")
    ]
    assert len(launch.calls) == 16 + 6 and state.look == 1
    assert [len(tuned.tried) for tuned in state.file.tuned] == [4, 4]
    again = read_study(file.path)
    assert [block.grown for block in again.blocks] == [(("optim.lr", "low"),)]
    (plain, _) = as_json(state, None)["tuning"]["arms"]
    assert len(plain["expected_best"]) == 4


def test_the_expected_lowest_of_k():
    # Of two draws from 1, 2, 3 the lowest is 1 in five cases of nine, 2 in three, 3 in one.
    assert expected_lowest([2.0, 3.0, 1.0]) == pytest.approx([2, 14 / 9, 36 / 27])
    assert expected_lowest([4.0]) == [4.0]


def test_a_failed_setting_counts_with_its_loss_before_training(file):
    write_tuning(file, {"plain": 2e-3, "warm": 2e-3})
    starts = []
    for seed in (0, 1):
        path = run_path(f"study-plain-lr0.004-tune-seed{seed}") / "metrics.jsonl"
        rows = read_jsonl(path)
        rows[-1]["nonfinite"] = True
        starts.append(rows[0]["val_loss"])
        write_sealed(path, rows)
    losses = [3 + math.log(2) ** 2, 3.0, sum(starts) / 2]
    assert expected_best(with_tuning(file).tuned[0]) == pytest.approx(expected_lowest(losses))


@pytest.mark.parametrize(
    ("rates", "losses", "lowest"),
    [
        # In log2, (x - 1.5)^2 + 3, whose points about 1 and 2 are equal: the lower one is the best.
        ([1, 2, 4, 8], [5.25, 3.25, 3.25, 5.25], 2**1.5),
        # In log10, 2 (x - 1.25)^2 + 3, at 0, 1 and 3.
        ([1, 10, 1000], [6.125, 3.125, 9.125], 10**1.25),
        ([1, 2, 4], [4.0, 3.0, 4.0], 2.0),
        ([1, 2, 4], [3.0, 3.5, 4.0], None),
        ([1, 2, 4], [4.0, 3.5, 3.0], None),
        ([1, 2, 4], [None, 3.0, 4.0], None),
        ([1, 2, 4], [4.0, 3.0, None], None),
        # The best is then at the edge; equal losses have no lowest point.
        ([1, 2, 4], [3.5, None, 3.6], None),
        ([1, 2, 4], [3.0, 3.0, 3.0], None),
        ([1, 2], [3.0, 4.0], None),
        ([1, 2, 4], [None, None, None], None),
    ],
)
def test_a_parabola_says_where_the_optimum_is(rates, losses, lowest):
    curve = Curve("", tuple(rates), tuple((loss,) for loss in losses), (9.0,), (0,))
    assert optimum(curve) == (lowest and pytest.approx(lowest))
    table = "\n".join(curve_lines([curve]))
    assert ("optimum" in table) == (lowest is not None)


def test_the_optimum_stands_in_table_and_json(file):
    """The losses are parabolas over the log rate about 0.0015 and, beyond the grid, 0.009."""
    register(file, allow=False)
    state = judge_runs(write_tuning(file, {"plain": 1.5e-3, "warm": 9e-3}), allow=False)
    row = next(line for line in curve_lines(state.curves) if line.startswith("optimum"))
    assert row.split() == ["optimum", "0.0015", "-"]
    values = as_json(state, None)
    assert [each["optimum"] for each in values["sensitivity"]] == [pytest.approx(1.5e-3), None]


def test_the_best_of_k_is_drawn():
    plot = best_of_k_plot({"plain": [3.5, 3.25], "warm": [3.75, 3.5, 3.0]})
    assert plot.curves.x.tolist() == [1, 2, 1, 2, 3]
    assert plot.curves.y.tolist() == [3.5, 3.25, 3.75, 3.5, 3.0]
    assert plot.ticks == {1: "1", 2: "2", 3: "3"}
    drawn = draw_in_terminal(plot, 60)
    assert drawn.endswith("settings tried (k)".center(60).rstrip() + "\nA plain, B warm")


def test_a_study_draws_rates_and_best_of_k(file, monkeypatch, capsys):
    monkeypatch.setattr(main, "conduct", lambda tuned, *_, **__: judge_runs(tuned, allow=False))
    register(file, allow=False)
    write_tuning(file, {"plain": 1.5e-3, "warm": 2e-3})
    main.run_study(file, 1, "cpu", False, None, as_json=False, plot=True)
    output = capsys.readouterr().out
    rates, tried = output.index("learning rate\n"), output.index("settings tried (k)")
    assert rates < tried < output.index("\nfigures: ")
    names = {path.name for path in study_folder("study").iterdir()}
    pictures = {
        f"{name}.{kind}" for name in ("learning-rate", "best-of-k") for kind in ("svg", "png")
    }
    assert pictures <= names


@pytest.mark.parametrize(
    "rates",
    ['["a", "b"]', "[0, 1e-3]", "[true, false]", "[-1e-3, 1e-3]"],
)
def test_a_grid_that_grows_has_learning_rates(folder, rates):
    with pytest.raises(RecipeError, match=r"optim\.lr = "):
        growing(folder, 2, ("[1e-3, 2e-3, 4e-3]", rates))


def test_a_grid_too_fine_to_round_does_not_grow(folder):
    """The next rates, 0.0009999 and 0.00100020001, would be 0.001 again with three digits."""
    file = growing(folder, 2, ("[1e-3, 2e-3, 4e-3]", "[1e-3, 1.0001e-3]"))
    names = [each.trial.name for each in all_tuning(widest(file))]
    assert len(set(names)) == len(names)


def test_take_over_reaches_the_runs_of_a_grown_grid(folder, monkeypatch):
    """The seeds are drawn, as those of a registered study are once more when it goes on."""
    file = write_study(folder, ('seeds = "0..1"\n', "n_seeds = 2\ngrow = 2\n"))
    register(file, allow=False)
    write_tuning(file, {"plain": 8e-3, "warm": 2e-3})
    asked: list[str] = []

    def free(trials: list[Trial], host: str) -> list[str]:
        asked.extend(trial.name for trial in trials)
        raise UsageError(host)

    monkeypatch.setattr(main, "free_runs", free)
    with pytest.raises(UsageError, match="gone"):
        main.run_study(read_study(file.path), 1, "cpu", False, "gone", False, False)
    assert any("lr0.008-tune" in name for name in asked)
