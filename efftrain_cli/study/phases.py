"""The runs of a study, phase by phase: tuning on seeds of its own, what it chose, then confirmation,
look by look; and what all of them cost."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np

from efftrain_cli.compare.reading import read_numbers
from efftrain_cli.compare.sensitivity import at_edge
from efftrain_cli.foundation.errors import RecipeError
from efftrain_cli.plan.cost import disk_bytes
from efftrain_cli.recipe.toml import toml_value
from efftrain_cli.run.directory import run_path
from efftrain_cli.run.rates import seconds_left
from efftrain_cli.study.file import Arm, Block, Edge, StudyFile
from efftrain_cli.trials.runner import tokens_so_far
from efftrain_cli.trials.trial import (
    ENDED,
    Choice,
    Trial,
    choose,
    read_trial,
    recipe_of,
    run_name,
    setting_word,
    state_of,
)


class StudyTrial(NamedTuple):
    """One run of a study."""

    phase: str
    """"tuning", "confirmation" or "learning rates"."""
    arm: str
    trial: Trial
    rate: float | None = None
    """Learning rate of a run that a primary over learning rates is judged by; None of others."""
    tried: tuple[str, ...] = ()
    """`key=value` of a point of the arm's grid; empty after tuning."""


@dataclass(frozen=True)
class Tuned:
    """What the tuning phase showed for one arm, in one block."""

    arm: str
    seeds: tuple[int, ...]
    """Seeds that are judged with its settings."""
    settings: tuple[str, ...] = ()
    """`key=value` overrides that its confirmation runs get; empty if the arm is not tuned."""
    tried: tuple[Choice, ...] = ()
    """Every point of the grid with its losses by seed."""
    warnings: tuple[str, ...] = ()
    edges: tuple[Edge, ...] = ()
    """Sides of its grid at which the best value is: the true optimum may lie beyond."""


def all_trials(file: StudyFile, tuned: Sequence[Tuned] = ()) -> list[StudyTrial]:
    """Return every run of the study, with the settings that tuning chose."""
    return [*tuning(file), *judged_trials(file, tuned)]


def tuning(file: StudyFile, blocks: Sequence[Block] | None = None) -> list[StudyTrial]:
    """Return the runs that choose each arm's settings; blocks outermost, then seeds.

    Args:
        blocks: some of the study's blocks; default: all.
    """
    trials = []
    for block in file.blocks if blocks is None else blocks:
        for seed, arm in itertools.product(block.tuning, file.study.arms):
            grid = []
            for key, values in file.grid_of(arm, block.grown).items():
                grid.append([(key, toml_value(value)) for value in values])
            # An arm without a grid has no point; the product of no grids would be one.
            for point in itertools.product(*grid) if grid else ():
                tried = tuple(f"{key}={value}" for key, value in point)
                words = [setting_word(key, value) for key, value in point]
                trial = _trial(file, arm, seed, tried, *words, "tune")
                trials.append(StudyTrial("tuning", arm.name, trial, None, tried))
    return trials


def judged_trials(
    file: StudyFile,
    tuned: Sequence[Tuned] = (),
    seeds: Sequence[int] | None = None,
) -> list[StudyTrial]:
    """Return the runs that the study is judged by, with the settings that tuning chose: those with
    their arm's own learning rate, unless every primary is over learning rates, then those over them;
    seeds outermost.

    Args:
        seeds: those of one look; default: all.
    """
    if seeds is None:
        seeds = file.seeds
    chosen: dict[tuple[str, int], tuple[str, ...]] = {}
    for each in tuned:
        chosen |= {(each.arm, seed): each.settings for seed in each.seeds}
    phases: list[tuple[str, tuple[float | None, ...]]] = [("learning rates", file.rates)]
    if not all(primary.question.over_rates for primary in file.study.primary):
        phases.insert(0, ("confirmation", (None,)))
    trials = []
    for phase, rates in phases:
        for seed, arm, rate in itertools.product(seeds, file.study.arms, rates):
            settings, words = [*chosen.get((arm.name, seed), ())], []
            if rate is not None:
                value = toml_value(rate)
                settings.append(f"optim.lr={value}")
                words.append(setting_word("optim.lr", value))
            trial = _trial(file, arm, seed, settings, *words)
            trials.append(StudyTrial(phase, arm.name, trial, rate))
    return trials


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
    return Trial(
        file.recipe_path(arm),
        every,
        seed,
        name,
    )


# --- what tuning chose -------------------------------------------------------------------------

LEARNING_RATES = ("optim.lr", "optim.muon_lr")
"""Recipe keys whose grids may grow."""


def choices(file: StudyFile) -> list[Tuned]:
    """Return each arm's setting in each block whose tuning runs have all ended.

    Raises:
        DataError: a tuning run cannot be read.
    """
    chosen = []
    for block in file.blocks:
        chosen += choices_of(file, block)
    return chosen


