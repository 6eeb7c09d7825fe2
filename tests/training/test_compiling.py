"""Compilation: graphs stay few whatever the schedule asks for, and compute what eager code
computes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from efftrain_cli.foundation.errors import UsageError
from efftrain_cli.foundation.step import Progress
from efftrain_cli.model.gpt import GPT
from efftrain_cli.model.kernels import choose_determinism
from efftrain_cli.plan.plan import plan_run, plan_step
from efftrain_cli.recipe.recipe import Recipe, load_recipe
from efftrain_cli.training import compiling, trainer
from efftrain_cli.training.build import build_model
from efftrain_cli.training.compiling import (
    GRAPH_LIMIT,
    MiddleFirst,
    Objective,
    compile_parts,
    compile_whole,
    compiled_graphs,
    compiler_errors,
    compiles,
    full_micro_batch,
    middle_micro_batch,
)
from efftrain_cli.training.trainer import StepClock
from tests.tiny import changed, tiny_recipe

FULL = 1024
RECIPE = tiny_recipe(
    f"model.seq_len={FULL}",
    f"train.tokens={400 * FULL}",
    "train.batch_size=2",
    f"train.micro_batch_tokens={2 * FULL}",
)
CPU = torch.device("cpu")


def whole_of(recipe: Recipe) -> tuple[Objective, Objective]:
    """(eager, compiled) objective of a fresh model of the recipe."""
    model = build_model(recipe, 60, CPU)

    def eager(*arguments: Any) -> dict[str, Tensor]:
        return {"ce": model.loss_sum(*arguments)}

    return eager, compile_whole(recipe, eager, backend="aot_eager")


def graphs_of(recipe: Recipe, shapes: list[tuple[int, int]]) -> int:
    """Graphs that training on micro-batches of these (sequences, seq_len) compiles; losses are
    checked against eager."""
    torch._dynamo.reset()
    eager, compiled = whole_of(recipe)
    before = compiled_graphs()
    for i, shape in enumerate(shapes):
        tokens = torch.randint(60, shape, generator=torch.Generator().manual_seed(i))
        targets = tokens.roll(1, 1)
        loss = compiled(tokens, targets, None, None)["ce"]
        loss.backward()
        if i % 20 == 0:
            torch.testing.assert_close(
                loss, eager(tokens, targets, None, None)["ce"], rtol=1e-5, atol=0
            )
    return compiled_graphs() - before


def test_the_micro_batch_of_a_full_step():
    assert full_micro_batch(RECIPE) == (2, FULL)
    uneven = changed(RECIPE, "train.batch_size=5")
    assert full_micro_batch(uneven) is None
    single = changed(RECIPE, "train.micro_batch_tokens=100")
    assert full_micro_batch(single) == (1, FULL)


@pytest.mark.parametrize("quantum, micro_batch_tokens, want", [
    (4, 2 * FULL, (2, FULL)),
    (8, 2 * FULL, (2, FULL)),
    # one micro-batch: an odd number of quanta would be cut into unequal halves
    (2, 2 * FULL, None),
    (4, 3 * FULL, None),
    (4, 100, None),
])  # fmt: skip
def test_simigrad_keeps_the_full_shape_where_its_quantum_is_two_micro_batches(
    quantum, micro_batch_tokens, want
):
    recipe = changed(
        RECIPE,
        "train.batch_size=8",
        f"train.micro_batch_tokens={micro_batch_tokens}",
        f"simigrad={{target = 0.5, min_batch_size = {quantum}, max_batch_size = 64, quantum ="
        f" {quantum}}}",
    )
    assert full_micro_batch(recipe) == want
    for batch_size in range(quantum, 65, quantum):
        plan = plan_step(recipe, Progress(batch_size=batch_size))
        parts = torch.arange(batch_size).tensor_split(plan.accumulation_steps)
        if want is not None:
            assert {len(part) for part in parts} == {want[0]}, batch_size


def test_the_shipped_recipes_keep_the_full_shape_and_the_logits_below_2_to_the_31():
    for name in ("gpt2-117m", "gpt2-117m-simigrad", "gpt2-117m-slw", "gpt2-1.5b", "gpt3-125m"):
        recipe = load_recipe(name)
        shape = full_micro_batch(recipe)
        assert shape is not None, name
        assert shape[0] * shape[1] * 50304 < 2**31, name


def test_the_graph_for_every_length_is_compiled_at_a_middle_one():
    assert middle_micro_batch(RECIPE) is None, "lengths stay"
    warming = changed(RECIPE, "seq_len_warmup={start = 8, steps = 130}")
    assert middle_micro_batch(warming) == (2, FULL // 2)
    larger = replace(
        warming,
        train=replace(RECIPE.train, tokens=10**9, batch_size=64, micro_batch_tokens=8 * FULL),
    )
    assert middle_micro_batch(larger) == (16, FULL // 2), "as many tokens as a full micro-batch"
    filled = changed(RECIPE, 'seq_len_warmup={start = 8, steps = 130, batch = "tokens"}')
    filled = replace(
        filled, train=replace(RECIPE.train, tokens=10**9, batch_size=2, micro_batch_tokens=8 * FULL)
    )
    assert middle_micro_batch(filled) == (4, FULL // 2), "as many tokens as a full step"
    torch._dynamo.reset()
    seen: list[tuple[int, ...]] = []

    def loss_sum(tokens: Tensor, targets: Tensor, *rest: Any) -> Tensor:
        return (tokens - targets).sum()

    def backend(graph: torch.fx.GraphModule, inputs: Sequence[Tensor]) -> torch.fx.GraphModule:
        seen.append(tuple(int(x.node.hint) for x in inputs if isinstance(x, torch.SymInt)))
        return graph

    whole = compile_whole(warming, loss_sum, backend)  # type: ignore
    compiled = MiddleFirst(warming, lambda *arguments: whole(*arguments[:4]))  # type: ignore
    for length in (8, 16, 24):
        tokens = torch.zeros(2, length, dtype=torch.int64)
        compiled(tokens, tokens.clone(), None, None)
    assert len(seen) == 1 and FULL // 2 in seen[0]


def test_all_ranks_wait_alike_for_a_compiler_that_fails_on_one(monkeypatch):
    """In the step of a new length each waits for the others as long as a compilation may take."""
    monkeypatch.setattr(trainer, "Stopwatch", lambda device, idle: None)
    recipe = changed(RECIPE, "seq_len_warmup={start = 8, steps = 130}")
    patience = []
    for faults in ([], ["no compiler"]):
        monkeypatch.setattr(compiling, "_FAULTS", faults)
        clock = StepClock(recipe, torch.device("cuda"))
        plans = [plan_step(recipe, Progress(step=step)) for step in (0, 0, 70)]
        assert plans[2].seq_len > plans[0].seq_len
        patience.append([clock.start(plan) for plan in plans])
    assert patience == [[True, False, True]] * 2


def broken_backend(graph: torch.fx.GraphModule, inputs: Sequence[Tensor]) -> Callable[..., object]:
    raise RuntimeError("Failed to find C compiler. Please specify via CC environment variable.")


def broken_backward(graph: torch.fx.GraphModule, inputs: Sequence[Tensor]) -> Callable[..., object]:
    """Compiles forward graphs alone."""
    from torch._dynamo.backends.common import aot_autograd

    return aot_autograd(fw_compiler=lambda graph, _: graph.forward, bw_compiler=broken_backend)(
        graph, inputs
    )


@pytest.mark.parametrize("by_blocks", [False, True], ids=["whole", "by blocks"])
def test_a_compiler_that_fails_is_named_with_a_fix(by_blocks):
    recipe = changed(RECIPE, "train.compile=on")
    with pytest.raises(UsageError) as caught:
        loss_by(broken_backend, recipe, by_blocks)
    fault, *fix = str(caught.value).split("\n")
    assert (
        fault == "torch.compile failed: RuntimeError: Failed to find C compiler. "
        "Please specify via CC environment variable."
    )
    assert "gcc g++ python3-dev" in fix[0] and 'train.compile="off"' in fix[1]
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("backend", [broken_backend, broken_backward])
@pytest.mark.parametrize("by_blocks", [False, True], ids=["whole", "by blocks"])
def test_auto_trains_uncompiled_if_the_compiler_fails(by_blocks, backend, monkeypatch, capsys):
    monkeypatch.setattr(compiling, "_FAULTS", [])
    cuda = torch.device("cuda")
    assert RECIPE.train.compile == "auto" and compiles(RECIPE, cuda)
    want = gradient_by(None, RECIPE, by_blocks)
    assert torch.equal(gradient_by(backend, RECIPE, by_blocks), want)
    said = capsys.readouterr().err
    assert said.count("warning: torch.compile failed") == 1, "once, not once a block"
    assert "1.3 to 1.9 times as long" in said and "Failed to find C compiler" in said
    assert not compiles(RECIPE, cuda), "memory is then estimated for eager code"
    assert compiles(changed(RECIPE, "train.compile=on"), cuda)


def gradient_by(backend: object, recipe: Recipe, by_blocks: bool) -> Tensor:
    """All gradients of fresh weights in a row, with the loss at the end, compiled by `backend`;
    None: eager."""
    loss, model = loss_by(backend, recipe, by_blocks)
    loss.backward()
    gradients = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    return torch.cat([*gradients, loss.detach().view(1)])


def loss_by(backend: object, recipe: Recipe, by_blocks: bool) -> tuple[Tensor, GPT]:
    """The loss of fresh weights, compiled by `backend`; None: eager."""
    torch._dynamo.reset()
    model = build_model(recipe, 60, CPU)
    tokens = torch.arange(2 * FULL).view(2, FULL) % 60
    if backend is None:
        return model.loss_sum(tokens, tokens), model
    if by_blocks:
        parts = compile_parts(recipe, model, backend=backend)  # type: ignore
        x = model.run_blocks(model.embed(tokens), run_block=parts.block)
        return parts.head_loss_sum(x, tokens), model

    def objective(*arguments: Any) -> dict[str, Tensor]:
        return {"ce": model.loss_sum(*arguments)}

    compiled = compile_whole(recipe, objective, backend)  # type: ignore
    return compiled(tokens, tokens, None, None)["ce"], model


def test_a_fault_in_the_backward_pass_is_named_and_others_pass():
    """The graph of a backward pass may be compiled when it first runs."""
    from torch._dynamo.exc import BackendCompilerFailed

    with (
        pytest.raises(UsageError, match="failed: ValueError: no kernel"),
        compiler_errors(),
    ):
        raise BackendCompilerFailed(compiler_errors, ValueError("no kernel"), None)
    with pytest.raises(torch.OutOfMemoryError), compiler_errors():
        raise BackendCompilerFailed(compiler_errors, torch.OutOfMemoryError("full"), None)
    with pytest.raises(RuntimeError, match="illegal memory access"), compiler_errors():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")


def test_deterministic_recipes_have_the_compiler_time_no_kernels():
    """PyTorch's switch sets the compiler's, and compiling leaves it set; else kernels are chosen by
    timing them."""
    import torch._inductor.config as inductor_config

    for deterministic in (True, False):
        choose_determinism(deterministic)
        loss_by("eager", RECIPE, by_blocks=True)
        assert inductor_config.deterministic is deterministic


@pytest.mark.slow
def test_without_a_compiler_pretrain_ends_with_two_lines_and_exit_2(fresh_efftrain, tmp_path):
    done = fresh_efftrain(
        "pretrain", "--recipe", "quickstart", "--steps", "1", "--set", "train.compile=on",
        CXX="/nonexistent", TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "cache"),
    code=2)  # fmt: skip
    assert "torch.compile failed: InvalidCxxCompiler: No working C++ compiler" in done.stderr
    assert "gcc g++ python3-dev" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.slow
def test_warmup_over_128_lengths_needs_two_graphs_at_most():
    recipe = changed(RECIPE, "seq_len_warmup={start = 8, steps = 130}")
    shapes = [(plan.batch_size, plan.seq_len) for plan, _ in plan_run(recipe)][:140]
    assert len({length for _, length in shapes}) == 128
    assert graphs_of(recipe, [(2, FULL), *shapes[::4]]) == 2, (
        "one graph for the full shape, one for all the others"
    )
    assert GRAPH_LIMIT >= 2


DROPPING = changed(
    RECIPE,
    "model.n_layer=4",
    "model.seq_len=16",
    "progressive_layer_drop={theta = 0.5, steps = 10}",
    "train.micro_batch_tokens=32",
)


@pytest.mark.slow
def test_compiled_blocks_take_what_attention_may_use_at_their_own_shape():
    """Dynamo does not look at the choice of kernels, so it must not pass from one kind of shape to
    the other."""
    torch._dynamo.reset()
    model = build_model(DROPPING, 60, CPU)
    traced: list[tuple[int, bool]] = []

    def backend(graph: torch.fx.GraphModule, inputs: Sequence[Tensor]) -> torch.fx.GraphModule:
        traced.append((len(traced), torch.backends.cuda.cudnn_sdp_enabled()))
        return graph

    parts = compile_parts(DROPPING, model, backend)  # type: ignore
    tokens = torch.randint(60, (2, 16))
    for length, enabled in ((16, True), (12, False), (10, True)):
        before = torch.backends.cuda.cudnn_sdp_enabled()
        torch.backends.cuda.enable_cudnn_sdp(enabled)
        try:
            part = tokens[:, :length].contiguous()
            parts.head_loss_sum(model.run_blocks(model.embed(part), run_block=parts.block), part)
        finally:
            torch.backends.cuda.enable_cudnn_sdp(before)
    assert [enabled for _, enabled in traced] == [True, True, False, False]


@pytest.mark.slow
def test_a_second_model_of_the_same_shape_needs_no_graph_of_its_own():
    """A probe before training, and the many short runs of tune-warmup, build the function anew."""
    recipe = changed(RECIPE, "model.seq_len=32")
    assert graphs_of(recipe, [(64, 32)]) == 1
    before = compiled_graphs()
    for _ in range(3):
        eager, compiled = whole_of(recipe)
        tokens, targets = torch.randint(60, (64, 32)), torch.randint(60, (64, 32))
        loss = compiled(tokens, targets, None, None)["ce"]
        loss.backward()
        torch.testing.assert_close(
            loss, eager(tokens, targets, None, None)["ce"], rtol=1e-5, atol=0
        )
    assert compiled_graphs() == before
