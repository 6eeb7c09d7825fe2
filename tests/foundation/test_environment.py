"""Environment variables: numbers and folders that cannot be used."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from efftrain_cli.foundation.environment import (
    environment_folder,
    environment_number,
    planned_device,
    usable_cores,
)
from efftrain_cli.foundation.errors import UsageError
from tests.conftest import cli

LIMITS = {
    "WORLD_SIZE LOCAL_WORLD_SIZE SLURM_STEP_NUM_TASKS EFFTRAIN_JOBS": (1, 1_048_576),
    "RANK LOCAL_RANK SLURM_PROCID SLURM_LOCALID": (0, 1_048_575),
    "MASTER_PORT": (1, 65_535),
    "SLURM_JOB_ID": (0, 1_099_511_627_776),
    "SOURCE_DATE_EPOCH": (0, 4_294_967_296),
}


@pytest.mark.parametrize("names", LIMITS)
def test_numbers_have_a_range(monkeypatch, names):
    """F98; tests/recorded/faults.json has the whole message."""
    least, most = LIMITS[names]
    for name in names.split():
        for text, number in (("", 7), (str(least), least), (f"0{most}", most)):
            monkeypatch.setenv(name, text)
            assert environment_number(name, 7) == number
        for text in (str(least - 1), str(most + 1), "1e3", "0x10", "²", "+1", " 1", "9" * 5000):
            monkeypatch.setenv(name, text)
            with pytest.raises(UsageError, match=f"set it to a .* from {least:,} to {most:,},"):
                environment_number(name, 7)


def test_a_system_that_knows_no_cores_has_one(monkeypatch):
    monkeypatch.delattr("os.sched_getaffinity", raising=False)
    monkeypatch.setattr("os.cpu_count", lambda: None)
    assert usable_cores() == 1


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
        ("auto", None, "", "cpu"),
        ("cpu", "0", "2.13.0", "cpu"),
    ],
)
def test_auto_is_the_cpu_where_no_gpu_can_be_used(monkeypatch, device, visible, torch, planned):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)

    def version(name: str) -> str:
        if not torch:
            raise PackageNotFoundError(name)
        return torch

    monkeypatch.setattr("importlib.metadata.version", version)
    assert planned_device(device) == planned
