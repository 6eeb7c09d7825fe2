"""AdamW: PyTorch's own, bit for bit, without its start-up cost."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from efftrain_cli.optim.adamw import AdamW
from efftrain_cli.optim.optimizer import ParameterSet
from efftrain_cli.recipe.optim import Optim
from tests.conftest import python

KINDS = {
    "0.weight": "matrix",
    "0.bias": "vector",
    "1.weight": "vector",
    "1.bias": "vector",
    "2.weight": "position_embedding",  # a matrix that no weight decay acts on
    "2.bias": "vector",
}


def made_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 33), nn.LayerNorm(33), nn.Linear(33, 7))


def made(model: nn.Module, **settings: float) -> AdamW:
    parameters = ParameterSet(named=dict(model.named_parameters()), kinds=KINDS)
    return AdamW(parameters, Optim(lr=3e-3, weight_decay=0.1, **settings))


@pytest.mark.parametrize("beta2_tokens, beta2", [(None, 0.95), (1000, 0.5**0.1)])
def test_steps_are_those_of_pytorch(beta2_tokens, beta2):
    """Bit for bit; to rounding with a half-life, in steps of a tenth of it."""
    model, reference = made_model(), made_model()
    ours = made(model, beta2_tokens=beta2_tokens)
    decayed, *others = reference.parameters()
    groups = [
        {"params": [decayed], "weight_decay": 0.1},
        {"params": others, "weight_decay": 0.0},
    ]
    theirs = torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, beta2), eps=1e-8, fused=True)
    for step in range(5):
        for p, q in zip(model.parameters(), reference.parameters(), strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
        if step == 2:  # a parameter without a gradient is left alone
            model[0].bias.grad = reference[0].bias.grad = None
        ours.step(3e-3, torch.zeros(()), beta2 if beta2_tokens else None)
        theirs.step()
    rtol, atol = (0, 0) if beta2_tokens is None else (2e-5, 1e-7)
    state = ours.tensors()
    for name, parameter in reference.named_parameters():
        torch.testing.assert_close(model.get_parameter(name), parameter, rtol=rtol, atol=atol)
        if beta2_tokens is None:
            for key in ("step", "exp_avg", "exp_avg_sq"):
                assert torch.equal(state[f"{key}.{name}"], theirs.state[parameter][key]), key


def test_steps_of_other_sizes_keep_the_half_life_in_tokens():
    """A step of one half-life (beta2 0.5), then one of two (0.25), gradients 1 and 2, beta1 0:

    v = 0.5, weight 0.5: the step is 0.1 x 1 / sqrt(1);
    v = 0.25 x 0.5 + 0.75 x 4 = 3.125, weight 0.25 x 0.5 + 0.75 = 0.875: 0.1 x 2 / sqrt(3.5714).
    """
    parameter = nn.Parameter(torch.zeros(1))
    settings = Optim(lr=0.1, betas=(0.0, 0.9), beta2_tokens=1000)
    adamw = AdamW(ParameterSet(named={"a": parameter}, kinds={"a": "vector"}), settings)
    weights = []
    for tokens, gradient in ((1000, 1.0), (2000, 2.0)):
        parameter.grad = torch.tensor([gradient])
        adamw.step(0.1, torch.zeros(()), settings.beta2_at(tokens))
        weights.append(parameter.item())
    assert weights == pytest.approx([-0.1, -0.1 - 0.105830])
    assert adamw.tensors()["exp_avg_sq_weight.a"].item() == pytest.approx(0.875)
    before = [tensor.clone() for tensor in adamw.tensors().values()]
    adamw.step(0.1, torch.ones(()), 0.5)
    assert all(map(torch.equal, adamw.tensors().values(), before))
    assert parameter.item() == weights[-1], "a step that is not finite changes nothing"


def test_measures_are_of_every_second_moment():
    """v is (1 - beta2) g^2 after a step."""
    model = made_model()
    optimizer = made(model)
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    optimizer.step(1e-2, torch.zeros(()))
    roots = torch.cat([p.grad.flatten().abs() * 0.05**0.5 for p in model.parameters()])
    measured = optimizer.columns()
    assert measured["adam_sqrt_v_l1"].item() == pytest.approx(roots.sum().item(), rel=1e-5)
    assert measured["adam_sqrt_v_max"].item() == pytest.approx(roots.max().item(), rel=1e-5)


EAGER_STEP = """
import sys, torch
from efftrain_cli.training.build import build_state
from efftrain_cli.training.gradient import Gradient
from efftrain_cli.recipe.optim import Optim
from efftrain_cli.recipe.sections import Model, Train
from efftrain_cli.recipe.recipe import Recipe
from efftrain_cli.foundation.step import Batch, Progress
from efftrain_cli.plan.plan import plan_step
from efftrain_cli.training.loop import update

recipe = Recipe(model=Model(n_layer=1, n_head=1, n_embd=8, seq_len=8), optim=Optim(lr=1e-3),
                train=Train(tokens=100, batch_size=2, dtype="fp32"))
cpu = torch.device("cpu")
state = build_state(recipe, 20, cpu)
ids = torch.zeros((2, 8), dtype=torch.int64)
plan = plan_step(recipe, Progress())
result = Gradient(recipe, state)(Batch(ids, ids), plan)
update(state, recipe, plan, result.scalars["loss"])
import efftrain_cli.pretrain
heavy = {"torch._dynamo", "torch._inductor", "sympy", "datasets", "pandas", "wandb", "scipy",
         "matplotlib", "transformers"} & sys.modules.keys()
assert not heavy, heavy
"""


def test_an_eager_step_imports_no_compiler():
    """It costs two seconds between the command and the first step."""
    python(EAGER_STEP)
