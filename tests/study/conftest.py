"""A study of two tiny recipes in a folder of its own, and stubs that train it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from efftrain_cli.run.directory import run_path
from efftrain_cli.study.blocks import Tuned
from efftrain_cli.study.file import StudyFile
from efftrain_cli.study.judge import StudyState
from efftrain_cli.study.load import read_study
from efftrain_cli.study.main import conduct
from efftrain_cli.study.phases import StudyTrial, all_trials, tuning_trials
from efftrain_cli.study.records import study_folder
from efftrain_cli.study.registration import register
from efftrain_cli.trials.runner import TrialRunner
from efftrain_cli.trials.trial import Trial
from tests.fake_runs import read_jsonl, write_sealed
from tests.trials.conftest import folder as two_recipes  # noqa: F401  a fixture
from tests.trials.stubs import Pretrain, quiet, write_trial

STUDY = """\
question = "Is warm worse than plain?"
seeds = "10..14"
looks = 2
baseline = "plain"

[[primary]]
measure = "final_loss"
direction = "different"

[tuning]
seeds = "0..1"
grid = { "optim.lr" = [1e-3, 2e-3, 4e-3] }

[[arms]]
name = "plain"
recipe = "plain.toml"

[[arms]]
name = "warm"
recipe = "warm.toml"
set = ["seq_len_warmup.start=16"]
"""


@pytest.fixture
def folder(two_recipes: Path) -> Path:  # noqa: F811  the same
    """study.toml, its two recipes and their text; the folder of runs is beside them."""
    (two_recipes / "study.toml").write_text(STUDY)
    return two_recipes


@pytest.fixture
def file(folder: Path) -> StudyFile:
    return read_study(folder / "study.toml")


@pytest.fixture
def conducted(file: StudyFile) -> StudyState:
    """The study after its last look: warm is better at the first, with the lowest of three equal
    rates."""
    return conduct_stubs(file)


def write_study(
    folder: Path, *changes: tuple[str, str], text: str = STUDY, name: str = "study"
) -> StudyFile:
    """Write a study with pieces of its text replaced, and read it."""
    for old, new in changes:
        assert old in text, old
        text = text.replace(old, new)
    path = folder / f"{name}.toml"
    path.write_text(text)
    return read_study(path)


def choose(file: StudyFile, **rates: str) -> StudyFile:
    """The study with what tuning chose, if it chose these learning rates for the arms in every
    block."""
    blocks = []
    for block in file.blocks:
        tuned = [Tuned(arm, block.seeds, (f"optim.lr={rate}",)) for arm, rate in rates.items()]
        blocks.append(replace(block, tuned=tuple(tuned)))
    return file.with_blocks(blocks)


def launcher(file: StudyFile, codes: dict[str, int] | None = None) -> Pretrain:
    """Stubs for all runs of a study; their losses do not depend on the rate, so the first of equals
    is chosen."""
    chosen = choose(file, plain="0.001", warm="0.001")
    return Pretrain([each.trial for each in all_trials(chosen)], codes)


def make_runner(file: StudyFile, launch: Pretrain) -> TrialRunner:
    return TrialRunner(study_folder(file.name), say=quiet, launch=launch)


def conduct_stubs(file: StudyFile, codes: dict[str, int] | None = None) -> StudyState:
    """Register a study and have stubs train it; `codes` gives the exit code of a run where it is
    not 0."""
    register(file, allow=False)
    return conduct(file, make_runner(file, launcher(file, codes)))


def all_tuning(file: StudyFile) -> list[StudyTrial]:
    """Return the runs that choose the settings of all blocks."""
    return tuning_trials(file, file.blocks)


def write_losses(trials: Iterable[StudyTrial], loss_of: Callable[[str, Trial], float]) -> None:
    """Write finished runs with a final loss by arm and trial."""
    for each in trials:
        write_trial(each.trial)
        path = run_path(each.trial.name) / "metrics.jsonl"
        rows = read_jsonl(path)
        rows[-1]["val_loss"] = loss_of(each.arm, each.trial)
        write_sealed(path, rows)
