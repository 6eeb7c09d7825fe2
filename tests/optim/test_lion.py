"""Lion: its steps by hand, and what it covers."""

from __future__ import annotations

import pytest
import torch

from efftrain_cli.optim.lion import Lion
from efftrain_cli.optim.optimizer import ParameterSet
from efftrain_cli.recipe.recipe import load_recipe
from efftrain_cli.recipe.sections import Optim
from tests.tiny import FOUR_BLOCKS, fresh

OK = torch.zeros(())


def made() -> tuple[Lion, dict[str, torch.nn.Parameter]]:
    parameters = {
        "h.0.mlp.c_fc.weight": torch.nn.Parameter(torch.tensor([[1.0, -2.0]])),
        "h.0.mlp.c_fc.bias": torch.nn.Parameter(torch.tensor([0.5])),
    }
    kinds = {"h.0.mlp.c_fc.weight": "matrix", "h.0.mlp.c_fc.bias": "vector"}
    settings = Optim(lr=1.0, betas=(0.75, 0.5), weight_decay=0.5)
    return Lion(ParameterSet(named=parameters, kinds=kinds), settings), parameters  # type: ignore[arg-type]


def test_two_steps_by_hand():
    lion, parameters = made()
    matrix, bias = parameters.values()
    matrix.grad, bias.grad = torch.tensor([[4.0, -8.0]]), torch.tensor([2.0])
    lion.step(0.25, OK)
    # Decay is 1 - 0.25 * 0.5 = 0.875 of the matrix alone; then 0.25 against the sign. m = half of
    # g.
    assert matrix.tolist() == [[0.625, -1.5]] and bias.tolist() == [0.25]
    assert lion.tensors()["exp_avg.h.0.mlp.c_fc.weight"].tolist() == [[2.0, -4.0]]
    matrix.grad, bias.grad = torch.tensor([[-8.0, 8.0]]), torch.tensor([0.0])
    lion.step(0.25, OK)
    # 0.75 * 2 - 0.25 * 8 = -0.5 and 0.75 * -4 + 0.25 * 8 = -1: the first sign turns. m: 0.5 * 2 -
    # 0.5 * 8 = -3, 2.
    assert matrix.tolist() == [[0.625 * 0.875 + 0.25, -1.5 * 0.875 + 0.25]] and bias.tolist() == [
        0.0
    ]
    assert lion.tensors()["exp_avg.h.0.mlp.c_fc.weight"].tolist() == [[-3.0, 2.0]]


def test_a_parameter_without_a_gradient_stays():
    lion, parameters = made()
    matrix, bias = parameters.values()
    matrix.grad = torch.tensor([[4.0, -8.0]])
    lion.step(0.25, OK)
    assert matrix.tolist() == [[0.625, -1.5]] and bias.tolist() == [0.5]
    assert not lion.tensors()["exp_avg.h.0.mlp.c_fc.bias"].any()


def test_groups_that_miss_a_parameter_are_a_bug():
    recipe = load_recipe("small-lion", FOUR_BLOCKS)
    state = fresh(recipe)
    assert isinstance(state.optimizer, Lion)
    covered = dict(state.model.named_parameters())
    from efftrain_cli.optim.optimizer import check_cover

    check_cover(state.optimizer, covered)
    with pytest.raises(RuntimeError, match="each parameter once"):
        check_cover(state.optimizer, dict(list(covered.items())[1:]))
