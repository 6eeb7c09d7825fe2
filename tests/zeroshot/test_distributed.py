"""An evaluation that several processes share: here threads, whose exchange waits for all of
them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from efftrain_cli.foundation.errors import EfftrainError
from efftrain_cli.zeroshot.distributed import DistributedEval, FailedElsewhereError
from efftrain_cli.zeroshot.score import Evaluator, Request
from tests.trained_run import random_gpt
from tests.zeroshot.test_score import CONFIG, some_requests


class Thread:
    """One of three ranks."""

    world_size = 3
    is_single_process = False

    def __init__(self, rank: int, said: list[Any], barrier: threading.Barrier) -> None:
        self.rank, self._said, self._barrier = rank, said, barrier

    def all_gather_json(self, value: object) -> list[Any]:
        self._said[self.rank] = value
        self._barrier.wait()
        found = list(self._said)
        self._barrier.wait()
        return found


def on_three(work: Callable[[DistributedEval], Any]) -> list[Any]:
    """What `work` returns or raises on each."""
    said, barrier, found = [None] * 3, threading.Barrier(3, timeout=30), [None] * 3

    def one(rank: int) -> None:
        try:
            found[rank] = work(DistributedEval(Thread(rank, said, barrier)))
        except Exception as error:
            found[rank] = error

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_all_get_the_scores_of_one_process_bit_for_bit():
    model = random_gpt(CONFIG, spread=0.5, seed=7)
    requests = some_requests(model)
    alone = Evaluator(model=model, context_length=CONFIG.seq_len, batch_tokens=40).score(requests)
    dealt: list[int] = []

    class Counting(DistributedEval):
        def deal(self, batches: Sequence[Any]) -> list[Any]:
            dealt.append(len(super().deal(batches)))
            return super().deal(batches)

    def score(distributed: DistributedEval) -> Any:
        counting = Counting(distributed.ranks)
        with counting.task("t"):
            return Evaluator(
                model=model, context_length=CONFIG.seq_len, batch_tokens=40, distributed=counting
            ).score(requests)

    assert on_three(score) == [alone] * 3
    assert min(dealt) >= 2, "each computes its share and no more"
    assert sum(dealt) == len(
        Evaluator(model=model, context_length=24, batch_tokens=40)._batches(requests)
    )


def test_fewer_batches_than_processes():
    model = random_gpt(CONFIG, spread=0.5, seed=7)
    request = Request((1, 2), (3,))
    found = on_three(
        lambda distributed: Evaluator(
            model=model, context_length=24, distributed=distributed
        ).score([request])
    )
    assert found == [Evaluator(model=model, context_length=24).score([request])] * 3


@pytest.mark.parametrize("when", ["before the exchange", "after it"])
def test_a_task_fails_on_all_where_it_fails_on_one(when):
    """And the next one is not disturbed by it."""

    def two_tasks(distributed: DistributedEval) -> Any:
        first: Any = None
        try:
            with distributed.task("a"):
                if when == "before the exchange" and distributed.ranks.rank == 1:
                    raise ValueError("no such file")
                first = distributed.gather("a", 1, [distributed.ranks.rank])
                if when == "after it" and distributed.ranks.rank == 1:
                    raise ValueError("no such file")
        except Exception as error:
            first = error
        with distributed.task("b"):
            return first, distributed.gather("b", 1, [distributed.ranks.rank])

    found = on_three(two_tasks)
    assert [second for _, second in found] == [[0, 1, 2]] * 3
    assert isinstance(found[1][0], ValueError)
    for rank in (0, 2):
        assert (
            isinstance(found[rank][0], FailedElsewhereError)
            and str(found[rank][0]) == "rank 1: ValueError: no such file"
        )


def test_other_items_on_one_process_are_refused_by_all():
    found = on_three(lambda distributed: distributed.gather("t", distributed.ranks.rank == 2, []))
    assert all(
        isinstance(error, EfftrainError) and "read different items" in str(error) for error in found
    )


def test_processes_that_are_at_different_places_are_told_so():
    """One compares facts for the next run, where the others exchange answers."""

    def work(distributed: DistributedEval) -> Any:
        if distributed.ranks.rank == 1:
            return distributed.ranks.all_gather_json({"checkpoint": "step-3"})
        return distributed.gather("t", 1, [])

    found = on_three(work)
    assert all(
        isinstance(found[rank], EfftrainError) and "different items" in str(found[rank])
        for rank in (0, 2)
    )
