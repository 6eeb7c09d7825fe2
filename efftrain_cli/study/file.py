"""The study file: arms, seeds, primary measures and looks, checked as a whole before anything is
trained.

A study says beforehand what would count as an answer. Its meaning, the arms' resolved recipes
included, is hashed when its first run starts; comments and the order of keys are free to change,
everything else is not.
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
    "seconds_to_target": cost_question("seconds", None),
}
"""The question that each value of `Primary.measure` asks; costs are compared as ratios, so a margin
is a share."""
BLOCKS = 4
"""Fewest blocks that are judged."""
MARGINS = ("noninferior", "equivalent")
"""Directions that are judged against a margin."""
DRAWN = 5
"""Seeds that are drawn where the file gives neither seeds nor their number."""
HIGHEST_RATE = 1e9
"""Grids of learning rates above it do not grow."""
LONGEST_NAME = 40
"""Of study and arm together, so that the names of their runs stay readable and allowed."""


def _seeds(value: Any) -> Any:
    """Return seeds as text, "0..4" or "1,3"; one whole number or a list of them is accepted too."""
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


Seeds = Annotated[str, BeforeValidator(_seeds)]
Values = Annotated[tuple[bool | int | float | str, ...], Field(min_length=1)]
Grid = dict[str, Values]


@dataclass(frozen=True, kw_only=True, config=SECTION)
class Primary:
    """A measure that the study is judged by."""

    measure: Literal[
        "final_loss", "lr_sensitivity", "tokens_to_target", "flops_to_target", "seconds_to_target"
    ]
    """final_loss: validation loss when the budget is used up. lr_sensitivity: how much that depends
    on the learning rate. A cost: tokens, FLOPs or seconds to reach a loss."""
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
    equal: Literal["tokens", "flops", "seconds"] | None = None
    """What the arms have in common, within 2 %; must be given where their tokens differ."""
    stuck_at: float | None = Field(default=None, gt=0, lt=1)
    """Share of the tokens, 0.2 unless set: a run is stuck if it ends above the baseline's median
    loss there."""
    tuning: Tuning | None = None
    arms: Annotated[tuple[Arm, ...], Field(min_length=2)]
    """The recipes that are compared, the baseline among them."""
    set: tuple[Text, ...] = ()
    """Changes of every arm's recipe, before the arm's own."""

    @property
    def is_about_seconds(self) -> bool:
        """Whether a verdict depends on training seconds."""
        axes = [primary.question.axis for primary in self.primary]
        return "seconds" in (self.equal, *axes)


class StudyFile:
    """A study with its place: what the file says, the recipes that it means, its hash, and how far
    its tuning is."""

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
        given = study.tuning and study.tuning.seeds
        self.tuning_seeds = parse_given(given or self.drawn.get("tuning.seeds"))
        """Seeds of the tuning phase; empty without one, and before they are drawn."""
        number = study.blocks or 1
        self.blocks = list(blocks)
        """Its blocks; the whole study as one if it has none."""
        if not self.blocks:
            for i in range(number):
                tuning = _cut(self.tuning_seeds, i, number)
                judged = _cut(self.seeds, i, number)
                self.blocks.append(Block(tuning, judged))
        self.block_of: dict[int, int] = {}
        """Seed -> number of its block, from 1."""
        for i, block in enumerate(self.blocks, 1):
            self.block_of |= dict.fromkeys((*block.tuning, *block.seeds), i)

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
        """The study's seeds whose settings are chosen."""
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
            blocks = study.blocks or 1
            each = 1 if study.blocks else DRAWN
            numbers["tuning.seeds"] = blocks * (study.tuning.n_seeds or each)
        return numbers

    @property
    def grow(self) -> int:
        """How often the grids may grow."""
        tuning = self.study.tuning
        if tuning is None:
            return 0
        if tuning.grow is not None:
            return tuning.grow
        # Studies from before grids could grow gave their tuning seeds.
        return 0 if tuning.seeds else 2

    @property
    def rates(self) -> tuple[float, ...]:
        """Learning rates of the primary that is judged over them; empty without one."""
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
        """Return the planned looks, of which so many are taken."""
        return Looks(self.looks, number, self.study.alpha, registered=True)

    @property
    def comparisons(self) -> int:
        """Number of claims that p is corrected for: each arm's primaries, costs to one loss counted
        as one."""
        primaries = enumerate(self.study.primary)
        members = {primary.question.member(place) for place, primary in primaries}
        return len(members) * (len(self.study.arms) - 1)

    def grid_of(self, arm: Arm, grown: Sequence[Edge] = ()) -> dict[str, tuple[Any, ...]]:
        """Return recipe key -> values that the arm is tuned over, with a point more at each side
        `grown`; empty if it is not tuned."""
        if self.study.tuning is None:
            return {}
        grid = dict(self.study.tuning.grid)
        if arm.grid is not None:
            grid = dict(arm.grid)
        for key, side in grown:
            values = grid.get(key, ())
            # What is no learning rate is refused as one, at its own place of the grid.
            if len(values) > 1 and all(_is_rate(value) for value in values):
                last, before = sorted(map(float, values), reverse=side == "high")[:2]
                # As far from the last in the logarithm as that is from its neighbour.
                more = float(f"{last * last / before:.3g}")
                if more not in values:
                    grid[key] = (*values, more)
        return grid

    def recipe_path(self, arm: Arm) -> str:
        """Return what --recipe is given: a name stays; a file is looked for beside the study."""
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
        """Return what the hash is taken of: all that decides what is trained and how it is judged,
        as dotted keys.

        Recipes stand as they are written, bases and changes included, but without their defaults: a
        later version of the program may know keys more. Drawn seeds follow from these values and
        are not among them.
        """
        values = dict(_flat(self.study))
        for arm in self.study.arms:
            written = read_recipe_file(self.recipe_path(arm), self.settings_of(arm)).values
            for key, value in flatten(written).items():
                if key != "seed" and not key.startswith(NOT_COMPUTED):
                    values[f"recipe of {arm.name}: {key}"] = value
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


def _cut(seeds: tuple[int, ...], i: int, number: int) -> tuple[int, ...]:
    """Return the i-th, from 0, of so many equal parts of seeds."""
    start = i * len(seeds) // number
    end = (i + 1) * len(seeds) // number
    return seeds[start:end]


def _flat(section: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield a section's values by dotted keys, but for the question and the names of recipes: an
    arm's recipe counts by what it says."""
    for field in fields(section):
        value = getattr(section, field.name)
        if field.name in ("question", "recipe"):
            continue
        if isinstance(value, Tuning):
            yield from _flat(value, f"{prefix}{field.name}.")
        elif isinstance(value, tuple) and value and isinstance(value[0], Primary | Arm):
            for i, item in enumerate(value):
                name = item.name if isinstance(item, Arm) else str(i)
                yield from _flat(item, f"{prefix}{field.name}.{name}.")
        elif value is not None:
            yield f"{prefix}{field.name}", value
