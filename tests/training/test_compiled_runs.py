"""Whole runs through the real compiler, on a CPU: every method's losses are eager code's, in as few
graphs as its shapes need, and no second of compilation counts as training."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from efftrain_cli.recipe.recipe import Recipe, load_recipe
from efftrain_cli.training.compiling import compiled_graphs
from tests.resume_law import run
from tests.tiny import changed, fresh

TINY = [
    "model={n_layer = 2, n_head = 2, n_embd = 32, seq_len = 32}",
    "data.tokenizer=bpe:300",
    "train={dtype = 'fp32', batch_size = 4, micro_batch_tokens = 64, tokens = 1024}",
    "eval.every=1000",
    "optim.warmup_steps=2",
]
BASELINE = load_recipe("small", [*TINY, "eval.internals=3"])
STAGES = "stages=[{model={n_layer=1}, switch={rule='tokens', value=512}}, {operators=['depth']}]"
GROWING = load_recipe("small-staged-depth", [*TINY, STAGES])
LLAMA = changed(
    BASELINE,
    "model.norm=rmsnorm",
    "model.mlp=swiglu",
    "model.positions=rope",
    "model.bias=false",
    "model.n_kv_head=1",
    "model.qk_norm=true",
    "model.tied=false",
    "model.softcap=20.0",
)
LENGTHS = ("train.tokens=2048", "seq_len_warmup={start = 2, multiple = 1, steps = 28}")
DROPPING = "progressive_layer_drop={theta = 0.5, steps = 4}"
RUNS: dict[str, tuple[Recipe, int]] = {
    "llama": (LLAMA, 1),
    "llama, layer drop": (changed(LLAMA, DROPPING), 2),
    # The full shape, and one for the 27 other lengths; both its dimensions stay above 1.
    "length warmup": (changed(BASELINE, *LENGTHS), 2),
    # A block and the head, whichever blocks run; with lengths, each twice.
    "length warmup, layer drop": (changed(BASELINE, *LENGTHS, DROPPING), 4),
    "SimiGrad": (
        changed(
            BASELINE, "simigrad={target = 0.9, min_batch_size = 4, max_batch_size = 8, quantum = 4}"
        ),
        1,
    ),
    "growth": (GROWING, 2),
}
"""Recipe, and the graphs that it needs."""


@pytest.fixture(autouse=True)
def nothing_stays_frozen() -> Iterator[None]:
    yield
    gc.unfreeze()
    torch._dynamo.reset()


def rows_of(recipe: Recipe, compile_: str) -> list[dict[str, Any]]:
    recipe = changed(recipe, f"train.compile={compile_}")
    return run(fresh(recipe), recipe)[1:]


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_a_compiled_run_is_an_eager_one_in_few_graphs(name):
    """F27."""
    recipe, graphs = RUNS[name]
    eager = rows_of(recipe, "off")
    torch._dynamo.reset()
    before = compiled_graphs()
    rows = rows_of(recipe, "on")
    assert compiled_graphs() - before == graphs
    assert len(rows) == len(eager) >= 5
    for row, want in zip(rows, eager, strict=True):
        assert row["loss"] == pytest.approx(want["loss"], rel=1e-5)
        assert row["grad_norm"] == pytest.approx(want["grad_norm"], rel=1e-3)
        inside = {key: want[key] for key in want if "_h." in key}
        assert {key: row[key] for key in inside} == pytest.approx(inside, rel=1e-3)
        assert row["tokens"] == want["tokens"] and row["seconds"] > 0
        assert want["compile_seconds"] == 0
    compiling = [row["step"] for row in rows if row["compile_seconds"]]
    assert compiling and compiling[0] == 1
    assert gc.get_freeze_count() > 0
    shapes = {(row["batch_size"], row["seq_len"], row["stage"]) for row in rows}
    assert (len(shapes) > 1) == (name not in ("llama", "llama, layer drop")), "nothing is shown"
