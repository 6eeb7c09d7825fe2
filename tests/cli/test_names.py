"""Names of runs and recipes as people type them: found by their beginning, corrected, and refused
before PyTorch is imported."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from efftrain_cli.foundation.errors import UsageError
from efftrain_cli.run.names import find_run, select_runs
from tests.conftest import cli, invoke, python
from tests.fake_runs import write_run


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("EFFTRAIN_RUNS", raising=False)
    write_run(tmp_path / "runs", "small", 1)
    write_run(tmp_path / "runs", "small", 2)
    write_run(tmp_path / "runs", "wide", 7, name="my-wide")
    write_run(tmp_path / "runs", "deep", 3)
    return tmp_path


@pytest.mark.parametrize(
    "typed, meant",
    [
        ("small-seed1", "small-seed1"),
        ("runs/small-seed1/", "small-seed1"),
        ("wide", "my-wide"),  # the recipe's name, where one run was trained by it
        ("my", "my-wide"),  # the beginning of one name
        ("de", "deep-seed3"),
    ],
)
def test_a_run_is_found_by_what_names_it_alone(root, typed, meant):
    assert find_run(typed).name == meant


def test_a_run_is_meant_before_a_recipe_and_before_a_beginning(root):
    write_run(root / "runs", "deep", 4, name="deep")
    assert find_run("deep").name == "deep"


@pytest.mark.parametrize(
    "typed, said",
    [
        ("small", "'small' means 2 runs: small-seed1, small-seed2"),
        ("wid", "'wid' means 2 runs: other, wid-seed2"),
        ("many", "'many' means 9 runs: .*, many-seed7 and 1 more"),
        ("small-sead1", "did you mean small-seed1"),
        ("zzz", "`efftrain runs list` shows all"),
        ("../small-seed1", "use 1 to 64 letters"),
    ],
)
def test_what_names_no_run_or_several_is_refused(root, typed, said):
    write_run(root / "runs", "wid", 1, name="other")
    write_run(root / "runs", "wid", 2)
    for seed in range(9):
        write_run(root / "runs", "many", seed, rows=[])
    with pytest.raises(UsageError, match=said.replace("`", ".")):
        find_run(typed)


def test_runs_of_a_study_answer_to_its_name_only(root):
    """A baseline that two races share belongs to both; a run that a person began, to its recipe."""
    runs = root / "runs"
    for name, members in (
        ("warm-study", ["warm-deep-seed1"]),
        ("race-deep-wide-123456", ["race-deep-1-seed100", "race-wide-1-seed100", "removed"]),
        ("race-deep-muon-654321", ["race-deep-1-seed100"]),
    ):
        (runs / name).mkdir()
        (runs / name / "runs.txt").write_text("".join(f"{member}\n" for member in members))
    for name in ("warm-deep-seed1", "race-deep-1-seed100", "race-wide-1-seed100"):
        write_run(runs, "deep", 1, name=name)
    found = {}
    for name in ("deep", "warm", "race-deep-wide-123456", "race-deep-muon-654321"):
        found[name] = [path.name for path in select_runs([name])]
    assert found == {
        "deep": ["deep-seed3"],
        "warm": ["warm-deep-seed1"],
        "race-deep-wide-123456": ["race-deep-1-seed100", "race-wide-1-seed100"],
        "race-deep-muon-654321": ["race-deep-1-seed100"],
    }


WRONG = {
    "sample smal": "small-seed1",
    "export smal": "small-seed1",
    "eval-zeroshot smal": "small-seed1",
    "grow smal --operator depth": "small-seed1",
    "grow --plan --small smal --operator depth": "small-seed1",
    "pretrain --resume smal": "small-seed1",
    "runs show smal": "small-seed1",
    "runs rm smal --yes": "small-seed1",
    "runs checkpoints smal": "small-seed1",
    "runs verify smal": "small-seed1",
    "wandb-sync smal": "small-seed1",
    "compare smallx": "small-seed1",
    "pretrain --recipe smal": "did you mean small?",
    "prepare --recipe smal": "did you mean small",
    "bench --recipe smal": "did you mean small",
    "verify-resume --recipe smal": "did you mean small",
    "tune-warmup --recipe smal": "did you mean small",
    "sweep smal": "did you mean small",
    "race small smal": "did you mean small",
    "recipes show smal": "did you mean small",
    "recipes diff small smal": "did you mean small",
    "recipes new x --tokens-per-parameter 0.09": "greater than or equal to 0.1",
    "import . --recipe smal": "did you mean small",
    "import no-such-folder": "no-such-folder",
    "pretrain --recipe small --name a/b": "is no portable file name",
    "pretrain --recipe small --name my-wide": "my-wide",
    "pretrain --recipe small --seed 1": "small-seed1",
    "pretrain --recipe small --device cudo": "no device 'cudo'",
    "pretrain --recipe small --set optim.lr=-1": "optim.lr",
    "sample small-seed1 --device cuda:x": "no device 'cuda:x'",
}
"""Command line -> what its message has."""

ANSWERS = """
import sys
class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "torch":
            raise ImportError("PyTorch was imported")
sys.meta_path.insert(0, NoTorch())
import contextlib, io, json
import efftrain_cli.cli.app as application
from efftrain_cli.cli.commands import register
register()
answers = {}
for line in json.loads(sys.argv[1]):
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            application.app(line.split(), prog_name="efftrain", standalone_mode=False)
        answers[line] = ["nothing", ""]
    except BaseException as error:
        answers[line] = [getattr(error, "exit_code", None), f"{type(error).__name__}: {error}"]
print(json.dumps(answers))
"""


def test_wrong_names_and_values_answer_without_pytorch(root):
    answers = json.loads(python(ANSWERS, json.dumps([*WRONG]), cwd=root).stdout)
    for line, (code, said) in answers.items():
        assert code == 2 and WRONG[line] in said, f"{line}: {said}"
    assert len(list((root / "runs").iterdir())) == 4, "a mistake leaves no folder"


def test_what_is_counted_begins_with_one(root):
    for line, options in (
        ("sample r", "max-tokens top-k count"),
        ("bench small", "steps devices"),
        ("verify-resume small", "steps"),
        ("eval-zeroshot r", "limit stride batch-tokens"),
    ):
        for option in options.split():
            done = invoke(f"{line} --{option} 0")
            assert done.exit_code == 2 and "Invalid value" in done.output, (line, option)


@pytest.mark.parametrize("value", ["-1", "9e-4", "nan", "1001"])
def test_numbers_that_mean_nothing_are_refused(root, value):
    for line, range_ in (
        (f"compare small --target-loss {value}", "from 0.01 to 100"),
        (f"sample no-run --temperature={value}", "from 0.001 to 1000"),
    ):
        with pytest.raises(UsageError, match=range_):
            cli(line)


@pytest.mark.parametrize(
    "line",
    [
        "pretrain --recipe small --name=",
        "compare a b --baseline=",
        "pretrain ''",
    ],
)
def test_an_empty_option_is_not_taken_for_its_default(line):
    with pytest.raises(UsageError) as refused:
        cli(line)
    names = {"compare a b --baseline=": "--baseline", "pretrain ''": "recipe"}
    name = names.get(line, "--name")
    assert str(refused.value) == f"{name} is empty\ngive it a value, or leave it out"
