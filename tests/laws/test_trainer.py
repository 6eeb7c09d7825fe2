"""The training loop: what it promises whatever the method."""

from __future__ import annotations

import math
import os
from itertools import islice

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from efftrain_cli.data.windows import Windows
from efftrain_cli.foundation.step import Progress
from efftrain_cli.plan.plan import plan_step
from efftrain_cli.recipe.recipe import Recipe
from efftrain_cli.training.gradient import Gradient
from efftrain_cli.training.loop import train
from efftrain_cli.training.record import read_records
from efftrain_cli.training.state import TrainState
from tests.recorded.bits import VOCAB_SIZE as VOCAB
from tests.recorded.bits import MadeTokens
from tests.tiny import METHODS, changed, fresh, tensors_of, tiny_recipe

RECIPE = tiny_recipe(
    "model.n_embd=32",
    "model.seq_len=32",
    "optim={lr = 3e-3, warmup_steps = 5}",
    "train.tokens=10_240",
    "train.micro_batch_tokens=100",
    "eval={every = 10, windows = 8}",
)


@pytest.fixture(scope="module")
def windows() -> Windows:
    """Tokens in which each mostly says the next one, so that a loss can fall."""
    return Windows(MadeTokens(), RECIPE.model.seq_len, RECIPE.seed)  # type: ignore[arg-type]


def run(
    state: TrainState, windows: Windows, recipe: Recipe = RECIPE, until: int | None = None
) -> list[dict]:
    val = windows.validation(recipe.eval.windows)
    rows = []
    for record in train(state, recipe, windows, val, until):
        rows += read_records(state, recipe, [record])
    return rows


def test_loss_falls_and_rows_say_what_happened(windows):
    state = fresh(RECIPE, VOCAB)
    rows = run(state, windows)
    assert [row["step"] for row in rows] == list(range(41))
    assert rows[0]["val_loss"] == pytest.approx(math.log(VOCAB), abs=0.1)
    assert "loss" not in rows[0]
    assert rows[-1]["val_loss"] < rows[0]["val_loss"] - 0.5
    assert [row["step"] for row in rows if row["val_loss"] is not None] == [0, 10, 20, 30, 40]
    assert sum(row["flops"] for row in rows[1:]) == pytest.approx(state.progress.flops)
    assert rows[-1]["tokens"] == state.progress.tokens == 40 * 8 * 32
    losses = [row["loss"] for row in rows[1:]]
    assert rows[2]["loss_ratio"] == pytest.approx(losses[1] / losses[0])
    assert rows[20]["loss_ratio"] == pytest.approx(losses[19] / min(losses[:19]))
    assert state.progress.best_loss == min(losses)
    assert state.progress.train_seconds == pytest.approx(sum(row["seconds"] for row in rows[1:]))


@pytest.mark.parametrize("warmup", [[], ["seq_len_warmup={start = 8, steps = 10}"]])
def test_loss_and_gradient_do_not_depend_on_the_micro_batches(windows, warmup):
    recipe = changed(RECIPE, *warmup)
    plan = plan_step(recipe, Progress())
    gradients = []
    for cuts in (1, 3, 8):
        state = fresh(recipe, VOCAB)
        state.model.double()
        cut = plan._replace(accumulation_steps=cuts)
        result = Gradient(recipe, state)(windows.batch(plan), cut)
        gradients.append((result.scalars["loss"], [p.grad for p in state.model.parameters()]))
    for loss, grads in gradients[1:]:
        torch.testing.assert_close(loss, gradients[0][0], rtol=1e-6, atol=0)
        for have, want in zip(grads, gradients[0][1], strict=True):
            # The loss itself is computed in fp32, so sums in another order differ in its last bits.
            torch.testing.assert_close(have, want, rtol=1e-4, atol=1e-8)


def test_a_loss_that_is_not_finite_changes_nothing(windows):
    state = fresh(RECIPE, VOCAB)
    run(state, windows, until=3)
    before = tensors_of(state)
    with torch.no_grad():
        saved = state.model.wte.weight[5].clone()
        state.model.wte.weight[5] = float("nan")
    before["wte.weight"] = state.model.wte.weight.detach().clone()
    val = windows.validation(2)
    records = list(islice(train(state, RECIPE, windows, val), 3))
    rows = read_records(state, RECIPE, records)
    assert [row["nonfinite"] for row in rows] == [True, True, True]
    assert rows[0]["loss"] is None
    for name, tensor in tensors_of(state).items():
        assert torch.equal(tensor.nan_to_num(123.0), before[name].nan_to_num(123.0)), name
    # Sticky: even when the loss is finite again, nothing moves until a person has looked.
    with torch.no_grad():
        state.model.wte.weight[5] = saved
    before["wte.weight"] = state.model.wte.weight.detach().clone()
    list(islice(train(state, RECIPE, windows, val), 2))
    assert torch.equal(state.model.wte.weight, before["wte.weight"])


def test_deterministic_kernels_are_what_the_recipe_says(windows):
    recipe = changed(RECIPE, "train.deterministic=true")
    try:
        first = run(fresh(recipe, VOCAB), windows, recipe, until=3)
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.utils.deterministic.fill_uninitialized_memory
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
        second = run(fresh(RECIPE, VOCAB), windows, until=3)
        assert not torch.are_deterministic_algorithms_enabled()
    finally:
        os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)
        torch.use_deterministic_algorithms(False)
    assert [row.get("loss") for row in first] == [row.get("loss") for row in second]


def test_losses_by_position_average_to_the_validation_loss_and_change_nothing(windows):
    recipe = changed(RECIPE, "eval.positions=true")
    rows = [run(fresh(each, VOCAB), windows, each, 12) for each in (RECIPE, recipe)]
    names = [f"val_loss_from_{start}" for start in (0, 2, 4, 8, 16)]
    widths = (2, 2, 4, 8, 16)
    for row in rows[1]:
        found = [row.pop(name) for name in names if name in row]
        if row["val_loss"] is not None:
            mean = sum(width * loss for width, loss in zip(widths, found, strict=True)) / 32
            assert mean == pytest.approx(row["val_loss"], rel=1e-5)
        else:
            assert not found
    columns = ("step", "loss", "grad_norm", "val_loss")
    assert [[row.get(name) for name in columns] for row in rows[0]] == [
        [row.get(name) for name in columns] for row in rows[1]
    ]


class Reads(TorchDispatchMode):
    """Notes every operation that brings a value from the device to the host."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = str(function)
        if name.startswith(("aten._local_scalar_dense", "aten.nonzero", "aten.equal.")):
            self.noted.append(name)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("method", METHODS)
def test_no_step_reads_from_the_device(method, windows, monkeypatch):
    """But SimiGrad's, whose gradients decide the next batch."""
    recipe = changed(RECIPE, "model.n_layer=3", "train.batch_size=8", *METHODS[method])
    state = fresh(recipe, VOCAB)
    steps = train(state, recipe, windows, windows.validation(2))
    for _ in range(4):
        next(steps)
    monkeypatch.setattr(torch, "get_rng_state", None)  # a copy from the device
    with Reads() as reads:
        # No operation of a CPU's tensor.
        monkeypatch.setattr(torch.Tensor, "tolist", lambda _: reads.noted.append("") or (1, 1, 1))
        for _ in range(3):
            next(steps)
    assert bool(reads.noted) == (method == "simigrad")
