"""Saves that are killed, refused or cut by a power failure, and what is removed after them."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from efftrain_cli.foundation.errors import DiskError
from efftrain_cli.foundation.files import temporary_beside
from efftrain_cli.plan.cost import checkpoint_bytes, in_flight_bytes
from efftrain_cli.plan.plan import model_config
from efftrain_cli.recipe.recipe import dump_recipe
from efftrain_cli.recipe.sections import Checkpoint
from efftrain_cli.run.directory import RunDirectory, checkpoints_of, new_run
from efftrain_cli.run.manifest import verify_checkpoint
from efftrain_cli.training import checkpoint
from efftrain_cli.training.build import build_state
from efftrain_cli.training.checkpoint import save
from efftrain_cli.training.resuming import check_disk
from tests.conftest import cli
from tests.faults.damage import (
    RECIPE,
    deaths,
    die_at,
    newest_checkpoint,
    save_step,
    step_of,
    truncate,
)
from tests.resume_law import run as train_made
from tests.tiny import CPU, VOCAB_SIZE, changed, fresh
from tests.trained_run import write_checkpoint


@pytest.mark.slow
def test_a_kill_at_every_point_of_a_save(tmp_path):
    """F2: before each write, fsync, rename and removal. The newest checkpoint that loads is the
    previous or the new one, and the next start leaves no temporary file."""

    def work(number: int) -> None:
        shutil.rmtree(tmp_path / "runs", ignore_errors=True)
        with new_run("r", "", {}) as run:
            for step in (5, 10):
                save_step(run, step)
        with RunDirectory.open("r") as run:
            newest_checkpoint(run)
            die_at(number, (checkpoint, "write_tensors"), (Path, "write_text"))
            save_step(run, 15)

    survivors = []
    for _ in deaths(work):
        with RunDirectory.open("r") as run:
            newest = newest_checkpoint(run)
            assert not run.corrupt
            survivors.append(step_of(newest))
            verify_checkpoint(newest)
            assert not [
                path for path in (run.path / "checkpoints").iterdir() if ".tmp" in path.name
            ]
            assert len(checkpoints_of(run.path)) in (2, 3)
    assert set(survivors) == {10, 15} and len(survivors) > 15


def test_the_last_verified_checkpoint_is_never_removed(run):
    """F13: with damaged newer ones about, neither the one that was loaded nor the one just written
    goes."""
    recipe = replace(RECIPE, checkpoint=Checkpoint(every=5, keep=1))
    truncate(checkpoints_of(run.path)[-1] / "model.safetensors")
    assert step_of(newest_checkpoint(run)) == 5
    state = fresh(RECIPE, 300)
    state.progress = state.progress._replace(step=7)
    save(run, state, recipe)
    assert [step_of(path) for path in checkpoints_of(run.path)] == [7, 10]
    verify_checkpoint(checkpoints_of(run.path)[0])
    run.purge_checkpoints(1)
    assert [step_of(path) for path in checkpoints_of(run.path)] == [7, 10]


def test_damaged_checkpoints_do_not_count_when_old_ones_are_removed(run):
    """keep = 2 with the newest damaged: two sound ones stay beside it."""
    truncate(checkpoints_of(run.path)[-1] / "model.safetensors")
    assert step_of(newest_checkpoint(run)) == 5
    save_step(run, 7)
    assert [step_of(path) for path in checkpoints_of(run.path)] == [5, 7, 10]


def test_a_newest_checkpoint_that_nobody_has_verified_is_no_reason_to_remove_the_verified_one(run):
    """F13: with keep = 1 the newest stays, and so does the newest that is known to be sound."""
    run.verified = {checkpoints_of(run.path)[0]}
    run.purge_checkpoints(1)
    assert [step_of(path) for path in checkpoints_of(run.path)] == [5, 10]


class FakeDisk:
    """Notes which paths were flushed, and what had been flushed when a checkpoint got its name or
    was removed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.flushed: set[str] = set()
        self.log: list[tuple[str, str, set[str]]] = []
        fsync, rename, rmtree, replace_ = os.fsync, os.rename, shutil.rmtree, os.replace

        def noted_fsync(descriptor: int) -> None:
            fsync(descriptor)
            self.flushed.add(os.readlink(f"/proc/self/fd/{descriptor}"))

        def noted(kind: str, function):
            def call(path, *rest, **options):
                self.log.append((kind, str(path), set(self.flushed)))
                self.flushed.discard(
                    str(Path(path).parent)
                )  # a name that changes has to be flushed again
                return function(path, *rest, **options)

            return call

        monkeypatch.setattr(os, "fsync", noted_fsync)
        monkeypatch.setattr(os, "rename", noted("rename", rename))
        monkeypatch.setattr(os, "replace", noted("rename", replace_))
        monkeypatch.setattr(shutil, "rmtree", noted("remove", rmtree))

    def when(self, kind: str, ending: str) -> set[str]:
        """What was on the disk for certain when `kind` happened to the path with this ending."""
        (found,) = [
            flushed for what, path, flushed in self.log if what == kind and path.endswith(ending)
        ]
        return found


