"""List the runs of a study's phases, choose settings by the tuning runs, and list costs.

Tuning has seeds of its own. The runs with the chosen settings are judged, look by look.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np

from efftrain_cli.compare.groups import rank
from efftrain_cli.compare.reading import RunNumbers
from efftrain_cli.compare.sensitivity import at_edge
from efftrain_cli.foundation.console import counted
from efftrain_cli.foundation.errors import RecipeError
from efftrain_cli.recipe.toml import toml_value
from efftrain_cli.study.blocks import Block, Edge, Tried, Tuned
from efftrain_cli.study.file import Arm, StudyFile
from efftrain_cli.trials.costs import needs_of
from efftrain_cli.trials.trial import (
    ENDED,
    Trial,
    points_of,
    read_trial,
    recipe_of,
    run_name,
    setting_word,
    state_of,
)


class StudyTrial(NamedTuple):
    """One run of a study."""

    arm: str
    trial: Trial
    rate: float | None = None
    """Learning rate of a run for the measure lr_sensitivity; None for other runs."""
    tried: tuple[str, ...] = ()
    """`key=value` of a point of the arm's grid; empty after tuning."""

    @property
    def phase(self) -> str:
        """ "tuning", "confirmation" or "learning rates"."""
        if self.tried:
            return "tuning"
        return "confirmation" if self.rate is None else "learning rates"


def all_trials(file: StudyFile) -> list[StudyTrial]:
    """Return every run of the study."""
    return [*tuning_trials(file, file.blocks), *judged_trials(file, file.seeds)]


def tuning_trials(file: StudyFile, blocks: Sequence[Block]) -> list[StudyTrial]:
    """Return the runs that choose each arm's settings, in the order block, seed, arm, point."""
    trials = []
    for block in blocks:
        for seed, arm in itertools.product(block.tuning, file.study.arms):
            grid = []
            for key, values in file.grid_of(arm, block.grown).items():
                grid.append((key, map(toml_value, values)))
            if not grid:
                # The product of no grids would be one point.
                continue
            for point in points_of(grid):
                tried = tuple(f"{key}={value}" for key, value in point)
                words = itertools.starmap(setting_word, point)
                trial = _trial(file, arm, seed, tried, *words, "tune")
                trials.append(StudyTrial(arm.name, trial, tried=tried))
    return trials


def judged_trials(file: StudyFile, seeds: Sequence[int]) -> list[StudyTrial]:
    """Return the runs that the study is judged by, with the settings that tuning chose.

    Runs with their arm's own learning rate come first, then those over the learning rates of
    lr_sensitivity. In each part the order is seed, arm, rate.
    """
    chosen: dict[tuple[str, int], tuple[str, ...]] = {}
    for each in file.tuned:
        chosen |= {(each.arm, seed): each.settings for seed in each.seeds}
    trials = []
    kinds = itertools.product(seeds, file.study.arms, file.judged_rates)
    for seed, arm, rate in kinds:
        settings = list(chosen.get((arm.name, seed), ()))
        words = []
        if rate is not None:
            value = toml_value(rate)
            settings.append(f"optim.lr={value}")
            words.append(setting_word("optim.lr", value))
        trial = _trial(file, arm, seed, settings, *words)
        trials.append(StudyTrial(arm.name, trial, rate))
    return sorted(trials, key=lambda each: each.rate is not None)


def _trial(
    file: StudyFile,
    arm: Arm,
    seed: int,
    settings: Sequence[str],
    *words: str,
) -> Trial:
    """Return the run of an arm.

    Args:
        settings: changes beside the arm's own.
        words: parts of the run's name that distinguish it from other runs of the arm.
    """
    name = run_name([f"{file.name}-{arm.name}", *words, f"seed{seed}"], settings)
    all_settings = (*file.settings_of(arm), *settings)
    return Trial(file.recipe_path(arm), all_settings, seed, name)


# --- what tuning chose -------------------------------------------------------------------------

LEARNING_RATES = ("optim.lr", "optim.muon_lr")
"""Recipe keys whose grids may grow."""


def tune(file: StudyFile, block: Block) -> tuple[Tuned, ...]:
    """Choose each arm's setting in a block by `BEST_RULE`; add warnings.

    Empty until every tuning run of the block has ended.

    Raises:
        UsageError: the recipe of a tuning run is not the one in the study file.
        DataError: a tuning run cannot be read.
    """
    # Arm -> settings -> runs.
    points: dict[str, dict[tuple[str, ...], list[RunNumbers]]] = {}
    for each in tuning_trials(file, [block]):
        run = read_trial(each.trial)
        if run is None or run.status not in ENDED:
            return ()
        of_arm = points.setdefault(each.arm, {})
        of_arm.setdefault(each.tried, []).append(run)

    tuned = []
    most = max(map(len, points.values()), default=0)
    for arm in file.study.arms:
        warnings: list[str] = []
        number = len(points.get(arm.name, ()))
        if number < most:
            how = f"tuned over {counted(number, 'setting')} and another over {most}"
            if not number:
                how = "not tuned while others are"
            warnings = [f"arm {arm.name!r} is {how}: it is at a disadvantage"]
        if arm.name not in points:
            tuned.append(Tuned(arm.name, block.seeds, warnings=tuple(warnings)))
            continue

        tried = []
        for settings, runs in points[arm.name].items():
            tried.append(Tried(settings, tuple(runs)))
        best = min(tried, key=lambda point: rank(point.losses))
        edges = _edges(file.grid_of(arm, block.grown), best.settings)
        for (key, _), warning in edges.items():
            warnings.append(f"arm {arm.name!r}: the best {key}, {warning}")
        tuned.append(
            Tuned(
                arm.name,
                block.seeds,
                best.settings,
                tuple(tried),
                tuple(warnings),
                tuple(edges),
            )
        )
    return tuple(tuned)


