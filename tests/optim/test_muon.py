"""Muon: torch's own on each hidden matrix, AdamW on the rest; skipping, resuming and growing like
AdamW."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from efftrain_cli.methods.growth_operators import grow
from efftrain_cli.methods.staged_growth import StagedGrowth
from efftrain_cli.methods.stages import Operator
from efftrain_cli.optim.muon import Muon
from efftrain_cli.optim.optimizer import ParameterSet
from efftrain_cli.plan.preview import summarize_plan
from efftrain_cli.training.stages import growth_state, load_grown
from tests.resume_law import run
from tests.tiny import changed, fresh, tiny_recipe

SETTINGS = [
    "model.n_embd=32",
    "optim={name = 'muon', lr = 3e-3, muon_lr = 0.02, min_lr = 1e-4, warmup_steps = 2}",
    "optim.grad_clip=0.5",
    "train.tokens=768",
    "train.micro_batch_tokens=64",
    "eval.every=3",
]
RECIPE = tiny_recipe(*SETTINGS)
ADAMW = changed(RECIPE, "optim.name=adamw", "optim.muon_lr=false")
LLAMA = tiny_recipe(
    *SETTINGS, "model.arch=llama", "model.n_head=4", "model.n_kv_head=2", "model.tied=false"
)


@pytest.mark.parametrize(
    "recipe, matrices, rows", [(RECIPE, 8, [32, 32, 32]), (LLAMA, 10, [32, 16, 16])]
)
def test_steps_are_those_of_torch_muon_and_adamw(recipe, matrices, rows):
    """q, k and v as matrices of their own; Muon's learning rate is muon_lr / lr times that of the
    step."""
    torch.manual_seed(0)
    state = fresh(recipe)
    theirs: dict[str, list[torch.nn.Parameter]] = {}
    groups: dict[str, list[torch.nn.Parameter]] = {"muon": [], "decayed": [], "others": []}
    hidden = 0
    for name, p in state.parameters.items():
        parts = p.detach().split(rows if name.endswith("c_attn.weight") else len(p))
        theirs[name] = [torch.nn.Parameter(part.clone()) for part in parts]
        group = "others"
        if name.startswith("h.") and p.dim() == 2:
            group = "muon"
            hidden += 1
        elif name in ("wte.weight", "lm_head.weight"):
            group = "decayed"
        groups[group] += theirs[name]
    assert hidden == matrices
    muon = torch.optim.Muon(groups["muon"], lr=0.5 * 0.02, weight_decay=0.1, momentum=0.95)
    adamw = torch.optim.AdamW(
        [
            {"params": groups["others"], "weight_decay": 0.0},
            {"params": groups["decayed"], "weight_decay": 0.1},
        ],
        lr=0.5 * 3e-3,
        betas=(0.9, 0.95),
        eps=1e-8,
        fused=True,
    )
    for _ in range(4):
        for name, p in state.parameters.items():
            p.grad = torch.randn_like(p)
            split = p.grad.split([len(part) for part in theirs[name]])
            for part, gradient in zip(theirs[name], split, strict=True):
                part.grad = gradient.clone()
        state.optimizer.step(0.5 * 3e-3, found_inf=torch.zeros(()))
        muon.step()
        adamw.step()
    for name, p in state.parameters.items():
        assert torch.equal(p, torch.cat(theirs[name])), name


# Five Newton-Schulz iterations of diag(3, 1) in fp64, worked out by hand.
ORTHOGONAL = torch.tensor([[0.75303345, 0.0, 0.0], [0.0, 1.13370623, 0.0]])


@pytest.mark.parametrize(
    "scale, factor", [("original", 1.0), ("match_rms_adamw", 0.2 * math.sqrt(3))]
)
@pytest.mark.parametrize("tall", [False, True])
def test_the_scale_multiplies_the_update_and_not_the_weight_decay(scale, factor, tall):
    """2 x 3 and 3 x 2: "original" multiplies the second by sqrt(3 / 2)."""
    update = ORTHOGONAL.T if tall else ORTHOGONAL
    if tall and scale == "original":
        factor = math.sqrt(1.5)
    named = {
        "matrix": torch.nn.Parameter(torch.ones_like(update)),
        "bias": torch.nn.Parameter(torch.zeros(3)),
    }
    settings = replace(RECIPE.optim, lr=0.1, muon_lr=None, muon_scale=scale, weight_decay=0.5)
    muon = Muon(ParameterSet(named=named, kinds={"matrix": "matrix", "bias": "bias"}), settings)
    gradient = torch.zeros_like(update)
    gradient[0, 0], gradient[1, 1] = 3.0, 1.0
    named["matrix"].grad = gradient
    muon.step(0.1, torch.zeros(()))
    # 1 - 0.1 x 0.5 is left of the weight; bf16 keeps 8 bits of the update.
    torch.testing.assert_close(
        named["matrix"].detach(), 0.95 - 0.1 * factor * update, rtol=0, atol=0.002
    )


def test_rows_and_plan_count_the_newton_schulz_iterations():
    """Each of two blocks adds 300 * 32^3 FLOPs a step."""
    iterations = 2 * 300 * 32**3
    rows, plain = (run(fresh(recipe), recipe, 1)[1] for recipe in (RECIPE, ADAMW))
    assert rows["optimizer_flops"] == iterations
    assert rows["flops"] - plain["flops"] == iterations
    assert rows["flops_without_logits"] - plain["flops_without_logits"] == iterations
    with_muon, without = (summarize_plan(recipe, vocab_size=64) for recipe in (RECIPE, ADAMW))
    assert with_muon.flops - without.flops == 6 * iterations


@pytest.mark.parametrize("kind", ["width", "depth"])
def test_growth_maps_the_momentum(kind):
    state = fresh(RECIPE)
    run(state, RECIPE, 4)
    grown = grow(growth_state(state), [Operator(kind, 2)], StagedGrowth(), seed=1)
    sizes = ("n_layer", "n_head", "n_embd")
    recipe = changed(RECIPE, *(f"model.{key}={getattr(grown.config, key)}" for key in sizes))
    larger = fresh(recipe)
    load_grown(larger, grown)
    old, new = state.optimizer.tensors(), larger.optimizer.tensors()
    weight = "momentum_buffer.h.1.mlp.c_fc.weight"
    if kind == "width":
        # What the momentum would be had the wide model always trained: every block's gradient is
        # half.
        assert torch.equal(new[weight], old[weight].repeat(2, 2) / 2)
        assert torch.equal(
            new["exp_avg_sq.wte.weight"], old["exp_avg_sq.wte.weight"].repeat(1, 2) / 4
        )
        assert torch.equal(new["exp_avg.ln_f.bias"], old["exp_avg.ln_f.bias"].repeat(2))
    else:
        assert torch.equal(new["momentum_buffer.h.2.mlp.c_fc.weight"], old[weight])
        assert not new["momentum_buffer.h.3.mlp.c_fc.weight"].any()  # inserted, its gradient was 0
        assert new["step.h.2.ln_1.bias"] == 4 and new["step.h.3.ln_1.bias"] == 0
