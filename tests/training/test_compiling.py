"""Compilation: graphs stay few whatever the schedule asks for, and compute what eager code computes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from efftrain_cli.methods.progressive_layer_drop import ProgressiveLayerDrop
from efftrain_cli.methods.seq_len_warmup import SeqLenWarmup
from efftrain_cli.plan.plan import plan_run
from efftrain_cli.recipe.recipe import Recipe
from efftrain_cli.recipe.sections import Model, Optim, Train
from efftrain_cli.training.compiling import (
    GRAPH_LIMIT,
    LossSum,
    compile_blocks,
    compile_whole,
    compiled_graphs,
    compiles_blocks,
    full_micro_batch,
    shapes_vary,
)
from efftrain_cli.training.gradient import build_model

FULL = 1024
RECIPE = Recipe(
    model=Model(n_layer=2, n_head=2, n_embd=16, seq_len=FULL),
    optim=Optim(lr=1e-3),
    train=Train(tokens=FULL * 2 * 200, batch_size=2, micro_batch_tokens=2 * FULL, dtype="fp32"),
)
CPU = torch.device("cpu")
pytestmark = pytest.mark.slow


def whole_of(recipe: Recipe) -> tuple[LossSum, LossSum]:
    """(eager, compiled) objective of a fresh model of the recipe."""
    model = build_model(recipe, 60, CPU)

    def eager(
        tokens: Tensor, targets: Tensor, gates: Sequence[bool] | None, scales: Tensor | None
    ) -> Tensor:
        return model.loss_sum(tokens, targets, gates, scales)

    return eager, compile_whole(recipe, eager, backend="aot_eager")


def graphs_of(recipe: Recipe, shapes: list[tuple[int, int]]) -> int:
    """Graphs that training on micro-batches of these (sequences, seq_len) compiles; losses are checked against eager."""
    torch._dynamo.reset()
    eager, compiled = whole_of(recipe)
    before = compiled_graphs()
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


def test_the_micro_batch_of_a_full_step() -> None:
    assert full_micro_batch(RECIPE) == (2, FULL)
    uneven = replace(RECIPE, train=replace(RECIPE.train, batch_size=5))
    assert full_micro_batch(uneven) is None and shapes_vary(uneven)
    single = replace(RECIPE, train=replace(RECIPE.train, micro_batch_tokens=100))
    assert full_micro_batch(single) == (1, FULL)


def test_warmup_over_128_lengths_needs_two_graphs_at_most() -> None:
    recipe = replace(RECIPE, seq_len_warmup=SeqLenWarmup(start=8, steps=130))
    shapes = [(plan.batch_size, plan.seq_len) for plan, _ in plan_run(recipe)][:140]
    assert len({length for _, length in shapes}) == 128
    assert graphs_of(recipe, [(2, FULL), *shapes[::4]]) == 2, "one graph for the full shape, one for all the others"
    assert GRAPH_LIMIT >= 2


def test_layer_dropping_compiles_one_block_for_all() -> None:
    recipe = replace(
        RECIPE,
        model=replace(RECIPE.model, n_layer=4, seq_len=16),
        progressive_layer_drop=ProgressiveLayerDrop(theta=0.5, steps=10),
    )
    assert compiles_blocks(recipe, 4) and not compiles_blocks(RECIPE, 4)
    torch._dynamo.reset()
    model = build_model(recipe, 60, CPU)
    tokens = torch.randint(60, (2, 16))
    patterns = [[bool(pattern >> i & 1) for i in range(4)] for pattern in range(16)]
    scales = torch.linspace(1, 2, 4)
    eager = [model.loss_sum(tokens, tokens, gates, scales).item() for gates in patterns]
    before = compiled_graphs()
    head_loss_sum = compile_blocks(recipe, model, backend="aot_eager")
    for gates, want in zip(patterns, eager, strict=True):
        loss = head_loss_sum(model.run_blocks(model.embed(tokens), gates, scales), tokens)
        loss.backward()
        assert loss.item() == pytest.approx(want, rel=1e-5)
    with torch.no_grad():
        model.loss_sum(tokens, tokens)
    assert compiled_graphs() - before <= 5


def test_a_second_model_of_the_same_shape_needs_no_graph_of_its_own() -> None:
    """A probe before training, and the many short runs of tune-warmup, build the function anew."""
    recipe = replace(RECIPE, model=replace(RECIPE.model, seq_len=32))
    assert graphs_of(recipe, [(64, 32)]) == 1
    before = compiled_graphs()
    for _ in range(3):
        eager, compiled = whole_of(recipe)
        tokens = torch.randint(60, (64, 32))
        loss = compiled(tokens, tokens, None, None)
        loss.backward()
        torch.testing.assert_close(loss, eager(tokens, tokens, None, None), rtol=1e-5, atol=0)
    assert compiled_graphs() == before
