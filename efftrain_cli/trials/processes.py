"""Processes that train runs: forks of a server that has imported torch, or new interpreters."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol

from efftrain_cli.foundation.files import make_folder
from efftrain_cli.foundation.signals import end_with

PYTHON = (sys.executable, "-P", "-m")
"""Starts a module. -P: a random.py of the working folder is not Python's."""


class Child(Protocol):
    """A process that trains a run."""

    def poll(self) -> int | None:
        """Return the exit code, below 0 that of a signal; None while it runs."""

    def send_signal(self, number: int, /) -> None:
        """Send a signal; none if it has ended."""

    def wait(self) -> int:
        """Wait for the end and return the exit code."""


Launch = Callable[[Sequence[str], Mapping[str, str], Path], Child]
"""Starts `efftrain` from its arguments, changes of the environment, and the file for its output."""


def launch_cold(
    arguments: Sequence[str],
    environment: Mapping[str, str],
    log: Path,
) -> Child:
    """Start an interpreter. It is in a group of its own: Ctrl-C reaches it through us, once."""
    parent = os.getpid()
    with open_log(log) as file:
        return subprocess.Popen(
            [*PYTHON, "efftrain_cli", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            env={**os.environ, **environment},
            process_group=0,
            preexec_fn=lambda: end_with(parent),
        )


class ForkServer:
    """Starts processes by forks of one that has imported torch (`forkserver`).

    It starts with the first of them and ends with this object. What Python and torch read at
    import, it has read then.
    """

    def __init__(self, log: Path) -> None:
        self.log = log
        """File for the server's own output: nothing, if all is well."""
        self.process: subprocess.Popen[bytes] | None = None
        self.count = 0

    def start(self, environment: Mapping[str, str]) -> None:
        """Start the server. It imports while this process goes on."""
        self.link, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with other, open_log(self.log) as file:
            self.process = subprocess.Popen(
                [*PYTHON, "efftrain_cli.trials.forkserver", str(other.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                # numpy's BLAS would start threads at import.
                env={**environment, "OPENBLAS_NUM_THREADS": "1"},
                pass_fds=[other.fileno()],
                process_group=0,
            )

    def launch(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        log: Path,
    ) -> Child:
        """Start a process, as `launch_cold`."""
        whole = {**os.environ, **environment}
        if self.process is None or self.process.poll() is not None:
            self.start(whole)
        self.count += 1
        request = {"number": self.count, "arguments": list(arguments), "environment": whole}
        message = json.dumps(request).encode()
        end, other = os.pipe()
        with open_log(log) as file:
            try:
                socket.send_fds(self.link, [message], [file.fileno(), other])
            except OSError:  # the server has just ended, or the variables exceed a packet
                os.close(end)
                return launch_cold(arguments, environment, log)
            finally:
                os.close(other)
        return ForkedChild(self.link, self.count, end)


@dataclass
class ForkedChild:
    """A child of the server."""

    link: socket.socket
    number: int
    """Of the request that started it."""
    end: int
    """Pipe that holds its exit code once it has ended, or is closed with it and the server."""
    returncode: int | None = None

    def poll(self) -> int | None:
        """See `Child`."""
        if self.returncode is None and select.select([self.end], [], [], 0.0)[0]:
            self.returncode = int(os.read(self.end, 16) or -signal.SIGKILL)
            os.close(self.end)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """See `Child`."""
        message = {"number": self.number, "signal": int(number)}
        # The children of a server that has ended got SIGTERM from the system.
        with contextlib.suppress(OSError):
            self.link.send(json.dumps(message).encode())

    def wait(self) -> int:
        """See `Child`."""
        while (code := self.poll()) is None:
            select.select([self.end], [], [])
        return code


def open_log(log: Path) -> BinaryIO:
    """Open a file to append to, and make its folder."""
    make_folder(log.parent)
    return log.open("ab")
