"""The tests that need a GPU, by pytest."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator

from benchmarks.gpu.measuring import ROOT, Bench, Figure, Part, child_environment, figure


def marked(bench: Bench) -> Iterator[Figure]:
    """On a CPU all of them are skipped."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-rfE", "-p", "no:cacheprovider", "tests/gpu"]
    environment = child_environment(bench)
    del environment["EFFTRAIN_RUNS"]  # each test has its own folder
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 1):
        raise RuntimeError(f"pytest: exit {done.returncode}\n{(done.stdout + done.stderr)[-1500:]}")
    lines = done.stdout.splitlines()
    counts = {word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|error|skipped)", lines[-1])}
    wrong = counts.get("failed", 0) + counts.get("error", 0)
    note = f"{'WRONG' if wrong else 'ok'}, {wrong} failed, {counts.get('skipped', 0)} skipped"
    yield figure("tests marked gpu", counts.get("passed", 0), "passed", note)
    for line in lines:
        if line.startswith(("FAILED", "ERROR")):
            yield figure(f"  {line[:200]}", None)


PARTS = (Part("pytest -m gpu", marked, 300),)
