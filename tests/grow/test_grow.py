"""`efftrain grow`: the new run, the untouched source, and what it refuses."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import shutil
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from efftrain_cli.foundation.errors import (
    CheckpointError,
    UsageError,
)
from efftrain_cli.grow import grow
from efftrain_cli.grow.grow import grow_run
from efftrain_cli.run.directory import checkpoints_of
from efftrain_cli.run.lines import read_lines
from efftrain_cli.run.metrics import latest_rows
from efftrain_cli.run_list import read_runs
from efftrain_cli.training import checkpoint
from efftrain_cli.training.stages import GrowthRecord, grow_stage
from tests.conftest import cli
from tests.damage import flip
from tests.fake_runs import write_run, write_sealed
from tests.tiny import CPU, assert_equal
from tests.trained_run import read_checkpoint

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
def own_folder() -> None:
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
        cli(f"pretrain {root / 'small.toml'} --name small --no-probe")
        yield root


def digest(folder: Path) -> dict[str, str]:
    """sha256 of every file of a folder."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_a_grown_run_begins_with_the_grown_state_and_leaves_the_source_alone(home):
    source = home / "runs" / "small"
    before = digest(source)
    grown = grow_run("small", ["width"], "wide", CPU, overrides=MORE)
    assert digest(source) == before
    assert grown.run == home / "runs" / "wide"
    assert abs(grown.record.val_loss_after - grown.record.val_loss_before) <= 1e-5
    assert grown.largest_logit_difference <= 1e-4
    (folder,) = checkpoints_of(grown.run)
    progress, model, optimizer, _ = read_checkpoint(folder)
    old_progress, old_model, old_optimizer, _ = read_checkpoint(grown.checkpoint)
    assert (progress.step, progress.stage, progress.tokens) == (15, 1, old_progress.tokens)
    assert progress.flops == old_progress.flops
    assert progress.schedule_step == round(15 / 1.776)
    assert torch.equal(model["wte.weight"], old_model["wte.weight"].repeat(1, 2))
    # Moments are mapped, not only copied: every block holds m / 2.
    moment = "exp_avg.h.0.mlp.c_fc.weight"
    assert torch.equal(optimizer[moment], old_optimizer[moment].repeat(2, 2) / 2)
    # The rows before the growth are the source's, so that a curve begins at step 0.
    assert [row["step"] for row in read_lines(grown.run / "metrics.jsonl")] == list(range(16))
    events = {event["event"]: event for event in read_lines(grown.run / "events.jsonl")}
    assert events["growth"]["grown_from"] == "small"
    assert events["growth"]["val_loss_after"] == grown.record.val_loss_after
    origin = json.loads((grown.run / "origin.json").read_text())
    assert origin["grown_from"]["run"] == "small"


def test_continuing_a_grown_run_is_training_its_recipe_from_the_start(home):
    """Bit for bit: grow changes nothing but where the run begins."""
    grown = grow_run("small", ["depth", "width"], "both", CPU, overrides=MORE)
    cli("pretrain --resume both --no-probe")
    cli(f"pretrain {grown.run / 'recipe.toml'} --name from-scratch --no-probe")
    found = []
    for name in ("both", "from-scratch"):
        run = home / "runs" / name
        progress, model, optimizer, _ = read_checkpoint(checkpoints_of(run)[-1])
        progress = progress._replace(train_seconds=0, segment=0)
        losses = [row.get("loss") for row in read_lines(run / "metrics.jsonl")]
        found.append((progress, losses, model, optimizer))
    (progress, losses, *tensors), (expected, expected_losses, *expected_tensors) = found
    assert progress == expected and losses == expected_losses and len(losses) == 31
    for have, want in zip(tensors, expected_tensors, strict=True):
        assert_equal(have, want)


def test_a_grown_run_of_a_resumed_source_keeps_its_next_rows(home):
    """The copied rows are one segment, and what the grown run adds counts beside them."""
    cli(f"pretrain {home / 'small.toml'} --name resumed --steps 6 --no-probe")
    cli("pretrain --resume resumed --no-probe")
    grown = grow_run("resumed", ["width"], "wide-resumed", CPU, overrides=MORE)
    assert {row["segment"] for row in read_lines(grown.run / "metrics.jsonl")} == {0}
    cli("pretrain --resume wide-resumed --no-probe")
    assert [row["step"] for row in latest_rows(grown.run)] == list(range(31))
    listed = read_runs(["resumed", "wide-resumed"]).sort_values("name")
    assert list(listed.tokens) == list(listed.budget) == [960, 1920], "each has its own budget"


