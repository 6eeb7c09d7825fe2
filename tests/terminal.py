"""A terminal of a given width, to see a screen as a user does."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

from tests.conftest import REPOSITORY


def on_terminal(cwd: Path, columns: int, *args: str, answer: str = "") -> str:
    """Return what `efftrain ARGS` shows on a terminal of that width, without colours; `answer` is
    typed there."""
    parent, child = pty.openpty()
    fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "TERM": "xterm-256color"}
    for name in ("COLUMNS", "LINES", "CI", "GITHUB_ACTIONS", "FORCE_COLOR", "PY_COLORS"):
        environment.pop(name, None)
    process = subprocess.Popen(
        [sys.executable, "-m", "efftrain_cli", *args],
        cwd=cwd,
        env=environment,
        stdin=child,
        stdout=child,
        stderr=child,
    )
    os.close(child)
    os.write(parent, answer.encode())
    shown = b""
    with contextlib.suppress(OSError):  # Linux ends a closed terminal with an error
        while chunk := os.read(parent, 65536):
            shown += chunk
    process.wait(timeout=60)
    os.close(parent)
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode()).replace("\r\n", "\n")
