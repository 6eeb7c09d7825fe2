"""What is made beside its place and renamed when it is whole: runs, checkpoints, exports; and what
is left alone."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from efftrain_cli.convert import import_hf
from efftrain_cli.export import export_run
from efftrain_cli.foundation.errors import DiskError
from efftrain_cli.foundation.files import disk_error
from efftrain_cli.grow.grow import grow_run
from efftrain_cli.run.directory import RunDirectory, checkpoints_of
from efftrain_cli.run.manifest import verify_checkpoint
from efftrain_cli.run_list import read_runs
from tests.faults.damage import DISK, call, contents, deaths, die_at, save_step
from tests.trained_run import make_run


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A folder with a run called r, its export in hf, and that imported as base."""
    make_run(tmp_path, "r")
    export_run("r", None, tmp_path / "hf")
    import_as(tmp_path, "base")
    return tmp_path


def import_as(home: Path, name: str) -> None:
    text = f"data.train={json.dumps(str(home / 'text.txt'))}"
    import_hf(home / "hf", name, overrides=(text, "data.repeat=true", "eval.windows=2"))


def make_import(home: Path) -> None:
    import_as(home, "made")


def make_growth(home: Path) -> None:
    grow_run("base", ["depth"], "made", torch.device("cpu"))


MAKERS = {"import": make_import, "grow": make_growth}


def temporaries(folder: Path) -> list[str]:
    return [path.name for path in folder.rglob("*.tmp")]


# --- F86: runs with a parent ----------------------------------------------------------------------


@pytest.mark.slow
def test_a_killed_import_leaves_no_run_without_its_checkpoint(home):
    """F86: before every operation on the disk."""

    def work(number: int) -> None:
        die_at(number)
        make_import(home)

    appeared = 0
    for _ in deaths(work):
        made = home / "runs" / "made"
        if made.exists():
            appeared += 1
            verify_checkpoint(checkpoints_of(made)[-1])
            with RunDirectory.open("made"):
                pass
            shutil.rmtree(made)
    assert appeared > 1


def test_a_growth_appears_with_its_checkpoint(home, monkeypatch):
    """F86: before every operation on the disk, where a kill would leave what is there; the source
    is untouched."""
    made, source = home / "runs" / "made", contents(home / "runs" / "base")
    found = set()

    def looking(real: Callable[..., object]) -> Callable[..., object]:
        def operation(*args: object, **options: object) -> object:
            found.add(made.exists())
            if made.exists():
                verify_checkpoint(checkpoints_of(made)[-1])
            return real(*args, **options)

        return operation

    for module, name in DISK:
        monkeypatch.setattr(module, name, looking(getattr(module, name)))
    make_growth(home)
    assert found == {False, True}
    assert contents(home / "runs" / "base") == source


@pytest.mark.parametrize("kind", MAKERS)
def test_a_run_whose_weights_are_lost_continues_with_no_others(home, kind):
    """F86: nothing starts from random weights; its rows are still listed."""
    MAKERS[kind](home)
    shutil.rmtree(home / "runs" / "made" / "checkpoints")
    for verb in (
        ("pretrain", "--resume", "made", "--no-probe"),
        ("sample", "made", "--prompt", "x"),
        ("export", "made", "--out", "out"),
        ("grow", "made", "--operator", "depth"),
    ):
        code, message = call(*verb)
        assert code == 3, (verb, message)
        assert "has no checkpoint: its weights are lost" in message, (verb, message)
    assert "made" in {run.name for run in read_runs().itertuples() if not run.problem}
    assert call("runs", "show", "made")[0] == 0
    assert not (home / "runs" / "made-grown").exists() and not (home / "out").exists()


# --- F104: a flush or a rename that fails ---------------------------------------------------------


def save_again(home: Path) -> None:
    with RunDirectory.open("r") as run:
        save_step(run, 20)


PLACES = {
    "import": (make_import, Path("runs/made")),
    "grow": (make_growth, Path("runs/made")),
    "export": (lambda home: export_run("r", None, home / "out"), Path("out")),
    "save": (save_again, Path("runs/r/checkpoints/step-00000020")),
}


@pytest.mark.parametrize(
    "kind, operation",
    [("import", "rename"), ("grow", "fsync"), ("export", "fsync"), ("save", "rename")],
)
def test_a_failed_flush_or_rename_leaves_nothing_half_made(home, monkeypatch, kind, operation):
    """F104: each one in turn, once; the message names the file, exit code 6."""
    make, place = PLACES[kind]
    make(home)  # prepares the data of a growth
    shutil.rmtree(home / place)
    real, failed = getattr(os, operation), 0
    for number in range(1, 100):
        seen = 0

        def failing(*args, number: int = number):
            nonlocal seen
            seen += 1
            if seen == number:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return real(*args)

        monkeypatch.setattr(os, operation, failing)
        message = ""
        try:
            make(home)
        except OSError as error:
            message = str(disk_error(error))
        except DiskError as error:
            message = str(error)
        monkeypatch.setattr(os, operation, real)
        assert temporaries(home) == []
        if seen < number:
            break
        if message:
            failed += 1
            assert str(place) in message or os.environ["EFFTRAIN_CACHE"] in message, message
            assert ".tmp" not in message, message
            assert not (home / place).exists()
        else:
            if kind == "save":
                verify_checkpoint(home / place)
            shutil.rmtree(home / place)
    assert failed >= (1 if operation == "rename" else 3)
    assert (home / place).exists()
