"""Losses and gradients that are not finite, and memory that does not suffice."""

from __future__ import annotations

import json
import re

import pytest

from tests.conftest import sets

# What makes step 8 go wrong, every time that step is computed.
NAN_IN_LOSS = """
import torch
from efftrain_cli.data.windows import Windows
from efftrain_cli.model.gpt import GPT
batch, head_loss_sum, now = Windows.batch, GPT.head_loss_sum, {}

def noting(self, plan, *rest):
    now["step"] = plan.step
    return batch(self, plan, *rest)

def bad(self, *args):
    loss = head_loss_sum(self, *args)
    return loss + VALUE if now.get("step") == 8 and torch.is_grad_enabled() else loss

Windows.batch, GPT.head_loss_sum = noting, bad
"""
NAN_IN_ONE_GRADIENT = """
import torch
from efftrain_cli.data.windows import Windows
import efftrain_cli.training.objective as build
batch, now, make = Windows.batch, {}, build.build_compute

def noting(self, plan, *rest):
    now["step"] = plan.step
    return batch(self, plan, *rest)

def making(recipe, state):
    def spoil(grad):
        return grad * VALUE if now.get("step") == 8 else grad

    state.model.h[1].mlp.c_fc.weight.register_hook(spoil)
    return make(recipe, state)

Windows.batch, build.build_compute = noting, making
"""


WAY_ON = "\n  at 0.0015: efftrain pretrain --resume r --override-resume --set optim.lr=0.0015\n"


@pytest.mark.parametrize(
    "inject, cause",
    [(NAN_IN_LOSS, "the loss"), (NAN_IN_ONE_GRADIENT, "gradients of h.1")],
    ids=["loss", "gradient"],
)
def test_a_step_that_is_not_finite(lab, inject, cause):
    """F22, F23: the update is not applied; exit code 4; the step is described, the state before it
    saved."""
    recipe = lab.recipe()
    inject = inject.replace("VALUE", 'float("inf")')
    errors = lab.train(recipe=recipe, inject=inject, code=4).errors
    fault = f"error: step 8: the loss or a gradient is not finite ({cause}); step 7 is saved"
    assert errors == fault + WAY_ON
    (event,) = lab.events("r", "diverged")
    assert event["step"] == 8
    assert event["seq_len"] == 32
    assert event["lr"] == pytest.approx(3e-3, rel=0.1)
    assert (event["window_start"], event["batch_size"], len(event["window_tokens"])) == (28, 4, 4)
    layers = event["grad_norm_by_layer"]
    assert set(layers) == {"wte", "wpe", "h.0", "h.1", "ln_f"}
    if "register_hook" in inject:
        assert layers["h.1"] is None
        assert layers["h.0"] > 0
    assert lab.events("r", "end")[-1]["status"] == "diverged"
    assert lab.rows("r")[-1]["nonfinite"] is True

    assert lab.checkpoints("r")[-1] == "step-00000007"
    # Without the fault the run goes on as if nothing had been.
    lab.resume()
    lab.train_whole(recipe)
    lab.assert_equal_runs("r", "whole", 20)


@pytest.mark.parametrize(
    ("changes", "command"),
    [
        ("--set optim.lr=1e9", "tiny --name hot-2"),
        (
            "--set optim.lr=1e9 --set optim.grad_clip=0",
            "{run}/recipe.toml --name hot-2 --set optim.lr=0.003",
        ),
    ],
    ids=["the recipe but for its rate", "with more settings"],
)
def test_a_rate_that_is_not_the_recipe_s_has_a_fix(lab, changes, command):
    """F22: two lines, and the second one works."""
    (lab.folder / "recipes").mkdir()
    lab.recipe("recipes/tiny")
    errors = lab.call(f"pretrain tiny --name hot --no-probe {changes}", code=4).errors
    *_, fault, fix = errors.splitlines()
    assert re.fullmatch(r"error: step (\d+): the loss .*; step \d+ is saved", fault)
    assert fix == f"  at 0.003: efftrain pretrain {command.format(run=lab.run('hot'))}"
    lab.call(fix.partition("efftrain ")[2], "--no-probe")


