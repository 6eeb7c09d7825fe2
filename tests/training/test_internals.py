"""`eval.internals`: its columns against independent arithmetic in fp64, and that measuring moves no
bit."""

from __future__ import annotations

import numpy as np
import pytest

from efftrain_cli.plan.plan import plan_step
from efftrain_cli.recipe.recipe import Recipe, load_recipe
from efftrain_cli.trackers.rows import series_of
from efftrain_cli.training.gradient import Gradient
from efftrain_cli.training.loop import train
from efftrain_cli.training.record import read_records
from efftrain_cli.training.state import TrainState
from tests.resume_law import RandomTokens, run
from tests.tiny import (
    FOUR_BLOCKS,
    METHODS,
    fresh,
)

LLAMA = ["model.arch=llama", "model.n_head=4", "model.n_kv_head=2", "model.qk_norm=true"]
TWO_BLOCKS = [*FOUR_BLOCKS, "model.n_layer=2"]


def weights_of(state: TrainState) -> dict[str, np.ndarray]:
    return {name: p.detach().double().numpy() for name, p in state.model.named_parameters()}


def normed(x: np.ndarray, weights: dict[str, np.ndarray], name: str, eps: float) -> np.ndarray:
    """A layer norm if the norm has a bias, else an RMS norm."""
    if f"{name}.bias" in weights:
        x = x - x.mean(-1, keepdims=True)
    x = x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weights[f"{name}.weight"]
    return x + weights.get(f"{name}.bias", 0.0)


def turned(x: np.ndarray) -> np.ndarray:
    """Rotary positions of (heads, T, D): pairs (i, i + D / 2) by position 10000^(-2 i / D)."""
    half = x.shape[-1] // 2
    angles = np.arange(x.shape[1])[:, None] * 10_000.0 ** (-np.arange(half) / half)
    a, b = x[..., :half], x[..., half:]
    turn, shift = np.cos(angles), np.sin(angles)
    return np.concatenate([a * turn - b * shift, b * turn + a * shift], -1)


def activations(
    recipe: Recipe, weights: dict[str, np.ndarray], ids: np.ndarray
) -> tuple[list[float], list[float]]:
    """RMS of each block's output, and its largest attention logit, in fp64."""
    model = recipe.model
    llama, heads = model.arch == "llama", model.n_head
    size = model.n_embd // heads

    def linear(x: np.ndarray, name: str) -> np.ndarray:
        return x @ weights[f"{name}.weight"].T + weights.get(f"{name}.bias", 0.0)

    x = weights["wte.weight"][ids]
    if not llama:
        x = x + weights["wpe.weight"][: len(ids)]
    sizes, largest = [], []
    for number in range(model.n_layer):
        block = f"h.{number}"
        rows = linear(normed(x, weights, f"{block}.ln_1", model.norm_eps), f"{block}.attn.c_attn")
        q, k, v = np.split(rows, [heads * size, (heads + model.kv_heads) * size], axis=-1)
        q, k, v = (part.reshape(len(ids), -1, size).swapaxes(0, 1) for part in (q, k, v))
        if model.qk_norm:
            q = normed(q, weights, f"{block}.attn.q_norm", model.norm_eps)
            k = normed(k, weights, f"{block}.attn.k_norm", model.norm_eps)
        if llama:
            q, k = turned(q), turned(k)
        k, v = (np.repeat(part, heads // model.kv_heads, axis=0) for part in (k, v))
        logits = q @ k.swapaxes(1, 2) / np.sqrt(size)
        logits[:, ~np.tri(len(ids), dtype=bool)] = -np.inf
        largest.append(logits.max())
        shares = np.exp(logits - logits.max(-1, keepdims=True))
        shares /= shares.sum(-1, keepdims=True)
        x = x + linear((shares @ v).swapaxes(0, 1).reshape(len(ids), -1), f"{block}.attn.c_proj")
        u = normed(x, weights, f"{block}.ln_2", model.norm_eps)
        hidden = linear(u, f"{block}.mlp.c_fc")
        if llama:
            hidden = hidden / (1 + np.exp(-hidden)) * linear(u, f"{block}.mlp.c_up")
        else:
            cubic = np.sqrt(2 / np.pi) * (hidden + 0.044715 * hidden**3)
            hidden = 0.5 * hidden * (1 + np.tanh(cubic))
        x = x + linear(hidden, f"{block}.mlp.c_proj")
        sizes.append(np.sqrt((x * x).mean()))
    return sizes, largest


def norm(tensors: dict[str, np.ndarray], block: str) -> float:
    """l2 norm over all that begin with a block's name, in fp64."""
    return float(np.sqrt(sum((t**2).sum() for n, t in tensors.items() if n.startswith(block))))


@pytest.mark.parametrize("model", [[], LLAMA], ids=["gpt2", "llama"])
def test_columns_are_those_of_independent_arithmetic(model):
    recipe = load_recipe("small", [*TWO_BLOCKS, *model, "eval.internals=2", "optim.grad_clip=0.1"])
    state, data = fresh(recipe), RandomTokens(recipe.model.seq_len)
    val = data.validation()
    rows = []
    records = train(state, recipe, data, val, until=2)  # type: ignore[arg-type]
    for _ in range(2):  # step 0 and step 1
        rows += read_records(state, recipe, [next(records)])
    before = weights_of(state)
    plan = plan_step(recipe, state.progress)
    Gradient(recipe, state)(data.batch(plan), plan)
    gradients = {n: p.grad.double().numpy() for n, p in state.model.named_parameters()}  # type: ignore[union-attr]
    state.model.zero_grad(set_to_none=True)
    (row,) = read_records(state, recipe, [next(records)])
    after = weights_of(state)

    changes = {name: after[name] - before[name] for name in before}
    sizes, largest = activations(recipe, after, val[0, :-1].numpy())
    assert row["step"] == 2 and row["grad_norm"] > 0.1
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


CASES = METHODS | {
    "ouroboros": ["ouroboros={modules = 4}"],
    "llama": LLAMA,
}


@pytest.mark.parametrize("method", ["none", "llama", "ouroboros"])
def test_every_block_has_its_columns_on_every_second_step(method):
    overrides = [*FOUR_BLOCKS, *CASES[method], "train.tokens=320", "eval.internals=2"]
    recipe = load_recipe("small", overrides)
    for row in run(fresh(recipe), recipe):
        there = {name for name in row if name.startswith(COLUMNS)}
        assert len(there) == (16 if row["step"] and row["step"] % 2 == 0 else 0)
        due = [row[name] for name in there - LOGITS if row[name] is not None]
        waiting = 2 if method == "ouroboros" and row["step"] == 2 else 0
        assert len(due) == len(there - LOGITS) - waiting and min(due, default=0.0) >= 0
        assert not [name for name in map(series_of, row) if name.startswith("other/")]


COLUMNS = ("grad_norm_h.", "update_ratio_h.", "residual_rms_h.", "attention_logit_max_h.")
LOGITS = {f"attention_logit_max_h.{number}" for number in range(4)}
