"""Have steps of a sweep's or study's recipes timed side by side, once their runs have ended."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

from efftrain_cli.compare.calibrated import with_calibration
from efftrain_cli.compare.comparability import why_seconds_differ
from efftrain_cli.compare.groups import finished_runs, group_runs, runs_of
from efftrain_cli.compare.reading import RunNumbers
from efftrain_cli.foundation.console import counted, say, silent
from efftrain_cli.foundation.signals import end_with
from efftrain_cli.run.calibrations import read_calibrations

LEAST_SECONDS = 100.0
"""Training seconds of all runs from which they are timed: 2 % of fewer is less than a process needs
to start."""


def calibrate_once(runs: Sequence[RunNumbers], device: str) -> None:
    """Time steps of these runs' recipes in a process of its own, unless a calibration holds them.

    A failure is a warning. Nothing is timed if no verdict on seconds could come of it.
    """
    groups = group_runs(finished_runs(runs), allow=True)
    ended = runs_of(groups)
    # In blocks of a study a group may have one seed, and its arm several.
    too_few = min(len(groups), len({run.seed for run in ended})) < 2
    if too_few or sum(run.seconds for run in ended) < LEAST_SECONDS or why_seconds_differ(ended):
        return
    if all(group.blocks for group in with_calibration(groups, read_calibrations().valid)):
        return
    if not silent():
        say(f"timing steps of {counted(len(groups), 'recipe')} side by side, for seconds")
    command = [sys.executable, "-m", "efftrain_cli", "calibrate", "--quiet", "--device", device]
    command += [run.name for run in ended]
    parent = os.getpid()
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=lambda: end_with(parent),
    )
    if done.returncode:
        reason = done.stderr.strip() or f"exit code {done.returncode}"
        say(f"warning: steps were not timed, so seconds are not judged: {reason}")
