"""F28: whatever wandb does, the run does not wait for it and its losses are the same."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.launch import Laboratory

SETTINGS = "class Settings:\n    def __init__(self, **settings): ...\n"
FAULTS = {
    "hangs for ten minutes": SETTINGS + "import time\ndef init(*args, **kwargs):\n    time.sleep(600)\n",
    "cannot be imported": "raise ImportError('broken installation')\n",
    "is killed": SETTINGS + "import os, signal\ndef init(*args, **kwargs):\n    os.kill(os.getpid(), signal.SIGKILL)\n",
    "answers with errors": SETTINGS + "class Error(Exception): ...\ndef init(*args, **kwargs):\n    raise Error('500 internal server error')\n",
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


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_wandb_cannot_harm_a_run(lab: Laboratory, fault: str) -> None:
    from tests.launch import REPOSITORY

    recipe = lab.recipe()
    assert lab.call("pretrain", "--recipe", recipe, "--name", "without", "--no-probe").code == 0
    path = f"{fake_wandb(lab.folder, FAULTS[fault])}:{REPOSITORY}"
    process = lab.start(
        "pretrain", "--recipe", recipe, "--name", "r", "--no-probe", "--wandb", "online", PYTHONPATH=path, WANDB_API_KEY="x" * 40
    )
    process.wait_for(lambda: lab.last_step("r") == 20)
    ended = time.monotonic()
    assert process.wait(60) == 0, process.err.read_text()
    assert time.monotonic() - ended < 15
    log = (lab.run("r") / "wandb" / "follow.log").read_text()
    assert SAID[fault] in log, log
    lab.assert_equal_runs("r", "without", 20)
    assert "Traceback" not in process.err.read_text()
