"""Who a process is among those of its run, by the environment of torchrun, srun or `--devices`, and
what the ranks exchange."""

from __future__ import annotations

import os
import subprocess
from dataclasses import replace

import pytest
import torch
from typer import Exit

from efftrain_cli.cli import options
from efftrain_cli.cli.options import share
from efftrain_cli.foundation.errors import LostProcessError, UsageError
from efftrain_cli.methods.simigrad import SimiGrad
from efftrain_cli.plan.plan import micro_batch_multiple
from efftrain_cli.recipe.sections import Parallel
from efftrain_cli.training import dist
from efftrain_cli.training.launch import process_rank, refuse_several
from tests.tiny import tiny_recipe

RECIPE = tiny_recipe("model.n_layer=1", "train.tokens=10_000", "train.micro_batch_tokens=64")
TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
SLURM = (
    "SLURM_STEP_NUM_TASKS",
    "SLURM_PROCID",
    "SLURM_LOCALID",
    "SLURM_STEP_NODELIST",
    "SLURM_JOB_ID",
    "SLURM_STEP_ID",
)


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*TORCHRUN, *SLURM):
        monkeypatch.setenv(name, "")  # so that it is as before afterwards
        monkeypatch.delenv(name)


def set_all(monkeypatch: pytest.MonkeyPatch, **values: str) -> None:
    for name, value in values.items():
        monkeypatch.setenv(name, value)


def test_a_step_of_srun_is_named_as_torchrun_names_it(monkeypatch):
    """The port is 20000 + (37 x job + step) mod 20000: steps that share a node have other ones."""
    step = {"SLURM_STEP_NUM_TASKS": "16", "SLURM_PROCID": "9", "SLURM_LOCALID": "1"}
    set_all(monkeypatch, SLURM_STEP_NODELIST="gpu[03-05,9],login", SLURM_JOB_ID="100001", **step)
    set_all(monkeypatch, SLURM_STEP_ID="2")
    asked = []
    monkeypatch.setattr(
        subprocess, "check_output", lambda command, text: asked.append(command) or "gpu03\ngpu04\n"
    )
    dist._name_srun_ranks()
    assert asked == [["scontrol", "show", "hostnames", "gpu[03-05,9],login"]]
    found = [os.environ[name] for name in TORCHRUN]
    assert found == ["9", "16", "1", "gpu03", str(20_000 + (37 * 100_001 + 2) % 20_000)]
    assert process_rank() == 9


def test_ranks_that_cannot_meet_are_told_what_to_set(monkeypatch):
    """F93."""
    set_all(monkeypatch, RANK="0", WORLD_SIZE="2", MASTER_PORT="29500")
    with pytest.raises(UsageError, match="cannot reach each other"), dist.joined():
        pass


def test_the_command_line_of_a_process_that_devices_start(monkeypatch):
    """It is the user's, which origin.json keeps; the process itself starts no others."""
    words = ["pretrain", "--devices", "2", "--recipe", "small"]
    started = []
    monkeypatch.setattr("sys.argv", ["efftrain", *words])
    monkeypatch.setattr(options, "launch", lambda devices, words: started.append((devices, words)))
    with pytest.raises(Exit):
        share("cpu", 2)
    assert started == [(2, words)]
    set_all(monkeypatch, WORLD_SIZE="2", RANK="1")
    share("cpu", 2)
    assert len(started) == 1


def test_a_command_of_one_process_is_refused_as_one_of_several(monkeypatch):
    """Else all of them would do the same in one folder."""
    refuse_several("sweep")
    set_all(monkeypatch, SLURM_STEP_NUM_TASKS="8")
    refuse_several("pretrain")
    with pytest.raises(UsageError, match="--ntasks=1; if it trains, --devices N shares each run"):
        refuse_several("sweep")


def test_an_error_of_a_collective_is_a_lost_process_and_others_are_not():
    text = "[gloo] Connection closed by peer [127.0.0.1]:1234"
    with pytest.raises(LostProcessError, match="closed by peer"), dist.peer_errors():
        raise RuntimeError(text)
    with pytest.raises(torch.OutOfMemoryError), dist.peer_errors():
        raise torch.OutOfMemoryError("timed out")


def test_nccl_adds_up_in_one_order(monkeypatch):
    """The user's own choice stands."""
    for name in ("NCCL_ALGO", "NCCL_PROTO", "NCCL_NVLS_ENABLE"):
        monkeypatch.setenv(name, "")  # so that it is as before afterwards
        monkeypatch.delenv(name)
    set_all(monkeypatch, NCCL_PROTO="LL")
    dist.fix_sums()
    assert os.environ["NCCL_ALGO"] == "Ring" and os.environ["NCCL_PROTO"] == "LL"
    assert os.environ["NCCL_NVLS_ENABLE"] == "0"


def test_halves_of_shards_have_equal_passes_on_every_rank():
    """Each rank needs the others' rows in every pass of either half."""
    simigrad = SimiGrad(target=0.5, min_batch_size=8, max_batch_size=64)
    recipe = replace(RECIPE, simigrad=simigrad)
    assert [micro_batch_multiple(recipe, ranks) for ranks in (1, 2, 3)] == [2, 2, 6]
    shards = replace(recipe, parallel=Parallel(strategy="shard"))
    assert [micro_batch_multiple(shards, ranks) for ranks in (2, 3)] == [4, 6]
