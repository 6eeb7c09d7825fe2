"""Weights, moments and validation losses that become NaN or Inf between two steps: F55."""

from __future__ import annotations

import json

import pytest
import torch

from efftrain_cli.foundation.errors import UnsoundError
from efftrain_cli.run.directory import checkpoints_of
from efftrain_cli.training import dist
from efftrain_cli.training.checkpoint import nonfinite_tensors
from tests.conftest import cli
from tests.faults.damage import save_step, step_of

# Once, after the update of step 8: the steps before it are sound, step 9 computes with what is
# broken.
BREAK = """
from pathlib import Path
import torch
import efftrain_cli.training.loop as loop
update, calls = loop.update, 0

def breaking(state, *values):
    global calls
    result = update(state, *values)
    calls += 1
    if calls == 8:
        with torch.no_grad():
            BROKEN
    return result

loop.update = breaking
"""
WEIGHT = 'state.model.h[1].mlp.c_fc.weight[3, 5] = float("VALUE")'
MOMENT = (
    'state.optimizer.tensors()["exp_avg_sq.h.0.attn.c_proj.weight"].view(-1)[7] = float("VALUE")'
)


def test_a_state_that_is_not_finite_is_never_saved(lab):
    """Exit 4 names the tensor and the last valid checkpoint, which is still there; the command
    gets past."""
    recipe = lab.recipe(keep="1")
    inject = BREAK.replace("BROKEN", WEIGHT.replace("VALUE", "-inf"))
    errors = lab.train(recipe=recipe, inject=inject, code=4).errors
    assert "h.1.mlp.c_fc.weight" in errors
    assert "the last valid checkpoint is step-00000005" in errors
    assert lab.checkpoints("r") == ["step-00000005"]
    cli("runs verify r")
    assert nonfinite_tensors(lab.tensors("r", 5)) == []
    assert lab.events("r", "diverged")[-1]["step"] <= 9
    assert lab.events("r", "end")[-1]["status"] == "diverged"

    fix = errors.splitlines()[-1]
    assert fix.startswith("  at 0.0015: efftrain pretrain --resume r --override-resume")
    lab.call(fix.partition("efftrain ")[2], "--no-probe")
    assert [row["step"] for row in lab.rows("r")] == list(range(21))
    assert lab.checkpoints("r") == ["step-00000020"]


def test_a_save_that_is_due_finds_what_no_loss_has_shown_yet(lab):
    """A moment breaks in the very step that is saved: neither saved, nor does it purge the
    checkpoint before."""
    inject = BREAK.replace("calls == 8", "calls == 10").replace(
        "BROKEN", MOMENT.replace("VALUE", "nan")
    )
    process = lab.train(recipe=lab.recipe(keep="1"), inject=inject, code=4)
    assert (
        "after step 10: NaN or infinity in exp_avg_sq.h.0.attn.c_proj.weight; not saved"
        in process.errors
    )
    assert lab.checkpoints("r") == ["step-00000005"]


@pytest.mark.parametrize("call", [3, 5])
def test_a_validation_loss_that_is_not_finite(lab, call):
    """All weights are finite; the evaluation of step 10, or F103 of the last step, is not."""
    inject = f"""
import efftrain_cli.training.loop as loop
evaluate, calls = loop.evaluate, 0

def broken(*args):
    global calls
    calls += 1
    return evaluate(*args) * (float("nan") if calls == {call} else 1.0)  # steps 0, 5, 10, 15, 20

loop.evaluate = broken
"""
    process = lab.train(recipe=lab.recipe(keep="1"), inject=inject, code=4)
    step = 5 * call - 5
    assert f"step {step}: the validation loss is not finite" in process.errors
    assert lab.last_step("r") == step
    assert lab.checkpoints("r") == [f"step-{step - 5:08d}"]
    (run,) = json.loads(cli("runs list --format json").output)
    assert run["status"] == "diverged"
    lab.resume()


def test_a_stop_does_not_save_it_either(lab):
    inject = BREAK.replace(
        "BROKEN",
        WEIGHT.replace("VALUE", "nan")
        + "; import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
    )
    lab.train(inject=inject, code=4)
    assert lab.checkpoints("r") == ["step-00000005"]


def test_what_another_rank_holds_is_not_saved_if_it_is_not_finite(run, monkeypatch):
    """This rank's tensors are finite; the ranks agree that another's are not."""
    monkeypatch.setattr(dist, "agree", lambda *flags: [True for _ in flags])
    with pytest.raises(UnsoundError, match="after step 12: NaN or infinity"):
        save_step(run, 12)
    assert [step_of(path) for path in checkpoints_of(run.path)] == [5, 10]


def test_which_tensors_are_not_finite():
    """The sum of the large ones would overflow."""
    tensors = {
        "large": torch.full((3,), 3e38),
        "nan": torch.tensor([0.0, float("nan")]),
        "inf": torch.tensor([1.0, -float("inf")], dtype=torch.bfloat16),
        "count": torch.tensor([1, 2]),
        "empty": torch.zeros(0),
    }
    assert nonfinite_tensors(tensors) == ["nan", "inf"]
