"""Divide one evaluation among processes: each computes some batches and receives all answers.

Batches are made of all requests before they are dealt, so an answer is computed in the same batch,
with the same bits, at every number of processes. The harness's own way, a share of the items each,
would make other batches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from efftrain_cli.foundation.errors import EfftrainError, LostProcessError
from efftrain_cli.foundation.records import text_digest
from efftrain_cli.training.ranks import ALONE, Ranks

T = TypeVar("T")


class FailedElsewhereError(EfftrainError):
    """Another process could not do its share of a task."""


@dataclass(frozen=True)
class DistributedEval:
    """This process's part in an evaluation: all of it by default."""

    ranks: Ranks = ALONE

    def deal(self, batches: Sequence[T]) -> list[T]:
        """Return this process's batches."""
        return list(batches[self.ranks.rank :: self.ranks.world_size])

    def gather(self, task: str, asked: object, answers: list[Any]) -> list[Any]:
        """Return the answers of all processes, JSON values.

        Args:
            asked: all that was asked, of every process, by whose hash the processes compare their
                items.

        Raises:
            FailedElsewhereError: another process has failed at its share.
            EfftrainError: another process reads other items.
        """
        if self.ranks.is_single_process:
            return answers
        what = f"{task} {text_digest(repr(asked))}"
        reports = self.ranks.all_gather_json({"what": what, "answers": answers})
        _check(reports)
        gathered = []
        for report in reports:
            gathered += report["answers"]
        return gathered

    @contextmanager
    def task(self, name: str) -> Iterator[None]:
        """Let a task succeed on all processes or none: FailedElsewhereError if another failed.

        Each process takes part in as many exchanges as the others, whether it fails or not.
        """
        try:
            yield
        except (FailedElsewhereError, LostProcessError):
            raise
        except Exception as error:
            failed = f"rank {self.ranks.rank}: {type(error).__name__}: {error}"
            self.ranks.all_gather_json({"failed": failed})
            raise
        _check(self.ranks.all_gather_json({"what": f"the end of {name}"}))


def _check(reports: Sequence[dict[str, Any]]) -> None:
    for report in reports:
        if "failed" in report:
            raise FailedElsewhereError(report["failed"])
    if len({report.get("what") for report in reports}) > 1:
        raise EfftrainError(
            "the processes read different items of this task\n"
            "  give all of them the same data and the same lm_eval"
        )
