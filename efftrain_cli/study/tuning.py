"""Choosing each arm's setting by its tuning runs: grids that grow, the setting chosen, and what tuning was worth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from efftrain_cli.compare.reading import read_numbers
from efftrain_cli.compare.sensitivity import at_edge
from efftrain_cli.run.directory import run_path
from efftrain_cli.study.file import Edge, StudyFile
from efftrain_cli.study.phases import Tuned, tuning
from efftrain_cli.trials.trial import ENDED, choose, read_trial

LEARNING_RATES = ("optim.lr", "optim.muon_lr")
"""Recipe keys whose grids may grow."""


def choices(file: StudyFile) -> tuple[Tuned, ...]:
    """Return each arm's setting, chosen by `BEST_RULE` from its tuning runs, with what to doubt.

    Empty until every tuning run has ended.

    Raises:
        DataError: a tuning run cannot be read.
    """
    every = tuning(file)
    for each in every:
        run = read_trial(each.trial)
        if run is None or run.status not in ENDED:
            return ()
    chosen = []
    for arm in file.study.arms:
        trials = [each.trial for each in every if each.arm == arm.name]
        if not trials:
            warning = f"arm {arm.name!r} is not tuned while others are: it is at a disadvantage"
            chosen.append(Tuned(arm.name, warnings=(warning,) * bool(every)))
            continue
        tried = choose(trials)
        best = next(choice for choice in tried if choice.best)
        settings = best.settings[len(file.settings_of(arm)) :]
        edges, warnings = _edges(file.grid_of(arm), settings)
        named = [f"arm {arm.name!r}: the best {warning}" for warning in warnings]
        chosen.append(
            Tuned(
                arm.name,
                settings,
                tuple(tried),
                tuple(named),
                tuple(edges),
            )
        )
    return tuple(chosen)


def settings_of(tuned: Sequence[Tuned]) -> dict[str, tuple[str, ...]]:
    """Return arm -> the overrides that its confirmation runs get."""
    return {each.arm: each.settings for each in tuned}


def _edges(
    grid: Mapping[str, Sequence[Any]], settings: Sequence[str]
) -> tuple[list[Edge], list[str]]:
    """Return the keys whose value in `settings` is the lowest or highest of several numbers, and
    what that means."""
    values = dict(setting.split("=", 1) for setting in settings)
    edges: list[Edge] = []
    warnings = []
    for key, tried in grid.items():
        if len(tried) < 2 or any(type(value) not in (int, float) for value in tried):
            continue
        best = float(values[key].replace("_", ""))
        warning = at_edge(best, tried)
        if warning:
            edges.append((key, "low" if best == min(tried) else "high"))
            warnings.append(f"{key}, {warning}")
    return edges, warnings


# --- grids that grow --------------------------------------------------------------------------


def widened(file: StudyFile) -> StudyFile:
    """Return the study with its grids of learning rates as far as the tuning runs made them grow.

    When all tuning runs have ended and the best rate of any arm is the lowest or highest tried, the
    grids of all arms get one more at that side, `grow` times at most. This follows from the runs, so
    a stopped study grows as one that was not stopped.
    """
    grown: list[Edge] = []
    for _ in range(file.grow):
        edges: set[Edge] = set()
        for each in choices(
            StudyFile(
                file.path,
                file.study,
                file.drawn,
                tuple(grown),
            )
        ):
            edges |= {edge for edge in each.edges if edge[0] in LEARNING_RATES}
        grown += sorted(edges)
    return StudyFile(
        file.path,
        file.study,
        file.drawn,
        tuple(grown),
    )


def widest(file: StudyFile) -> StudyFile:
    """Return the study with its grids as wide as they may get."""
    sides: list[Edge] = []
    for key in LEARNING_RATES:
        sides += [(key, "low"), (key, "high")]
    return StudyFile(
        file.path,
        file.study,
        file.drawn,
        tuple(sides * file.grow),
    )


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
