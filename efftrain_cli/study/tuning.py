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
from efftrain_cli.study.plans import Plan, Settings
from efftrain_cli.trials.trial import Runner, Trial, points_of

FEW_SEEDS = 3
"""Tuning seeds below which the choice of settings deserves a caveat."""
CARRIED = -1 / 3
"""Power of the parameters by which rates are carried to larger sizes: Porian et al. 2024, arXiv
2406.19146."""
RATES = ("optim.lr", "optim.muon_lr", "optim.min_lr")
"""Keys that are carried so; other settings stay."""
TUNED = "tuned on 3 seeds: a tie is told apart in 8 to 9 % of races, not in 5"
"""What a verdict of a tuned race says of itself."""


@dataclass(frozen=True)
class Tuned:
    """What tuning came to."""

    points: Mapping[str, Settings] = field(default_factory=dict)
    """Label of an arm -> its best settings; none of an arm that is not tuned."""
    caveats: Sequence[str] = ()
    grid: pd.DataFrame = field(default_factory=pd.DataFrame)
    """The losses of all settings; empty without tuning."""


def tuning_trials(plan: Plan) -> dict[Trial, Settings]:
    """Return the runs that tune a plan's arms, each with its point of the grid."""
    points = {}
    for seed, arm in itertools.product(plan.study.tuning_seeds, plan.arms):
        if not arm.grid:
            continue
        texts = {key: [*map(toml_value, values)] for key, values in arm.grid.items()}
        more = (f"train.tokens={arm.size.middle}",) if arm.size is not None else ()
        for point in points_of(texts):
            trial = arm.trial(
                seed,
                point,
                more,
                "tune",
            )
            points[replace(trial, arm=arm.label)] = point
    return points


def tune(plan: Plan, runner: Runner) -> Tuned:
    """Train every arm over its grid; return each arm's best settings."""
    points = tuning_trials(plan)
    if not points:
        return Tuned()
    by_name = {trial.name: point for trial, point in points.items()}
    groups = group_runs(runner.train(list(points), "tuning"))
    chosen = {best.label: by_name[best.first.name] for best in best_of_each(groups)}
    caveats = carry(plan, chosen)
    seeds = len(plan.study.tuning_seeds)
    if seeds < FEW_SEEDS:
        caveats.append(
            f"settings were chosen on {counted(seeds, 'seed')}: intervals do not include this noise"
        )
    frame = grid_frame(groups, sorted(plan.varied))
    return Tuned(chosen, [*caveats, *edge_notes(frame)], frame)


def carry(plan: Plan, chosen: dict[str, Settings]) -> list[str]:
    """Add the settings of sizes that are not tuned: those of the size before, with rates by
    CARRIED. Return how the rule did at the sizes that are tuned."""
    tuned = plan.study.tuned_sizes
    notes = []
    for before, arm in itertools.pairwise(plan.arms):
        if before.name != arm.name or before.label not in chosen:
            continue
        assert before.size is not None and arm.size is not None
        factor = (arm.size.parameters / before.size.parameters) ** CARRIED
        point = carried(chosen[before.label], factor)
        if not arm.grid:
            chosen[arm.label] = point
        elif tuned:
            best = ", ".join(chosen[arm.label])
            notes.append(
                f"{arm.label}: carried from {before.size.name} {', '.join(point)}, best {best}"
            )
    if len(tuned) == 1:
        notes.append(f"rates are carried from {tuned[0]} unchecked: tune the next size too")
    return notes


def carried(point: Settings, factor: float) -> Settings:
    """Return settings with learning rates times a factor."""
    settings = []
    for setting in point:
        key, _, value = setting.partition("=")
        if key in RATES:
            value = f"{factor * float(value):.3g}"
        settings.append(f"{key}={value}")
    return tuple(settings)