@pytest.mark.parametrize("module, function", [(checkpoint, "write"), (grow, "dump_recipe")])
def test_interrupted_growth_writes_nothing(home, monkeypatch, module, function):
    before = digest(home / "runs")

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(module, function, interrupt)
    with pytest.raises(KeyboardInterrupt):
        grow_run("small", ["width"], "never", CPU, overrides=MORE)
    assert digest(home / "runs") == before


@pytest.mark.parametrize(
    "loss, change, is_kept", [(0.5, 0.9e-5, True), (0.5, 1.1e-5, False), (2.0, 1.9e-5, True)]
)
def test_a_growth_may_move_the_loss_by_rounding(home, monkeypatch, loss, change, is_kept):
    """By 1e-5 nats, and 1e-5 of a loss above 1."""

    def moved(*args: Any) -> GrowthRecord:
        changes = {"val_loss_before": loss, "val_loss_after": loss + change}
        return dataclasses.replace(grow_stage(*args), **changes)

    monkeypatch.setattr(grow, "grow_stage", moved)
    name = f"moved-{loss}-{change}"
    stays = pytest.raises(CheckpointError, match=r"should have stayed .* nothing was written")
    with nullcontext() if is_kept else stays:
        grow_run("small", ["width"], name, CPU, overrides=MORE)
    assert (home / "runs" / name).exists() == is_kept


def test_without_optimizer_state_the_weights_alone_are_offered(home):
    bare = home / "runs" / "bare"
    shutil.copytree(home / "runs" / "small", bare)
    (checkpoints_of(bare)[-1] / "optimizer.safetensors").unlink()
    offered = r"with the weights\n  add --weights-only.*moments of all parameters are lost"
    with pytest.raises(CheckpointError, match=offered):
        grow_run("bare", ["depth"], "bare-deep", CPU, overrides=MORE)
    assert not (home / "runs" / "bare-deep").exists()
    grown = grow_run("bare", ["depth"], "bare-deep", CPU, weights_only=True, overrides=MORE)
    assert abs(grown.record.val_loss_after - grown.record.val_loss_before) <= 1e-5
    _, _, optimizer, _ = read_checkpoint(checkpoints_of(grown.run)[0])
    assert not any(tensor.any() for tensor in optimizer.values())
    assert grown.recipe.staged_growth.moments == "reset"


def test_damaged_weights_are_refused_even_alone(home):
    shutil.copytree(home / "runs" / "small", home / "runs" / "bent")
    for folder in checkpoints_of(home / "runs" / "bent"):
        flip(folder / "model.safetensors", -72)
    for weights_only in (False, True):
        with pytest.raises(CheckpointError, match=r"model\.safetensors"):
            grow_run("bent", ["width"], "bent-wide", CPU, weights_only=weights_only)
    assert not (home / "runs" / "bent-wide").exists()


GREW = """\
run         RUNS/deep, from small after step 15
parameters  8,688 -> 36,224
loss        LOSS -> LOSS nats per token on the same validation windows
logits      largest difference SMALL

next        1,040 tokens are left
  efftrain pretrain --resume deep
"""
COPIED = """\
run         RUNS/copied, from small after step 15
parameters  8,688 -> 11,968
loss        LOSS -> LOSS nats per token on the same validation windows
logits      largest difference SMALL
            (these variants do not keep the loss)
lost        the optimizer's moments and step counters: expect a higher loss for about a hundred \
steps

next        nothing is left of train.tokens = 960, which counts the tokens before the growth
  efftrain pretrain --resume copied --set train.tokens=N   (N tokens in all)
"""


