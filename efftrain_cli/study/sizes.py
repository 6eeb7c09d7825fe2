"""The sizes of a study: every arm at every size and budget. The longest run of a size is the trunk
from which the shorter ones branch off where their own decay begins."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from pydantic.dataclasses import dataclass as checked

from efftrain_cli.compare.inference import POWER, detectable
from efftrain_cli.compare.ladder import FEWEST_SIZES, LEVEL
from efftrain_cli.foundation.console import human
from efftrain_cli.foundation.errors import UsageError
from efftrain_cli.foundation.section import SECTION, Count, Text, parse_count
from efftrain_cli.plan.plan import plan_run
from efftrain_cli.plan.preview import summarize_plan
from efftrain_cli.recipe.recipe import Recipe, load_recipe
from efftrain_cli.recipe.sizes import likely_vocabulary, scored_parameters, written_sizes
from efftrain_cli.recipe.toml import toml_value
from efftrain_cli.trials.trial import Trial, recipe_of

NOISES = (0.05, 0.1, 0.2)
"""sigma / s for which a plan says what slope it could see."""


@checked(frozen=True, kw_only=True, config=SECTION)
class StudySize:
    """A size at which every arm is trained."""

    name: Text
    parameters: Count | None = None
    """Shape, batch, rates and evaluations by docs/sizes.md, for at most so many parameters."""
    set: tuple[Text, ...] = ()
    """Changes of every arm's recipe at this size."""
    tokens: Count | None = None
    """Budget; `tokens_per_parameter` times the parameters without it."""
    seeds: str = ""
    """Seeds of this size if they are others than the study's."""


def parse_sizes(text: str) -> tuple[StudySize, ...]:
    """Parse "0.1M..1.6M x2" as sizes.

    Raises:
        ValueError: the text is not of this form.
    """
    match = re.fullmatch(r"\s*(\S+?)\s*\.\.\s*(\S+)\s+x\s*(\d+(?:\.\d+)?)\s*", text)
    if match is None or float(match[3]) <= 1:
        raise ValueError('write sizes as "0.1M..1.6M x2"')
    first, last = parse_count(match[1]), parse_count(match[2])
    sizes = []
    parameters = float(first)
    while parameters <= last * 1.001:
        size = StudySize(name=human(round(parameters)), parameters=round(parameters))
        sizes.append(size)
        parameters *= float(match[3])
    return tuple(sizes)


class Point(NamedTuple):
    """Where a shorter run branches off."""

    step: int
    tokens: int


