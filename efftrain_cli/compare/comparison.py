"""Comparing runs: arms, results and caveats. Screens, files and figures only show what is here."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pandas as pd

from efftrain_cli.compare.arms import (
    Arm,
    best_at_scales,
    best_settings,
    group_runs,
    ordered_arms,
    pair_up,
)
from efftrain_cli.compare.checks import (
    describe_changes,
    describe_differences,
    find_caveats,
    find_refusals,
    find_unshared,
)
from efftrain_cli.compare.figures import figures_of
from efftrain_cli.compare.grids import choice_notes, edge_notes, grid_frame, varied_keys
from efftrain_cli.compare.judge import Claim, Result, decide, judge
from efftrain_cli.compare.ladder import Ladder, ladder_of
from efftrain_cli.compare.measures import measures_of
from efftrain_cli.foundation.errors import UsageError
from efftrain_cli.run.reading import CURVE, Run, differing_keys

if TYPE_CHECKING:
    from matplotlib.figure import Figure

REFUSALS = 5
"""Most reasons of a refusal that are listed."""


@dataclass(frozen=True, eq=False)
class Comparison:
    """Arms, and how they differ from the first, their baseline."""

    arms: list[Arm]
    rows: list[Result]
    """A row per measure and arm."""
    differences: list[str]
    """Sentences: settings that differ though they are not the method's."""
    changes: list[str]
    """Sentences: what an arm changed beside its own settings."""
    caveats: list[str]
    ladder: Ladder
    grid: pd.DataFrame
    """Losses of the settings that arms were chosen from; empty if each has one: `grid_frame`."""

    @property
    def verdicts(self) -> list[Result]:
        """The rows of claims."""
        return [row for row in self.rows if row.direction]

    @property
    def results(self) -> pd.DataFrame:
        """The rows as a frame: what CSV, JSON and a notebook show."""
        return pd.DataFrame(self.rows)

    @property
    def gains(self) -> pd.DataFrame:
        """The compute multipliers by size; empty if the baseline has one budget."""
        return self.ladder.gains

    @property
    def settings(self) -> pd.DataFrame:
        """The settings that differ, with the value of each arm."""
        rows = []
        for key in differing_keys([arm.first.settings for arm in self.arms]):
            values = {arm.label: arm.first.settings.get(key, "-") for arm in self.arms}
            rows.append({"setting": key, **values})
        return pd.DataFrame(rows)

    @property
    def runs(self) -> pd.DataFrame:
        """A row per run: how it ended and what it spent."""
        rows = []
        for arm in self.arms:
            for run in arm.runs:
                row = {
                    "arm": arm.label,
                    "seed": run.seed,
                    "run": run.name,
                    "status": arm.status_of(run),
                    **{name: run.spent(name) for name in CURVE},
                }
                rows.append(row)
        return pd.DataFrame(rows)

    def figures(self) -> list[Figure]:
        """Draw every figure for which there are data."""
        return figures_of(
            self.arms,
            self.rows,
            self.grid,
            self.ladder,
        )

    @property
    def frames(self) -> dict[str, pd.DataFrame]:
        """Everything that is a table, by title."""
        return {
            "results": self.results,
            "gains": self.gains,
            "grid": self.grid,
            "settings": self.settings,
            "runs": self.runs,
        }


def compare(
    runs: Iterable[Run],
    *,
    baseline: str | None = None,
    claims: Sequence[Claim] = (Claim(),),
    target: float | None = None,
    alpha: float = 0.05,
    share: float = 1.0,
    every_setting: bool = False,
    allow: bool = False,
    closed: Sequence[Result] = (),
    races: int = 1,
    maximize: bool = False,
    varied: Collection[str] = (),
) -> Comparison:
    """Compare arms with a baseline.

    Args:
        baseline: see `ordered_arms`.
        claims: what is judged; default: whether the final loss differs.
        target: loss to reach, nats per token; default: that of a claim, if it has one.
        share: share of alpha that may be spent: see `shares`.
        allow: show losses that do not compare, and judge nothing.
        closed: claims that are not judged again.
        races: see `decide`.
        maximize: see `measures_of`.
        varied: keys that were varied on purpose.

    Raises:
        UsageError: losses do not compare, or there is one arm only.
    """
    runs = list(runs)
    every = group_runs(runs)
    chosen = every if every_setting else best_settings(every)
    base, *others = arms = ordered_arms(chosen, baseline)
    if len({arm.label for arm in arms}) < max(2, len(arms)):
        raise UsageError(
            "a comparison needs two arms or more, each with its own name\n"
            "  name runs of another recipe or setting"
        )
    compared: list[Run] = []
    for arm in arms:
        compared += arm.runs
    caveats = find_caveats(compared)
    is_one_recipe = len({arm.first.arm for arm in arms}) == 1
    if is_one_recipe and baseline is None:
        claims = ()
        caveats.append("settings of one recipe: --baseline names one to judge the others by")
    scales = {arm.scale for arm in arms}
    rivals = [arm for arm in every if arm.scale in scales]
    grid = grid_frame(rivals, varied_keys(rivals))
    caveats += edge_notes(grid)
    if len(chosen) < len(every):
        caveats += choice_notes(grid)
    refusals = find_refusals(compared)
    if refusals and not allow:
        faults = "".join(f"  - {refusal}\n" for refusal in refusals[:REFUSALS])
        raise UsageError(
            f"these losses do not compare:\n{faults}"
            "  leave out one side of each line, or pass --allow to show them unjudged"
        )
    if refusals:
        claims = ()
        caveats = [*(f"NOT COMPARABLE: {refusal}" for refusal in refusals), *caveats]

    by_measure: dict[str, Claim] = {}
    for claim in claims:
        by_measure[claim.measure] = claim
        target = target or claim.target
    pairs = [pair_up(base, arm) for arm in others]
    caveats += find_unshared(pairs)
    results = []
    ladder = ladder_of(best_at_scales(every), base.first.arm)
    for measure in measures_of(
        runs,
        target,
        maximize,
        ladder.logs,
    ):
        for each in pairs:
            result = judge(
                each,
                measure,
                level=alpha * share,
                claim=by_measure.get(measure.key),
                claims=len(claims) * len(others),
            )
            results.append(result)
    changes = [describe_changes(base, arm) for arm in others]
    return Comparison(
        arms=arms,
        rows=decide(
            results,
            alpha,
            share,
            closed,
            races,
        ),
        differences=describe_differences(arms, {*varied, *varied_keys(every)}),
        changes=[change for change in changes if change],
        caveats=caveats,
        ladder=ladder,
        grid=grid,
    )
