"""benchmarks/gpu: both calls at tiny shapes on a CPU, and what a figure that fails leaves."""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.conftest import REPOSITORY

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(REPOSITORY)}


def run(*command: str) -> str:
    done = subprocess.run(
        [sys.executable, *command], env=ENVIRONMENT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def figures_of(folder: Path) -> dict[str, dict[str, object]]:
    return json.loads((folder / "figures.json").read_text())["figures"]


@pytest.mark.slow
def test_two_calls_measure_everything(tmp_path):
    script = str(REPOSITORY / "benchmarks" / "gpu")
    began = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    run(script, "1", "--smoke", "--out", str(tmp_path / "1"))
    middle = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    earlier = str(tmp_path / "1" / "figures.json")
    table = run(script, "2", "--smoke", "--out", str(tmp_path / "2"), "--earlier", earlier)
    end = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    assert max(middle - began, end - middle) < 60

    figures = figures_of(tmp_path / "2")
    first = ["device", "peer", "gpt2", "llama", "gradients", "resume", "host_reads", "gpt2_32"]
    second = ["lengths", "methods", "large", "checkpoint", "medium", "pair"]
    assert list(figures) == first + second
    statuses = {name: figure["status"] for name, figure in figures.items()}
    assert statuses.pop("peer") == statuses.pop("host_reads") == "needs CUDA"
    assert set(statuses.values()) == {"ok"}, figures

    assert figures["gradients"]["ok"] and figures["gradients"]["sharded_ok"]
    assert figures["gradients"]["lost_ln_1_bias_fails"]
    assert figures["resume"]["deterministic_bits_equal"]
    rows = re.findall(r"^(\w+) +(?:ok|needs CUDA) +\d+ s", table, re.MULTILINE)
    assert rows[-len(figures) :] == list(figures), "the table ends what a call prints"


SCRIPT = """
import os, signal, sys, time
from pathlib import Path
from types import SimpleNamespace
from benchmarks.gpu import process

process.LEAST, process.GRACE = 0, 1
out = Path(sys.argv[1])

def fails(bench, note):
    note(first=1.0)
    raise RuntimeError("then it broke")

def dies(bench, note):
    os._exit(3)

def waits(bench, note):
    note(first=2.0)
    time.sleep(60)

def deaf(bench, note):
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
    time.sleep(60)

figures = {"fails": fails, "dies": dies, "waits": waits, "deaf": deaf}
figures["works"] = lambda bench, note: note(all=3.0)
if "--only" in sys.argv:
    bench = SimpleNamespace(results=process.Results(out), deadline=0.0)
    limits = dict.fromkeys(sys.argv[-1].split(","), 1)
    process.work(bench, figures, limits, time.time() + 60)
else:
    command = [sys.executable, __file__, str(out)]
    process.supervise(command, list(figures), out, time.time() + 60)
"""


@pytest.mark.slow
def test_a_figure_that_fails_keeps_its_values_and_the_next_begins(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    run(str(script), str(tmp_path))
    figures = figures_of(tmp_path)
    assert figures["works"]["status"] == "ok" and figures["works"]["all"] == 3
    assert {figures[name]["status"] for name in ("fails", "dies", "waits", "deaf")} == {"failed"}
    assert figures["fails"]["first"] == 1 and "then it broke" in str(figures["fails"]["error"])
    assert figures["dies"]["error"] == "exit code 3"
    assert figures["waits"]["first"] == 2 and "its time is over" in str(figures["waits"]["error"])
    assert figures["deaf"]["error"] == "stopped after its limit"


@pytest.mark.slow
def test_a_lost_gradient_of_a_small_parameter_is_seen():
    from benchmarks.gpu.figures import gradient_errors  # what it imports takes seconds

    want = {"wte.weight": torch.full((100,), 10.0), "h.0.ln_1.bias": torch.full((4,), 0.01)}
    assert gradient_errors(want, want)["ok"]
    for factor in (0.0, 0.5):
        got = want | {"h.0.ln_1.bias": factor * want["h.0.ln_1.bias"]}
        errors = gradient_errors(got, want)
        assert not errors["ok"]
        assert next(iter(errors["worst"].items())) == pytest.approx(("h.0.ln_1.bias", 1 - factor))
