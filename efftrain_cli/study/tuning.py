"""Choosing each arm's setting by its tuning runs: grids that grow, the setting chosen, and what tuning was worth."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from efftrain_cli.compare.reading import read_numbers
from efftrain_cli.compare.sensitivity import at_edge
from efftrain_cli.run.directory import run_path
from efftrain_cli.study.file import Arm, Growth, StudyFile
from efftrain_cli.study.phases import Tuned, tuning
from efftrain_cli.trials.trial import ENDED, Choice, choose, read_trial

LEARNING_RATES = ("optim.lr", "optim.muon_lr")
"""Recipe keys whose grids may grow."""


def tuning_done(file: StudyFile) -> bool:
    """Return whether every tuning run exists and has ended."""
    runs = (read_trial(each.trial) for each in tuning(file))
    return all(run is not None and run.status in ENDED for run in runs)


def choices(file: StudyFile) -> tuple[Tuned, ...]:
    """Return each arm's setting, chosen by `BEST_RULE` from its tuning runs, with its warnings.

    Empty until every tuning run has ended.

    Raises:
        DataError: a tuning run cannot be read.
    """
    if not tuning_done(file):
        return ()
    chosen, runs = [], tuning(file)
    for arm in file.study.arms:
        trials = [each.trial for each in runs if each.arm == arm.name]
        if not trials:
            warning = f"arm {arm.name!r} is not tuned while others are: it is at a disadvantage"
            chosen.append(Tuned(arm.name, (), (), (warning,) if runs else ()))
            continue
        tried = choose(trials)
        best = next(choice for choice in tried if choice.best)
        settings = best.settings[len(file.settings_of(arm)) :]
        chosen.append(Tuned(arm.name, settings, tuple(tried), _edge_warnings(file, arm, best)))
    return tuple(chosen)


def settings_of(tuned: Sequence[Tuned]) -> dict[str, tuple[str, ...]]:
    """Return arm -> the overrides that its confirmation runs get."""
    return {each.arm: each.settings for each in tuned}


def _edge_warnings(file: StudyFile, arm: Arm, best: Choice) -> tuple[str, ...]:
    """Say for which keys the best value is the smallest or largest tried: the true optimum may lie beyond."""
    warnings = []
    for key, values in file.grid_of(arm).items():
        are_numbers = all(type(value) in (int, float) for value in values)
        if are_numbers and len(values) > 1:
            edge = at_edge(_value(best.settings, key), values)
            if edge:
                warnings.append(f"arm {arm.name!r}: the best {key}, {edge}")
    return tuple(warnings)


def _value(settings: Sequence[str], key: str) -> float:
    """Return the number that settings `key=value` give a key, the last of them."""
    return float(dict(setting.split("=", 1) for setting in settings)[key].replace("_", ""))


# --- grids that grow --------------------------------------------------------------------------


def widened(file: StudyFile) -> StudyFile:
    """Return the study with its grids of learning rates as far as the tuning runs made them grow.

    When all tuning runs have ended and the best rate of any arm is the lowest or highest tried, the
    grids of all arms get one more at that side, `grow` times at most. This follows from the runs, so
    a stopped study grows as one that was not stopped.
    """
    grown: list[Growth] = []
    for _ in range(file.grow):
        current = StudyFile(file.path, file.study, file.drawn, tuple(grown))
        grown += sorted(_edges(current))
    return StudyFile(file.path, file.study, file.drawn, tuple(grown))


def widest(file: StudyFile) -> StudyFile:
    """Return the study with its grids as wide as they may get."""
    sides: list[Growth] = []
    for key in LEARNING_RATES:
        sides += [(key, "low"), (key, "high")]
    return StudyFile(file.path, file.study, file.drawn, tuple(sides * file.grow))


def _edges(file: StudyFile) -> set[Growth]:
    """Return the ends of grids at which an arm's best learning rate is; none before tuning has ended."""
    edges: set[Growth] = set()
    for arm, tuned in zip(file.study.arms, choices(file), strict=False):
        grid = file.grid_of(arm)
        for key in LEARNING_RATES:
            values = grid.get(key, ())
            if len(values) < 2:
                continue
            best = _value(tuned.settings, key)
            if best == min(values):
                edges.add((key, "low"))
            if best == max(values):
                edges.add((key, "high"))
    return edges


# --- what tuning was worth --------------------------------------------------------------------


def expected_best(tuned: Tuned) -> list[float]:
    """Return the lowest mean loss to expect of k of the arm's settings, for k = 1 to all of them, nats per token.

    The k settings are drawn with replacement; a run that did not finish counts with its loss before training.

    Source: Dodge et al. 2019, arXiv 1909.03004, section 3.
    """
    losses = []
    for choice in tuned.tried:
        each = []
        for name, loss in zip(choice.names, choice.losses, strict=True):
            if loss is None:
                loss = float(read_numbers(run_path(name)).evaluated["val_loss"][0])
            each.append(loss)
        losses.append(sum(each) / len(each))
    return expected_lowest(losses)


def expected_lowest(values: Sequence[float]) -> list[float]:
    """Return the expected lowest of k of the values, drawn with replacement, for k = 1 to all of them."""
    n = len(values)
    # Of one draw, that it is at least the i-th lowest, i from 0.
    chances = np.arange(n, -1, -1) / n
    return [float(np.sort(values) @ -np.diff(chances**k)) for k in range(1, n + 1)]
