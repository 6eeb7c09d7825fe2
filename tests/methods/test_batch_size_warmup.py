"""The ramp of the batch size against Megatron-LM's."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from efftrain_cli.methods.batch_size_warmup import BatchSizeWarmup
from tests.tiny import tiny_recipe


def megatron(consumed: int, start: int, increment: int, ramp: int, full: int) -> int:
    """`RampupBatchsizeNumMicroBatches` of Megatron-LM's microbatches.py, written out again."""
    increments = (full - start) // increment
    if consumed > ramp:
        return full
    return start + int(consumed / (ramp / increments)) * increment


@pytest.mark.parametrize(
    "start, increment, ramp, full",
    [
        (16, 16, 1_953_125, 256),
        (32, 32, 100_000, 512),
        (8, 8, 1_000, 64),
        (1, 3, 777, 64),
        (64, 64, 50_000, 4096),
    ],
)
def test_every_step_of_the_ramp_is_megatron_s(start, increment, ramp, full):
    warmup = BatchSizeWarmup(start=start, increment=increment, sequences=ramp)
    steps = consumed = 0
    while consumed <= 1.1 * ramp:
        batch_size = warmup.batch_size_at(consumed, full)
        assert batch_size == megatron(consumed, start, increment, ramp, full)
        steps += batch_size < full
        consumed += batch_size
    assert batch_size == full
    assert warmup.steps_of_ramp(full) == steps


def test_the_edges_of_an_increase():
    warmup = BatchSizeWarmup(
        start=16, increment=16, sequences=150
    )  # 15 increments of 10 sequences each
    assert [warmup.batch_size_at(consumed, 256) for consumed in (0, 9, 10, 149, 150, 151)] == [
        16,
        16,
        32,
        240,
        256,
        256,
    ]


def test_a_start_at_the_full_batch_changes_nothing():
    warmup = BatchSizeWarmup(start=64, increment=8, sequences=1000)
    assert {warmup.batch_size_at(consumed, 64) for consumed in range(0, 2000, 64)} == {64}
    assert warmup.steps_of_ramp(64) == 0


@pytest.mark.parametrize(
    "keys", [{"start": 0}, {"increment": 0}, {"sequences": 0}, {"sequences": 1.5}, {"sequence": 3}]
)
def test_bad_sections_are_refused(keys):
    with pytest.raises(ValidationError):
        BatchSizeWarmup(**{"start": 8, "increment": 8, "sequences": 100, **keys})


@pytest.mark.parametrize(
    "keys, key",
    [
        ({"start": 128}, "start"),
        ({"increment": 5}, "increment"),
        ({"sequences": 10_000}, "sequences"),
    ],
)
def test_ramps_that_do_not_fit_the_recipe_are_problems(keys, key):
    fitting = {"start": 8, "increment": 8, "sequences": 1000}
    sizes = ["model.seq_len=128", "train.batch_size=64", "train.tokens=1_000_000"]
    recipe = tiny_recipe(*sizes)
    assert not list(BatchSizeWarmup(**fitting).problems(recipe))
    ((found, rule),) = BatchSizeWarmup(**{**fitting, **keys}).problems(recipe)
    assert found == f"batch_size_warmup.{key}"
    assert str(keys[key])[:2] in rule


@pytest.mark.parametrize(
    "start, increment, full, steps",
    [(256, 256, 4096, 20_000), (8, 8, 64, 300), (8, 4, 64, 40)],
)
def test_a_ramp_of_so_many_steps(start, increment, full, steps):
    warmup = BatchSizeWarmup(start=start, increment=increment, sequences=1)
    ramp = BatchSizeWarmup(
        start=start, increment=increment, sequences=warmup.sequences_for(steps, full)
    )
    # Each batch size may round up to a step of its own.
    assert abs(ramp.steps_of_ramp(full) - steps) <= (full - start) // increment
