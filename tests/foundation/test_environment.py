"""Environment variables: numbers and folders that cannot be used."""

from __future__ import annotations

from pathlib import Path

import pytest

from efftrain_cli.foundation.environment import (
    environment_folder,
    environment_number,
    planned_device,
)
from efftrain_cli.foundation.errors import UsageError


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("WORLD_SIZE", "9" * 5000),
        ("MASTER_PORT", "65536"),
        ("EFFTRAIN_RUNS", "~nosuchuser/runs"),
    ],
)
def test_an_unusable_variable_is_two_lines(lab, name, value):
    """F98: exit 2, the variable and its range."""
    lines = lab.train(recipe=lab.recipe(), **{name: value}, code=2).errors.splitlines()
    assert len(lines) == 2 and lines[0].startswith("error: ")
    assert name in "".join(lines) and value[:40] in lines[0]
    assert not (lab.folder / "runs").exists()


def test_a_path_of_an_unknown_user_is_two_lines(lab):
    """F98: in a recipe's name and in its text."""
    for words in ("~nosuchuser/a.toml", f"{lab.recipe()} --set data.train=~nosuchuser/a.txt"):
        process = lab.call(f"pretrain {words}", code=None)
        lines = process.errors.splitlines()
        assert process.code == 2 and len(lines) == 2, lines
        assert "no home directory of that user is known" in lines[0]


def test_numbers_and_folders(monkeypatch):
    for text, number in (("", 7), ("1", 1), ("65535", 65535), ("080", 80)):
        monkeypatch.setenv("MASTER_PORT", text)
        assert environment_number("MASTER_PORT", 7) == number
    for text in ("0", "65536", "1e3", "0x10", "²", "+1", " 1"):
        monkeypatch.setenv("MASTER_PORT", text)
        with pytest.raises(UsageError, match="set it to a whole number from 1 to 65,535"):
            environment_number("MASTER_PORT", 7)
    monkeypatch.setenv("HOME", "/home/a")
    for text, folder in (("", "runs"), ("b/c", "b/c"), ("~/b", "/home/a/b")):
        monkeypatch.setenv("EFFTRAIN_RUNS", text)
        assert environment_folder("EFFTRAIN_RUNS", "runs") == Path(folder)


@pytest.mark.parametrize(
    "device, visible, torch, planned",
    [
        ("auto", None, "2.13.0", "auto"),
        ("auto", "GPU-8932f937", "2.13.0", "auto"),
        ("auto", "", "2.13.0", "cpu"),
        ("auto", "-1,0", "2.13.0", "cpu"),
        ("auto", None, "2.13.0+cpu", "cpu"),
        ("cpu", "0", "2.13.0", "cpu"),
    ],
)
def test_auto_is_the_cpu_where_no_gpu_can_be_used(monkeypatch, device, visible, torch, planned):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr("importlib.metadata.version", lambda name: torch)
    assert planned_device(device) == planned
