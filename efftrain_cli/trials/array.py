"""`--array`: the runs of a sweep or of a study's next look as a Slurm job array instead of
processes of this machine.

Two files: an sbatch script, and beside it the list of the runs, named by its hash, so that a
pending array keeps its own list when a later one is written.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from efftrain_cli.foundation.console import counted
from efftrain_cli.foundation.errors import StoppedError
from efftrain_cli.foundation.files import make_folder, write_whole
from efftrain_cli.foundation.records import text_digest
from efftrain_cli.run.directory import runs_root
from efftrain_cli.run.status import ENDED
from efftrain_cli.trials.runner import add_members, begin_arguments, read_trial
from efftrain_cli.trials.trial import Trial, check_trials

if TYPE_CHECKING:
    from efftrain_cli.run.reading import Run

SCRIPT = """\
#!/bin/bash
#SBATCH --job-name={job}
#SBATCH --array=0-{last}%{jobs}
#SBATCH --nodes=1
#SBATCH --ntasks-per-node={devices}
#SBATCH --signal=TERM@180
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output="{logs}/%x-%A_%a.log"
# Task i trains the run in line i + 1 of the list: its name, a tab, and the options that begin it.
cd {here} || exit 2
export EFFTRAIN_RUNS={runs} EFFTRAIN_STUDY={study} PYTHONSAFEPATH={safe_path}
IFS=$'\\t' read -r name begin < <(sed -n "$((SLURM_ARRAY_TASK_ID + 1))p" {list})
eval "options=($begin)"
if [ -d "$EFFTRAIN_RUNS/$name" ]; then options=(--resume "$name" --from-start); fi
srun {python} -P -m efftrain_cli pretrain --device {device} "${{options[@]}}"
code=$?
# Not SLURM_JOB_ID: that of an array's last task names the whole array.
if [ "$code" = 75 ]; then scontrol requeue "${{SLURM_ARRAY_JOB_ID}}_$SLURM_ARRAY_TASK_ID"; fi
# A run that diverges is a result.
if [ "$code" = 4 ]; then code=0; fi
exit "$code"
"""


@dataclass(frozen=True, kw_only=True)
class ArrayWriter:
    """Writes the job array of trials where `TrialRunner` would train them."""

    folder: Path
    """Where script, list and the tasks' output go."""
    device: str
    devices: int
    """Processes that share each run, on one node."""
    jobs: int
    """Tasks that Slurm runs at once."""
    study: str = ""
    """As of `TrialRunner`."""

    def train(self, trials: Sequence[Trial], title: str = "runs") -> list[Run]:
        """Return the runs if all have ended; else write the array of those that are left.

        Raises:
            StoppedError: runs are left: the message says how to submit them.
            UsageError: a run has the name of a trial and another recipe.
        """
        states = check_trials(trials)
        if self.study:
            add_members(self.folder, trials)
        pending = [trial for trial in trials if states[trial.name] not in ENDED]
        if not pending:
            return list(map(read_trial, trials))
        left = [trial for trial in pending if states[trial.name] != "running"]
        text = f"{counted(len(pending), 'run')} left, all of them under way"
        if left:
            text = (
                f"{len(left)} of {counted(len(trials), 'run')} left, {self.jobs} at once (--jobs)\n"
                f"  submit them: sbatch {shlex.quote(str(self._write(left)))}"
            )
        raise StoppedError(f"{title}: {text}\n  give this command again when they have ended")

    def _write(self, trials: Sequence[Trial]) -> Path:
        lines = [f"{trial.name}\t{shlex.join(begin_arguments(trial))}\n" for trial in trials]
        text = "".join(lines)
        listed = self.folder / f"array-{text_digest(text)[:8]}.txt"
        logs = self.folder / "logs"
        make_folder(logs)
        write_whole(listed, text)
        script = listed.with_suffix(".sbatch")
        values = SCRIPT.format(
            job=self.folder.name,
            last=len(trials) - 1,
            jobs=self.jobs,
            devices=self.devices,
            logs=logs.absolute(),
            here=shlex.quote(str(Path.cwd())),
            runs=shlex.quote(str(runs_root().absolute())),
            study=self.study,
            list=shlex.quote(str(listed.absolute())),
            python=shlex.quote(sys.executable),
            safe_path=os.environ.get("PYTHONSAFEPATH", ""),
            device=shlex.quote(self.device),
        )
        write_whole(script, values)
        return script
