"""Which rank is found to hang, and which is left alone, by what all have said of themselves."""

from __future__ import annotations

import json

import pytest

from efftrain_cli.foundation.errors import UsageError
from efftrain_cli.training.ranks import Ranks
from efftrain_cli.training.watch import FIRST, LIMIT, Place, Watch, judge

WORKING, WAITING = "forward and backward", "exchange"


def verdict(*phases: tuple[str, float], silent: tuple[float, ...] = ()) -> list[int]:
    places = {rank: Place(1, 7, phase, seconds, 60) for rank, (phase, seconds) in enumerate(phases)}
    found = judge(places, dict(enumerate(silent or (0.0,) * len(phases))), 60)
    if found is None:
        return []
    ranks, text = found
    assert (
        f"rank {ranks[0]} (step 7, {phases[ranks[0]][0]}, " in text
        and f"all {len(phases)} processes end" in text
    )
    return ranks


def test_a_rank_that_works_too_long_hangs_and_those_that_wait_for_it_do_not() -> None:
    assert verdict((WAITING, 61), (WORKING, 61), (WAITING, 61)) == [1]
    assert verdict((WAITING, 61), (WORKING, 59), (WAITING, 61)) == []


@pytest.mark.parametrize("phase", ["prepare", "compile", "evaluate", "save", "end"])
def test_declared_phases_take_as_long_as_they_do(phase: str) -> None:
    assert verdict((phase, 10_000), (WAITING, 10_000), silent=(10_000, 0)) == []


def test_where_all_wait_nobody_has_long_begun_to() -> None:
    """Rank 0 saved for an hour, while rank 1 waited."""
    assert verdict((WAITING, 1), ("sum", 3600)) == []
    assert verdict((WAITING, 61), ("sum", 3600)) == [0, 1]


def test_a_rank_whose_watcher_is_silent_was_halted() -> None:
    assert verdict((WAITING, 61), (WAITING, 2), silent=(0, 61)) == [1]


def test_slow_work_is_given_as_long_as_its_kind_has_needed() -> None:
    places = {0: Place(1, 7, WORKING, 100, 300), 1: Place(1, 7, WAITING, 100, 60)}
    assert judge(places, {0: 0, 1: 0}, 60) is None


def test_a_rank_that_has_ended_says_so() -> None:
    """Rank 0 may save for minutes after the others have stopped in an exchange: they are not silent."""
    from torch.distributed import HashStore

    store = HashStore()
    watch = Watch(1, 2, lambda: store)
    watch.start()
    watch.enter("exchange", 7)
    watch.stop()
    assert json.loads(store.get("place/1"))[1:3] == [7, "end"]


def test_who_waits_for_another_in_its_work_does_not_hang() -> None:
    """A ring's devices receive from each other in the middle of a step."""
    from torch.distributed import HashStore

    watch = Watch(0, 2, HashStore)
    ranks, phases = Ranks(rank=0, world_size=2, watch=watch), []
    watch.enter("forward and backward", 7)
    ranks._carry(lambda dist: phases.append(watch.phase))
    assert phases == ["sum"] and watch.phase == "forward and backward"
    watch.enter("save")
    ranks._carry(lambda dist: phases.append(watch.phase))
    assert phases[1] == watch.phase == "save"


def test_the_first_step_teaches_how_long_work_takes() -> None:
    from torch.distributed import HashStore

    store = HashStore()
    watch = Watch(0, 2, lambda: store)
    watch.enter(FIRST, 1)
    watch._since -= 100
    watch.enter("update")
    watch._tell()
    assert json.loads(store.get("place/0"))[4] == pytest.approx(1000, rel=0.01)


@pytest.mark.parametrize("value", ["soon", "0", "-1"])
def test_a_limit_that_is_no_time_is_refused(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv(LIMIT, value)
    with pytest.raises(UsageError, match=LIMIT):
        Watch(0, 2, lambda: pytest.fail("not reached"))
