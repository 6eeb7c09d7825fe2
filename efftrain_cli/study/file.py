"""The study file: arms, seeds, primary measures and looks, checked as a whole before anything is
trained.

A study says beforehand what would count as an answer. Its values are hashed when its first run
starts, with the recipes of its arms. Comments and the order of keys may change after that, values
may not.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field
from pydantic.dataclasses import dataclass

from efftrain_cli.compare.engine import Looks
from efftrain_cli.compare.measures import FINAL_LOSS, Question, cost_question
from efftrain_cli.compare.sensitivity import LR_SENSITIVITY
from efftrain_cli.compare.sequential import schedule
from efftrain_cli.foundation.bounds import RUNS
from efftrain_cli.foundation.errors import UsageError
from efftrain_cli.foundation.records import digest_of
from efftrain_cli.foundation.section import SECTION, Text
from efftrain_cli.recipe.draft import (
    find_recipe,
    is_path,
    read_recipe_file,
    shown_path,
)
from efftrain_cli.recipe.recipe import Recipe, load_recipe
from efftrain_cli.recipe.toml import flatten
from efftrain_cli.run.small_files import NOT_COMPUTED
from efftrain_cli.study.blocks import Block, Edge, Tuned
from efftrain_cli.trials.trial import parse_seeds

MEASURES = {
    "final_loss": FINAL_LOSS,
    "lr_sensitivity": LR_SENSITIVITY,
    "tokens_to_target": cost_question("tokens", None),
    "flops_to_target": cost_question("flops", None),
}
"""Question of each value of `Primary.measure`.

Costs are compared as ratios, so their margin is a share.
"""
BLOCKS = 4
"""Fewest blocks that are judged."""
MARGINS = ("noninferior", "equivalent")
"""Directions that are judged against a margin."""
DRAWN = 5
"""Seeds that are drawn if the file gives neither seeds nor their number."""
HIGHEST_RATE = 1e9
"""Bound of learning rates: a grid with a value from here on does not grow."""
LONGEST_NAME = 40
"""Characters of a study's and an arm's name together: the names of runs hold both."""


def _seeds_as_text(value: Any) -> Any:
    """Return seeds as text, "0..4" or "1,3". A whole number or a list of them becomes text."""
    if type(value) is int:
        value = (value,)
    if isinstance(value, tuple):
        value = ",".join(map(str, value))
    if isinstance(value, str):
        try:
            parse_seeds(value)
        except UsageError as error:
            raise ValueError(str(error).removeprefix("--seeds ")) from None
    return value


Seeds = Annotated[str, BeforeValidator(_seeds_as_text)]
Values = Annotated[tuple[bool | int | float | str, ...], Field(min_length=1)]
Grid = dict[str, Values]
"""Recipe key -> values to try."""


@dataclass(frozen=True, kw_only=True, config=SECTION)
class Primary:
    """A measure that the study is judged by."""

    measure: Literal["final_loss", "lr_sensitivity", "tokens_to_target", "flops_to_target"]
    """final_loss: validation loss when the budget is used up. lr_sensitivity: how much that depends
    on the learning rate. A cost: tokens or FLOPs to reach a loss."""
    direction: Literal["better", "different", "noninferior", "equivalent"]
    """What the arm must be shown to be, against the baseline."""
    margin: float | None = Field(default=None, gt=0)
    """For noninferior and equivalent: how much worse, or how far apart, still does not matter; nats
    per token, or for a cost a share (0.05 is 5 %)."""
    target: float | None = Field(default=None, gt=0)
    """For a cost: the loss to reach, nats per token; without it, of each pair of runs, the worse
    run's final loss."""
    rates: tuple[Annotated[float, Field(gt=0)], ...] | None = None
    """For lr_sensitivity: the learning rates, rising, that every arm is trained with by every
    seed."""

    @property
    def question(self) -> Question:
        """The question that it asks."""
        question = MEASURES[self.measure]
        if self.target is not None and question.axis:
            question = cost_question(question.axis, self.target)
        return replace(
            question,
            key=self.measure,
            direction=self.direction,
            margin=self.margin,
        )


@dataclass(frozen=True, kw_only=True, config=SECTION)
class Tuning:
    """Every arm is trained with each of these settings on separate seeds; the best is then used for
    the study's seeds."""

    seeds: Seeds | None = None
    """Seeds for choosing: "0..1", "3" or "1,2". None of them may be one of the study's seeds."""
    n_seeds: int | None = Field(default=None, ge=1, le=RUNS)
    """Number of seeds that are drawn instead, 5 unless set; with blocks those of each block, 1
    unless set."""
    grow: int | None = Field(default=None, ge=0, le=2)
    """How often the grids of learning rates may grow at the side where an arm's best is at the
    edge: 2 unless set, but 0 where `seeds` are given."""
    grid: Grid
    """Recipe key -> values to try: { "optim.lr" = [1e-3, 2e-3, 4e-3] }. Several keys are combined
    with each other."""


