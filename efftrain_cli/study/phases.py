"""The runs of a study, phase by phase: tuning on seeds of its own, what it chose, then
confirmation, look by look; and what all of them cost."""

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
    """Learning rate of a run that a primary over learning rates is judged by; None of others."""
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
    """Return the runs that choose each arm's settings in these blocks; by block, then seed."""
    trials = []
    for block in blocks:
        for seed, arm in itertools.product(block.tuning, file.study.arms):
            grid = []
            for key, values in file.grid_of(arm, block.grown).items():
                grid.append((key, map(toml_value, values)))
            # An arm without a grid has no point; the product of no grids would be one.
            for point in points_of(grid) if grid else ():
                tried = tuple(f"{key}={value}" for key, value in point)
                words = itertools.starmap(setting_word, point)
                trial = _trial(file, arm, seed, tried, *words, "tune")
                trials.append(StudyTrial(arm.name, trial, tried=tried))
    return trials


def judged_trials(file: StudyFile, seeds: Sequence[int]) -> list[StudyTrial]:
    """Return the runs that judge the study at these seeds, with the settings that tuning chose.

    Those with their arm's own learning rate come first, then those over the learning rates of a
    primary; seeds outermost.
    """
    chosen: dict[tuple[str, int], tuple[str, ...]] = {}
    for each in file.tuned:
        chosen |= {(each.arm, seed): each.settings for seed in each.seeds}
    trials = []
    kinds = itertools.product(seeds, file.study.arms, file.judged_rates)
    for seed, arm, rate in kinds:
        settings = [*chosen.get((arm.name, seed), ())]
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
    """Return the run of an arm with settings besides its own; `words` tell its name from others."""
    name = run_name([f"{file.name}-{arm.name}", *words, f"seed{seed}"], settings)
    every = (*file.settings_of(arm), *settings)
    return Trial(file.recipe_path(arm), every, seed, name)


# --- what tuning chose -------------------------------------------------------------------------

LEARNING_RATES = ("optim.lr", "optim.muon_lr")
"""Recipe keys whose grids may grow."""


def tune(file: StudyFile, block: Block) -> tuple[Tuned, ...]:
    """Return each arm's setting in a block, chosen by `BEST_RULE` from its tuning runs, with what
    to doubt.

    Empty until every tuning run has ended.

    Raises:
        UsageError: a tuning run has another recipe than the study asks for.
        DataError: a tuning run cannot be read.
    """
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
    """Return the keys whose value in `settings` is the lowest or highest of several numbers, and
    what that means."""
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
    """Return the study with what its tuning runs chose, and its grids of learning rates as far as
    they made them grow.

    When all tuning runs of a block have ended and the best rate of any arm is the lowest or highest
    tried, the block's grids of all arms get one more at that side, `grow` times at most, unless a
    recipe refuses it. This follows from the runs, so a stopped study grows as one that was not
    stopped. No block grows by the runs of another: their differences would not be independent.

    Raises:
        UsageError, DataError: as `tune`.
    """
    blocks = [replace(block, grown=()) for block in file.blocks]
    return file.with_blocks([_tuned(file, block, file.grow) for block in blocks])


def _tuned(file: StudyFile, block: Block, times: int) -> Block:
    """Return a block with what its tuning chose, its grids grown so many times at most."""
    block = replace(block, tuned=tune(file, block))
    edges: set[Edge] = set()
    for each in block.tuned:
        edges |= {edge for edge in each.edges if edge[0] in LEARNING_RATES}
    wider = _grow(file, block, sorted(edges))
    if not times or wider == block:
        return block
    return _tuned(file, wider, times - 1)


def widest(file: StudyFile) -> StudyFile:
    """Return the study with its grids as wide as they may get."""
    sides: list[Edge] = []
    for key in LEARNING_RATES:
        sides += [(key, "low"), (key, "high")]
    wider = _grow(file, Block(file.tuning_seeds, ()), sides * file.grow)
    return file.with_blocks([replace(block, grown=wider.grown) for block in file.blocks])


def _grow(file: StudyFile, block: Block, edges: Sequence[Edge]) -> Block:
    """Return the block with one more point at each edge, but for points that a recipe refuses: a
    rate below min_lr."""
    for edge in edges:
        wider = replace(block, grown=(*block.grown, edge))
        try:
            # What one seed's recipe refuses, every seed's does.
            for each in tuning_trials(file, [replace(wider, tuning=wider.tuning[:1])]):
                recipe_of(each.trial)
        except RecipeError:
            continue
        block = wider
    return block


# --- what tuning was worth --------------------------------------------------------------------


def expected_best(tuned: Tuned) -> list[float]:
    """Return the lowest mean loss to expect of k of the arm's settings, for k = 1 to all of them,
    nats per token.

    The k settings are drawn with replacement; a run that did not finish counts with its loss before
    training.

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
    """Return arm -> `expected_best`, the mean over its blocks; empty without tuning."""
    lowest = {}
    for name in dict.fromkeys(arm.arm for arm in tuned if arm.tried):
        blocks = [expected_best(arm) for arm in tuned if arm.arm == name]
        # As far as the shortest: a block's grid may have grown.
        lowest[name] = [fmean(values) for values in zip(*blocks, strict=False)]
    return lowest


def expected_lowest(values: Sequence[float]) -> list[float]:
    """Return the expected lowest of k values drawn with replacement, for k = 1 to all of them."""
    n = len(values)
    # Of one draw, that it is at least the i-th lowest, i from 0.
    chances = np.arange(n, -1, -1) / n
    lowest = []
    for k in range(1, n + 1):
        lowest.append(float(np.sort(values) @ -np.diff(chances**k)))
    return lowest


# --- what they cost ---------------------------------------------------------------------------


def read_costs(file: StudyFile) -> list[dict[str, Any]]:
    """Return every run of the study with its state and what it still needs, as `needs_of`.

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
