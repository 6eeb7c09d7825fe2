"""`--array` with a stand-in for Slurm: stopped and killed tasks are requeued and continue, phase
after phase."""

from __future__ import annotations

import fcntl
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from efftrain_cli.foundation.errors import StoppedError
from efftrain_cli.trials.array import ArrayWriter
from efftrain_cli.trials.trial import grid
from tests.conftest import REPOSITORY, cli
from tests.faults.test_clusters import executable
from tests.trials.stubs import STUDY, both, write_trial

SRUN = """#!PYTHON
import os, pathlib, signal, subprocess, sys, time
options = sys.argv[1:]
name = options[options.index("--resume" if "--resume" in options else "--name") + 1]
run = pathlib.Path(os.environ["EFFTRAIN_RUNS"]) / name
task = subprocess.Popen(options)
kill = {"0": signal.SIGTERM, "1": signal.SIGKILL}.get(os.environ["SLURM_ARRAY_TASK_ID"])
if kill and os.environ["SLURM_RESTART_COUNT"] == "0":
    while task.poll() is None and not (run / "metrics.jsonl").exists():
        time.sleep(0.01)
    while task.poll() is None and (run / "metrics.jsonl").read_text().count("\\n") < 7:
        time.sleep(0.01)
    task.send_signal(kill)
code = task.wait()
sys.exit(128 - code if code < 0 else code)
"""
SCONTROL = """#!/bin/bash
echo "$@" >> requeued
"""


def array_of(text: str) -> Path:
    """The script that a command says to submit."""
    return Path(re.findall(r"submit them: sbatch (\S+)", text)[0])


def names_in(script: Path) -> list[str]:
    listed = script.with_suffix(".txt").read_text().splitlines()
    return [line.split("\t")[0] for line in listed]


def submit(folder: Path, script: Path, begin: int = 0) -> list[int]:
    """Run an array one task after the other, each again if it is requeued or was killed; the last
    exit codes. From restart 1 on, none is stopped."""
    first, last, _ = map(int, re.findall(r"--array=(\d+)-(\d+)%(\d+)", script.read_text())[0])
    codes = []
    for task in range(first, last + 1):
        for restarts in range(begin, 3):
            code = subprocess.run(
                ["bash", str(script)],
                cwd="/",
                env={
                    **os.environ,
                    "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
                    "PYTHONPATH": str(REPOSITORY),
                    "OMP_NUM_THREADS": "1",
                    "SLURM_ARRAY_JOB_ID": "77",
                    "SLURM_ARRAY_TASK_ID": str(task),
                    "SLURM_RESTART_COUNT": str(restarts),
                },
                timeout=300,
                check=False,
            ).returncode
            if code not in (75, 128 + 9):
                break
        codes.append(code)
    return codes


def stand_in(folder: Path) -> None:
    (folder / "bin").mkdir()
    executable(folder / "bin" / "srun", SRUN)
    executable(folder / "bin" / "scontrol", SCONTROL)


@pytest.mark.slow
def test_a_study_is_trained_by_arrays_phase_by_phase(folder, efftrain):
    stand_in(folder)
    (folder / "small.toml").write_text(STUDY)
    words = ["study", "small.toml", "--device", "cpu", "--array", "--jobs", "3"]

    tuning = efftrain(*words, code=75)
    assert "tuning: 4 of 4 runs left, 3 at once (--jobs)" in tuning.stderr
    script = array_of(tuning.stderr)
    assert "#SBATCH --array=0-3%3\n" in script.read_text()
    assert (folder / "runs" / "small-study" / "plan.json").is_file(), "it is registered"
    assert submit(folder, script) == [0, 0, 0, 0]
    assert (folder / "requeued").read_text() == "requeue 77_0\n"
    stopped, killed = names_in(script)[:2]
    for name in (stopped, killed):
        events = (folder / "runs" / name / "events.jsonl").read_text().splitlines()
        kinds = [json.loads(line)["event"] for line in events]
        assert kinds.count("start") == 1 and kinds.count("resume") == 1

    judged = efftrain(*words, code=75)
    assert "2 pairs: 4 of 4 runs left" in judged.stderr
    script = array_of(judged.stderr)
    assert [re.sub("-lr[^-]*(-3)?", "", name) for name in names_in(script)] == [
        "small-plain-seed5",
        "small-warm-seed5",
        "small-plain-seed6",
        "small-warm-seed6",
    ]
    assert submit(folder, script, begin=1) == [0, 0, 0, 0]
    origin = json.loads((folder / "runs" / names_in(script)[-1] / "origin.json").read_text())
    assert origin["study"] == "small"

    done = efftrain(*words)
    assert "warm is equivalent to plain within 4 in final loss" in done.stdout


def test_an_array_names_the_runs_that_are_left_and_nobody_trains(folder):
    trials = grid(["plain.toml", "warm.toml"], (0, 1), {"optim.betas": ["[0.9, 0.99]"]})
    writer = ArrayWriter(folder=folder / "logs", device="cpu", devices=2, jobs=1)
    write_trial(trials[0])
    write_trial(trials[1], 4)
    write_trial(trials[2], 75)
    lock = (folder / "runs" / trials[2].name / "lock").open("w")
    fcntl.flock(lock, fcntl.LOCK_EX)
    with pytest.raises(StoppedError) as stopped:
        writer.train(trials)
    script = array_of(str(stopped.value))
    (line,) = script.with_suffix(".txt").read_text().splitlines()
    assert line == (
        f"{trials[3].name}\t--recipe warm.toml --seed 1 --name {trials[3].name} "
        "--set 'optim.betas=[0.9, 0.99]'"
    )
    text = script.read_text()
    assert "#SBATCH --array=0-0%1\n" in text and "#SBATCH --ntasks-per-node=2\n" in text
    assert f"{sys.executable} -P -m efftrain_cli pretrain --device cpu" in text
    with pytest.raises(StoppedError, match="1 run left, all of them under way"):
        writer.train(trials[:3])
    lock.close()
    assert [run.status for run in writer.train(trials[:2])] == ["finished", "diverged"]


def test_a_sweep_is_compared_once_its_array_has_ended(folder):
    words = ["sweep", "plain.toml", "warm.toml", "--seeds", "0", "--array", "--jobs", "8"]
    with pytest.raises(StoppedError) as stopped:
        cli(*words)
    assert "#SBATCH --array=0-1%8\n" in array_of(str(stopped.value)).read_text()
    for trial in both(0):
        write_trial(trial)
    assert "warm against plain is not judged in final loss" in cli(*words).stdout
