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
from tests.conftest import cli


def test_numbers_have_a_range(monkeypatch):
    """F98; tests/recorded/faults.json has the whole message."""
    for text, number in (("", 7), ("1", 1), ("65535", 65535), ("080", 80)):
        monkeypatch.setenv("MASTER_PORT", text)
        assert environment_number("MASTER_PORT", 7) == number
    for text in ("0", "65536", "1e3", "0x10", "²", "+1", " 1", "9" * 5000):
        monkeypatch.setenv("MASTER_PORT", text)
        with pytest.raises(UsageError, match="set it to a whole number from 1 to 65,535"):
            environment_number("MASTER_PORT", 7)


def test_folders_may_begin_at_home(monkeypatch):
    """F98"""
    monkeypatch.setenv("HOME", "/home/a")
    for text, folder in (("", "runs"), ("b/c", "b/c"), ("~/b", "/home/a/b")):
        monkeypatch.setenv("EFFTRAIN_RUNS", text)
        assert environment_folder("EFFTRAIN_RUNS", "runs") == Path(folder)
    for words in ("~nosuchuser/a.toml", "small --set data.train=~nosuchuser/a.txt"):
        with pytest.raises(UsageError, match=r"^~nosuchuser.*: no home directory of that user"):
            cli(f"prepare {words}")


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
