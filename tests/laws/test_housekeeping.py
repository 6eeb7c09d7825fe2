"""Constants are assigned once, and an aborted test run ends the processes that it started."""

from __future__ import annotations

import ast
import signal
import subprocess
import sys
import time
from collections import Counter

import psutil

from tests.conftest import REPOSITORY

WAITS = """
import subprocess, sys
def test_waits():
    child = subprocess.Popen(["sleep", "300"], start_new_session=True)
    open({out!r}, "w").write(str(child.pid))
    child.wait()
"""


def constants_assigned_twice(source: str) -> list[str]:
    """Return the names in capitals that a module, or a class of it, assigns more than once at its
    own level."""
    tree = ast.parse(source)
    scopes = [tree.body, *(node.body for node in tree.body if isinstance(node, ast.ClassDef))]
    found = []
    for body in scopes:
        targets = [
            target for node in body if isinstance(node, ast.Assign) for target in node.targets
        ]
        targets += [node.target for node in body if isinstance(node, ast.AnnAssign)]
        names = [target.id for target in targets if isinstance(target, ast.Name)]
        found += [name for name, n in Counter(names).items() if n > 1 and name.isupper()]
    return found


def test_no_constant_is_assigned_twice():
    assert constants_assigned_twice("A = 1\nB: int = 2\nA = 3\nclass C:\n    D = 1\n    D = 2") == [
        "A",
        "D",
    ]
    for folder in ("efftrain_cli", "tests", "benchmarks"):
        for path in (REPOSITORY / folder).rglob("*.py"):
            assert constants_assigned_twice(path.read_text(encoding="utf-8")) == [], path


def test_an_aborted_run_ends_its_children(tmp_path):
    (tmp_path / "test_waits.py").write_text(WAITS.format(out=str(tmp_path / "pid")))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.conftest", str(tmp_path)]
    run = subprocess.Popen([*command, "--rootdir", str(tmp_path)], cwd=REPOSITORY)
    end = time.monotonic() + 60
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        assert time.monotonic() < end and run.poll() is None
        time.sleep(0.05)
    child = psutil.Process(int((tmp_path / "pid").read_text()))
    run.send_signal(signal.SIGTERM)
    assert run.wait(60) == 2
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE
