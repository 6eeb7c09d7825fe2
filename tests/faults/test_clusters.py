"""F83: the batch files of docs/clusters.md, with a stand-in for srun and scontrol: stopped before
the limit, requeued, continued."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY
from tests.fake_runs import read_jsonl
from tests.launch import write_recipe

pytestmark = pytest.mark.slow
SRUN = """#!PYTHON
import json, os, pathlib, signal, subprocess, sys, time
count = int(os.environ["TASKS"])
metrics = pathlib.Path(os.environ["EFFTRAIN_RUNS"]) / "big" / "metrics.jsonl"
tasks = []
for rank in range(count):
    step = {
        "SLURM_STEP_NUM_TASKS": str(count),
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_ID": "0",
    }
    tasks.append(subprocess.Popen(sys.argv[1:], env={**os.environ, **step}))
if os.environ["SLURM_RESTART_COUNT"] == "0":  # --signal=TERM@180: to every task of the step
    while not metrics.exists() or metrics.read_text().count("\\n") < 4:
        if any(task.poll() is not None for task in tasks):
            break
        time.sleep(0.05)
    for task in tasks:
        task.send_signal(signal.SIGTERM)
codes = [task.wait() for task in tasks]
sys.exit(max(128 - code if code < 0 else code for code in codes))
"""
SCONTROL = """#!/bin/bash
if [ "$1" = show ]; then echo localhost; else echo "$@" >> requeued; fi
"""


def batch_file(number: int) -> str:
    """The first file of the page, or the same from srun on as the second has it."""
    page = (REPOSITORY / "docs" / "clusters.md").read_text()
    first, second = re.findall(r"```sh\n(.*?)```", page, re.DOTALL)
    return [first, first[: first.index("srun ")] + second][number]


def executable(path: Path, text: str) -> None:
    path.write_text(text.replace("PYTHON", sys.executable))
    path.chmod(0o755)


@pytest.mark.parametrize("number, tasks, code", [(0, 2, 75), (1, 1, 1)], ids=["srun", "torchrun"])
def test_a_job_is_stopped_before_its_limit_requeued_and_goes_on(tmp_path, number, tasks, code):
    write_recipe(tmp_path, "gpt2-117m", tokens="25_600", every="1000")
    script = (
        batch_file(number)
        .replace("--recipe gpt2-117m", "--recipe gpt2-117m.toml")
        .replace("--nproc-per-node 8", "--nproc-per-node 2")
    )
    script = script.replace(
        "head:29500", f"head:{random.randint(30000, 50000)}"
    )  # tests run beside each other
    (tmp_path / "job.sh").write_text(script)
    (tmp_path / "bin").mkdir()
    executable(tmp_path / "bin" / "srun", SRUN)
    executable(tmp_path / "bin" / "scontrol", SCONTROL)
    executable(tmp_path / "bin" / "efftrain", '#!/bin/bash\nexec PYTHON -m efftrain_cli "$@"\n')
    executable(
        tmp_path / "bin" / "torchrun", '#!/bin/bash\nexec PYTHON -m torch.distributed.run "$@"\n'
    )
    environment = {
        **os.environ,
        "PATH": f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(REPOSITORY),
        "EFFTRAIN_RUNS": str(tmp_path / "runs"),
        "EFFTRAIN_CACHE": str(tmp_path / "cache"),
        "OMP_NUM_THREADS": "1",
        "TASKS": str(tasks),
        "SLURM_JOB_ID": str(random.randint(1, 10**6)),
        "SLURM_JOB_NODELIST": "localhost",
        "SLURM_NNODES": "1",
    }

    def job(restarts: int) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", "job.sh"],
            cwd=tmp_path,
            env={**environment, "SLURM_RESTART_COUNT": str(restarts)},
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )

    stopped = job(0)
    assert stopped.returncode == code, stopped.stderr
    assert (tmp_path / "requeued").read_text() == f"requeue {environment['SLURM_JOB_ID']}\n", (
        stopped.stderr
    )
    rows = (tmp_path / "runs" / "big" / "metrics.jsonl").read_text().splitlines()
    saved = f"step-{json.loads(rows[-1])['step']:08d}"
    assert [path.name for path in (tmp_path / "runs" / "big" / "checkpoints").iterdir()] == [saved]

    finished = job(1)
    assert finished.returncode == 0, finished.stderr
    events = read_jsonl(tmp_path / "runs" / "big" / "events.jsonl")
    assert [event["status"] for event in events if event["event"] == "end"] == [
        "stopped",
        "finished",
    ]
    assert (tmp_path / "requeued").read_text().count("requeue") == 1
