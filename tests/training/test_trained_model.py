"""Taking a model out of a run: the right checkpoint, the right tokenizer, and clear refusals;
sample and export on top."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from efftrain_cli.foundation.errors import CheckpointError, DataError, UsageError
from efftrain_cli.training.loading import load_trained_model
from tests.conftest import cli
from tests.damage import flip
from tests.trained_run import make_run

CPU = torch.device("cpu")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with checkpoints of steps 10 and 20."""
    return make_run(tmp_path, steps=(10, 20))


def test_the_newest_or_the_one_asked_for(run):
    newest = load_trained_model("random", None, CPU)
    assert newest.progress.step == 20 and newest.checkpoint.name == "step-00000020"
    for wanted in ("10", "step-00000010"):
        older = load_trained_model("random", wanted, CPU)
        assert older.progress.step == 10
        assert older.model_sha256 != newest.model_sha256
        assert not torch.equal(older.model.wpe.weight, newest.model.wpe.weight)
    with pytest.raises(UsageError, match="checkpoints of steps 10, 20"):
        load_trained_model("random", "15", CPU)


def test_a_damaged_checkpoint_is_passed_over_or_refused(run, capsys):
    flip(run / "checkpoints" / "step-00000020" / "model.safetensors", 99)
    assert load_trained_model("random", None, CPU).progress.step == 10
    assert "step-00000020" in capsys.readouterr().err
    with pytest.raises(CheckpointError, match=r"model\.safetensors is damaged"):
        load_trained_model("random", "20", CPU)
    flip(run / "checkpoints" / "step-00000010" / "progress.json", 99)
    with pytest.raises(CheckpointError, match="run 'random' has no valid checkpoint"):
        load_trained_model("random", None, CPU)


def test_no_checkpoint_and_no_run(run):
    shutil.rmtree(run / "checkpoints")
    with pytest.raises(CheckpointError, match=r"has no checkpoint yet.*\n  wait for it"):
        load_trained_model("random", None, CPU)
    with pytest.raises(UsageError, match="did you mean random"):
        load_trained_model("randon", None, CPU)


def test_another_tokenizer_is_refused(run):
    path = run / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    # Two tokens trade places: every file is well formed, and every text would come out wrong.
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    path.write_text(json.dumps(tokenizer))
    with pytest.raises(DataError, match="not the tokenizer this run was trained with"):
        load_trained_model("random", None, CPU)
    path.unlink()
    with pytest.raises(DataError, match="missing"):
        load_trained_model("random", None, CPU)


def test_sample_and_export_commands(run, tmp_path):
    first = cli("sample", "random", "--prompt", "Anna found", "--max-tokens", "30", "--seed", "3")
    assert first.stdout.startswith("Anna found") and len(first.stdout) > 20
    again = cli(
        "sample",
        "random",
        "--prompt=Anna found",
        "--max-tokens=30",
        "--seed=2",
        "--count=2",
        "--top-p=1",
    )
    assert again.stdout.startswith("--- seed 2\n")
    assert again.stdout.split("--- seed 3\n")[1] == first.stdout

    for refused in ("0", "1.1"):
        with pytest.raises(UsageError, match="above 0 and at most 1"):
            cli("sample", "random", "--top-p", refused)

    cli("export", "random", "--out", "out", "--checkpoint", "10")
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"} <= names
    with pytest.raises(UsageError):
        cli("export", "random", "--out", "out")
