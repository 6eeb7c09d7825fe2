"""One evaluation shared by several processes: batches are dealt to them, and each gets the answers of all.

Batches are made of all requests before they are dealt, so an answer is computed beside the same others at every number
of processes. A task fails on all where it fails on one: each process takes part in as many exchanges as the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from efftrain_cli.foundation.errors import EfftrainError, LostProcessError

T = TypeVar("T")


class Ranks(Protocol):
    """The processes, as `training.ranks.Ranks` knows them."""

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    def all_gather_json(self, value: object) -> list[Any]:
        """What each process gives, as JSON values, on all of them."""


class FailedElsewhereError(EfftrainError):
    """Another process could not do its share of a task."""


@dataclass(frozen=True)
class Sharing:
    """How this process shares an evaluation. Without `ranks` it is alone."""

    ranks: Ranks | None = None

    def deal(self, batches: Sequence[T]) -> list[T]:
        """This process's batches."""
        return (
            list(batches)
            if self.ranks is None
            else list(batches[self.ranks.rank :: self.ranks.world_size])
        )

    def gather(self, what: str, answers: list[Any]) -> list[Any]:
        """The answers of all processes, JSON values, to their shares of `what`.

        Raises:
            FailedElsewhereError: another one has failed at its share.
            EfftrainError: another one is at something else: it reads other items.
        """
        if self.ranks is None:
            return answers
        everyone = self.ranks.all_gather_json({"what": what, "answers": answers})
        _check(everyone)
        return [answer for said in everyone for answer in said["answers"]]

    @contextmanager
    def task(self, name: str) -> Iterator[None]:
        """One task, which succeeds on all processes or on none: `FailedElsewhereError` where it failed on another."""
        if self.ranks is None:
            yield
            return
        try:
            yield
        except (FailedElsewhereError, LostProcessError):
            raise
        except Exception as error:
            self.ranks.all_gather_json(
                {"failed": f"rank {self.ranks.rank}: {type(error).__name__}: {error}"}
            )
            raise
        _check(self.ranks.all_gather_json({"what": f"the end of {name}"}))


def _check(everyone: Sequence[dict[str, Any]]) -> None:
    for said in everyone:
        if "failed" in said:
            raise FailedElsewhereError(said["failed"])
    if len({said.get("what") for said in everyone}) > 1:
        raise EfftrainError(
            "the processes read different items of this task\ngive all of them the same data and the same lm_eval"
        )
