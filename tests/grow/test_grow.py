"""`efftrain grow`: the new run, the untouched source, and what it refuses."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from efftrain_cli.foundation.errors import (
    CheckpointError,
    UsageError,
)
from efftrain_cli.grow import grow as grow_module
from efftrain_cli.grow.grow import grow_run
from efftrain_cli.pretrain import resume, start
from efftrain_cli.recipe.recipe import load_recipe
from efftrain_cli.run.directory import checkpoints_of
from efftrain_cli.run.lines import read_lines
from efftrain_cli.run.metrics import latest_rows, read_metrics
from efftrain_cli.run.reading import load_run
from efftrain_cli.run_list import read_runs
from efftrain_cli.training import checkpoint as checkpoint_module
from tests.conftest import cli
from tests.damage import flip
from tests.fake_runs import write_rows, write_run
from tests.trained_run import read_checkpoint

CPU = torch.device("cpu")
RECIPE = """
[model]
n_layer = 1
n_head = 1
n_embd = 16
seq_len = 16
[data]
train = "{text}"
valid_fraction = 0.1
tokenizer = "bpe:280"
[optim]
lr = 3e-3
warmup_steps = 3
decay_tokens = 1920
[train]
tokens = 960
batch_size = 4
dtype = "fp32"
[eval]
every = 5
windows = 20
[checkpoint]
every = 5
"""
MORE = ("stages.1.rewarmup_steps=3", "train.tokens=1920")


@pytest.fixture(autouse=True)
def own_runs() -> None:
    """Let all tests share the runs of `home`."""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder of runs with one finished run of 15 steps, `small`."""
    root = tmp_path_factory.mktemp("grow")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EFFTRAIN_RUNS", str(root / "runs"))
        (root / "text.txt").write_text(
            "".join(f"line {i}: {i * i} is the square of {i}\n" for i in range(1500))
        )
        (root / "small.toml").write_text(RECIPE.format(text=root / "text.txt"))
        start(
            load_recipe(str(root / "small.toml")),
            recipe_name="small",
            name="small",
            with_probe=False,
        )
        yield root


