"""Arms, runs that differ in their seed alone, and the pairs of runs by which arms are compared."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch

import numpy as np

from efftrain_cli.foundation.errors import UsageError
from efftrain_cli.recipe.recipe import methods_among
from efftrain_cli.run.reading import Run

STUCK_AT = 0.2
"""Share of the tokens at which the baseline's median loss is the level of a stuck run."""


@dataclass(frozen=True, eq=False)
class Arm:
    """Runs of one recipe and setting, one per seed."""

    label: str
    runs: tuple[Run, ...]
    stuck_above: float = math.inf
    """Final loss above which a run is stuck, nats per token."""

    @property
    def first(self) -> Run:
        """The run of the lowest seed: all share its recipe and settings."""
        return self.runs[0]

    @property
    def scale(self) -> tuple[str, float, float]:
        """Recipe, size and budget: settings are chosen among arms that share them."""
        first = self.first
        return first.arm, first.size, first.budget

    @property
    def rank(self) -> tuple[int, float]:
        """Sort key of the best setting: fewest runs without a final loss, then the lowest mean."""
        losses = [run.final_loss for run in self.runs]
        known = [loss for loss in losses if not math.isnan(loss)]
        missing = len(losses) - len(known)
        mean = np.mean(known or [math.inf])
        return missing, float(mean)

    def status_of(self, run: Run) -> str:
        """Return how a run ended: as `Run.status`, or "stuck"."""
        if run.final_loss > self.stuck_above:
            return "stuck"
        return run.status


def ordered_arms(arms: Sequence[Arm], baseline: str | None) -> list[Arm]:
    """Return arms with names of their own and the level of stuck runs, the baseline first.

    Args:
        baseline: name of an arm or run, or a glob; default: the first recipe without a method.

    Raises:
        UsageError: `baseline` is not one arm.
    """
    arms = list(arms)
    recipes = Counter(arm.label for arm in arms)
    for number, arm in enumerate(arms):
        if recipes[arm.label] > 1:
            # Runs are named by their settings.
            label = arm.first.name.removesuffix(f"-seed{arm.first.seed}")
            arms[number] = replace(arm, label=label)

    base = find_baseline(arms, baseline)
    level = stuck_level(base)
    # Sorting keeps the order of the others.
    ordered = sorted(arms, key=lambda arm: arm is not base)
    return [replace(arm, stuck_above=level) for arm in ordered]


def group_runs(runs: Iterable[Run]) -> list[Arm]:
    """Return an arm for each recipe and setting.

    Raises:
        UsageError: two runs have one recipe, setting and seed.
    """
    groups: dict[str, dict[int, Run]] = {}
    for run in runs:
        settings = sorted(run.settings.items())
        identity = f"{run.arm} {settings}"
        by_seed = groups.setdefault(identity, {})
        other = by_seed.setdefault(run.seed, run)
        if other is not run:
            raise UsageError(
                f"{other.name} and {run.name} have the same recipe and seed:"
                " not independent samples\n  name one of them"
            )
    arms = []
    for by_seed in groups.values():
        ordered = [by_seed[seed] for seed in sorted(by_seed)]
        arm = Arm(ordered[0].arm, tuple(ordered))
        arms.append(arm)
    return arms


def best_of_each(
    arms: Iterable[Arm],
    kind: Callable[[Arm], Hashable] = lambda arm: arm.first.arm,
) -> list[Arm]:
    """Return the best setting of each kind of arm, the best first; by default of each recipe."""
    best: dict[Hashable, Arm] = {}
    for arm in sorted(arms, key=lambda arm: arm.rank):
        best.setdefault(kind(arm), arm)
    return list(best.values())


def best_at_scales(arms: Iterable[Arm]) -> list[Arm]:
    """Return the best setting of each recipe, size and budget."""
    return best_of_each(arms, lambda arm: arm.scale)


def best_settings(arms: Sequence[Arm]) -> list[Arm]:
    """Return each recipe at its best setting, at the largest scale that all recipes have.

    If all arms are settings of one recipe, return them all: they are what is compared.
    """
    recipes = {arm.first.arm for arm in arms}
    if len(recipes) == 1:
        return list(arms)
    best = best_at_scales(arms)
    recipes_at = Counter(arm.scale[1:] for arm in best)

    def reach(arm: Arm) -> tuple[bool, float, float]:
        _, size, budget = arm.scale
        is_shared = recipes_at[size, budget] == len(recipes)
        return is_shared, size, budget

    largest = {}
    for arm in sorted(best, key=reach):
        # A later arm replaces an earlier one of its recipe.
        largest[arm.first.arm] = arm
    return [arm for arm in arms if arm in largest.values()]


