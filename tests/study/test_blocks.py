"""Blocks: every judged seed has a tuning of its own, on seeds and with grids of its own."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from efftrain_cli.foundation.errors import RecipeError, StoppedError
from efftrain_cli.study.file import StudyFile
from efftrain_cli.study.judge import judge_runs
from efftrain_cli.study.load import read_study
from efftrain_cli.study.main import conduct
from efftrain_cli.study.phases import all_trials, best_of_k, widest, with_tuning
from efftrain_cli.study.records import read_plan, study_folder
from efftrain_cli.study.registration import register
from efftrain_cli.study.rehearse import toy_study
from efftrain_cli.study.text import as_json, tuning_lines
from efftrain_cli.trials.array import ArrayWriter
from efftrain_cli.trials.trial import recipe_of
from tests.conftest import invoke
from tests.study import conftest
from tests.study.conftest import (
    STUDY,
    all_tuning,
    conduct_stubs,
    launcher,
    make_runner,
    write_losses,
)
from tests.trials.stubs import write_trial

BLOCKS = (
    STUDY.replace('seeds = "10..14"\nlooks = 2\n', "blocks = 4\n")
    .replace('seeds = "0..1"\n', "grow = 0\n")
    .replace("1e-3, 2e-3, 4e-3", "1e-3, 2e-3")
)


def write_study(folder: Path, *changes: tuple[str, str]) -> StudyFile:
    return conftest.write_study(folder, *changes, text=BLOCKS)


def tune_blocks(file: StudyFile, best: dict[int, float]) -> StudyFile:
    """Write tuning runs whose final loss is lowest at the rate that is best for their seed."""
    write_losses(
        all_tuning(file),
        lambda arm, trial: 3 + abs(recipe_of(trial).optim.lr - best[trial.seed]),
    )
    return with_tuning(file)


def test_every_block_has_seeds_of_its_own(folder):
    file = write_study(folder, ("grow = 0", "grow = 0\nn_seeds = 3"))
    assert len(file.seeds) == 4 and len(file.tuning_seeds) == 12
    assert len({*file.seeds, *file.tuning_seeds}) == 16
    assert [block.seeds for block in file.blocks] == [(seed,) for seed in file.seeds]
    assert file.blocks[1].tuning == file.tuning_seeds[3:6]
    assert [file.block_of[seed] for seed in file.seeds] == [1, 2, 3, 4]
    # Four blocks, three tuning seeds, two arms, two rates.
    assert len(all_tuning(file)) == 4 * 3 * 2 * 2


def test_a_block_is_tuned_on_one_seed_unless_set(folder):
    file = write_study(folder)
    assert file.seeds_to_draw == {"seeds": 4, "tuning.seeds": 4}


def test_each_judged_seed_is_trained_with_what_its_block_chose(folder):
    file = write_study(folder)
    first, second, third, fourth = file.tuning_seeds
    file = tune_blocks(file, {first: 1e-3, second: 2e-3, third: 2e-3, fourth: 1e-3})
    tuned = file.tuned
    assert [(each.arm, each.seeds) for each in tuned[:3]] == [
        ("plain", (file.seeds[0],)),
        ("warm", (file.seeds[0],)),
        ("plain", (file.seeds[1],)),
    ]
    rates = {}
    for each in all_trials(file):
        if each.phase == "confirmation" and each.arm == "warm":
            rates[each.trial.seed] = each.trial.settings
    assert rates == {
        file.seeds[0]: ("seq_len_warmup.start=16", "optim.lr=0.001"),
        file.seeds[1]: ("seq_len_warmup.start=16", "optim.lr=0.002"),
        file.seeds[2]: ("seq_len_warmup.start=16", "optim.lr=0.002"),
        file.seeds[3]: ("seq_len_warmup.start=16", "optim.lr=0.001"),
    }
    lines = [line.split() for line in tuning_lines(tuned)]
    # Both seeds' losses, then the mark: 3.0000 where the rate is the best, else 0.001 more.
    assert lines[2][:7] == [
        "plain",
        "optim.lr=0.001",
        "3.0005",
        "3.0000",
        "3.0010",
        "3.0010",
        "3.0000",
    ]
    assert " ".join(lines[2][7:]) == "chosen in 2 of 4 blocks"
    # In each block one of two settings has 3, the other 3.001: of one drawn 3.0005, of two 3.00025.
    assert best_of_k(tuned)["plain"] == pytest.approx([3.0005, 3.00025])


def test_a_block_grows_by_its_own_runs_only(folder):
    file = write_study(folder, ("grow = 0", "grow = 1"), ("1e-3, 2e-3", "1e-3, 2e-3, 4e-3"))
    low, high, *inner = file.tuning_seeds
    best = {low: 1e-3, high: 4e-3} | dict.fromkeys(inner, 2e-3)
    wider = tune_blocks(file, best)
    grown = [block.grown for block in wider.blocks]
    assert grown == [(("optim.lr", "low"),), (("optim.lr", "high"),), (), ()]
    # Both arms of the block got the rate; the block's choice waits for it, the others have theirs.
    assert len(all_tuning(wider)) == 4 * 2 * 3 + 2 * 2
    assert wider.chosen_seeds == [*file.seeds[2:]]
    assert len(all_tuning(widest(file))) == 4 * 2 * 5


def test_only_the_blocks_of_a_look_are_tuned(folder):
    """Warm is much better here, so the first look decides."""
    file = write_study(folder, ("blocks = 4", "blocks = 8\nlooks = 2"))
    register(file, allow=False)
    launch = launcher(file)
    state = conduct(file, make_runner(file, launch))
    assert (file.looks, state.look, state.verdicts[0].outcome) == ((4, 8), 1, "better")
    assert len(launch.calls) == 4 * 2 * 2 + 4 * 2
    assert {each.seeds[0] for each in state.file.tuned} == {*file.seeds[:4]}
    assert not any("tuned on" in label.text for label in state.labels)


def test_receipts_and_json_name_the_block(folder):
    file = write_study(folder)
    state = conduct_stubs(file)
    for _ in range(2):
        rows = list(csv.DictReader((study_folder("study") / "receipts.csv").open()))
        second = [row for row in rows if row["block"] == "2" and row["arm"] == "plain"]
        seeds = [str(file.tuning_seeds[1])] * 2 + [str(file.seeds[1])]
        assert [row["seed"] for row in second] == seeds
        assert second[2]["settings"] == "optim.lr=0.001"
        # A study that has ended is judged again, and nothing else.
        conduct(read_study(file.path), make_runner(file, launcher(file)))
    arms = as_json(state, None)["tuning"]["arms"]
    assert [arm["seeds"] for arm in arms[:3]] == [[file.seeds[0]]] * 2 + [[file.seeds[1]]]
    plan = json.loads(invoke("study", "study.toml", "--plan", "--format", "json").stdout)
    assert [run["block"] for run in plan["runs"]] == [1] * 4 + [2] * 4 + [3] * 4 + [4] * 4 + [
        1, 1, 2, 2, 3, 3, 4, 4,
    ]  # fmt: skip


def test_a_stopped_study_of_blocks_goes_on(folder):
    file = write_study(folder)
    stopped = f"study-warm-lr0.002-tune-seed{file.tuning_seeds[2]}"
    with pytest.raises(StoppedError):
        conduct_stubs(file, {stopped: 75})
    status = json.loads(invoke("study", "study.toml", "--status", "--format", "json").stdout)
    states = {row[3]: row[4] for row in status["runs"]}
    assert status["runs"][-1][:2] == ["confirmation, block 4", "warm"]
    assert states[stopped] == "unfinished" and states[f"study-warm-seed{file.seeds[0]}"] == "new"
    again = read_study(file.path)
    assert again.blocks == file.blocks
    launch = launcher(again)
    assert conduct(again, make_runner(again, launch)).look == 1
    assert launch.calls[0] == f"resume {stopped}" and len(launch.calls) == 1 + 4 + 8


def test_arrays_of_blocks_are_written_phase_by_phase(folder):
    file = write_study(folder)
    register(file, allow=False)
    writer = ArrayWriter(folder=study_folder("study"), device="cpu", devices=1, jobs=1)
    assert conduct(file, writer).look == 0
    (listed,) = study_folder("study").glob("array-*.txt")
    assert listed.read_text().count("-tune-") == 2 * 16
    for each in all_tuning(file):
        write_trial(each.trial)
    assert conduct(file, writer).look == 0
    (second,) = {*study_folder("study").glob("array-*.txt")} - {listed}
    names = [line.partition("\t")[0] for line in second.read_text().splitlines()]
    assert names == [f"study-{arm}-seed{seed}" for seed in file.seeds for arm in ("plain", "warm")]


def test_the_plan_says_what_a_block_is(folder):
    write_study(folder, ("grow = 0", "n_seeds = 2"))
    output = invoke("study", "study.toml", "--plan").output
    assert "seeds      4 drawn when registered, judged after 4 seeds" in output
    words = "each tunes every arm on 2 seeds of its own, and is judged by one"
    assert f"blocks     {words}" in output
    # Two rates, grown by two at either end, two arms, eight seeds.
    drawn = "8 drawn when registered; grids may grow at their edges, to 96 tuning runs at most"
    assert f"tuning     seeds {drawn}" in output


def test_a_registered_study_keeps_its_blocks(folder):
    file = write_study(folder)
    register(file, allow=False)
    for each in all_trials(file)[:4]:
        write_trial(each.trial)
    plan = read_plan("study")
    assert plan is not None and plan.values["blocks"] == 4
    assert read_study(file.path).blocks == file.blocks
    assert write_study(folder, ("blocks = 4", "blocks = 5")).blocks[:4] == file.blocks


def test_a_rehearsal_has_two_blocks(folder):
    file = write_study(folder)
    small = toy_study(file, folder)
    assert [(block.tuning, block.seeds) for block in small.blocks] == [
        ((file.tuning_seeds[i],), (file.seeds[i],)) for i in (0, 1)
    ]
    assert small.study.arms[0].grid == {"optim.lr": (0.001, 0.002)}


def test_the_verdict_is_over_one_difference_a_block(folder):
    file = write_study(folder)
    (verdict,) = judge_runs(conduct_stubs(file).file, allow=False).verdicts
    assert verdict.seeds == file.seeds and verdict.estimate.df == 3
    assert invoke("compare", "--study", "study.toml").exit_code == 0


@pytest.mark.parametrize(
    ("old", "new", "key", "rule"),
    [
        ("blocks = 4", "blocks = 3", "blocks", "needs 4 or more"),
        ("blocks = 4", "blocks = 0", "blocks", "at least 1"),
        ("blocks = 4", "blocks = 6\nlooks = 2", "looks", "first look at 3 blocks"),
        ("blocks = 4", "blocks = 4\nlooks = 3", "looks", "at least 5 seeds"),
        ("blocks = 4", 'blocks = 4\nseeds = "1..4"', "seeds", "no meaning beside blocks"),
        ("blocks = 4", "blocks = 4\nn_seeds = 4", "n_seeds", "no meaning beside blocks"),
        ("grow = 0", 'seeds = "1..4"', "tuning.seeds", "no meaning beside blocks"),
        ('[tuning]\ngrow = 0\ngrid = { "optim.lr" = [1e-3, 2e-3] }', "", "blocks", "[tuning]"),
    ],
)
def test_wrong_blocks(folder, old, new, key, rule):
    with pytest.raises(RecipeError) as error:
        write_study(folder, (old, new))
    (problem,) = error.value.problems
    assert problem.key == key and rule in problem.rule
