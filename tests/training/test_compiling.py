"""Compilation: graphs stay few whatever the schedule asks for, and compute what eager code
computes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from efftrain_cli.foundation.errors import UsageError
from efftrain_cli.model.gpt import GPT
from efftrain_cli.model.kernels import choose_determinism
from efftrain_cli.recipe.recipe import Recipe
from efftrain_cli.training import compiling, objective
from efftrain_cli.training.compiling import compiles, compiles_blocks
from efftrain_cli.training.objective import Compute, Objective
from tests.tiny import changed, fresh, tiny_recipe

RECIPE = tiny_recipe("train.batch_size=2")


@pytest.fixture
def compiles_by(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[GPT, Compute]]:
    """A function: (backend or None, recipe, by_blocks) -> a fresh model and what computes its
    losses, compiled by the backend, or eager."""

    def build(backend: object, recipe: Recipe, by_blocks: bool = False) -> tuple[GPT, Compute]:
        monkeypatch.setattr(compiling, "BACKEND", backend)
        monkeypatch.setattr(compiling, "WHOLE_MODEL_BLOCKS", 0 if by_blocks else 24)
        monkeypatch.setattr(objective, "compiles", lambda *_: backend is not None)
        state = fresh(recipe, 60)
        return state.model, Objective(recipe, state).compute

    return build


def broken_backend(graph: torch.fx.GraphModule, inputs: Sequence[Tensor]) -> Callable[..., object]:
    raise RuntimeError("Failed to find C compiler. Please specify via CC environment variable.")


def broken_backward(graph: torch.fx.GraphModule, inputs: Sequence[Tensor]) -> Callable[..., object]:
    """Compiles forward graphs alone."""
    from torch._dynamo.backends.common import aot_autograd

    return aot_autograd(fw_compiler=lambda graph, _: graph.forward, bw_compiler=broken_backend)(
        graph, inputs
    )


def test_a_compiler_that_fails_is_named_with_a_fix(compiles_by):
    recipe = changed(RECIPE, "train.compile=on")
    with pytest.raises(UsageError) as caught:
        gradient_by(*compiles_by(broken_backend, recipe))
    fault, *fix = str(caught.value).split("\n")
    assert (
        fault == "torch.compile failed: RuntimeError: Failed to find C compiler. "
        "Please specify via CC environment variable."
    )
    assert "gcc g++ python3-dev" in fix[0] and 'train.compile="off"' in fix[1]
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("by_blocks", [False, True], ids=["whole", "by blocks"])
def test_auto_trains_uncompiled_if_the_compiler_fails(by_blocks, compiles_by, monkeypatch, capsys):
    monkeypatch.setattr(compiling, "_FAULTS", [])
    cuda = torch.device("cuda")
    assert RECIPE.train.compile == "auto" and compiles(RECIPE, cuda)
    want = gradient_by(*compiles_by(None, RECIPE))
    assert torch.equal(gradient_by(*compiles_by(broken_backward, RECIPE, by_blocks)), want)
    said = capsys.readouterr().err
    assert said.count("warning: torch.compile failed") == 1, "once, not once a block"
    assert "1.3 to 1.9 times as long" in said and "Failed to find C compiler" in said
    assert not compiles(RECIPE, cuda), "memory is then estimated for eager code"
    assert compiles(changed(RECIPE, "train.compile=on"), cuda)


def gradient_by(model: GPT, compute: Compute) -> Tensor:
    """All gradients of a model in a row, with the loss at the end."""
    torch._dynamo.reset()
    tokens = torch.arange(32).view(2, 16) % 60
    loss = compute(tokens, tokens, None, None)["loss"]
    loss.backward()
    gradients = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    return torch.cat([*gradients, loss.detach().view(1)])


@pytest.mark.parametrize("compile_", ["auto", "on"])
def test_more_graphs_than_the_limit(compile_, compiles_by, monkeypatch, capsys):
    """A length that grows and a single sequence need two graphs."""
    monkeypatch.setattr(compiling, "_FAULTS", [])
    monkeypatch.setattr(compiling, "GRAPH_LIMIT", 1)
    torch._dynamo.reset()
    recipe = changed(RECIPE, f"train.compile={compile_}")
    _, compute = compiles_by("eager", recipe)
    losses = []
    try:
        for sequences in (2, 1):
            tokens = torch.zeros(sequences, 8, dtype=torch.int64)
            losses.append(float(compute(tokens, tokens, None, None)["loss"].detach()))
    except UsageError as error:
        assert compile_ == "on" and "torch.compile failed: FailOnRecompileLimitHit" in str(error)
        return
    assert compile_ == "auto" and losses[0] == pytest.approx(2 * losses[1], rel=1e-5)
    assert "warning: torch.compile failed: FailOnRecompileLimitHit" in capsys.readouterr().err


def test_all_lengths_are_compiled_at_half_of_the_longest(monkeypatch):
    """Kernels fit the first length that they see: not the shortest, with which a warmup begins."""
    shapes = []

    def noting(recipe: Recipe, function: Compute, full_shape: object) -> Compute:
        def compute(tokens: Tensor, *rest: Any) -> Any:
            shapes.append(tuple(tokens.shape))
            return function(tokens, *rest)

        return compute

    monkeypatch.setattr(objective, "by_shape", noting)
    recipe = changed(RECIPE, "train.compile=on", "seq_len_warmup={start = 4, steps = 4}")
    compute = Objective(recipe, fresh(recipe)).compute
    for length in (16, 4, 6):
        tokens = torch.zeros(2, length, dtype=torch.int64)
        compute(tokens, tokens, None, None)
    assert shapes == [(2, 16), (2, 8), (2, 4), (2, 6)]


def test_deep_models_are_compiled_by_blocks():
    assert [compiles_blocks(RECIPE, n_layer) for n_layer in (24, 25)] == [False, True]


def test_deterministic_recipes_have_the_compiler_time_no_kernels(compiles_by):
    """PyTorch's switch sets the compiler's, and compiling leaves it set; else kernels are chosen by
    timing them."""
    import torch._inductor.config as inductor_config

    for deterministic in (True, False):
        choose_determinism(deterministic)
        gradient_by(*compiles_by("eager", RECIPE, by_blocks=True))
        assert inductor_config.deterministic is deterministic
