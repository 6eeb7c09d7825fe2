"""Every command in docs/compare.md runs."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tests.conftest import invoke
from tests.docs.pages import commands_of, text_of
from tests.fake_runs import write_run

INLINE = re.findall(r"`(efftrain [^`]+)`", text_of("compare").replace("\n", " "))
COMMANDS = [*commands_of("compare"), *(command for command in INLINE if " --" in command)]


def test_the_page_has_commands() -> None:
    assert len(COMMANDS) >= 6


@pytest.mark.parametrize("command", COMMANDS)
def test_command(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for seed in range(2):
        write_run(tmp_path / "runs", "unstable", seed)
        write_run(
            tmp_path / "runs",
            "unstable-slw",
            seed,
            speed=1.3,
            more="\n[seq_len_warmup]\nsteps = 10\n",
        )
    words = shlex.split(command, comments=True)[1:]
    if words[0] == "sweep":  # its plan: training is tested elsewhere
        for seed in range(2):
            for name in ("unstable", "unstable-slw"):
                (tmp_path / "runs" / f"{name}-seed{seed}" / "recipe.toml").unlink()
        words.append("--plan")
    result = invoke(*words)
    assert result.exit_code == 0, (result.output, result.exception)
