"""An evaluation that several processes share: here threads, whose exchange waits for all of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from efftrain_cli.foundation.errors import EfftrainError
from efftrain_cli.zeroshot.score import Evaluator, Request
from efftrain_cli.zeroshot.sharing import FailedElsewhereError, Sharing
from tests.trained_run import random_gpt
from tests.zeroshot.test_score import CONFIG, some_requests


class Thread:
    """One of three ranks."""

    world_size = 3

    def __init__(self, rank: int, said: list[Any], barrier: threading.Barrier) -> None:
        self.rank, self._said, self._barrier = rank, said, barrier

    def all_gather_json(self, value: object) -> list[Any]:
        self._said[self.rank] = value
        self._barrier.wait()
        found = list(self._said)
        self._barrier.wait()
        return found


def on_three(work: Callable[[Sharing], Any]) -> list[Any]:
    """What `work` returns or raises on each."""
    said, barrier, found = [None] * 3, threading.Barrier(3, timeout=30), [None] * 3

    def one(rank: int) -> None:
        try:
            found[rank] = work(Sharing(Thread(rank, said, barrier)))
        except Exception as error:
            found[rank] = error

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_all_get_the_scores_of_one_process_bit_for_bit() -> None:
    model = random_gpt(CONFIG, spread=0.5, seed=7)
    requests = some_requests(model)
    alone = Evaluator(model=model, context_length=CONFIG.seq_len, batch_tokens=40).score(requests)
    dealt: list[int] = []

    class Counting(Sharing):
        def deal(self, batches: Sequence[Any]) -> list[Any]:
            dealt.append(len(super().deal(batches)))
            return super().deal(batches)

    def score(sharing: Sharing) -> Any:
        counting = Counting(sharing.ranks)
        with counting.task("t"):
            return Evaluator(
                model=model, context_length=CONFIG.seq_len, batch_tokens=40, sharing=counting
            ).score(requests)

    assert on_three(score) == [alone] * 3
    assert min(dealt) >= 2, "each computes its share and no more"
    assert sum(dealt) == len(
        Evaluator(model=model, context_length=24, batch_tokens=40)._batches(requests)
    )


def test_fewer_batches_than_processes() -> None:
    model = random_gpt(CONFIG, spread=0.5, seed=7)
    request = Request((1, 2), (3,))
    found = on_three(
        lambda sharing: Evaluator(model=model, context_length=24, sharing=sharing).score([request])
    )
    assert found == [Evaluator(model=model, context_length=24).score([request])] * 3


@pytest.mark.parametrize("when", ["before the exchange", "after it"])
def test_a_task_fails_on_all_where_it_fails_on_one(when: str) -> None:
    """And the next one is not disturbed by it."""

    def two_tasks(sharing: Sharing) -> Any:
        first: Any = None
        try:
            with sharing.task("a"):
                if when == "before the exchange" and sharing.ranks.rank == 1:
                    raise ValueError("no such file")
                first = sharing.gather("a", [sharing.ranks.rank])
                if when == "after it" and sharing.ranks.rank == 1:
                    raise ValueError("no such file")
        except Exception as error:
            first = error
        with sharing.task("b"):
            return first, sharing.gather("b", [sharing.ranks.rank])

    found = on_three(two_tasks)
    assert [second for _, second in found] == [[0, 1, 2]] * 3
    assert isinstance(found[1][0], ValueError)
    for rank in (0, 2):
        assert (
            isinstance(found[rank][0], FailedElsewhereError)
            and str(found[rank][0]) == "rank 1: ValueError: no such file"
        )


def test_other_items_on_one_process_are_refused_by_all() -> None:
    found = on_three(lambda sharing: sharing.gather(f"task {sharing.ranks.rank == 2}", []))
    assert all(
        isinstance(error, EfftrainError) and "read different items" in str(error) for error in found
    )


def test_processes_that_are_at_different_places_are_told_so() -> None:
    """One compares facts for the next run, where the others exchange answers."""

    def work(sharing: Sharing) -> Any:
        if sharing.ranks.rank == 1:
            return sharing.ranks.all_gather_json({"checkpoint": "step-3"})
        return sharing.gather("t", [])

    found = on_three(work)
    assert all(
        isinstance(found[rank], EfftrainError) and "different items" in str(found[rank])
        for rank in (0, 2)
    )
