"""A ring of one process: the same code as a ring of several, which tests/laws/test_ring.py
starts."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from torch import Tensor

from efftrain_cli.recipe.recipe import Recipe, load_recipe
from efftrain_cli.training.ranks import Ranks
from efftrain_cli.training.rings import Rings
from efftrain_cli.training.state import TrainState
from efftrain_cli.training.trainer import train
from tests.resume_law import RandomTokens, run
from tests.tiny import FOUR_BLOCKS, assert_equal, fresh, tensors_of

RINGS = {
    "plain": [],
    "by module": ["ouroboros.clip=module"],
    "warmup, mean": ["ouroboros.warmup_steps=3", "ouroboros.embedding_gradient=mean"],
}


class OneRank(Ranks):
    """The only process of its ring."""

    def broadcast(self, tensors: Iterable[Tensor], src: int = 0) -> None:
        assert src == 0


def train_ring(state: TrainState, recipe: Recipe, until: int) -> None:
    data = RandomTokens(recipe.model.seq_len)
    devices = Rings(recipe, state, OneRank())
    for _ in train(state, recipe, data, data.validation(), until, devices):  # type: ignore[arg-type]
        pass
    assert devices.is_whole


@pytest.mark.parametrize("ring", RINGS)
def test_a_ring_that_is_stopped_goes_on_as_one_device(ring):
    """From what a checkpoint of step 5 holds in flight."""
    recipe = load_recipe("small", [*FOUR_BLOCKS, "ouroboros.modules=2", *RINGS[ring]])
    alone = fresh(recipe)
    state = fresh(recipe)
    train_ring(state, recipe, until=5)
    run(alone, recipe, until=5)
    assert state.method_tensors
    assert_equal(state.method_tensors, alone.method_tensors)
    train_ring(state, recipe, until=8)
    run(alone, recipe, until=8)
    assert_equal(tensors_of(state), tensors_of(alone))
    assert_equal(state.method_tensors, alone.method_tensors)
