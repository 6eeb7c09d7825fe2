"""Who a process is among those of its run, by the environment of torchrun, srun or `--devices`, and
what the ranks exchange."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher import api
from torch.distributed.launcher.api import LaunchConfig
from typer import Exit

from efftrain_cli.cli import options
from efftrain_cli.cli.options import share
from efftrain_cli.foundation.errors import LostProcessError, UsageError
from efftrain_cli.methods.simigrad import SimiGrad
from efftrain_cli.plan.plan import micro_batch_multiple
from efftrain_cli.recipe.sections import Parallel
from efftrain_cli.run.reading import load_run
from efftrain_cli.training import dist, launch
from efftrain_cli.training.launch import PARENT, process_rank, refuse_several
from efftrain_cli.training.session import source_hash
from tests.launch import start_ranks
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
    with pytest.raises(UsageError, match="give one of the two"):
        share("cuda:0", 2)


@pytest.mark.parametrize(
    "error, code, said",
    [
        (None, 0, ""),
        (SignalException("", signal.SIGTERM), 75, ""),
        (5, 5, ""),
        (
            -9,
            137,
            "error: rank 1 was ended by SIGKILL\n  resume the run from its last checkpoint\n",
        ),
    ],
)
def test_the_exit_code_is_that_of_the_first_to_fail(monkeypatch, capsys, error, code, said):
    """F80, F95; 5 cores are 2 threads for each of 2 processes."""
    for name in (PARENT, "OMP_NUM_THREADS", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"):
        monkeypatch.setenv(name, "")  # so that it is as before afterwards
        monkeypatch.delenv(name)
    monkeypatch.setattr(launch, "usable_cores", lambda: 5)
    if isinstance(error, int):
        failure = ProcessFailure(local_rank=1, pid=1, exitcode=error, error_file="")
        error = ChildFailedError("efftrain", {1: failure})

    def start(config: LaunchConfig, program: str) -> Callable[..., None]:
        assert (config.nproc_per_node, config.max_nodes, config.max_restarts) == (2, 1, 0)

        def run(*words: str) -> None:
            assert words == ("-m", "efftrain_cli", "bench")
            assert os.environ["OMP_NUM_THREADS"] == "2"
            if error is not None:
                raise error

        return run

    monkeypatch.setattr(api, "elastic_launch", start)
    assert launch.launch(2, ["bench"]) == code
    assert capsys.readouterr().err == said


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


# --- real ranks, forked from one process: imports of PyTorch would take seconds -------------------

COPIES = """
import os
import efftrain_cli.training.dist as dist
from efftrain_cli.model.gpt import GPT
dist.BUCKET = 5000
begin = dist.GradientSum.begin
drawn, rank = GPT.initial_weights, int(os.environ["RANK"])
GPT.initial_weights = lambda self, seed: drawn(self, seed + rank)

def early(self, losses):
    self.overlaps = True
    begin(self, losses)

dist.GradientSum.begin = early
"""
"""Several buckets, sent during the backward pass as on CUDA, and other weights on each rank: those
of rank 0 count."""
DROPPING = "[progressive_layer_drop]\ntheta = 0.5\nsteps = 4\n"
SHARDS = {"extra": '[parallel]\nstrategy = "shard"\n', "batch_size": "3"}
RANKS = {
    "copies": (2, {"extra": DROPPING}, COPIES),
    # Four micro-batches of 1, 1, 1 and 0 sequences.
    "shards": (2, {**SHARDS, "micro_batch_tokens": "32"}, ""),
    "ring": (3, {"extra": "[ouroboros]\nmodules = 4\n", "n_layer": "4"}, ""),
}


@pytest.mark.parametrize("kind", RANKS)
def test_ranks_train_what_one_process_trains(lab, kind):
    """F9, F68: six steps, from whose checkpoint one process goes on."""
    count, values, inject = RANKS[kind]
    recipe = lab.recipe(every="4", **values)
    words = ("pretrain", recipe, "--name", "r")
    ranks = start_ranks(lab.zygote, lab.folder, count, *words, "--steps", "6", inject=inject)
    assert [rank.wait() for rank in ranks] == [0] * count, ranks[0].errors
    lab.train("whole", "--steps", "8", recipe=recipe)
    meaning = "the last bits of the results may differ"
    if kind == "copies":
        meaning = "[progressive_layer_drop] reads micro-batches: the results may differ by more"
    note = f"note: continued with world_size {count} -> 1: {meaning}"
    assert note in lab.resume("r", "--steps", "8").errors
    assert load_run(lab.run("r")).notes[-1] == f"continued with world_size {count} -> 1"
    for have, want in zip(lab.rows("r"), lab.rows("whole"), strict=True):
        for name in ("loss", "grad_norm", "val_loss", "adam_sqrt_v_l1", "adam_sqrt_v_max"):
            if want.get(name) is not None:
                assert have[name] == pytest.approx(want[name], rel=1e-5), (have["step"], name)
    found, expected = lab.tensors("r", 8), lab.tensors("whole", 8)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)


def test_ranks_with_nothing_to_train_say_so_once(lab):
    lab.train("r", "--steps", "4")
    words = ("pretrain", "--resume", "r", "--steps", "4")
    ranks = start_ranks(lab.zygote, lab.folder, 2, *words)
    assert [rank.wait() for rank in ranks] == [0, 0], ranks[0].errors
    said = "nothing to train: run r is after step 4 already, and --steps 4 ends there or before\n"
    assert ranks[0].output == said


FAULTS = """
import os
import efftrain_cli.training.dist as dist
import efftrain_cli.training.session as session
from efftrain_cli.foundation.errors import StoppedError
dist.GRACE = 0.5

def fail(*args):
    raise RuntimeError("DefaultCPUAllocator: not enough memory")

def stop(*args):
    raise StoppedError("stopped by SIGTERM")

if os.environ["RANK"] == "1":
    FAULT
"""


@pytest.mark.parametrize(
    "fault, codes, said",
    [
        (
            "session.__version__, session.source_hash = '0.0.0', lambda: 'another'",
            [2, 2],
            "error: the processes of this run differ: efftrain: 0.0.0 on rank 1, 0.1.0 on rank 0;"
            f" source: another on rank 1, {source_hash()} on rank 0\n"
            "  start all of them by one command, from the same installation and data\n",
        ),
        (
            "session.Gradient = fail",
            [1, 5],
            "error: rank 1: out of memory in the largest micro-batch planned, 2 sequences of 32"
            " tokens: DefaultCPUAllocator: not enough memory\n  set train.micro_batch_tokens = 32"
            " (now 64), or train.activation_checkpointing = true (slower, much less memory)\n",
        ),
        ("session.Gradient = stop", [1, 75], "rank 1: stopped by SIGTERM\n"),
    ],
    ids=["of all", "of one", "stop of one"],
)
def test_an_error_is_said_once(lab, fault, codes, said):
    """F80, F82: by rank 0 if all ranks have it; else by each that has one of its own, such as one
    whose memory is less than the probe takes."""
    words = ("pretrain", lab.recipe(), "--name", "r")
    inject = FAULTS.replace("FAULT", fault)
    ranks = start_ranks(lab.zygote, lab.folder, 2, *words, inject=inject)
    assert [rank.wait() for rank in ranks] == codes
    assert ranks[0].errors == said
    assert lab.last_step("r") == -1
    assert lab.run("r").exists() == (codes != [2, 2])
