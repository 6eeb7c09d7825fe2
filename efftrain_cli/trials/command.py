"""Training by any program: its command, run once per trial, and the losses that it prints."""

from __future__ import annotations

import fcntl
import math
import os
import re
import subprocess
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path

import pandas as pd

from efftrain_cli.compare.sources import read_table
from efftrain_cli.foundation.console import say
from efftrain_cli.foundation.errors import EfftrainError, StoppedError, UsageError
from efftrain_cli.foundation.files import make_folder, write_whole
from efftrain_cli.foundation.signals import describe_end, end_with
from efftrain_cli.run.reading import CURVE, Run
from efftrain_cli.trials.trial import Trial, check_names, last_lines

METRIC = r"val[_ ]loss[ :=]+(\S+)"
"""Regular expression of a printed loss."""


@dataclass(frozen=True)
class CommandRunner:
    """Trains by commands of the user, and reads losses from what they print."""

    table: Path
    """CSV file of the runs so far, which `read_table` reads."""
    metric: str
    """Regular expression of a printed loss.

    Its groups `val_loss`, `step`, `tokens`, `flops` and `seconds` are columns of the curve; a
    single group without a name is the loss. The last match is the final loss; one that is not
    finite is a run that diverged.
    """
    _: KW_ONLY
    failed_exit: int | None
    """Exit code of a command whose training diverged."""

    def train(self, trials: Sequence[Trial], title: str = "") -> list[Run]:
        """Train trials by their commands, as `Runner.train`.

        Raises:
            EfftrainError: a command failed, or printed no loss; what was trained is kept.
        """
        check_names(trials)
        make_folder(self.table.parent)
        for number, each in enumerate(trials, 1):
            with self.table.with_name("lock").open("a") as lock:
                # Another race of this command may be training its baseline.
                fcntl.flock(lock, fcntl.LOCK_EX)
                if each.name not in self.read():
                    say(f"[{number}/{len(trials)}] {each.arm} seed {each.seed}")
                    self.run_command(each)
        runs = self.read()
        return [runs[each.name] for each in trials]

    def read(self) -> dict[str, Run]:
        """Return the runs so far by name."""
        if not self.table.exists():
            return {}
        return {run.name: run for run in read_table(self.table)}

    def run_command(self, each: Trial) -> None:
        """Run the command of a trial, and add its curve to the table."""
        command = fill_in(each.recipe, each)
        parent = os.getpid()
        try:
            ended = subprocess.run(
                command,
                shell=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env={**os.environ, "SEED": str(each.seed)},
                preexec_fn=lambda: end_with(parent),
                check=False,
            )
        except KeyboardInterrupt:
            raise StoppedError(
                f"stopped by SIGINT in {each.name}; earlier runs are kept\n"
                "  give the same command again to continue"
            ) from None
        output = ended.stdout.decode("utf-8", "replace")
        has_failed = ended.returncode == self.failed_exit
        curve = curve_of(self.metric, output)
        if not has_failed and (ended.returncode or curve.empty):
            raise command_error(command, ended.returncode, output)
        if curve.empty:
            curve = pd.DataFrame({"val_loss": [math.nan]})
        curve["failed"] = has_failed or not math.isfinite(curve.val_loss.iloc[-1])
        curve = curve.assign(run=each.name, arm=each.arm, seed=each.seed)
        if self.table.exists():
            curve = pd.concat([pd.read_csv(self.table), curve])
        # The table is whole at every instant: a killed race continues from it.
        write_whole(self.table, curve.to_csv(index=False))


def check_metric(metric: str) -> None:
    """Check a regular expression of a printed loss.

    Raises:
        UsageError: it is none, or names no loss.
    """
    try:
        pattern = re.compile(metric)
    except re.error as error:
        raise UsageError(f"--metric {metric!r} is no regular expression: {error}") from None
    unknown = set(pattern.groupindex) - {*CURVE}
    is_one_group = pattern.groups == 1 and not pattern.groupindex
    if unknown or not (is_one_group or "val_loss" in pattern.groupindex):
        raise UsageError(
            f"--metric {metric!r} does not say which group is the loss\n"
            f"  give one group, or named ones: {', '.join(reversed(CURVE))}"
        )


def check_command(command: str) -> None:
    """Check that a command depends on seed and arm.

    Raises:
        UsageError: it lacks a place for one of them.
    """
    reads_seed = "{seed}" in command or "SEED" in command
    for place, is_read in (("{seed}", reads_seed), ("{arm}", "{arm}" in command)):
        if not is_read:
            raise UsageError(
                f"--command {command!r} has no {place}: its runs would be one run\n"
                "  write it as 'python train.py --seed {seed} --opt {arm}'"
            )


def fill_in(command: str, each: Trial) -> str:
    """Return a command with arm and seed at their places; other braces stay."""
    return command.replace("{arm}", each.arm).replace("{seed}", str(each.seed))


def curve_of(metric: str, output: str) -> pd.DataFrame:
    """Return a row per match of a regular expression; of repeated steps the last."""
    rows = []
    for match in re.finditer(metric, output):
        rows.append(match.groupdict() or {"val_loss": match[1]})
    curve = pd.DataFrame(rows).apply(pd.to_numeric, errors="coerce")
    if "step" not in curve:
        # Without a step only the last match is known to be at the end.
        return curve[-1:]
    return curve.drop_duplicates("step", keep="last")


def command_error(
    command: str,
    code: int,
    output: str,
) -> EfftrainError:
    """Return the error of a command that failed or printed no loss, with its last lines."""
    rest = f"its last lines:\n{last_lines(output)}"
    if code:
        how, _ = describe_end(code)
        return EfftrainError(
            f"{command}\n  {how}; earlier runs are kept, the same command continues; {rest}"
        )
    return UsageError(f"{command}\n  printed nothing that matches --metric; {rest}")