@dataclass(frozen=True)
class Size:
    """A size, as one arm has it."""

    name: str
    parameters: int
    """Of blocks, norms and head."""
    budgets: tuple[int, ...]
    """Tokens, rising; the last is the trunk's."""
    points: tuple[Point, ...]
    """Where each budget but the last branches off."""

    @property
    def middle(self) -> int:
        """Budget at which the arm is tuned."""
        return self.budgets[len(self.budgets) // 2]


def settings_of_size(
    size: StudySize,
    recipe: str,
    settings: Sequence[str],
    tokens_per_parameter: float,
) -> tuple[str, ...]:
    """Return the changes of every arm's recipe at a size.

    Args:
        recipe, settings: the baseline's, whose tokenizer counts.
    """
    if size.parameters is None:
        return size.set
    loaded = load_recipe(recipe, settings)
    vocabulary = likely_vocabulary(loaded.data.tokenizer)
    if size.tokens is not None:
        tokens_per_parameter = size.tokens / size.parameters
    written = written_sizes(
        loaded,
        vocabulary,
        size.parameters,
        tokens_per_parameter,
    )
    lines = tuple(f"{line.key}={toml_value(line.value)}" for line in written)
    return (*lines, *size.set)


def size_of(
    size: StudySize,
    recipe: str,
    settings: Sequence[str],
    tokens_per_parameter: float,
    branches: Sequence[float],
) -> Size:
    """Return a size as the arm of this recipe has it.

    Args:
        branches: budgets, as multiples of the size's tokens.

    Raises:
        UsageError: its budgets cannot branch off one run.
    """
    loaded = load_recipe(recipe, settings)
    parameters = scored_parameters(loaded.model, likely_vocabulary(loaded.data.tokenizer))
    tokens = size.tokens or round(tokens_per_parameter * parameters)
    budgets = tuple(round(tokens * multiple) for multiple in sorted(branches))
    points: list[Point] = []
    before = warmup = loaded.optim.warmup_steps
    for budget in budgets:
        point = point_of(load_recipe(recipe, [*settings, f"train.tokens={budget}"]))
        if point.step <= before:
            raise UsageError(
                f"size {size.name}: the budget of {budget:,} tokens decays from step {point.step}"
                f" on, which must lie beyond the warmup of {warmup} steps and"
                " beyond the next shorter budget\n  raise the tokens, or leave a branch out"
            )
        before = point.step
        points.append(point)
    return Size(
        size.name,
        parameters,
        budgets,
        tuple(points[:-1]),
    )


def point_of(recipe: Recipe) -> Point:
    """Return where a run's decay begins: after the last step at the peak rate.

    Raises:
        UsageError: it has no plateau, or its steps follow the gradients.
    """
    optim = recipe.optim
    own_end = optim.decay_tokens or optim.decay_steps
    if optim.decay_share is None or own_end or "steps" in recipe.varies:
        raise UsageError(
            "budgets branch off one run where their decay begins, and this schedule or batch has no"
            " such step\n  set optim.schedule=wsd and optim.decay_share=0.2 for every arm"
        )
    start = (1 - optim.decay_share) * recipe.train.tokens
    point = Point(0, 0)
    for _, after in plan_run(recipe):
        if after.tokens <= start:
            point = Point(after.step, after.tokens)
    return point


def check_sizes(sizes: Sequence[Size]) -> None:
    """Check that sizes differ and rise.

    Raises:
        UsageError: they do not.
    """
    for smaller, larger in itertools.pairwise(sizes):
        if larger.parameters <= smaller.parameters:
            raise UsageError(
                f"sizes {smaller.name} and {larger.name} have {smaller.parameters:,} and"
                f" {larger.parameters:,} parameters\n  sizes must rise: leave one out"
            )


# --- what a ladder costs, and what it could see ---------------------------------------------------


def flops_of(trials: Sequence[Trial]) -> float:
    """Return the FLOPs of trials, a trunk's once."""
    costs = []
    for trial in trials:
        recipe = recipe_of(trial)
        vocab_size = likely_vocabulary(recipe.data.tokenizer)
        costs.append(summarize_plan(recipe, vocab_size=vocab_size).flops)
        if trial.trunk is not None:
            until = trial.trunk.step
            costs.append(-summarize_plan(recipe, vocab_size=vocab_size, until=until).flops)
    return sum(costs)


def ladder_lines(
    sizes: Sequence[Size],
    trials: Sequence[Trial],
    pairs: int,
) -> Iterator[str]:
    """Yield what a plan says of its sizes.

    Args:
        sizes: as the baseline has them.
        trials: all runs, tuning included.
        pairs: seeds of a size.
    """
    for size in sizes:
        budgets = ", ".join(map(human, size.budgets))
        yield f"size    {size.name}: {size.parameters:,} parameters, {budgets} tokens"
    yield f"flops   {human(flops_of(trials), 'FLOP')}s in all"
    if len(sizes) < FEWEST_SIZES:
        yield f"slope   fewer than {FEWEST_SIZES} sizes: M per size, no verdict over sizes"
        return
    doublings = np.log2([size.parameters for size in sizes])
    spread = math.sqrt(np.square(doublings - doublings.mean()).sum())
    seen = []
    for noise in NOISES:
        # Three runs of a trunk are less than three runs apart, but no more than one.
        se = noise * math.sqrt(2 / pairs) / spread
        slope = detectable(se, len(sizes) - 2, LEVEL / 2)
        seen.append(f"{100 * math.expm1(slope):.2g} %")
    yield (
        f"slope   in {100 * POWER:.0f} % of cases {', '.join(seen)} of M per doubling of the size,"
        f" if sigma/s is {', '.join(map(str, NOISES))} and rates are tuned well"
    )