@dataclass(frozen=True, kw_only=True, config=SECTION)
class Arm:
    """One of the recipes that are compared."""

    name: Text
    """Short name, part of the names of its runs."""
    recipe: Text
    """Name of a recipe, or the path of one as seen from the study file."""
    set: tuple[Text, ...] = ()
    """Changes of the recipe: ["optim.lr=2e-3"]."""
    grid: Grid | None = None
    """Tuning grid of this arm where it is another than [tuning]'s; {} where the arm is not
    tuned."""


@dataclass(frozen=True, kw_only=True, config=SECTION)
class Study:
    """A whole study, as its file says."""

    question: str = ""
    """What the study is for, in one sentence."""
    seeds: Seeds | None = None
    """Seeds that every arm is trained with, in the order of their look: "10..14" (both
    included)."""
    n_seeds: int | None = Field(default=None, ge=2, le=RUNS)
    """Number of seeds that are drawn instead, 5 unless set."""
    blocks: int | None = Field(default=None, ge=1, le=RUNS)
    """Number of blocks instead of seeds: each tunes every arm on seeds of its own and is judged by
    one more."""
    alpha: float = Field(default=0.05, gt=0, lt=0.5)
    """Chance of one or more false claims where nothing differs, over all primaries, arms and
    looks."""
    looks: int = Field(default=1, ge=1, le=20)
    """How often the study is judged, evenly spread over its seeds; it ends early where everything
    is decided."""
    baseline: Text
    """Name of the arm that the others are compared with."""
    primary: Annotated[tuple[Primary, ...], Field(min_length=1)]
    """Measures that the study is judged by; all others are exploratory."""
    equal: Literal["tokens", "flops"] | None = None
    """What the arms have in common, within 2 %; must be given where their tokens differ."""
    stuck_at: float | None = Field(default=None, gt=0, lt=1)
    """Share of the tokens, 0.2 unless set: a run is stuck if it ends above the baseline's median
    loss there."""
    tuning: Tuning | None = None
    arms: Annotated[tuple[Arm, ...], Field(min_length=2)]
    """The recipes that are compared, the baseline among them."""
    set: tuple[Text, ...] = ()
    """Changes of every arm's recipe, before the arm's own."""


