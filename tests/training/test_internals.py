"""`eval.internals`: its columns against independent arithmetic in fp64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from efftrain_cli.model.gpt import GPT
from efftrain_cli.plan.plan import plan_step
from efftrain_cli.recipe.recipe import load_recipe
from efftrain_cli.training.gradient import Gradient
from efftrain_cli.training.loop import train
from efftrain_cli.training.record import read_records
from efftrain_cli.training.state import TrainState
from tests.resume_law import RandomTokens, run
from tests.tiny import FOUR_BLOCKS, fresh

TWO_BLOCKS = [*FOUR_BLOCKS, "model.n_layer=2", "eval.internals=2", "optim.grad_clip=0.1"]
Arrays = dict[str, np.ndarray]


def weights_of(state: TrainState) -> Arrays:
    return {name: p.detach().double().numpy() for name, p in state.model.named_parameters()}


def activations(model: GPT, tokens: Tensor) -> tuple[list[float], list[float]]:
    """Return the RMS of each block's output and its largest attention logit, of tokens (1, T), by
    what the layers put out."""
    sizes = []
    largest = []

    def see_block(_: object, __: object, x: Tensor) -> None:
        sizes.append(float(x.double().square().mean().sqrt()))

    def see_rows(_: object, __: object, rows: Tensor) -> None:
        heads = model.config.n_head
        q, k, _ = rows.double().view(tokens.shape[1], 3, heads, -1).permute(1, 2, 0, 3)
        logits = q @ k.mT / math.sqrt(q.shape[-1])
        largest.append(float(logits[:, torch.ones(logits.shape[1:]).tril() > 0].max()))

    for block in model.h:
        block.register_forward_hook(see_block)
        block.attn.c_attn.register_forward_hook(see_rows)
    with torch.no_grad():
        model.hidden(tokens)
    return sizes, largest


def norm(tensors: Arrays, block: str) -> float:
    """Return the l2 norm over all whose names begin with a block's."""
    return float(np.sqrt(sum((t**2).sum() for n, t in tensors.items() if n.startswith(block))))


def test_columns_are_those_of_independent_arithmetic():
    recipe = load_recipe("small", TWO_BLOCKS)
    state = fresh(recipe)
    data = RandomTokens(recipe.model.seq_len)
    val = data.validation()
    records = train(state, recipe, data, val, until=2)  # type: ignore[arg-type]
    rows = read_records(state, recipe, [next(records), next(records)])  # steps 0 and 1
    before = weights_of(state)
    plan = plan_step(recipe, state.progress)
    Gradient(recipe, state)(data.batch(plan), plan)
    gradients = {n: p.grad.double().numpy() for n, p in state.model.named_parameters()}  # type: ignore[union-attr]
    state.model.zero_grad(set_to_none=True)
    (row,) = read_records(state, recipe, [next(records)])
    after = weights_of(state)

    changes = {name: after[name] - before[name] for name in before}
    sizes, largest = activations(state.model, val[:1, :-1])
    assert row["grad_norm"] > 0.1, "clipping counts"
    for number in range(2):
        block = f"h.{number}"
        expected = {
            f"grad_norm_{block}": norm(gradients, f"{block}."),
            f"update_ratio_{block}": norm(changes, f"{block}.") / norm(before, f"{block}."),
            f"residual_rms_{block}": sizes[number],
            f"attention_logit_max_{block}": largest[number],
        }
        assert {name: row[name] for name in expected} == pytest.approx(expected, rel=1e-4)
    assert not [name for earlier in rows for name in earlier if "_h." in name]
    assert len([name for name in row if "_h." in name]) == 8


def test_a_gradient_that_is_not_due_yet_has_no_norm():
    """Of four modules, blocks 0 and 1 wait for theirs in step 2."""
    overrides = [*FOUR_BLOCKS, "ouroboros.modules=4", "train.tokens=256", "eval.internals=2"]
    recipe = load_recipe("small", overrides)
    rows = run(fresh(recipe), recipe)
    norms = [[row[f"grad_norm_h.{block}"] for block in range(4)] for row in rows[2::2]]
    assert [value is None for value in norms[0]].count(True) == 2
    assert None not in norms[1]
