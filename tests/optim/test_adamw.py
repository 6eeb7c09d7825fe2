"""AdamW: PyTorch's own, bit for bit, without its start-up cost."""

from __future__ import annotations

import subprocess
import sys

import torch
from torch import nn

from efftrain_cli.optim.adamw import build_adamw, set_lr
from tests.conftest import REPOSITORY


def model_and_gradients() -> tuple[nn.Module, list[list[torch.Tensor]]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 33), nn.LayerNorm(33), nn.Linear(33, 7))
    return model, [[torch.randn_like(p) for p in model.parameters()] for _ in range(5)]


def test_steps_are_those_of_pytorch() -> None:
    ours_model, gradients = model_and_gradients()
    theirs_model, _ = model_and_gradients()
    ours = build_adamw(ours_model, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    matrices = [p for p in theirs_model.parameters() if p.dim() >= 2]
    others = [p for p in theirs_model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    theirs = torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.95), eps=1e-8, fused=True)
    for i, step in enumerate(gradients):
        for model in (ours_model, theirs_model):
            for p, gradient in zip(model.parameters(), step, strict=True):
                p.grad = gradient.clone()
        if i == 2:  # a parameter without a gradient is left alone
            for model in (ours_model, theirs_model):
                model[2].bias.grad = None
        set_lr(ours, 3e-3)
        ours.found_inf = torch.zeros(())
        ours.step()
        theirs.step()
    for a, b in zip(ours_model.parameters(), theirs_model.parameters(), strict=True):
        assert torch.equal(a, b)
        for key in ("step", "exp_avg", "exp_avg_sq"):
            assert torch.equal(ours.state[a][key], theirs.state[b][key]), key
    ours.zero_grad()
    assert all(p.grad is None for p in ours_model.parameters())


def test_found_inf_leaves_everything_as_it_is() -> None:
    model, gradients = model_and_gradients()
    optimizer = build_adamw(model, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    set_lr(optimizer, 1e-2)
    before = [p.detach().clone() for p in model.parameters()]
    for p, gradient in zip(model.parameters(), gradients[0], strict=True):
        p.grad = gradient * float("nan")
    optimizer.found_inf = torch.ones(())
    optimizer.step()
    for p, value in zip(model.parameters(), before, strict=True):
        assert torch.equal(p, value)
        assert not optimizer.state[p]["step"] and not optimizer.state[p]["exp_avg"].any()


EAGER_STEP = """
import sys, torch
from efftrain_cli.training.gradient import build_forward_backward, build_model, build_optimizer
from efftrain_cli.recipe.sections import Model, Optim, Train
from efftrain_cli.recipe.recipe import Recipe
from efftrain_cli.training.state import TrainState
from efftrain_cli.plan.step import Batch, Progress
from efftrain_cli.plan.plan import plan_step
from efftrain_cli.training.trainer import update

recipe = Recipe(model=Model(n_layer=1, n_head=1, n_embd=8, seq_len=8), optim=Optim(lr=1e-3),
                train=Train(tokens=100, batch_size=2, dtype="fp32"))
cpu = torch.device("cpu")
model = build_model(recipe, 20, cpu)
state = TrainState(model=model, optimizer=build_optimizer(recipe, model))
ids = torch.zeros((2, 8), dtype=torch.int64)
gradient = build_forward_backward(recipe, model, cpu)(Batch(ids, ids), plan_step(recipe, Progress()))
update(state, 1e-3, 1.0, gradient.loss)
import efftrain_cli.pretrain, efftrain_cli.training.logger
heavy = [name for name in ("torch._dynamo", "torch._inductor", "sympy", "datasets", "pandas", "wandb", "scipy",
                           "matplotlib", "transformers") if name in sys.modules]
assert not heavy, heavy
"""


def test_an_eager_step_imports_no_compiler() -> None:
    """It costs two seconds between the command and the first step."""
    done = subprocess.run(
        [sys.executable, "-c", EAGER_STEP], cwd=REPOSITORY, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