def choices_of(file: StudyFile, block: Block) -> list[Tuned]:
    """Return each arm's setting in a block, chosen by `BEST_RULE` from its tuning runs, with what to doubt.

    Empty until every tuning run has ended.

    Raises:
        DataError: a tuning run cannot be read.
    """
    every = tuning(file, [block])
    runs = [read_trial(each.trial) for each in every]
    if any(run is None or run.status not in ENDED for run in runs):
        return []
    chosen = []
    for arm in file.study.arms:
        trials = [each.trial for each in every if each.arm == arm.name]
        if not trials:
            warning = f"arm {arm.name!r} is not tuned while others are: it is at a disadvantage"
            chosen.append(Tuned(arm.name, block.seeds, warnings=(warning,) * bool(every)))
            continue
        tried = choose(trials)
        best = next(choice for choice in tried if choice.best)
        settings = best.settings[len(file.settings_of(arm)) :]
        edges = _edges(file.grid_of(arm, block.grown), settings)
        warnings = []
        for (key, _), warning in edges.items():
            warnings.append(f"arm {arm.name!r}: the best {key}, {warning}")
        chosen.append(
            Tuned(
                arm.name,
                block.seeds,
                settings,
                tuple(tried),
                tuple(warnings),
                tuple(edges),
            )
        )
    return chosen


def seeds_of(tuned: Sequence[Tuned]) -> set[int]:
    """Return the seeds whose settings are chosen."""
    return set().union(*(each.seeds for each in tuned))


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


def widened(file: StudyFile) -> StudyFile:
    """Return the study with its grids of learning rates as far as the tuning runs made them grow.

    When all tuning runs of a block have ended and the best rate of any arm is the lowest or highest tried,
    the block's grids of all arms get one more at that side, `grow` times at most, unless a recipe refuses
    it. This follows from the runs, so a stopped study grows as one that was not stopped. No block grows by
    the runs of another: their differences would not be independent.
    """
    grown = []
    for block in file.blocks:
        wider = block._replace(grown=())
        for _ in range(file.grow):
            edges: set[Edge] = set()
            for each in choices_of(file, wider):
                edges |= {edge for edge in each.edges if edge[0] in LEARNING_RATES}
            wider = _grow(file, wider, sorted(edges))
        grown.append(wider.grown)
    return StudyFile(file.path, file.study, file.drawn, grown)


def widest(file: StudyFile) -> StudyFile:
    """Return the study with its grids as wide as they may get."""
    sides: list[Edge] = []
    for key in LEARNING_RATES:
        sides += [(key, "low"), (key, "high")]
    wider = _grow(file, Block(file.tuning_seeds, ()), sides * file.grow)
    return StudyFile(file.path, file.study, file.drawn, [wider.grown] * len(file.blocks))


def _grow(file: StudyFile, block: Block, edges: Sequence[Edge]) -> Block:
    """Return the block with one more point at each edge, but for points that a recipe refuses: a rate below min_lr."""
    for edge in edges:
        wider = block._replace(grown=(*block.grown, edge))
        try:
            # What one seed's recipe refuses, every seed's does.
            for each in tuning(file, [wider._replace(tuning=wider.tuning[:1])]):
                recipe_of(each.trial)
        except RecipeError:
            continue
        block = wider
    return block


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


def best_of_k(tuned: Sequence[Tuned]) -> dict[str, list[float]]:
    """Return arm -> `expected_best`, the mean over its blocks; empty without tuning."""
    lowest = {}
    for name in dict.fromkeys(arm.arm for arm in tuned if arm.tried):
        blocks = [expected_best(arm) for arm in tuned if arm.arm == name]
        # As far as the shortest: a block's grid may have grown.
        lowest[name] = [fmean(values) for values in zip(*blocks, strict=False)]
    return lowest


def expected_lowest(values: Sequence[float]) -> list[float]:
    """Return the expected lowest of k of the values, drawn with replacement, for k = 1 to all of them."""
    n = len(values)
    # Of one draw, that it is at least the i-th lowest, i from 0.
    chances = np.arange(n, -1, -1) / n
    return [float(np.sort(values) @ -np.diff(chances**k)) for k in range(1, n + 1)]


# --- what they cost ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Phase:
    """The runs of one arm in one phase, or of all."""

    phase: str
    arm: str
    runs: int
    done: int
    tokens_left: int
    seconds_left: float | None
    """Wall time that is left, one run after the other, by earlier runs of the same model; None if
    there are none."""
    disk_bytes: int
    """Bytes that its runs keep, those done included."""

    @property
    def runs_left(self) -> int:
        """Runs that have not ended."""
        return self.runs - self.done


def phases_of(file: StudyFile) -> list[Phase]:
    """Return the study's phases by arm.

    Raises:
        UsageError: a run's name is taken by a run with another recipe.
    """
    runs: dict[tuple[str, str], list[Phase]] = {}
    for phase, arm, trial, *_ in all_trials(file):
        recipe = recipe_of(trial)
        left = max(0, recipe.train.tokens - tokens_so_far(trial.name))
        done = not left
        # What tuning chooses is not known yet; it changes neither size nor time unless it is tuned itself.
        if phase == "tuning" or file.study.tuning is None:
            done = state_of(trial) in ENDED
        if done:
            left = 0
        needs = (left, seconds_left(recipe, left), disk_bytes(recipe))
        runs.setdefault((phase, arm), []).append(
            Phase(
                phase,
                arm,
                1,
                int(done),
                *needs,
            )
        )
    return [sum_phases(phase, arm, each) for (phase, arm), each in runs.items()]


def sum_phases(phase: str, arm: str, parts: Sequence[Phase]) -> Phase:
    """Return what phases need together, as one of this name; unknown seconds make the sum unknown."""
    _, _, *columns = zip(*map(astuple, parts), strict=True)
    sums: list[Any] = [None if None in values else sum(values) for values in columns]
    return Phase(phase, arm, *sums)
