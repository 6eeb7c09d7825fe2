"""F28: whatever wandb does, the run does not wait for it and its losses are the same."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY
from tests.launch import Laboratory, Process, wait_until
from tests.wandb_files import read_history

SETTINGS = "class Settings:\n    def __init__(self, **settings): ...\n"
FAULTS = {
    "hangs for ten minutes": (
        SETTINGS + "import time\ndef init(*args, **kwargs):\n    time.sleep(600)\n"
    ),
    "cannot be imported": "raise ImportError('broken installation')\n",
    "is killed": (
        SETTINGS + "import os, signal\ndef init(*args, **kwargs):\n    os.kill(os.getpid(),"
        " signal.SIGKILL)\n"
    ),
    "answers with errors": (
        SETTINGS
        + "class Error(Exception): ...\ndef init(*args, **kwargs):\n    raise Error('500 internal"
        " server error')\n"
    ),
}
SAID = {
    "hangs for ten minutes": "",  # it has no time to say anything
    "cannot be imported": "broken installation",
    "is killed": "",
    "answers with errors": "500 internal server error",
}


def fake_wandb(folder: Path, source: str) -> str:
    (folder / "fake" / "wandb").mkdir(parents=True)
    (folder / "fake" / "wandb" / "__init__.py").write_text(source)
    return str(folder / "fake")


def said_by_undisturbed(process: Process, lab: Laboratory) -> str:
    """Run "r" ends within 15 s of its last step, with the losses of a run without wandb; returns
    what it printed to stderr."""
    process.wait_for(lambda: lab.last_step("r") == 20)
    ended = time.monotonic()
    assert process.wait(60) == 0, process.errors
    assert time.monotonic() - ended < 15
    lab.train_whole()
    lab.assert_equal_runs("r", "whole", 20)
    said = process.errors
    assert "Traceback" not in said
    return said


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_wandb_cannot_harm_a_run(lab, fault):
    path = f"{fake_wandb(lab.folder, FAULTS[fault])}:{REPOSITORY}"
    online = ("--wandb", "online")
    process = lab.start(*lab.words("r"), *online, PYTHONPATH=path, WANDB_API_KEY="x" * 40)
    said_by_undisturbed(process, lab)
    log = (lab.run("r") / "wandb" / "follow.log").read_text()
    assert SAID[fault] in log, log


@contextlib.contextmanager
def silent_server() -> Iterator[str]:
    """A server on this machine that takes every connection and answers none; yields its
    address."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


@pytest.mark.slow
@pytest.mark.parametrize("network", ["nobody listens", "never answers"])
def test_the_real_wandb_without_a_working_server(lab, network):
    """wandb's own retries go on in the child: the run ends in time, with the same losses, an
    offline copy and one warning."""
    pytest.importorskip("wandb")
    with contextlib.ExitStack() as stack:
        if network == "nobody listens":
            address = "http://127.0.0.1:9"  # the port of "discard", which nothing serves
        else:
            address = stack.enter_context(silent_server())
        process = lab.start(
            *lab.words("r"),
            "--wandb",
            "online",
            WANDB_BASE_URL=address,
            WANDB_API_KEY="x" * 40,
        )
        said = said_by_undisturbed(process, lab)
        assert said.count("warning: ") == 1
        assert "wandb is still busy" in said or "metrics are kept offline" in said
        folder = lab.run("r") / "wandb"
        wait_until((folder / "followed.json").exists, timeout=60)
        wait_until(
            lambda: "metrics are kept offline" in (folder / "follow.log").read_text(), timeout=60
        )
    (copy,) = folder.rglob("offline-run-*")
    assert [row["_step"] for row in read_history(copy)] == [row["step"] for row in lab.rows("r")]
