"""What every optimizer promises."""

from __future__ import annotations

import math

import pytest
import torch

from efftrain_cli.foundation.tensors import Tensors
from efftrain_cli.optim.lion import Lion
from efftrain_cli.optim.tensors import split_by_size
from efftrain_cli.plan.plan import plan_step
from efftrain_cli.training.build import OPTIMIZER_CLASSES
from efftrain_cli.training.loop import update
from tests.resume_law import run
from tests.tiny import METHODS, fresh, tensors_of, tiny_recipe


@pytest.mark.parametrize("optimizer", OPTIMIZER_CLASSES)
@pytest.mark.parametrize(
    "gradient, nonfinite, moves",
    [(math.nan, 0.0, False), (math.inf, 0.0, False), (1.0, 1.0, False), (1.0, 0.0, True)],
    ids=["nan", "inf", "after one that was not finite", "finite"],
)
def test_a_step_that_is_not_finite_changes_nothing(optimizer, gradient, nonfinite, moves):
    recipe = tiny_recipe(*METHODS.get(optimizer, [f"optim.name={optimizer}"]))
    state = fresh(recipe)
    run(state, recipe, until=2)
    before = tensors_of(state)
    state.nonfinite = torch.tensor(nonfinite)
    for parameter in state.model.parameters():
        parameter.grad = torch.full_like(parameter, gradient)
    update(state, recipe, plan_step(recipe, state.progress), torch.zeros(()))
    assert state.nonfinite == (not moves)
    for name, tensor in tensors_of(state).items():
        assert torch.equal(tensor, before[name]) != moves, name


@pytest.mark.parametrize(
    "settings", [["optim.beta2_tokens=500"], METHODS["muon"], ["optim.name=lion"]]
)
def test_state_scales_with_its_power_of_the_gradient(settings):
    recipe = tiny_recipe(*settings)
    tensors = []
    for scale in (1, 2):
        state = fresh(recipe)
        for parameter in state.model.parameters():
            parameter.grad = torch.full_like(parameter, scale)
        state.optimizer.step(1e-3, torch.zeros(()), recipe.optim.beta2_at(128))
        tensors.append(state.optimizer.tensors())
    for name, tensor in tensors[0].items():
        power = state.optimizer.gradient_powers[name.partition(".")[0]]
        torch.testing.assert_close(tensors[1][name], tensor * 2**power)


def test_an_optimizer_that_misses_a_parameter_is_a_bug(monkeypatch):
    class Forgetful(Lion):
        def tensors(self) -> Tensors:
            return dict(list(super().tensors().items())[1:])

    monkeypatch.setitem(OPTIMIZER_CLASSES, "lion", Forgetful)
    with pytest.raises(RuntimeError, match="each parameter once"):
        fresh(tiny_recipe("optim.name=lion"))


def test_tensors_are_grouped_up_to_a_size():
    """6 is alone, 2 + 2 fit into 4, 5 is alone, and 1 + 3 fit again."""
    groups = list(split_by_size([6, 2, 2, 5, 1, 3], 4))
    assert groups == [slice(0, 1), slice(1, 3), slice(3, 4), slice(4, 6)]
