"""A process that imports torch once and forks a child per trial, on Linux.

`processes.ForkServer` starts it and is its client.

`python -P -m efftrain_cli.trials.forkserver FD` serves the socket of that descriptor until its
other end is closed; then it ends its children saved, and itself. A child sets what a new process
would have: log, signals, variables, threads. Only what is read at import is the server's.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
import traceback
from collections.abc import Mapping
from typing import Any, NoReturn

from efftrain_cli.foundation.signals import end_with

LARGEST = 1 << 20
"""Bytes that a request may have."""
TICK = 0.01
"""Seconds between two looks at the children."""
STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that schedulers send to every process: children get them from the parent alone, once."""
MODULES = (
    "torch",
    "efftrain_cli.cli.pretrain",
    "efftrain_cli.pretrain",
    # Imported by functions that training calls.
    "efftrain_cli.run.names",
    "getpass",
    "numpy.ctypeslib",
    "numpy.ma",
    "rich.progress",
    "safetensors.torch",
    "tokenizers",
)
"""What training imports."""


def import_training() -> None:
    """Import the training path. Run no tensor operation, after which a forked child hangs in
    OpenMP, and ask CUDA nothing.

    Raises:
        RuntimeError: an import started a thread or CUDA.
    """
    for name in MODULES:
        importlib.import_module(name)
    from efftrain_cli.training.origin import library_variables, package_commit

    # Children record the commit whose code they run, and what the libraries read.
    package_commit()
    library_variables()
    threads = len(os.listdir("/proc/self/task"))
    if threads > 1 or sys.modules["torch"].cuda.is_initialized():
        raise RuntimeError(f"not safe to fork: {threads} threads, or CUDA is initialized")
    # The collector would write to every object, and so copy each page that children share.
    gc.collect()
    gc.freeze()


class Server:
    """Forks a child per request, and writes the code of each into its pipe."""

    def __init__(self, link: socket.socket) -> None:
        self.link = link
        self.pid = os.getpid()
        self.children: dict[int, tuple[int, int]] = {}
        """Number of a request -> process number, and the pipe for its exit code."""
        # For ever: a child takes them once it is its own.
        signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
        self.is_warm = False
        try:
            import_training()
            self.is_warm = True
        except Exception:
            traceback.print_exc()

    def serve(self) -> None:
        """Serve until the other end is closed; then end the children saved, and wait for them."""
        is_open = True
        while is_open or self.children:
            watched = [self.link] if is_open else []
            if select.select(watched, [], [], TICK if self.children else None)[0]:
                is_open = self.receive()
            self.reap()

    def receive(self) -> bool:
        """Serve one request; return False if there will be no more."""
        message, descriptors, _, _ = socket.recv_fds(self.link, LARGEST, 2)
        if not message:
            for pid, _ in self.children.values():
                os.kill(pid, signal.SIGTERM)
            return False
        request = json.loads(message)
        number = request["number"]
        if descriptors:
            self.start(request, *descriptors)
        elif number in self.children:
            # Only this loop reaps, so the process number is still this child's.
            os.kill(self.children[number][0], request["signal"])
        return True

    def start(self, request: dict[str, Any], log: int, end: int) -> None:
        """Fork the child of a request."""
        try:
            pid = os.fork()
            if pid == 0:
                self.become_trial(request, log)
            self.children[request["number"]] = pid, end
        except OSError as error:
            os.write(log, f"error: cannot start a process: {error}\n".encode())
            os.write(end, b"1")
            os.close(end)
        os.close(log)

    def reap(self) -> None:
        """Report the children that have ended."""
        for number, (pid, end) in list(self.children.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                del self.children[number]
                with contextlib.suppress(BrokenPipeError):  # the parent was killed
                    os.write(end, str(os.waitstatus_to_exitcode(status)).encode())
                os.close(end)

    def become_trial(self, request: dict[str, Any], log: int) -> NoReturn:
        """Run a request in this forked process and end it."""
        code = 1
        try:
            self.enter(request["environment"], log)
            if not self.is_warm:
                program = [sys.executable, "-P", "-m", "efftrain_cli"]
                os.execv(sys.executable, [*program, *request["arguments"]])
            sys.argv[1:] = request["arguments"]
            runpy.run_module("efftrain_cli", run_name="__main__", alter_sys=True)
        except SystemExit as end:
            code = int(end.code or 0)
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(OSError, ValueError):
                    stream.flush()
            os._exit(code)

    def enter(self, environment: Mapping[str, str], log: int) -> None:
        """Set what a new process would have: log, signals, variables, threads."""
        os.dup2(log, 1)
        os.dup2(log, 2)
        self.link.close()
        end_with(self.pid)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)
        os.environ.clear()
        os.environ.update(environment)  # CUDA_VISIBLE_DEVICES too: CUDA starts later
        threads = environment.get("OMP_NUM_THREADS", "")
        if self.is_warm and threads.isdecimal() and int(threads):
            sys.modules["torch"].set_num_threads(int(threads))


def main() -> None:
    link = socket.socket(fileno=int(sys.argv[1]))
    link.set_inheritable(False)
    Server(link).serve()


if __name__ == "__main__":
    main()
