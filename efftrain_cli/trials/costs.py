"""What runs still cost: tokens, time and disk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from efftrain_cli.foundation.console import counted, human, human_seconds
from efftrain_cli.foundation.files import free_bytes
from efftrain_cli.plan.cost import disk_bytes
from efftrain_cli.plan.preview import summarize_plan
from efftrain_cli.plan.rates import seconds_left
from efftrain_cli.run.directory import runs_root
from efftrain_cli.run.metrics import last_row
from efftrain_cli.run.status import ENDED
from efftrain_cli.trials.trial import Trial, recipe_of, state_of


@dataclass(frozen=True)
class Costs:
    """What trials need that have not ended."""

    runs: int
    tokens: int
    seconds: float | None
    """One run after the other; None if nothing was measured here."""
    disk: int
    """Bytes."""

    @property
    def time(self) -> str:
        """The seconds in words."""
        if not self.runs:
            return "nothing is left to train"
        if self.seconds is None:
            return "time unknown: nothing was measured here"
        return f"about {human_seconds(self.seconds)} (by earlier runs)"

    def __str__(self) -> str:
        if not self.runs:
            return self.time
        parts = [
            counted(self.runs, "run"),
            f"{human(self.tokens)} tokens",
            self.time,
            f"{human(self.disk, 'B')} of disk",
        ]
        return ", ".join(parts)


def costs_of(trials: Sequence[Trial], weights_only: bool = False) -> Costs:
    """Return what trials of recipes still need.

    Args:
        weights_only: finished runs keep their last weights only.
    """
    left = [trial for trial in trials if state_of(trial) not in ENDED]
    recipes = list(map(recipe_of, left))
    tokens = list(map(tokens_left, left))
    seconds = []
    for recipe, needed in zip(recipes, tokens, strict=True):
        time = seconds_left(recipe, needed)
        if time is not None:
            seconds.append(time)
    return Costs(
        runs=len(left),
        tokens=sum(tokens),
        seconds=sum(seconds) if len(seconds) == len(left) else None,
        disk=sum(disk_bytes(recipe, weights_only) for recipe in recipes),
    )


def tokens_left(trial: Trial) -> int:
    """Return the tokens that a trial still needs."""
    recipe = recipe_of(trial)
    tokens = recipe.train.tokens
    if trial.until is not None:
        tokens = summarize_plan(recipe, until=trial.until).tokens
    done = last_row(runs_root() / trial.name).get("tokens") or trial.begun
    return max(0, tokens - int(done))


def disk_lines(costs: Costs) -> list[str]:
    """Return a warning if the disk has no room for all runs."""
    free = free_bytes(runs_root())
    if costs.disk <= free:
        return []
    return [
        f"warning: {human(costs.disk, 'B')} needed, {human(free, 'B')} free:"
        " lower checkpoint.keep, or set EFFTRAIN_RUNS to another disk"
    ]
