"""The questions that a recipe asks of each of its methods. The answers here are the baseline's: a
method gives those that differ.

A method's section, its list of hyperparameters and the object with the paper's equations are one
frozen dataclass, a `Method`. What it decides about a step is asked in `plan/plan.py`, how its
gradient is computed in `training/gradient.py`, both by name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

if TYPE_CHECKING:
    from efftrain_cli.foundation.step import StepPlan, StepResult
    from efftrain_cli.model.config import GPTConfig


Problems = Iterator[tuple[str, str]]
"""(dotted key, rule) of each breach of a recipe."""
Changes = dict[str, Any]
"""Fields of a recipe with the values to replace theirs by."""
Columns = dict[str, float | None]
"""Columns of a step's row in metrics.jsonl."""


class Sections(Protocol):
    """What methods read of a recipe: its other sections, and what follows from them."""

    @property
    def model(self) -> Any: ...
    @property
    def data(self) -> Any: ...
    @property
    def optim(self) -> Any: ...
    @property
    def train(self) -> Any: ...
    @property
    def eval(self) -> Any: ...
    @property
    def is_sharded(self) -> bool: ...
    @property
    def delayed_gradients(self) -> Any: ...
    @property
    def stages(self) -> tuple[Any, ...]: ...
    @property
    def methods(self) -> Mapping[str, Any]: ...
    @property
    def varies(self) -> frozenset[str]: ...
    @property
    def full_steps(self) -> int | None: ...


class Method:
    """A section of a recipe that switches a training-efficiency method on by being present."""

    varies: ClassVar[frozenset[str]] = frozenset()
    """What differs from step to step: "length", "batch", "blocks" (which of them run); "steps"
    where only training shows how many steps the budget gives."""
    supports_sharding: ClassVar[bool] = True
    """Whether it works where each device holds a share of the model."""
    gradients_held: ClassVar[int] = 0
    """Gradients of the whole model that it holds beside the one that accumulates."""
    prefix: ClassVar[str] = ""
    """What its columns of metrics.jsonl begin with, where that is not the section's name."""
    aliases: ClassVar[Mapping[str, str]] = {}
    """What other programs and papers call its keys, in lower case and with _ for -; "" is the
    section itself."""

    def problems(self, recipe: Sections) -> Problems:
        """Yield (dotted key, rule) of everything in `recipe` that this method cannot work with."""
        yield from ()

    def warnings(self, recipe: Sections) -> Iterator[str]:
        """Yield what is legal and probably not meant, one sentence each."""
        yield from ()

    def cut_matters(self) -> bool:
        """Return whether a step's gradient depends on how it is cut into micro-batches by more than
        rounding.

        If so, train.micro_batch_tokens and the number of devices are settings of the method.
        """
        return False

    def batch_bounds(self, batch_size: int) -> tuple[int, int]:
        """Return the fewest and most sequences of a step whose number is not planned;
        train.batch_size is given."""
        return batch_size, batch_size

    def in_flight_bytes(self, shape: GPTConfig) -> int:
        """Return the bytes of its own tensors between two full steps, which each checkpoint holds
        too."""
        return 0

    def assumptions(self, recipe: Sections) -> list[str]:
        """List what a plan cannot know in advance, and what it assumes instead, one sentence
        each."""
        return []

    def shortened(self, recipe: Sections, half: int, batch_size: int) -> Changes:
        """Return fields of the recipe that move this method's schedule into 2 x `half` steps of
        `batch_size` sequences.

        It then changes before and after a stop in the middle. Empty if the method has no schedule.
        """
        return {}

    def without_schedule(self) -> Changes:
        """Return fields of the recipe with which every step is a full one; empty if this method's
        steps are."""
        return {}

    def columns(self, recipe: Sections, plan: StepPlan, result: StepResult) -> Columns:
        """Return this method's columns of a step's row in metrics.jsonl, each with the method's
        prefix."""
        return {}


def varying(methods: Mapping[str, Method], *what: str) -> list[str]:
    """List the sections among `methods` that vary any of `what`."""
    return [name for name, method in methods.items() if not method.varies.isdisjoint(what)]
