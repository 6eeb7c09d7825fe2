"""Lion: its steps by hand."""

from __future__ import annotations

import torch

from efftrain_cli.optim.lion import Lion
from efftrain_cli.optim.optimizer import ParameterSet
from efftrain_cli.recipe.optim import Optim


def test_steps_by_hand():
    """The third parameter has no gradient, and stays."""
    matrix = torch.nn.Parameter(torch.tensor([[1.0, -2.0]]))
    bias = torch.nn.Parameter(torch.tensor([0.5]))
    still = torch.nn.Parameter(torch.tensor([[0.5]]))
    named = {"matrix": matrix, "bias": bias, "still": still}
    kinds = {"matrix": "matrix", "bias": "vector", "still": "matrix"}
    settings = Optim(lr=1.0, betas=(0.75, 0.5), weight_decay=0.5)
    lion = Lion(ParameterSet(named=named, kinds=kinds), settings)  # type: ignore[arg-type]

    bias.grad = torch.tensor([2.0])
    lion.step(0.25, torch.zeros(()))
    assert matrix.tolist() == [[1.0, -2.0]] and bias.tolist() == [0.25]

    matrix.grad = torch.tensor([[4.0, -8.0]])
    bias.grad = torch.tensor([0.0])
    lion.step(0.25, torch.zeros(()))
    # Decay is 1 - 0.25 * 0.5 = 0.875 of the matrix alone; then 0.25 against the sign. m = half of
    # g.
    assert matrix.tolist() == [[0.625, -1.5]] and bias.tolist() == [0.0]
    assert lion.tensors()["exp_avg.matrix"].tolist() == [[2.0, -4.0]]

    matrix.grad = torch.tensor([[-8.0, 8.0]])
    bias.grad = None
    lion.step(0.25, torch.zeros(()))
    # 0.75 * 2 - 0.25 * 8 = -0.5 and 0.75 * -4 + 0.25 * 8 = -1: the first sign turns. m: 0.5 * 2 -
    # 0.5 * 8 = -3, 2.
    assert matrix.tolist() == [[0.625 * 0.875 + 0.25, -1.5 * 0.875 + 0.25]]
    assert bias.tolist() == [0.0]
    assert lion.tensors()["exp_avg.matrix"].tolist() == [[-3.0, 2.0]]
    assert still.item() == 0.5 and not lion.tensors()["exp_avg.still"].any()
