"""Tuning the arms of a plan: every point of each arm's grid, on seeds of their own."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import pandas as pd

from efftrain_cli.compare.arms import best_of_each, group_runs
from efftrain_cli.compare.grids import edge_notes, grid_frame
from efftrain_cli.foundation.console import counted
from efftrain_cli.recipe.toml import toml_value
from efftrain_cli.study.plans import Grid, Plan, PlannedArm, Settings
from efftrain_cli.trials.trial import Runner, Trial, setting_word

Point = dict[str, str]
"""Recipe key -> value, as TOML."""
FEW_SEEDS = 3
"""Tuning seeds below which the choice of settings deserves a caveat."""
CARRIED = -1 / 3
"""Power of the parameters by which rates are carried to larger sizes: Porian et al. 2024, arXiv
2406.19146."""
TUNED = "tuned on 3 seeds: a tie is told apart in 8 to 9 % of races, not in 5"
"""What a verdict of a tuned race says of itself."""


@dataclass(frozen=True)
class Tuned:
    """What tuning came to."""

    points: Mapping[str, Point]
    """Label of an arm -> its best settings; none of an arm that is not tuned."""
    caveats: Sequence[str] = ()
    grid: pd.DataFrame = field(default_factory=pd.DataFrame)
    """The losses of all settings; empty without tuning."""

    def trials(
        self,
        arm: PlannedArm,
        seed: int,
    ) -> list[Trial]:
        """Return the runs of an arm and seed at its best settings."""
        point = self.points.get(arm.label, {})
        return arm.trials(
            seed,
            settings_of(point),
            *words_of(point),
        )


def tuning_trials(plan: Plan) -> dict[Trial, Point]:
    """Return the runs that tune a plan's arms, each with its settings."""
    points = {}
    for seed, arm in itertools.product(plan.tuning_seeds, plan.arms):
        for point in points_of(arm.grid):
            settings = settings_of(point)
            if arm.size is not None:
                settings = (*settings, f"train.tokens={arm.size.middle}")
            trial = arm.trial(
                seed,
                settings,
                *words_of(point),
                "tune",
            )
            points[replace(trial, arm=arm.label)] = point
    return points


def tune(plan: Plan, runner: Runner) -> Tuned:
    """Train every arm over its grid; return each arm's best settings."""
    points = tuning_trials(plan)
    if not points:
        return Tuned({})
    by_name = {trial.name: point for trial, point in points.items()}
    groups = group_runs(runner.train(list(points), "tuning"))
    chosen = {best.label: by_name[best.first.name] for best in best_of_each(groups)}
    caveats = carry(plan, chosen)
    if len(plan.tuning_seeds) < FEW_SEEDS:
        seeds = counted(len(plan.tuning_seeds), "seed")
        caveats.append(f"settings were chosen on {seeds}: intervals lack this noise")
    frame = grid_frame(groups, sorted(plan.varied))
    return Tuned(
        chosen,
        [*caveats, *edge_notes(frame)],
        frame,
    )


def carry(plan: Plan, chosen: dict[str, Point]) -> list[str]:
    """Add the settings of sizes that are not tuned: those of the size before, with rates by
    CARRIED. Return what the rule would have carried to the sizes that are tuned."""
    checks = []
    for before, arm in itertools.pairwise(plan.arms):
        last = chosen.get(before.label)
        if before.size is None or arm.size is None or before.name != arm.name or last is None:
            continue
        factor = (arm.size.parameters / before.size.parameters) ** CARRIED
        point = {}
        for key, value in last.items():
            point[key] = f"{factor * float(value):.3g}" if key.endswith("lr") else value
        if not arm.grid:
            chosen[arm.label] = point
        elif not all(each.grid for each in plan.baselines):
            best = ", ".join(chosen[arm.label].values())
            carried = ", ".join(point.values())
            checks.append(f"{arm.label}: carried from {before.size.name} {carried}, best {best}")
    return checks


def points_of(grid: Grid) -> list[Point]:
    """Return every combination of a grid's values; none of an empty grid."""
    points = []
    if grid:
        for values in itertools.product(*grid.values()):
            texts = map(toml_value, values)
            points.append(
                dict(
                    zip(
                        grid,
                        texts,
                        strict=True,
                    )
                )
            )
    return points


def settings_of(point: Point) -> Settings:
    """Return a point as overrides."""
    return tuple(f"{key}={value}" for key, value in point.items())


def words_of(point: Point) -> list[str]:
    """Return a point as parts of a run's name."""
    return [*itertools.starmap(setting_word, point.items())]
