"""The CUDA path: what it computes against references, what it must never do. Run `pytest -m gpu`
where there is a GPU."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from efftrain_cli.bench import random_windows
from efftrain_cli.foundation.step import Batch
from efftrain_cli.model.losses import summed_cross_entropy
from efftrain_cli.plan.plan import full_plan
from efftrain_cli.recipe.recipe import Recipe, load_recipe
from efftrain_cli.training.build import build_state
from efftrain_cli.training.compiling import compiled_graphs
from efftrain_cli.training.gradient import Gradient
from efftrain_cli.training.loop import train, update
from efftrain_cli.training.record import read_records
from efftrain_cli.training.session import choose_device
from efftrain_cli.training.state import TrainState
from tests.launch import start_efftrain
from tests.tiny import changed

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="needs a CUDA device; this PyTorch sees none"
    ),
]
CUDA = torch.device("cuda")
VOCAB = 1000
LIMITS = {"fp32": 1e-3, "bf16": 0.2}
"""Largest relative error of a parameter's gradient, by dtype. A lost gradient's error is 1."""


def relative(a: Sequence[Tensor], b: Sequence[Tensor]) -> float:
    """||a - b|| / ||b|| over lists of tensors."""
    difference = [float((x.double() - y.double()).norm()) for x, y in zip(a, b, strict=True)]
    return math.hypot(*difference) / math.hypot(*(float(y.double().norm()) for y in b))


def worst_gradient(
    got: dict[str, Tensor | None], want: dict[str, Tensor | None]
) -> tuple[str, float]:
    """The parameter whose gradient is furthest from the wanted one, and ||a - b|| / ||b||."""
    errors = {}
    for name, wanted in want.items():
        gradient = got[name]
        assert wanted is not None
        errors[name] = relative(
            [torch.zeros_like(wanted) if gradient is None else gradient], [wanted]
        )
    return max(errors.items(), key=lambda item: item[1])


@pytest.fixture(autouse=True)
def one_after_the_other() -> Iterator[None]:
    """Graphs, kernel choices and memory of one test do not reach the next."""
    yield
    torch._dynamo.reset()
    torch.use_deterministic_algorithms(False)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.cuda.empty_cache()


def small(*settings: str) -> Recipe:
    """4 layers x 128 at length 256, bf16, two micro-batches of 8 a step, without end."""
    recipe = load_recipe(
        "small",
        [
            "data.tokenizer=bpe:1000",
            "train.tokens=1000000000",
            "train.batch_size=16",
            "train.micro_batch_tokens=2048",
            "train.dtype=bf16",
            "eval.every=1000000",
            "optim.decay_tokens=false",
            *settings,
        ],
    )
    assert recipe.data.tokenizer == f"bpe:{VOCAB}"
    return recipe


def fresh(
    recipe: Recipe, device: torch.device = CUDA, residual: torch.dtype | None = None
) -> TrainState:
    state = build_state(recipe, VOCAB, device)
    if residual is not None:
        state.model.residual_dtype = residual
    return state


def batch_of(recipe: Recipe, device: torch.device = CUDA) -> Batch:
    generator = torch.Generator().manual_seed(5)
    shape = (recipe.train.batch_size, recipe.model.seq_len)
    tokens, targets = (torch.randint(VOCAB, shape, generator=generator) for _ in range(2))
    return Batch(tokens, targets).to(device)


def gradient_of(
    recipe: Recipe, residual: torch.dtype | None = None, seq_len: int | None = None
) -> tuple[float, dict[str, Tensor | None]]:
    """(loss, gradients by parameter) of one step from fresh weights, at full length unless
    `seq_len` says another."""
    state = fresh(recipe, residual=residual)
    length = seq_len or recipe.model.seq_len
    plan = full_plan(recipe, recipe.train.batch_size, length, recipe.model.n_layer, 2)
    batch = batch_of(recipe)
    batch = Batch(batch.tokens[:, :length], batch.targets[:, :length])
    result = Gradient(recipe, state)(batch, plan)
    return float(result.scalars["loss"]), {
        name: p.grad for name, p in state.model.named_parameters()
    }


def rows_of(
    recipe: Recipe, steps: int, folder: Path, device: torch.device = CUDA
) -> list[dict[str, object]]:
    """The first `steps` rows of a run on random tokens, read as they come."""
    folder.mkdir(exist_ok=True)
    windows = random_windows(recipe, VOCAB, folder)
    state = fresh(recipe, device)
    records = train(state, recipe, windows, windows.validation(2), steps)
    return [read_records(state, recipe, [record])[0] for record in records][1:]


@pytest.mark.parametrize("seq_len", [256, 200, 64])
@pytest.mark.parametrize("dtype, loss_limit", [("fp32", 1e-5), ("bf16", 2e-3)])
def test_compiled_is_eager_for_every_parameter_and_shape(dtype, loss_limit, seq_len):
    loss, gradients = gradient_of(
        small(f"train.dtype={dtype}", "train.compile=on"), seq_len=seq_len
    )
    want, wanted = gradient_of(small(f"train.dtype={dtype}", "train.compile=off"), seq_len=seq_len)
    assert loss == pytest.approx(want, rel=loss_limit)
    name, error = worst_gradient(gradients, wanted)
    assert error < LIMITS[dtype], name


def test_compiled_blocks_are_the_compiled_whole(monkeypatch):
    whole, wanted = gradient_of(small("train.compile=on", "train.dtype=fp32"))
    monkeypatch.setattr("efftrain_cli.training.objective.compiles_blocks", lambda *_: True)
    before = compiled_graphs()
    blocks, gradients = gradient_of(small("train.compile=on", "train.dtype=fp32"))
    assert compiled_graphs() - before == 2, "a block and the head"
    assert blocks == pytest.approx(whole, rel=1e-5)
    name, error = worst_gradient(gradients, wanted)
    assert error < LIMITS["fp32"], name


def test_a_bf16_residual_stream_costs_no_more_than_bf16_does():
    loss, truth = gradient_of(small("train.dtype=fp32", "train.compile=off"))
    _, wide = gradient_of(small("train.compile=off"), torch.float32)
    narrow_loss, narrow = gradient_of(small("train.compile=off"), torch.bfloat16)
    assert narrow_loss == pytest.approx(loss, rel=2e-3)
    _, usual = worst_gradient(wide, truth)
    name, error = worst_gradient(narrow, truth)
    assert error < max(LIMITS["bf16"], 2.5 * usual), name


def test_the_one_buffer_head_is_the_plain_one_and_padding_rows_get_exactly_nothing():
    tokens, n_embd, vocab, rows = 2048, 256, 50257, 50304
    generator = torch.Generator().manual_seed(6)
    x0 = torch.randn(tokens, n_embd, generator=generator).cuda()
    w0 = (0.05 * torch.randn(rows, n_embd, generator=generator)).cuda()
    y = torch.randint(vocab, (tokens,), generator=generator).cuda()

    def gradients(form: Callable[[Tensor, Tensor], Tensor]) -> list[Tensor]:
        x, w = x0.clone().requires_grad_(), w0.clone().requires_grad_()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            (form(x, w) / tokens).backward()
        assert x.grad is not None and w.grad is not None
        return [x.grad, w.grad]

    ours = gradients(lambda x, w: summed_cross_entropy(x, w, y, vocab))
    plain = gradients(
        lambda x, w: F.cross_entropy(F.linear(x, w)[:, :vocab].float(), y, reduction="sum")
    )
    assert relative(ours, plain) < 1e-2
    assert torch.count_nonzero(ours[1][vocab:]) == 0


def test_a_gradient_that_is_not_finite_changes_nothing_then_or_later():
    recipe = small("train.compile=off")
    state = fresh(recipe)
    plan = full_plan(recipe, 16, 256, 4)._replace(lr=1e-3)
    tensors = [*state.model.parameters(), *state.optimizer.tensors().values()]

    def step(value: float) -> None:
        for parameter in state.model.parameters():
            parameter.grad = torch.full_like(parameter, value)
        update(state, recipe, plan, torch.ones((), device=CUDA))

    step(0.1)
    before = [x.detach().clone() for x in tensors]
    for value in (float("nan"), 0.1, float("inf"), 0.1):
        step(value)
    assert state.nonfinite.item() == 1
    assert all(torch.equal(x, y) for x, y in zip(tensors, before, strict=True))


def test_a_warmup_over_many_lengths_needs_two_graphs(tmp_path):
    recipe = changed(small("train.compile=on"), "seq_len_warmup={start = 8, steps = 32}")
    before = compiled_graphs()
    rows = rows_of(recipe, 36, tmp_path)
    assert len({row["seq_len"] for row in rows}) == 32
    assert compiled_graphs() - before == 2
    assert sum(bool(row["compile_seconds"]) for row in rows) == 2


def test_each_kind_of_shape_keeps_its_own_kernel_after_a_probe(monkeypatch):
    """The full shape compiled first, with cuDNN allowed, must not decide for the others; blocks
    compiled one by one."""
    from torch.profiler import ProfilerActivity, profile

    monkeypatch.setattr("efftrain_cli.training.objective.compiles_blocks", lambda *_: True)
    recipe = changed(small("train.compile=on"), "seq_len_warmup={start = 8, steps = 32}")
    state = fresh(recipe)
    forward_backward = Gradient(recipe, state)

    def kernels(length: int) -> str:
        sequences = recipe.train.batch_size
        plan = full_plan(recipe, sequences, length, recipe.model.n_layer, 2)
        tokens = torch.zeros((sequences, length), dtype=torch.int64, device=CUDA)
        for _ in range(2):
            with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
                forward_backward(Batch(tokens, tokens), plan)
                torch.cuda.synchronize()
        return " ".join(event.key for event in profiler.key_averages())

    full = kernels(recipe.model.seq_len)
    for length in (64, 104, 128):
        assert "cudnn_attention" not in kernels(length)
    assert ("cudnn_attention" in kernels(recipe.model.seq_len)) == ("cudnn_attention" in full), (
        "and it keeps its own"
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "recipe",
    [
        ("small",),
        ("unstable-slw",),
        ("unstable", "--set", "batch_size_warmup={start = 16, increment = 16, sequences = 1571}"),
        ("small-pld",),
        ("small-simigrad",),
        ("small-staged-depth",),
    ],
)
def test_every_method_resumes_exactly(recipe, tmp_path):
    process = start_efftrain(tmp_path, "verify-resume", *recipe, "--device", "cuda")
    out, err = process.communicate(timeout=900)
    assert process.returncode == 0, out + err


@pytest.mark.parametrize("method", ["none", "length warmup", "layer drop"])
def test_no_step_waits_for_the_device(method, tmp_path):
    recipe = {
        "none": small("train.compile=off"),
        "length warmup": changed(
            small("train.compile=off"), "seq_len_warmup={start = 8, steps = 32}"
        ),
        "layer drop": changed(
            small("train.compile=off"), "progressive_layer_drop={theta = 0.5, steps = 8}"
        ),
    }[method]
    windows = random_windows(recipe, VOCAB, tmp_path)
    state = fresh(recipe)
    records = train(state, recipe, windows, windows.validation(2))
    taken = [next(records) for _ in range(3)]
    torch.cuda.set_sync_debug_mode("error")
    try:
        taken += [next(records) for _ in range(4)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert [row["step"] for row in read_records(state, recipe, taken)] == list(range(7))


@pytest.mark.parametrize("name", ["cuda:0", "cuda:1"])
def test_seconds_are_positive_and_true(name, tmp_path):
    if int(name[-1]) >= torch.cuda.device_count():
        pytest.skip(f"there is no {name}")
    device = choose_device(name)
    try:
        recipe = changed(small("train.compile=on"), "seq_len_warmup={start = 8, steps = 16}")
        windows = random_windows(recipe, VOCAB, tmp_path)
        state = fresh(recipe, device)
        records = train(state, recipe, windows, windows.validation(2))
        taken = [
            next(records) for _ in range(20)
        ]  # nothing is read: work piles up while the next shape compiles
        rows = read_records(state, recipe, taken)[1:]
        assert all(float(str(row["seconds"])) > 0 for row in rows)
        torch.cuda.synchronize(device)
        start = time.perf_counter()
        rows = read_records(state, recipe, [next(records) for _ in range(30)])
        torch.cuda.synchronize(device)
        wall = time.perf_counter() - start
        assert 0.5 * wall < sum(float(str(row["seconds"])) for row in rows) <= 1.02 * wall
    finally:
        torch.cuda.set_device(0)


def test_activation_checkpointing_gives_the_same_gradient_in_less_memory():
    results, peaks = [], []
    for setting in ("true", "false"):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        recipe = small(
            f"train.activation_checkpointing={setting}", "train.dtype=fp32", "train.compile=off"
        )
        results.append(gradient_of(recipe))
        peaks.append(torch.cuda.max_memory_allocated())
    (loss, gradients), (want, wanted) = results
    assert loss == pytest.approx(want, rel=1e-6) and worst_gradient(gradients, wanted)[1] < 1e-5
    assert peaks[0] < 0.9 * peaks[1]