def test_a_state_that_could_not_be_saved_is_not_called_saved(lab):
    full = """
import efftrain_cli.training.checkpoint as checkpoint
from efftrain_cli.foundation.errors import DiskError
save = checkpoint.save

def full(run, state, recipe):
    if state.progress.step == 7:
        GPT.head_loss_sum = head_loss_sum
        raise DiskError("the disk is full")
    return save(run, state, recipe)

checkpoint.save = full
"""
    inject = NAN_IN_LOSS.replace("VALUE", 'float("nan")') + full
    errors = lab.train(inject=inject, code=4).errors
    cause = "recomputed, the same step is finite: memory or hardware may be faulty"
    fault = f"({cause}); step 7 could not be saved: the disk is full"
    assert errors.endswith(fault + WAY_ON)
    assert lab.checkpoints("r") == ["step-00000005"]
    assert lab.events("r", "save_failed")[-1]["step"] == 7


LITTLE_MEMORY = """
import resource
pages = int(open("/proc/self/statm").read().split()[0])
limit = pages * resource.getpagesize() + (400 << 20)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
"""


def test_too_little_memory_is_found_before_the_first_step(lab):
    """F26: the probe runs the largest planned shape first; exit code 5 with the setting to
    change."""
    recipe = lab.recipe(
        tokens="400_000",
        batch_size="2048",
        micro_batch_tokens="65536",
        extra="[seq_len_warmup]\nstart = 8\nsteps = 5\n",
    )
    args = ("pretrain", "--recipe", recipe, "--set", "data.repeat=true", "--name")
    process = lab.call(*args, "r", inject=LITTLE_MEMORY, code=5)
    errors = process.errors
    assert "set train.micro_batch_tokens = 32768 (now 65536)" in errors
    assert lab.last_step("r") == -1
    # What the message asks for is enough.
    process = lab.call(
        *args, "s", "--steps", "1", "--set", "train.micro_batch_tokens=2048", inject=LITTLE_MEMORY
    )


def test_a_model_that_no_memory_holds(lab):
    """F26: refused before it is built, with its size, the machine's, and what to lower; no run is
    left."""
    large = sets("model.n_embd=131072", "model.n_layer=200")
    errors = lab.train("r", *large, code=5).errors
    assert "a model of 41.2T parameters on micro-batches of" in errors
    assert "lower model.n_layer (now 200) or model.n_embd (now 131072)" in errors
    assert not lab.run("r").exists()


def test_memory_that_runs_out_while_the_model_is_built(lab):
    """F26: the machine has it, but others hold it, or a limit is set."""
    large = sets("model.n_embd=1024", "model.n_layer=48")
    errors = lab.train("r", *large, inject=LITTLE_MEMORY, code=5).errors
    assert "more than cpu has free\n  lower model.n_layer (now 48)" in errors
    assert not lab.run("r").exists()


STAGES = """
[[stages]]
model = { n_layer = 1, n_embd = 32, n_head = 1 }
switch = { rule = "steps", value = 7 }
[[stages]]
operators = ["depth", "width"]
rewarmup_steps = 3
"""


@pytest.mark.slow
def test_a_step_that_is_not_finite_right_after_growth(lab):
    """The state that is saved is the grown one."""
    lab.train(
        recipe=lab.recipe(extra=STAGES), inject=NAN_IN_LOSS.replace("VALUE", 'float("nan")'), code=4
    )
    assert lab.checkpoints("r")[-1] == "step-00000007"
    assert json.loads((lab.checkpoint("r", 7) / "progress.json").read_text())["stage"] == 1
    assert lab.tensors("r", 7)["wte.weight"].shape[1] == 64
    lab.resume()