class StudyFile:
    """A study with the path of its file, its drawn seeds, its blocks and their tuned settings."""

    def __init__(
        self,
        path: Path,
        study: Study,
        drawn: dict[str, str] | None = None,
        blocks: Sequence[Block] = (),
    ) -> None:
        self.path = path
        self.name = path.stem
        self.study = study
        self.drawn = drawn or {}
        """Key -> the seeds that were drawn for it."""
        self.seeds = parse_given(study.seeds or self.drawn.get("seeds"))
        """The study's seeds, in the order in which they are trained; empty before they are
        drawn."""
        tuning_seeds = self.drawn.get("tuning.seeds")
        if study.tuning and study.tuning.seeds:
            tuning_seeds = study.tuning.seeds
        self.tuning_seeds = parse_given(tuning_seeds)
        """Seeds of the tuning phase; empty without one, and before they are drawn."""

        self.blocks = list(blocks)
        """Blocks of the study; one block with all seeds if its file gives no `blocks`."""
        if not self.blocks:
            n_blocks = study.blocks or 1
            for i in range(n_blocks):
                tuning = _part(self.tuning_seeds, i, n_blocks)
                judged = _part(self.seeds, i, n_blocks)
                self.blocks.append(Block(tuning, judged))

        self.block_of: dict[int, int] = {}
        """Seed -> number of its block, from 1."""
        for number, block in enumerate(self.blocks, 1):
            for seed in (*block.tuning, *block.seeds):
                self.block_of[seed] = number

    def with_blocks(self, blocks: Sequence[Block]) -> StudyFile:
        """Return the study with other blocks of the same seeds."""
        return StudyFile(self.path, self.study, self.drawn, blocks)

    @property
    def tuned(self) -> list[Tuned]:
        """What each arm is trained with, block after block."""
        tuned: list[Tuned] = []
        for block in self.blocks:
            tuned += block.tuned
        return tuned

    @property
    def chosen_seeds(self) -> list[int]:
        """The study's seeds in blocks that are tuned."""
        chosen: list[int] = []
        for block in self.blocks:
            if block.tuned:
                chosen += block.seeds
        return chosen

    @property
    def seeds_to_draw(self) -> dict[str, int]:
        """Key -> how many seeds are drawn for it; empty if the file gives all seeds."""
        numbers = {}
        study = self.study
        if study.seeds is None:
            numbers["seeds"] = study.blocks or study.n_seeds or DRAWN
        if study.tuning and study.tuning.seeds is None:
            if study.blocks:
                numbers["tuning.seeds"] = study.blocks * (study.tuning.n_seeds or 1)
            else:
                numbers["tuning.seeds"] = study.tuning.n_seeds or DRAWN
        return numbers

    @property
    def grow(self) -> int:
        """How often the grids may grow."""
        tuning = self.study.tuning
        if tuning is None:
            return 0
        if tuning.grow is not None:
            return tuning.grow
        # A study registered before grids could grow has `tuning.seeds` in its file: keep that.
        return 0 if tuning.seeds else 2

    @property
    def rates(self) -> tuple[float, ...]:
        """Learning rates of the primary measure lr_sensitivity; empty without one."""
        for primary in self.study.primary:
            if primary.question.over_rates:
                return primary.rates or ()
        return ()

    @property
    def judged_rates(self) -> tuple[float | None, ...]:
        """Learning rates that every seed of an arm is judged at; None: the arm's own."""
        if all(primary.question.over_rates for primary in self.study.primary):
            return self.rates
        return (None, *self.rates)

    @property
    def looks(self) -> tuple[int, ...]:
        """Numbers of seeds at which the study is judged."""
        return schedule(len(self.seeds), self.study.looks)

    def looks_taken(self, number: int) -> Looks:
        """Return the planned looks, of which the first `number` are taken."""
        return Looks(plan=self.looks, taken=number, alpha=self.study.alpha, registered=True)

    @property
    def comparisons(self) -> int:
        """Number of claims that p-values are corrected for: the primary measures of each arm.

        Costs to reach one loss count as one.
        """
        primaries = enumerate(self.study.primary)
        members = {primary.question.member(place) for place, primary in primaries}
        n_methods = len(self.study.arms) - 1
        return len(members) * n_methods

    def grid_of(self, arm: Arm, grown: Sequence[Edge] = ()) -> dict[str, tuple[Any, ...]]:
        """Return recipe key -> values that the arm is tuned over; empty if it is not tuned.

        Args:
            grown: (key, side) of each value that is added at an end of the grid.
        """
        if self.study.tuning is None:
            return {}
        grid = dict(self.study.tuning.grid)
        if arm.grid is not None:
            grid = dict(arm.grid)
        for key, side in grown:
            values = grid.get(key, ())
            # A value that is no learning rate fails elsewhere, in the check of the grid.
            if len(values) < 2 or not all(_is_rate(value) for value in values):
                continue
            outward = sorted(map(float, values), reverse=side == "high")
            last, neighbour = outward[:2]
            # The step from the last value equals the step to it, in the logarithm.
            added = float(f"{last * last / neighbour:.3g}")
            if added not in values:
                grid[key] = (*values, added)
        return grid

    def recipe_path(self, arm: Arm) -> str:
        """Return the value of --recipe for an arm: a recipe's name, or the path of its file.

        A relative path starts at the folder of the study file.
        """
        path = find_recipe(arm.recipe, beside=self.path)
        if is_path(arm.recipe) or path.parent == self.path.parent:
            return shown_path(path)
        return arm.recipe

    def recipe_of(self, arm: Arm) -> Recipe:
        """Return the arm's recipe, before any tuning."""
        return load_recipe(self.recipe_path(arm), self.settings_of(arm))

    def settings_of(self, arm: Arm) -> tuple[str, ...]:
        """`key=value` overrides of the arm, before any tuning."""
        return (*self.study.set, *arm.set)

    def values(self) -> dict[str, Any]:
        """Return the values that are hashed: what is trained and how it is judged, by dotted key.

        Recipes are included with their bases and changes, but without defaults: a later version of
        the program may have further keys. Drawn seeds follow from these values and are left out.
        """
        values = dict(_flat(self.study))
        for arm in self.study.arms:
            written = read_recipe_file(self.recipe_path(arm), self.settings_of(arm)).values
            for key, value in flatten(written).items():
                if key != "seed" and not key.startswith(NOT_COMPUTED):
                    values[f"recipe of {arm.name}: {key}"] = value
        # As plan.json will hold them: tuples become lists.
        return json.loads(json.dumps(values))

    @property
    def sha256(self) -> str:
        """Hash of `values`."""
        return digest_of(self.values())


def _is_rate(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value < HIGHEST_RATE


def parse_given(seeds: str | None) -> tuple[int, ...]:
    """Parse seeds; empty if none are given."""
    return parse_seeds(seeds) if seeds else ()


def _part(seeds: tuple[int, ...], i: int, n_parts: int) -> tuple[int, ...]:
    """Return part `i`, from 0, of `n_parts` equal parts of the seeds."""
    start = i * len(seeds) // n_parts
    end = (i + 1) * len(seeds) // n_parts
    return seeds[start:end]


def _flat(section: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) for each key of a section that has a value.

    Without the question, and without the names of recipes: their content counts.
    """
    for field in fields(section):
        key = f"{prefix}{field.name}"
        value = getattr(section, field.name)
        if value is None or field.name in ("question", "recipe"):
            continue
        if isinstance(value, Tuning):
            yield from _flat(value, f"{key}.")
        elif isinstance(value, tuple) and value and isinstance(value[0], Primary | Arm):
            for i, item in enumerate(value):
                name = item.name if isinstance(item, Arm) else str(i)
                yield from _flat(item, f"{key}.{name}.")
        else:
            yield key, value
