"""Whole runs through the real compiler, on a CPU: every method's losses are eager code's, in as few
graphs as its shapes need, and no second of compilation counts as training."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from efftrain_cli.bench import random_windows
from efftrain_cli.recipe.recipe import Recipe, load_recipe
from efftrain_cli.training import loop
from efftrain_cli.training.compiling import compiled_graphs
from efftrain_cli.training.device import Stopwatch
from efftrain_cli.training.record import StepRecord, read_records
from efftrain_cli.training.stages import train_stages
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
LENGTHS = "seq_len_warmup={start = 8, steps = 6}"
DROPPING = "progressive_layer_drop={theta = 0.5, steps = 4}"
RUNS: dict[str, tuple[Recipe, int]] = {
    "llama": (LLAMA, 1),
    "llama, layer drop": (changed(LLAMA, DROPPING), 2),
    # The full shape, and one for every other length; both its dimensions stay above 1.
    "length warmup": (changed(BASELINE, LENGTHS), 2),
    # A block and the head, whichever blocks run; with lengths, each twice.
    "length warmup, layer drop": (changed(BASELINE, LENGTHS, DROPPING), 4),
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


def rows_of(recipe: Recipe, folder: Path, compiled: bool) -> list[dict[str, object]]:
    recipe = replace(recipe, train=replace(recipe.train, compile="on" if compiled else "off"))
    windows = random_windows(recipe, 300, folder)
    state = fresh(recipe, 300)
    records = train_stages(state, recipe, windows, windows.validation(2))
    rows = []
    for record in records:
        if isinstance(record, StepRecord):
            rows += read_records(state, recipe, [record])
    return rows[1:]


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_a_compiled_run_is_an_eager_one_in_few_graphs(name, tmp_path, monkeypatch):
    """F27."""
    waited: list[bool] = []

    class Watched(Stopwatch):
        def __init__(self, device: torch.device, idle: bool = False) -> None:
            waited.append(idle)
            super().__init__(device, idle)

    recipe, graphs = RUNS[name]
    for folder in ("eager", "compiled"):
        (tmp_path / folder).mkdir()
    eager = rows_of(recipe, tmp_path / "eager", compiled=False)
    torch._dynamo.reset()
    monkeypatch.setattr(loop, "Stopwatch", Watched)
    before = compiled_graphs()
    rows = rows_of(recipe, tmp_path / "compiled", compiled=True)
    assert compiled_graphs() - before == graphs
    assert len(rows) == len(eager) >= 5
    for row, want in zip(rows, eager, strict=True):
        assert row["loss"] == pytest.approx(want["loss"], rel=1e-5)
        assert row["grad_norm"] == pytest.approx(want["grad_norm"], rel=1e-3)
        inside = {key: want[key] for key in want if "_h." in key}
        assert {key: row[key] for key in inside} == pytest.approx(inside, rel=1e-3)
        assert row["tokens"] == want["tokens"] and row["seconds"] > 0  # type: ignore
        assert want["compile_seconds"] == 0
    compiling = [row["step"] for row in rows if row["compile_seconds"]]
    assert compiling and compiling[0] == 1
    shapes = {
        (row["batch_size"], row["seq_len"], row["stage"], row["accumulation_steps"]) for row in rows
    }
    # Each evaluation has a watch too, which never waits.
    assert (
        sum(waited)
        == len({(shape[0] / shape[3], *shape[1:3]) for shape in shapes})
        == len([w for w in waited if w])
    )
    assert gc.get_freeze_count() > 0
    if name in ("length warmup", "SimiGrad"):
        assert len(shapes) > 1, "otherwise nothing is shown"
    if name == "growth":
        assert {row["stage"] for row in rows} == {0, 1}