def find_baseline(
    arms: Sequence[Arm],
    name: str | None,
) -> Arm:
    """Return the arm that `name` means; without one, the first arm without a method.

    Raises:
        UsageError: the name means no arm, or several.
    """
    if name is None:
        plain = [arm for arm in arms if not method_sections(arm.first.settings)]
        return (plain or arms)[0]
    matches = []
    for arm in arms:
        names = [arm.label, arm.first.arm]
        names += [run.name for run in arm.runs]
        if any(fnmatch(each, name) for each in names):
            matches.append(arm)
    if len(matches) != 1:
        labels = ", ".join(arm.label for arm in arms)
        raise UsageError(f"--baseline {name!r} means {len(matches)} arms\n  choose of {labels}")
    return matches[0]


def method_sections(keys: Iterable[str]) -> set[str]:
    """Return the sections of methods among those of dotted keys."""
    sections = {key.partition(".")[0]: True for key in keys}
    return {*methods_among(sections)}


def stuck_level(base: Arm) -> float:
    """Return the baseline's median loss at STUCK_AT of the tokens; infinite if unknown."""
    losses = []
    for run in base.runs:
        tokens = run.curve.tokens.to_numpy()
        share = tokens / run.spent("tokens")
        if run.status == "finished" and share.min() < STUCK_AT:
            val_loss = run.curve.val_loss.to_numpy()
            loss = np.interp(STUCK_AT, share, val_loss)
            losses.append(loss)
    median = np.median(losses or [math.inf])
    return float(median)


# --- pairs ----------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Pairs:
    """The runs of a baseline and an arm that are compared."""

    arm: str
    kept: list[list[Run]]
    """Finished runs of both sides without the failed, the stuck and their partners."""
    failed: list[int]
    """Numbers of runs that diverged or ended stuck, of both sides."""
    total: list[int]
    pending: list[str]
    """Names of runs that may still finish."""
    unshared: list[str]
    """Names of runs that are left out because the other side lacks their seed."""
    is_paired: bool

    @property
    def runs(self) -> list[Run]:
        """The runs that are kept on both sides."""
        base, arm = self.kept
        return base + arm

    @property
    def fewest(self) -> int:
        """Number of runs that are kept on the smaller side."""
        return min(map(len, self.kept))

    @property
    def shares(self) -> tuple[float, float]:
        """Shares of runs that diverged or ended stuck."""
        base, arm = np.divide(self.failed, self.total)
        return base, arm

    @property
    def remarks(self) -> str:
        """What decides beside the values: failed and stuck runs, and missing partners."""
        remarks = []
        if any(self.failed):
            base, arm = map("{} of {}".format, self.failed, self.total)
            remarks.append(f"failed or stuck: {arm}, baseline {base}")
        if not self.is_paired:
            remarks.append("no shared seed: Welch's test of all runs")
        return "; ".join(remarks)


def pair_up(base: Arm, arm: Arm) -> Pairs:
    """Pair the runs of two arms by seed; if they share no seed, compare them all unpaired."""
    shared = {run.seed for run in base.runs} & {run.seed for run in arm.runs}
    sides = []
    failed = []
    pending: list[str] = []
    unshared: list[str] = []
    left_out: set[int] = set()
    for each in (base, arm):
        side = []
        failures = 0
        for run in each.runs:
            if shared and run.seed not in shared:
                unshared.append(run.name)
                continue
            side.append(run)
            if run.is_pending:
                pending.append(run.name)
                left_out.add(run.seed)
            elif each.status_of(run) != "finished":
                failures += 1
                left_out.add(run.seed)
        sides.append(side)
        failed.append(failures)

    kept = []
    for side in sides:
        kept.append([run for run in side if run.seed not in left_out])
    return Pairs(
        arm=arm.label,
        kept=kept,
        failed=failed,
        total=[len(side) for side in sides],
        pending=pending,
        unshared=unshared,
        is_paired=bool(shared),
    )
