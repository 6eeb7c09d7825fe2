"""Compilation: graphs stay few whatever the schedule asks for, and compute what eager code
computes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from efftrain_cli.foundation.errors import UsageError
from efftrain_cli.foundation.step import Progress
from efftrain_cli.model.gpt import GPT
from efftrain_cli.model.kernels import choose_determinism
from efftrain_cli.plan.plan import plan_run, plan_step
from efftrain_cli.recipe.recipe import Recipe, load_recipe
from efftrain_cli.training import compiling, objective
from efftrain_cli.training.compiling import (
    GRAPH_LIMIT,
    compiled_graphs,
    compiles,
    full_micro_batch,
    middle_micro_batch,
)
from efftrain_cli.training.objective import Compute, Objective
from tests.tiny import changed, fresh, tiny_recipe

FULL = 1024
RECIPE = tiny_recipe(
    f"model.seq_len={FULL}",
    f"train.tokens={400 * FULL}",
    "train.batch_size=2",
    f"train.micro_batch_tokens={2 * FULL}",
)


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


def graphs_of(build: Callable[..., tuple[GPT, Compute]], recipe: Recipe, shapes: list) -> int:
    """Graphs that training on micro-batches of these (sequences, seq_len) compiles; losses are
    checked against eager."""
    torch._dynamo.reset()
    _, eager = build(None, recipe)
    _, compute = build("aot_eager", recipe)
    before = compiled_graphs()
    for i, shape in enumerate(shapes):
        tokens = torch.randint(60, shape, generator=torch.Generator().manual_seed(i))
        targets = tokens.roll(1, 1)
        loss = compute(tokens, targets, None, None)["loss"]
        loss.backward()
        if i % 20 == 0:
            expected = eager(tokens, targets, None, None)["loss"]
            torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
    return compiled_graphs() - before


def test_the_micro_batch_of_a_full_step():
    assert full_micro_batch(RECIPE, 1) == (2, FULL)
    uneven = changed(RECIPE, "train.batch_size=5")
    assert full_micro_batch(uneven, 1) is None
    single = changed(RECIPE, "train.micro_batch_tokens=100")
    assert full_micro_batch(single, 1) == (1, FULL)


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
    assert full_micro_batch(recipe, 1) == want
    for batch_size in range(quantum, 65, quantum):
        plan = plan_step(recipe, Progress(batch_size=batch_size))
        parts = torch.arange(batch_size).tensor_split(plan.accumulation_steps)
        if want is not None:
            assert {len(part) for part in parts} == {want[0]}, batch_size


def test_the_shipped_recipes_keep_the_full_shape_and_the_logits_below_2_to_the_31():
    for name in ("gpt2-117m", "gpt2-117m-simigrad", "gpt2-117m-slw", "gpt2-1.5b", "gpt3-125m"):
        recipe = load_recipe(name)
        shape = full_micro_batch(recipe, 1)
        assert shape is not None, name
        assert shape[0] * shape[1] * 50304 < 2**31, name


def test_the_graph_for_every_length_is_compiled_at_a_middle_one(compiles_by):
    assert middle_micro_batch(RECIPE) == [], "lengths stay"
    warming = changed(RECIPE, "seq_len_warmup={start = 8, steps = 130}")
    assert middle_micro_batch(warming) == [(2, FULL // 2)]
    larger = replace(
        warming,
        train=replace(RECIPE.train, tokens=10**9, batch_size=64, micro_batch_tokens=8 * FULL),
    )
    assert middle_micro_batch(larger) == [(16, FULL // 2)], "as many tokens as a full micro-batch"
    filled = changed(RECIPE, 'seq_len_warmup={start = 8, steps = 130, batch = "tokens"}')
    filled = replace(
        filled, train=replace(RECIPE.train, tokens=10**9, batch_size=2, micro_batch_tokens=8 * FULL)
    )
    assert middle_micro_batch(filled) == [(4, FULL // 2)], "as many tokens as a full step"
    torch._dynamo.reset()
    seen: list[int] = []

    def backend(graph: torch.fx.GraphModule, inputs: Sequence[Tensor]) -> torch.fx.GraphModule:
        seen.extend(int(x.node.hint) for x in inputs if isinstance(x, torch.SymInt))
        return graph

    _, compute = compiles_by(backend, warming)
    for length in (8, 16, 24):
        tokens = torch.zeros(2, length, dtype=torch.int64)
        compute(tokens, tokens.clone(), None, None)
    assert FULL // 2 in seen and not {8, 16, 24} & set(seen)


def broken_backend(graph: torch.fx.GraphModule, inputs: Sequence[Tensor]) -> Callable[..., object]:
    raise RuntimeError("Failed to find C compiler. Please specify via CC environment variable.")


def broken_backward(graph: torch.fx.GraphModule, inputs: Sequence[Tensor]) -> Callable[..., object]:
    """Compiles forward graphs alone."""
    from torch._dynamo.backends.common import aot_autograd

    return aot_autograd(fw_compiler=lambda graph, _: graph.forward, bw_compiler=broken_backend)(
        graph, inputs
    )


@pytest.mark.parametrize("by_blocks", [False, True], ids=["whole", "by blocks"])
def test_a_compiler_that_fails_is_named_with_a_fix(by_blocks, compiles_by):
    recipe = changed(RECIPE, "train.compile=on")
    with pytest.raises(UsageError) as caught:
        gradient_by(*compiles_by(broken_backend, recipe, by_blocks))
    fault, *fix = str(caught.value).split("\n")
    assert (
        fault == "torch.compile failed: RuntimeError: Failed to find C compiler. "
        "Please specify via CC environment variable."
    )
    assert "gcc g++ python3-dev" in fix[0] and 'train.compile="off"' in fix[1]
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("backend", [broken_backend, broken_backward])
@pytest.mark.parametrize("by_blocks", [False, True], ids=["whole", "by blocks"])
def test_auto_trains_uncompiled_if_the_compiler_fails(
    by_blocks, backend, compiles_by, monkeypatch, capsys
):
    monkeypatch.setattr(compiling, "_FAULTS", [])
    cuda = torch.device("cuda")
    assert RECIPE.train.compile == "auto" and compiles(RECIPE, cuda)
    want = gradient_by(*compiles_by(None, RECIPE))
    assert torch.equal(gradient_by(*compiles_by(backend, RECIPE, by_blocks)), want)
    said = capsys.readouterr().err
    assert said.count("warning: torch.compile failed") == 1, "once, not once a block"
    assert "1.3 to 1.9 times as long" in said and "Failed to find C compiler" in said
    assert not compiles(RECIPE, cuda), "memory is then estimated for eager code"
    assert compiles(changed(RECIPE, "train.compile=on"), cuda)


def gradient_by(model: GPT, compute: Compute) -> Tensor:
    """All gradients of a model in a row, with the loss at the end."""
    torch._dynamo.reset()
    tokens = torch.arange(2 * FULL).view(2, FULL) % 60
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


def test_running_out_of_memory_while_compiling_stays_that(compiles_by):
    def full(graph: torch.fx.GraphModule, inputs: Sequence[Tensor]) -> Callable[..., object]:
        raise torch.OutOfMemoryError("full")

    with pytest.raises(torch.OutOfMemoryError):
        gradient_by(*compiles_by(full, changed(RECIPE, "train.compile=on")))


def test_deterministic_recipes_have_the_compiler_time_no_kernels(compiles_by):
    """PyTorch's switch sets the compiler's, and compiling leaves it set; else kernels are chosen by
    timing them."""
    import torch._inductor.config as inductor_config

    for deterministic in (True, False):
        choose_determinism(deterministic)
        gradient_by(*compiles_by("eager", RECIPE, by_blocks=True))
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
def test_warmup_over_128_lengths_needs_two_graphs_at_most(compiles_by):
    recipe = changed(RECIPE, "seq_len_warmup={start = 8, steps = 130}")
    shapes = [(plan.batch_size, plan.seq_len) for plan, _ in plan_run(recipe)][:140]
    assert len({length for _, length in shapes}) == 128
    assert graphs_of(compiles_by, recipe, [(2, FULL), *shapes[::4]]) == 2, (
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
def test_compiled_blocks_take_what_attention_may_use_at_their_own_shape(compiles_by):
    """Dynamo does not look at the choice of kernels, so it must not pass from one kind of shape to
    the other."""
    torch._dynamo.reset()
    traced: list[bool] = []

    def backend(graph: torch.fx.GraphModule, inputs: Sequence[Tensor]) -> torch.fx.GraphModule:
        traced.append(torch.backends.cuda.cudnn_sdp_enabled())
        return graph

    _, compute = compiles_by(backend, DROPPING)
    tokens = torch.randint(60, (2, 16))
    for length, enabled in ((16, True), (12, False), (10, True)):
        before = torch.backends.cuda.cudnn_sdp_enabled()
        torch.backends.cuda.enable_cudnn_sdp(enabled)
        try:
            part = tokens[:, :length].contiguous()
            compute(part, part, None, torch.ones(4))
        finally:
            torch.backends.cuda.enable_cudnn_sdp(before)
    assert traced == [True, True, False, False]


@pytest.mark.slow
def test_a_second_model_of_the_same_shape_needs_no_graph_of_its_own(compiles_by):
    """A probe before training, and the many short runs of tune-warmup, build the function anew."""
    recipe = changed(RECIPE, "model.seq_len=32")
    assert graphs_of(compiles_by, recipe, [(64, 32)]) == 1
    before = compiled_graphs()
    for _ in range(3):
        _, compute = compiles_by("aot_eager", recipe)
        tokens = torch.randint(60, (64, 32))
        compute(tokens, tokens.roll(1, 1), None, None)["loss"].backward()
    assert compiled_graphs() == before
