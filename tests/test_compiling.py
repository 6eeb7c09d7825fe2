"""Compilation: graphs stay few whatever the schedule asks for, and compute what eager code computes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from efftrain_cli.build import build_model
from efftrain_cli.compiling import GRAPH_LIMIT, compile_loss_sum, compiled_graphs, shapes_vary
from efftrain_cli.methods.progressive_layer_drop import ProgressiveLayerDrop
from efftrain_cli.methods.seq_len_warmup import SeqLenWarmup
from efftrain_cli.plan import plan_run
from efftrain_cli.recipe import Model, Optim, Recipe, Train

FULL = 1024
RECIPE = Recipe(
    model=Model(n_layer=2, n_head=2, n_embd=16, seq_len=FULL),
    optim=Optim(lr=1e-3),
    train=Train(tokens=FULL * 2 * 200, batch_size=2, micro_batch_tokens=2 * FULL, dtype="fp32"),
)
CPU = torch.device("cpu")
pytestmark = pytest.mark.slow


def graphs_of(recipe: Recipe, shapes: list[tuple[int, int]]) -> int:
    """Graphs that training on micro-batches of these (sequences, seq_len) compiles; losses are checked against eager."""
    torch._dynamo.reset()
    model = build_model(recipe, 60, CPU)

    def eager(tokens, targets, gates, scales):
        return model.loss_sum(tokens, targets, gates, scales)

    before = compiled_graphs()
    compiled = compile_loss_sum(recipe, model, eager, backend="aot_eager")
    for i, shape in enumerate(shapes):
        tokens = torch.randint(60, shape, generator=torch.Generator().manual_seed(i))
        loss = compiled(tokens, tokens, None, None)
        loss.backward()
        if i % 20 == 0:
            torch.testing.assert_close(loss, eager(tokens, tokens, None, None), rtol=1e-5, atol=0)
    return compiled_graphs() - before


def test_fixed_shapes_need_one_graph() -> None:
    assert not shapes_vary(RECIPE)
    assert graphs_of(RECIPE, [(2, FULL)] * 3) == 1


def test_warmup_over_128_lengths_needs_two_graphs_at_most() -> None:
    recipe = replace(RECIPE, seq_len_warmup=SeqLenWarmup(start=8, steps=130))
    shapes = [(plan.batch_size, plan.seq_len) for plan, _ in plan_run(recipe)][:140]
    assert len({length for _, length in shapes}) == 128
    assert graphs_of(recipe, shapes[::4]) <= 2
    assert GRAPH_LIMIT >= 2


def test_layer_dropping_compiles_one_block_for_all() -> None:
    recipe = replace(
        RECIPE,
        model=replace(RECIPE.model, n_layer=4, seq_len=16),
        progressive_layer_drop=ProgressiveLayerDrop(theta=0.5, steps=10),
    )
    torch._dynamo.reset()
    model = build_model(recipe, 60, CPU)
    before = compiled_graphs()
    loss_sum = compile_loss_sum(
        recipe, model, lambda t, y, gates, scales: model.loss_sum(t, y, gates, scales), backend="aot_eager"
    )
    tokens = torch.randint(60, (2, 16))
    for pattern in range(16):
        gates = [bool(pattern >> i & 1) for i in range(4)]
        loss_sum(tokens, tokens, gates, torch.linspace(1, 2, 4)).backward()
    with torch.no_grad():
        loss_sum(tokens, tokens, None, None)
    assert compiled_graphs() - before <= 4
