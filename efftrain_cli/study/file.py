"""A study file: its keys, and the rules between them."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass

from efftrain_cli.compare.judge import Claim
from efftrain_cli.foundation.errors import Breaches
from efftrain_cli.foundation.section import SECTION, Text
from efftrain_cli.study.sizes import StudySize, parse_sizes
from efftrain_cli.trials.command import METRIC
from efftrain_cli.trials.trial import parse_seeds

Grid = dict[str, tuple[bool | int | float | str, ...]]
"""Recipe key -> values to try."""
RATIOS = ("different", "better")
"""Directions of a cost: a ratio under a decay lies towards 1, so no margin holds for it."""


@dataclass(frozen=True, kw_only=True, config=SECTION)
class StudyArm:
    """A recipe that is compared."""

    name: Text
    recipe: str = ""
    """Name of a recipe, or its path as seen from the study file; "" with a command."""
    set: tuple[Text, ...] = ()
    """Changes of the recipe: ["optim.lr=2e-3"]."""
    grid: Grid | None = None
    """Tuning grid of this arm if it is another than [tuning]'s; {} if the arm is not tuned."""


@dataclass(frozen=True, kw_only=True, config=SECTION)
class Tuning:
    """Settings that every arm is trained with on seeds of their own; the best is judged."""

    seeds: Text
    grid: Grid
    sizes: tuple[Text, ...] = ()
    """Sizes at which the arms are tuned; larger ones carry rates on by N^(-1/3). Default: all."""


@dataclass(frozen=True, kw_only=True, config=SECTION)
class Study:
    """A study, as its file says."""

    question: str = ""
    """What the study is for, in one sentence."""
    baseline: Text
    """Name of the arm that the others are compared with."""
    arms: tuple[StudyArm, ...] = Field(min_length=2)
    primary: tuple[Claim, ...] = Field(min_length=1)
    """Claims that are judged; every other measure is estimated."""
    seeds: Text
    """Seeds of every arm, in the order of the looks: "10..14", both included."""
    looks: tuple[int, ...] = ()
    """Numbers of pairs at which the study is judged; only at all of them unless set."""
    alpha: float = Field(default=0.05, gt=0, lt=0.5)
    """Chance of one or more false claims if nothing differs, over all claims and looks."""
    give_up: float = Field(default=1.0, gt=0, le=1)
    """p-value above which a claim is given up at an early look of five pairs or more."""
    tuning: Tuning | None = None
    set: tuple[Text, ...] = ()
    """Changes of every arm's recipe, before the arm's own."""
    command: str = ""
    """Command that trains an arm, with places for {seed} and {arm}, instead of recipes."""
    metric: str = METRIC
    """With a command: regular expression of a printed loss, whose last match counts."""
    maximize: bool = False
    """With a command: what it prints is a score, of which the higher is better."""
    sizes: Text | tuple[StudySize, ...] = ()
    """Sizes at which every arm is trained: "0.1M..1.6M x2", or a table for each."""
    tokens_per_parameter: float = Field(default=20.0, gt=0)
    """Tokens of a size that names none, per parameter of it."""
    branches: tuple[float, ...] = Field(default=(0.5, 1.0, 2.0), min_length=2)
    """Budgets of a size, in multiples of its tokens."""

    @property
    def each_size(self) -> tuple[StudySize, ...]:
        """The sizes, whichever way they are written.

        Raises:
            ValueError: the text is not of its form.
        """
        if isinstance(self.sizes, str):
            return parse_sizes(self.sizes)
        return self.sizes

    @property
    def tuning_seeds(self) -> tuple[int, ...]:
        """Seeds that the arms are tuned on; none without tuning."""
        if self.tuning is None:
            return ()
        return parse_seeds(self.tuning.seeds)

    @property
    def tuned_sizes(self) -> tuple[str, ...]:
        """Sizes that are tuned if they are not all."""
        if self.tuning is None:
            return ()
        return self.tuning.sizes

    @model_validator(mode="after")
    def _rules_between_keys(self) -> Study:
        found = list(breaches(self))
        if found:
            raise Breaches(found)
        return self


def breaches(study: Study) -> Iterator[tuple[str, str]]:
    """Yield key and rule of each mistake that concerns several keys."""
    names = [arm.name for arm in study.arms]
    if study.baseline not in names or has_repeats(names):
        yield "baseline", "must be one of the arms, and each arm needs its own name"
    for number, arm in enumerate(study.arms):
        if bool(arm.recipe) == bool(study.command):
            yield f"arms.{number}.recipe", "is required without a command, forbidden with one"
    of_recipes = study.tuning or study.set or study.sizes
    if study.command and of_recipes:
        yield "command", "cannot be combined with tuning, set or sizes: write them into it"
    seeds = parse_seeds(study.seeds)
    if len(seeds) < 2:
        yield "seeds", "must be two or more: one pair supports no claim"
    rising = sorted({*study.looks, len(seeds)})
    if study.looks and [*study.looks] != rising:
        yield "looks", f"must rise and end at all {len(seeds)} seeds"
    try:
        sizes = study.each_size
    except ValueError as error:
        yield "sizes", str(error)
        return
    judged = {*seeds}
    for number, size in enumerate(sizes):
        own = parse_seeds(size.seeds or study.seeds)
        if len(own) < 2:
            yield f"sizes.{number}.seeds", "must be two or more: one pair supports no claim"
        judged |= {*own}
    if judged & {*study.tuning_seeds}:
        yield "tuning.seeds", "must differ from the study's, or the tuned arm looks too good"
    size_names = [size.name for size in sizes]
    yield from size_breaches(study, size_names)
    measures = [claim.measure for claim in study.primary]
    targets = {claim.target for claim in study.primary if claim.target}
    if has_repeats(measures) or len(targets) > 1:
        yield "primary", "must name each measure once, and one target at most"
    is_scored = study.command and {*measures} == {"final_loss"}
    if study.maximize and not is_scored:
        yield "maximize", "is for the final scores that a command prints"
    if "compute_multiplier" in measures and not sizes:
        yield "primary", "of a compute multiplier needs sizes"
    for number, claim in enumerate(study.primary):
        for name, rule in claim_breaches(claim):
            yield f"primary.{number}.{name}", rule


def size_breaches(study: Study, names: list[str]) -> Iterator[tuple[str, str]]:
    """Yield key and rule of each mistake about the sizes of these names."""
    tuned = [*study.tuned_sizes]
    first = names[: len(tuned)]
    if tuned != first:
        yield "tuning.sizes", "must be the first sizes, in their order: rates are carried upwards"
    if has_repeats(names):
        yield "sizes", "must have different names"
    if min(study.branches) <= 0:
        yield "branches", "must be positive: they are multiples of a size's tokens"


def has_repeats(values: Collection[object]) -> bool:
    """Return whether a value occurs twice."""
    return len({*values}) < len(values)


def claim_breaches(claim: Claim) -> Iterator[tuple[str, str]]:
    """Yield key and rule of each mistake of a primary."""
    if claim.direction not in RATIOS:
        if claim.measure != "final_loss":
            yield "direction", "of a cost must be different or better: its ratio is a bound"
        elif not claim.margin:
            yield "margin", f"is required for {claim.direction}"
    if claim.measure.endswith("_to_target") and claim.target is None:
        yield "target", "is required for a cost to a target"