def _edges(grid: Mapping[str, Sequence[Any]], settings: Sequence[str]) -> dict[Edge, str]:
    """Return (key, side) -> warning for each value in `settings` at an edge of its grid."""
    values = dict(setting.split("=", 1) for setting in settings)
    edges: dict[Edge, str] = {}
    for key, tried in grid.items():
        if len(tried) < 2 or any(type(value) not in (int, float) for value in tried):
            continue
        best = float(values[key].replace("_", ""))
        warning = at_edge(best, tried)
        if warning:
            edges[key, "low" if best == min(tried) else "high"] = warning
    return edges


# --- grids that grow --------------------------------------------------------------------------


def with_tuning(file: StudyFile) -> StudyFile:
    """Return the study with the settings that its tuning runs chose, and with its grown grids.

    If all tuning runs of a block have ended and an arm's best learning rate is at an edge of its
    grid, the grids of all arms in that block get one more point on that side. This is repeated at
    most `grow` times, and points that make a recipe invalid are left out. Growth depends on the
    block's runs alone. So a stopped study grows like one that was not stopped, and blocks stay
    independent.

    Raises:
        UsageError, DataError: as `tune`.
    """
    blocks = [replace(block, grown=()) for block in file.blocks]
    return file.with_blocks([_tuned(file, block, file.grow) for block in blocks])


def _tuned(file: StudyFile, block: Block, times: int) -> Block:
    """Return a block with the settings that its tuning chose; its grids may grow `times` times."""
    block = replace(block, tuned=tune(file, block))
    edges: set[Edge] = set()
    for each in block.tuned:
        edges |= {(key, side) for key, side in each.edges if key in LEARNING_RATES}
    wider = _grow(file, block, sorted(edges))
    if not times or wider == block:
        return block
    return _tuned(file, wider, times - 1)


def widest(file: StudyFile) -> StudyFile:
    """Return the study with its grids grown on all sides as often as they may grow."""
    sides: list[Edge] = []
    for key in LEARNING_RATES:
        sides += [(key, "low"), (key, "high")]
    wider = _grow(file, Block(file.tuning_seeds, ()), sides * file.grow)
    return file.with_blocks([replace(block, grown=wider.grown) for block in file.blocks])


def _grow(file: StudyFile, block: Block, edges: Sequence[Edge]) -> Block:
    """Return the block with one more point at each edge.

    A point that makes a recipe invalid, such as a rate below min_lr, is left out.
    """
    for edge in edges:
        wider = replace(block, grown=(*block.grown, edge))
        try:
            # A recipe is valid or invalid for all seeds alike: check the first seed only.
            for each in tuning_trials(file, [replace(wider, tuning=wider.tuning[:1])]):
                recipe_of(each.trial)
        except RecipeError:
            continue
        block = wider
    return block


# --- what tuning was worth --------------------------------------------------------------------


def expected_best(tuned: Tuned) -> list[float]:
    """Return the expected lowest mean loss of k of the arm's settings, for k = 1 to all of them.

    In nats per token. The k settings are drawn with replacement. A run that did not finish counts
    with its loss before training.

    Source: Dodge et al. 2019, arXiv 1909.03004, section 3.
    """
    means = []
    for tried in tuned.tried:
        losses = []
        for run in tried.runs:
            loss = run.final_loss
            if loss is None:
                loss = float(run.evaluated["val_loss"][0])
            losses.append(loss)
        means.append(sum(losses) / len(losses))
    return expected_lowest(means)


def best_of_k(tuned: Sequence[Tuned]) -> dict[str, list[float]]:
    """Return arm -> mean of `expected_best` over its blocks; empty without tuning."""
    lowest = {}
    for name in dict.fromkeys(arm.arm for arm in tuned if arm.tried):
        blocks = [expected_best(arm) for arm in tuned if arm.arm == name]
        # Blocks may have different numbers of settings, as grids grow: end with the fewest.
        lowest[name] = [fmean(values) for values in zip(*blocks, strict=False)]
    return lowest


def expected_lowest(values: Sequence[float]) -> list[float]:
    """Return the expected lowest of k of the values, for k = 1 to all; drawn with replacement."""
    n = len(values)
    ordered = np.sort(values)
    # Probability that one draw is at least the i-th lowest value, i from 0.
    at_least = np.arange(n, -1, -1) / max(n, 1)
    lowest = []
    for k in range(1, n + 1):
        is_lowest = -np.diff(at_least**k)
        lowest.append(float(ordered @ is_lowest))
    return lowest


# --- what they cost ---------------------------------------------------------------------------


def read_costs(file: StudyFile) -> list[dict[str, Any]]:
    """Return a row per run of the study: its state, and with `needs_of` the cost that is left.

    Raises:
        UsageError: a run's name is taken by a run with another recipe.
    """
    rows = []
    chosen = file.chosen_seeds
    for each in all_trials(file):
        # Before tuning has ended, the recipe of a judged run is not known.
        state = "new"
        if each.phase == "tuning" or each.trial.seed in chosen:
            state = state_of(each.trial)
        row = {
            "phase": each.phase,
            "block": file.block_of[each.trial.seed],
            "arm": each.arm,
            "name": each.trial.name,
            "seed": each.trial.seed,
            "settings": list(each.trial.settings),
            "state": state,
        }
        rows.append(row | needs_of(each.trial, state))
    return rows