def test_the_command_prints_sizes_losses_and_how_to_go_on(home):
    """320 rows and 16 positions of 16 channels, and 3,280 parameters a block; of 32 channels
    12,704."""
    depth = "grow small --operator depth"
    copied = cli(f"{depth} --name copied --weights-only --set staged_growth.depth=copy_append")
    more = "--set train.tokens=2K --set staged_growth.symmetry=none"
    grown = cli(f"{depth} --operator width --name deep {more}")
    assert copied.stderr == ""
    assert grown.stderr.startswith('warning: staged_growth.symmetry = "none": without dropout')
    for shown, expected in ((copied, COPIED), (grown, GREW)):
        out = shown.stdout.replace(str(home / "runs"), "RUNS")
        out = re.sub(r"difference [\d.e-]+", "difference SMALL", out)
        assert re.sub(r"\d\.\d{6}", "LOSS", out) == expected
    # Measured on all 20 windows, so the losses are those of the source's own last row.
    last = latest_rows(home / "runs" / "small")[-1]["val_loss"]
    losses = re.findall(r"\d\.\d{6}", grown.stdout)
    assert [float(loss) for loss in losses] == [pytest.approx(last, abs=2e-6)] * 2


def test_planning_from_runs(home):
    with pytest.raises(UsageError, match=r"small.*: 3 validation losses .* at least 5 are needed"):
        cli("grow --plan --small small --operator depth")
    write_run(home / "runs", "small", 0, name="warm", more="[seq_len_warmup]\nsteps = 10\n")
    with pytest.raises(UsageError, match="uses seq_len_warmup\n  plan with runs from scratch"):
        cli("grow --plan --small warm --operator depth")
    floor = {}
    step_flops = {}
    for name, width, batch_size in (("thin", 64, 16), ("broad", 128, 8)):
        run = write_run(home / "runs", "small", 0, name=name)
        recipe = (run / "recipe.toml").read_text().replace("n_embd = 64", f"n_embd = {width}")
        recipe = recipe.replace("batch_size = 8", f"batch_size = {batch_size}")
        (run / "recipe.toml").write_text(recipe)
        floor[name] = (8.8e13 / (24 * width**2 * 1000)) ** 0.076
        rows = [{"step": 0, "segment": 0, "val_loss": 9.0}]
        for step in range(100, 60_000, 100):
            loss = floor[name] + (4.2e3 / step) ** 0.76
            rows.append({"step": step, "segment": 0, "val_loss": loss})
        write_sealed(run / "metrics.jsonl", rows)
        # Two blocks with biases, two norms in each and one at the end, 512 rows, context 128.
        weights = 2 * (12 * width**2 + 13 * width) + 2 * width + 512 * width
        step_flops[name] = batch_size * 128 * (6 * weights + 12 * 2 * width * 128)

    def step_with(name: str, above_floor: float) -> float:
        return 4.2e3 * above_floor ** (-1 / 0.76)

    lines = cli("grow --plan --small thin --target broad --operator depth").output.splitlines()
    head, by_slope, by_cost, note = lines
    assert " ".join(head.split()) == "rule grow at step target's step saves schedule_ratio"
    assert note == "projected from two runs from scratch; no grown run was measured"
    cost = step_flops["broad"] / step_flops["thin"]
    # d log L / d log S = -0.76 x / (floor + x) for a loss of floor + x.
    end = step_with("broad", 0.052 * floor["broad"] / (0.76 - 0.052))
    apart = floor["thin"] - floor["broad"]
    for line, rule, excess in (
        (by_slope, "slope above -0.0575", 0.0575 * floor["thin"] / (0.76 - 0.0575)),
        (by_cost, "equal marginal cost", apart / (cost ** (0.76 / 1.76) - 1)),
    ):
        assert line.startswith(rule)
        *_, step, start, share, ratio = re.sub("[,%]", "", line).split()
        assert float(step) == pytest.approx(step_with("thin", excess), rel=0.02)
        assert float(start) == pytest.approx(step_with("broad", excess + apart), rel=0.02)
        saved = (float(start) * cost - float(step)) / (end * cost)
        assert float(share) == pytest.approx(100 * saved, rel=0.03)
        assert float(ratio) == pytest.approx(float(start) / float(step), abs=0.001)
    alone = cli("grow --plan --small thin --operator width --operator depth").output
    assert alone.splitlines()[1:] == [
        "slope above -0.03  never",
        "--target RUN, of the target's size, adds equal marginal cost and the savings",
    ]