def digest(folder: Path) -> dict[str, str]:
    """sha256 of every file of a folder."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def test_a_grown_run_begins_with_the_grown_state_and_leaves_the_source_alone(home):
    source = home / "runs" / "small"
    before = digest(source)
    grown = grow_run("small", ["width"], "wide", CPU, overrides=MORE)
    assert digest(source) == before
    assert grown.run == home / "runs" / "wide"
    assert abs(grown.record.val_loss_after - grown.record.val_loss_before) <= 1e-5
    assert grown.largest_logit_difference <= 1e-4
    assert grown.logits_after == pytest.approx(grown.logits_before, abs=1e-4)
    assert (
        2 * grown.record.parameters_before
        < grown.record.parameters_after
        < 4 * grown.record.parameters_before
    )
    (checkpoint,) = checkpoints_of(grown.run)
    progress, model, optimizer, _ = read_checkpoint(checkpoint)
    old_progress, old_model, old_optimizer, _ = read_checkpoint(grown.checkpoint)
    assert (progress.step, progress.stage, progress.tokens) == (15, 1, old_progress.tokens)
    assert progress.flops == old_progress.flops
    assert progress.schedule_step == round(15 / 1.776)
    assert torch.equal(model["wte.weight"], old_model["wte.weight"].repeat(1, 2))
    weight = "mlp.c_fc.weight"  # moments are mapped, not only copied: every block holds m / 2
    assert torch.equal(
        optimizer[f"exp_avg.h.0.{weight}"], old_optimizer[f"exp_avg.h.0.{weight}"].repeat(2, 2) / 2
    )
    # the rows before the growth are the source's, so that a curve begins at step 0
    assert [row["step"] for row in read_lines(grown.run / "metrics.jsonl")] == list(range(16))
    (event,) = [e for e in read_lines(grown.run / "events.jsonl") if e["event"] == "growth"]
    assert event["grown_from"] == "small" and event["val_loss_after"] == grown.record.val_loss_after
    origin = json.loads((grown.run / "origin.json").read_text())
    assert origin["grown_from"]["run"] == "small"


def test_continuing_a_grown_run_is_training_its_recipe_from_the_start(home):
    """Bit for bit: grow changes nothing but where the run begins."""
    grown = grow_run("small", ["depth", "width"], "both", CPU, overrides=MORE)
    resume("both", with_probe=False)
    start(
        load_recipe(str(grown.run / "recipe.toml")),
        recipe_name="x",
        name="from-scratch",
        with_probe=False,
    )
    tensors = [
        read_checkpoint(checkpoints_of(home / "runs" / name)[-1])
        for name in ("both", "from-scratch")
    ]
    assert tensors[0][0]._replace(train_seconds=0, segment=0) == tensors[1][0]._replace(
        train_seconds=0, segment=0
    )
    for which in (1, 2):
        assert tensors[0][which].keys() == tensors[1][which].keys()
        assert all(
            torch.equal(tensor, tensors[1][which][name])
            for name, tensor in tensors[0][which].items()
        )
    rows = [
        {r["step"]: r.get("loss") for r in read_lines(home / "runs" / n / "metrics.jsonl")}
        for n in ("both", "from-scratch")
    ]
    assert rows[0] == rows[1] and len(rows[0]) == 31


def test_a_grown_run_of_a_resumed_source_keeps_its_next_rows(home):
    """The copied rows are one segment, and what the grown run adds counts beside them, for every
    reader."""
    start(
        load_recipe(str(home / "small.toml")),
        recipe_name="small",
        name="resumed",
        steps=6,
        with_probe=False,
    )
    resume("resumed", steps=9, with_probe=False)
    resume("resumed", with_probe=False)
    rows = read_lines(home / "runs" / "resumed" / "metrics.jsonl")
    assert sorted({row["segment"] for row in rows}) == [0, 1, 2]
    grown = grow_run("resumed", ["width"], "wide-resumed", CPU, overrides=MORE)
    assert {row["segment"] for row in read_lines(grown.run / "metrics.jsonl")} == {0}
    resume("wide-resumed", with_probe=False)
    assert [row["step"] for row in latest_rows(grown.run)] == list(range(31))
    loaded = load_run(grown.run)
    assert (loaded.spent("step"), loaded.spent("tokens"), loaded.status) == (30, 1920, "finished")
    listed = read_runs(["resumed", "wide-resumed"], sort="name")
    assert list(listed.tokens) == list(listed.budget) == [960, 1920], "each has its own budget"
    read = read_metrics(grown.run, ("step", "loss"))
    assert (len(read.columns["step"]), read.segments, read.corrupt) == (31, 2, ())
    ratios = read_metrics(grown.run, ("loss_ratio",)).columns["loss_ratio"]
    assert np.isfinite(ratios).sum() == 29


@pytest.mark.parametrize("where", ["write", "dump_recipe"])
def test_interrupted_growth_writes_nothing(home, monkeypatch, where):
    source = home / "runs" / "small"
    before, runs = digest(source), set((home / "runs").iterdir())

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    module = grow_module if where == "dump_recipe" else checkpoint_module
    monkeypatch.setattr(module, where, interrupt)
    with pytest.raises(KeyboardInterrupt):
        grow_run("small", ["width"], "never", CPU, overrides=MORE)
    assert digest(source) == before
    assert set((home / "runs").iterdir()) == runs


def test_without_optimizer_state_the_weights_alone_are_offered(home):
    shutil.copytree(home / "runs" / "small", home / "runs" / "bare")
    (checkpoints_of(home / "runs" / "bare")[-1] / "optimizer.safetensors").unlink()
    with pytest.raises(
        CheckpointError,
        match=r"with the weights\n  add --weights-only.*moments of all parameters are lost",
    ):
        grow_run("bare", ["depth"], "bare-deep", CPU, overrides=MORE)
    assert not (home / "runs" / "bare-deep").exists()
    grown = grow_run("bare", ["depth"], "bare-deep", CPU, weights_only=True, overrides=MORE)
    assert abs(grown.record.val_loss_after - grown.record.val_loss_before) <= 1e-5
    _, _, optimizer, _ = read_checkpoint(checkpoints_of(grown.run)[0])
    assert not any(tensor.any() for tensor in optimizer.values())
    assert grown.recipe.staged_growth is not None and grown.recipe.staged_growth.moments == "reset"


def test_damaged_weights_are_refused_even_alone(home):
    shutil.copytree(home / "runs" / "small", home / "runs" / "bent")
    for checkpoint in checkpoints_of(home / "runs" / "bent"):
        flip(checkpoint / "model.safetensors", -72)
    for weights_only in (False, True):
        with pytest.raises(CheckpointError, match=r"model\.safetensors"):
            grow_run("bent", ["width"], "bent-wide", CPU, weights_only=weights_only)
    assert not (home / "runs" / "bent-wide").exists()


def test_the_command_prints_sizes_losses_logits_and_how_to_go_on(home):
    result = cli(
        "grow",
        "small",
        "--operator",
        "depth",
        "--name",
        "deep",
        "--set",
        "train.tokens=2K",
        "--set",
        "staged_growth.symmetry=none",
    )
    assert "->" in result.output and "largest difference 0" in result.output
    # Measured on all 20 windows, so the losses are those of the source's own last row.
    found = re.search(r"loss +([\d.]+) -> ([\d.]+)", result.output)
    last = latest_rows(home / "runs" / "small")[-1]["val_loss"]
    assert (
        found is not None
        and [float(loss) for loss in found.groups()] == [pytest.approx(last, abs=2e-6)] * 2
    )
    assert "efftrain pretrain --resume deep" in result.output
    copies = ["--name", "copied", "--set", "staged_growth.depth=copies"]
    copied = cli("grow", "small", "--operator", "depth", *copies)
    assert "do not keep the loss" in copied.output
    assert "next        nothing is left of train.tokens = " in copied.output
    assert "pretrain --resume copied --set train.tokens=N" in copied.output


def test_planning_from_runs(home):
    with pytest.raises(UsageError, match=r"small.*: 3 validation losses are too few"):
        cli("grow", "--plan", "--small", "small", "--operator", "depth")
    warm = write_run(home / "runs", "small", 0, name="warm", more="[seq_len_warmup]\nsteps = 10\n")
    assert warm.name == "warm"
    with pytest.raises(UsageError, match="uses seq_len_warmup\n  plan with runs from scratch"):
        cli("grow", "--plan", "--small", "warm", "--operator", "depth")
    for name, width in (("thin", 64), ("broad", 128)):
        run = write_run(home / "runs", "small", 0, name=name)
        recipe = (run / "recipe.toml").read_text()
        (run / "recipe.toml").write_text(recipe.replace("n_embd = 64", f"n_embd = {width}"))
        floor = (8.8e13 / (24 * width**2 * 1000)) ** 0.076
        rows = [
            {"step": step, "segment": 0, "val_loss": floor + (4.2e3 / step) ** 0.76}
            for step in range(50, 20_000, 50)
        ]
        write_rows(run, rows)
    runs = ["--small", "thin", "--target", "broad"]
    lines = cli("grow", "--plan", *runs, "--operator", "width").output.splitlines()
    assert lines[0].split("  ")[0] == "rule" and "schedule_ratio" in lines[0]
    assert lines[2].startswith("equal marginal cost") and "%" in lines[2]
    alone = cli("grow", "--plan", "--small", "thin", "--operator", "width").output
    assert "equal marginal" not in alone.splitlines()[1]