def test_a_save_survives_a_power_failure_at_any_moment(run, monkeypatch):
    """Every byte of a checkpoint is flushed before it gets its name, and its name before an older
    one is removed; an older one loses its name before its files."""
    disk = FakeDisk(monkeypatch)
    run.log([{"step": 15, "segment": 0}])
    save_step(run, 15)
    folder = run.path / "checkpoints"
    new = folder / "step-00000015"
    before_rename = disk.when("rename", temporary_beside(new).name)
    temporary = str(temporary_beside(new))
    assert {f"{temporary}/{path.name}" for path in new.iterdir()} | {temporary} <= before_rename
    assert str(run.path / "metrics.jsonl") in before_rename, "its rows are there too"
    # What is removed was renamed before, and the new checkpoint's name was on the disk by then.
    assert str(folder) in disk.when("rename", "step-00000005")
    assert [path for kind, path, _ in disk.log if kind == "remove"] == [
        str(temporary_beside(folder / "step-00000005"))
    ]
    assert [step_of(path) for path in checkpoints_of(run.path)] == [10, 15]


def test_a_damaged_step_is_moved_aside_when_it_is_saved_again(run):
    corrupt = checkpoints_of(run.path)[-1]
    truncate(corrupt / "model.safetensors")
    newest_checkpoint(run)
    save_step(run, 10)
    verify_checkpoint(corrupt)
    assert (run.path / "checkpoints" / "step-00000010.corrupt" / "model.safetensors").exists()
    assert [step_of(path) for path in checkpoints_of(run.path)] == [5, 10]
    assert step_of(newest_checkpoint(run)) == 10
    # A sound one of this step is not written twice.
    assert save_step(run, 10) == 0.0


BESIDE = """
import threading
import efftrain_cli.training.checkpoint as checkpoint
import efftrain_cli.training.logbook as logbook
import efftrain_cli.training.loop as loop
logbook.saves_beside = lambda device: True
write, update = checkpoint.write, loop.update
stepped = threading.Event()

def late(path, *rest):
    if path.name != "step-00000020":  # at the end no step follows
        stepped.wait()
        stepped.clear()
    if path.name == "step-00000005":
        raise OSError(28, "No space left on device")
    return write(path, *rest)

def updating(state, recipe, plan, loss):
    columns = update(state, recipe, plan, loss)
    if plan.step in (7, 12, 16):
        stepped.set()
    return columns

checkpoint.write, loop.update = late, updating
"""
"""Checkpoints are written beside the steps, as on CUDA, and only after some of them; the first is
refused by the disk."""


def test_a_save_beside_the_steps_holds_the_state_before_them(lab):
    recipe = lab.recipe(keep="4")
    lab.train("whole", recipe=recipe)
    lab.train(recipe=recipe, inject=BESIDE)
    lab.assert_equal_runs("r", "whole", 20)
    for step in (10, 15):
        whole = lab.tensors("whole", step)
        for name, tensor in lab.tensors("r", step).items():
            assert torch.equal(tensor, whole[name])
    assert [event["step"] for event in lab.events("r", "save_failed")] == [5]
    assert [event["step"] for event in lab.events("r", "checkpoint")] == [10, 15, 20]
    cli("runs verify r")


STAGES = """stages=[{model={n_layer=1}, switch={rule="steps", value=2}}, {operators=["depth"]}]"""


@pytest.mark.parametrize(
    "overrides",
    [["optim.name=muon", "optim.muon_lr=0.02"], ["ouroboros.modules=3"], [STAGES]],
    ids=["muon", "ouroboros", "staged"],
)
def test_the_estimate_of_a_checkpoints_size(overrides, tmp_path):
    """F16: within 2 %, gradients in flight and the last stage included."""
    recipe = changed(RECIPE, *overrides)
    stage = max(0, len(recipe.stages) - 1)
    state = build_state(recipe, VOCAB_SIZE, CPU, stage)
    if recipe.ouroboros is not None:
        train_made(state, recipe, until=3)
    folder = tmp_path / "step-00000001"
    write_checkpoint(folder, state, dump_recipe(recipe))
    size = sum(file.stat().st_size for file in folder.iterdir())
    config = model_config(recipe, VOCAB_SIZE)
    estimate = checkpoint_bytes(recipe, config)
    assert estimate == pytest.approx(size, rel=0.02)
    one_module = changed(recipe, "ouroboros.modules=1")
    assert in_flight_bytes(one_module, config) == 0


def test_too_little_disk_is_refused(tmp_path, monkeypatch):
    """F16: (keep + 1) checkpoints and 10 %; one byte less is refused."""
    size = checkpoint_bytes(RECIPE, model_config(RECIPE, 300))
    needed = 3 * size * 11 // 10
    usage = shutil.disk_usage(tmp_path)
    folder = tmp_path / "runs" / "new"
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=needed))
    check_disk(folder, RECIPE, 300)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=needed - 1))
    with pytest.raises(DiskError, match=f"{needed:,} bytes needed, {needed - 1:,} bytes free"):
        check_disk(folder, RECIPE, 300)
    check_disk(folder, RECIPE, 300, existing=1)
