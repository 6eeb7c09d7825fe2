"""Who a process is among those of its run, by the environment of torchrun, srun or `--devices`."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
from typer import Exit

from efftrain_cli.cli import options
from efftrain_cli.cli.options import share
from efftrain_cli.foundation.errors import LostProcessError, UsageError
from efftrain_cli.foundation.signals import Stop
from efftrain_cli.foundation.step import Progress
from efftrain_cli.methods.simigrad import SimiGrad
from efftrain_cli.optim.adamw import AdamW
from efftrain_cli.plan.cost import gradient_copies
from efftrain_cli.plan.plan import plan_step
from efftrain_cli.training.compiling import full_micro_batch, micro_batch_shapes
from efftrain_cli.training.devices import Devices
from efftrain_cli.training.joining import TORCHRUN, _first_host, _open_store, joined, ranks_wanted
from efftrain_cli.training.launch import (
    HUNG,
    PARENT,
    _rank_environment,
    _wait,
    launch,
    refuse_several,
)
from efftrain_cli.training.logger import stopped_by
from efftrain_cli.training.ranks import Ranks, _hung
from efftrain_cli.training.sharded import Sharded
from efftrain_cli.training.trainer import loss_by_position
from efftrain_cli.training.worker import fix_sums
from tests.resume_law import RandomTokens
from tests.tiny import CPU, changed, fresh, tiny_recipe

RECIPE = tiny_recipe("model.n_layer=1", "train.tokens=10_000", "train.micro_batch_tokens=64")
SLURM = (
    "SLURM_STEP_NUM_TASKS",
    "SLURM_PROCID",
    "SLURM_LOCALID",
    "SLURM_STEP_NODELIST",
    "SLURM_JOB_NODELIST",
    "SLURM_JOB_ID",
)


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*TORCHRUN, *SLURM):
        monkeypatch.delenv(name, raising=False)


def set_all(monkeypatch: pytest.MonkeyPatch, **values: str) -> None:
    for name, value in values.items():
        monkeypatch.setenv(name, value)


EIGHT = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "gpu1",
    "MASTER_PORT": "29500",
}
"""What torchrun tells rank 5 of 8."""


def be_rank(monkeypatch: pytest.MonkeyPatch, rank: int, port: int) -> None:
    """Let this process be a rank of two on this machine."""
    own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    set_all(monkeypatch, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), **own)


def test_a_process_alone_looks_for_no_others(monkeypatch):
    assert ranks_wanted() is None
    set_all(monkeypatch, WORLD_SIZE="1", RANK="0")
    assert ranks_wanted() is None
    # A shell inside an allocation has the job's variables, and is not a step of srun.
    set_all(monkeypatch, SLURM_JOB_ID="7", SLURM_PROCID="0", SLURM_JOB_NODELIST="a,b")
    assert ranks_wanted() is None


def test_nccl_adds_up_in_one_order_where_the_recipe_asks_for_it(monkeypatch):
    names = ("NCCL_ALGO", "NCCL_PROTO", "NCCL_NVLS_ENABLE")
    for name in names:
        monkeypatch.setenv(name, "")  # so that it is as before afterwards
        monkeypatch.delenv(name)
    fix_sums(RECIPE)
    assert not any(name in os.environ for name in names)
    set_all(monkeypatch, NCCL_PROTO="LL")
    fix_sums(changed(RECIPE, "train.deterministic=true"))
    assert [os.environ[name] for name in names] == ["Ring", "LL", "0"], (
        "the user's own choice stands"
    )


def test_torchruns_environment(monkeypatch):
    set_all(monkeypatch, **EIGHT)
    assert ranks_wanted() == (5, 8, 1, "gpu1", 29500)


def test_a_step_of_srun(monkeypatch):
    step = {"SLURM_STEP_NUM_TASKS": "16", "SLURM_PROCID": "9", "SLURM_LOCALID": "1"}
    set_all(monkeypatch, SLURM_STEP_NODELIST="gpu[03-05,9],login", SLURM_JOB_ID="100001", **step)
    assert ranks_wanted() == (9, 16, 1, "gpu03", 20000 + 1)


@pytest.mark.parametrize(
    "nodes, first",
    [
        ("gpu[03-05,9],login", "gpu03"),
        ("login", "login"),
        ("a,b", "a"),
        ("a,gpu[1-2]", "a"),
        ("n[7]", "n7"),
        ("n[1,3]", "n1"),
    ],
)
def test_the_first_host_of_slurms_list(nodes, first):
    assert _first_host(nodes) == first


@pytest.mark.parametrize(
    "changed, message",
    [
        ({"MASTER_ADDR": ""}, "lacks MASTER_ADDR"),
        ({"RANK": "8"}, "RANK = 8 is not below WORLD_SIZE = 8"),
    ],
)
def test_an_environment_that_cannot_be_is_refused(monkeypatch, changed, message):
    set_all(monkeypatch, **{**EIGHT, **changed})
    with pytest.raises(UsageError, match=message):
        ranks_wanted()


def test_devices_are_not_launched_by_a_process_that_was(monkeypatch):
    set_all(monkeypatch, WORLD_SIZE="2", RANK="0")
    with pytest.raises(UsageError, match="cannot be combined with torchrun or srun\\n  remove it"):
        launch(2, ["pretrain"])


def test_the_command_line_of_a_process_that_devices_start(monkeypatch):
    """It is the user's, which origin.json keeps; the process itself starts no others."""
    words = ["pretrain", "--devices", "2", "--recipe", "small"]
    started = []
    monkeypatch.setattr("sys.argv", ["efftrain", *words])
    monkeypatch.setattr(options, "launch", lambda devices, words: started.append((devices, words)))
    monkeypatch.delenv(PARENT, raising=False)
    with pytest.raises(Exit):
        share("cpu", 2)
    assert started == [(2, words)]
    monkeypatch.setenv(PARENT, "7")
    share("cpu", 2)
    assert len(started) == 1


def test_threads_are_those_that_the_process_may_use(monkeypatch):
    """8 cores, of which a batch system left 4: two for each of two processes."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1, 4, 5}, raising=False)
    assert _rank_environment(2)["OMP_NUM_THREADS"] == "2"


def test_a_command_of_one_process_is_refused_as_one_of_several(monkeypatch):
    """Else all of them would do the same in one folder."""
    refuse_several("sweep")
    set_all(monkeypatch, SLURM_STEP_NUM_TASKS="8")
    refuse_several("pretrain")
    with pytest.raises(UsageError, match="--ntasks=1; if it trains, --devices N shares each run"):
        refuse_several("sweep")


class TwoAlike(Ranks):
    """Rank 0 of two that have the same numbers; an agreement waits for the other one."""

    def all_reduce(self, tensors: Sequence[torch.Tensor], group: object = None) -> None:
        for tensor in tensors:
            tensor *= 2

    def all_reduce_max(self, tensor: torch.Tensor, patient: bool = False) -> None:
        time.sleep(0.05)


def test_time_for_other_ranks_is_counted_once():
    ranks = TwoAlike(world_size=2)
    Devices(ranks).sync_stop_flag(1)
    with ranks.timing_sum(CPU):
        time.sleep(0.02)
    stats = ranks.pop_comm_stats()
    assert stats is not None
    assert 0.05 <= stats.wait_seconds < 5 and 0.02 <= stats.comm_seconds() < 5
    later = ranks.pop_comm_stats()
    assert later is not None and later.wait_seconds == 0.0 and later.comm_seconds() is None


def test_ranks_share_the_windows_of_losses_by_position():
    """Four windows, all alike: each of two ranks computes two."""
    state = fresh(RECIPE)
    windows = RandomTokens(16).validation(1).repeat(4, 1)
    alone = loss_by_position(state.model, windows, 16, "fp32")
    shared = loss_by_position(state.model, windows, 16, "fp32", TwoAlike(world_size=2))
    assert list(alone) == [f"val_loss_from_{start}" for start in (0, 1, 2, 4, 8)]
    for name, loss in alone.items():
        assert float(shared[name]) == pytest.approx(float(loss), rel=1e-6)


def test_optimizer_columns_of_shards_are_sums_and_maxima():
    """Rank 0 has second moments of 2 and 3; rank 1 has 4 in all, at most 7."""

    def all_reduce(tensors: Sequence[torch.Tensor]) -> None:
        tensors[0] += 4

    def all_reduce_max(tensor: torch.Tensor) -> None:
        tensor.clamp_(min=7)

    columns = {"adam_sqrt_v_l1": torch.tensor(5.0), "adam_sqrt_v_max": torch.tensor(3.0)}
    optimizer = SimpleNamespace(columns=lambda: columns, columns_by_max=AdamW.columns_by_max)
    shards = SimpleNamespace(
        ranks=SimpleNamespace(all_reduce=all_reduce, all_reduce_max=all_reduce_max)
    )
    found = Sharded.optimizer_columns(shards, SimpleNamespace(optimizer=optimizer))  # type: ignore[arg-type]
    assert found == {"adam_sqrt_v_l1": 9.0, "adam_sqrt_v_max": 7.0}
    assert columns == {"adam_sqrt_v_l1": 5.0, "adam_sqrt_v_max": 3.0}, "the optimizer's own stay"


def test_the_cause_of_an_end_is_never_a_process_that_the_launcher_killed(monkeypatch):
    class Child:
        def __init__(self, code: int | None) -> None:
            self.code = code

        def poll(self) -> int | None:
            return self.code

        def kill(self) -> None:
            self.code = -9

    monkeypatch.setattr("efftrain_cli.training.launch.PATIENCE", 0.0)
    assert _wait([Child(1), Child(3), Child(None)]) == 3
    assert _wait([Child(75), Child(75)]) == 75
    assert _wait([Child(1), Child(-9)]) == 137
    assert _wait([Child(0), Child(0)]) == 0
    monkeypatch.setattr("efftrain_cli.training.launch.HALTED", 0.0)
    halted = Child(None)  # rank 0, as rank 1 reports
    assert _wait([halted, Child(HUNG)]) == LostProcessError.exit_code and halted.code == -9


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def test_a_rank_that_is_lost_while_joining_is_not_waited_for_without_end(monkeypatch):
    """It has reached the store, and says nothing more."""
    import torch.distributed as dist

    port = free_port()
    be_rank(monkeypatch, 0, port)
    monkeypatch.setattr("efftrain_cli.training.joining.JOINING", timedelta(seconds=2))
    stores = []
    client = threading.Thread(
        target=lambda: stores.append(dist.TCPStore("127.0.0.1", port, 2, is_master=False))
    )
    client.start()
    with pytest.raises(UsageError, match="rank 0 of 2 cannot reach the others"), joined():
        pass
    client.join()


@pytest.mark.parametrize("error, aborts", [(LostProcessError, 1), (UsageError, 0)])
def test_the_group_is_aborted_after_a_lost_rank(monkeypatch, error, aborts):
    """To destroy it, NCCL would wait for the lost rank."""
    import torch.distributed as dist

    abort, aborted = dist.distributed_c10d._abort_process_group, []

    def counted() -> None:
        aborted.append(None)
        abort()

    monkeypatch.setattr(dist.distributed_c10d, "_abort_process_group", counted)
    alone = (0, 1, 0, "127.0.0.1", free_port())
    monkeypatch.setattr("efftrain_cli.training.joining.ranks_wanted", lambda: alone)
    with pytest.raises(error), joined() as ranks:
        assert dist.is_initialized() and ranks.world_size == 1
        raise error("rank 1 has ended")
    assert len(aborted) == aborts and not dist.is_initialized()


def test_a_restart_of_torchrun_reads_no_key_of_the_attempt_before(monkeypatch):
    import torch.distributed as dist

    port = free_port()
    agent = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    first = _open_store("127.0.0.1", port, 2, 0)
    first.set("start", "a recipe")
    assert first.check(["start"]) and agent.num_keys() > 0
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert not _open_store("127.0.0.1", port, 2, 0).check(["start"])


def test_copies_of_the_gradient_are_counted():
    """SimiGrad keeps the gradient of one half beside that of the other."""
    simigrad = SimiGrad(target=0.5, min_batch_size=8, max_batch_size=64)
    assert gradient_copies(RECIPE) == 1
    assert gradient_copies(replace(RECIPE, simigrad=simigrad)) == 2


@pytest.mark.parametrize("ranks, want", [(1, (4, 16)), (2, (4, 16)), (4, (2, 16))])
def test_the_full_shape_is_that_of_the_ranks_cut(ranks, want):
    assert full_micro_batch(RECIPE, ranks) == want
    assert micro_batch_shapes(plan_step(RECIPE, Progress(), ranks)) == {want}


def test_a_silent_service_at_the_address_ends_the_start(monkeypatch):
    """F93: it takes connections and never answers."""
    with socket.socket() as service:
        service.bind(("127.0.0.1", 0))
        service.listen()
        port = service.getsockname()[1]
        be_rank(monkeypatch, 1, port)
        monkeypatch.setattr("efftrain_cli.training.joining.JOINING", timedelta(seconds=2))
        with pytest.raises(UsageError, match=f"cannot reach the others at 127.0.0.1:{port}"):
            joined().__enter__()


@pytest.mark.parametrize(
    "text, is_lost",
    [
        ("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:13204.", True),
        ("[gloo/transport/tcp/pair.cc:601] Read error: Connection reset by peer", True),
        ("[gloo/transport/tcp/pair.cc:355] writev [127.0.0.1]:1: Broken pipe", True),
        ("[gloo/transport/tcp/unbound_buffer.cc:84] Timed out waiting 3000ms for recv", True),
        ("ncclRemoteError: A call failed possibly due to a remote process exiting", True),
        ("[enforce fail at gloo/transport/tcp/pair.cc:451] op.preamble.length <= op.nbytes", False),
        ("NCCL error: unhandled cuda error\nLast error: illegal memory access", False),
        ("CUDA error: an illegal memory access was encountered", False),
    ],
)
def test_only_connection_errors_are_lost_peers(text, is_lost):
    with (
        pytest.raises(LostProcessError if is_lost else RuntimeError) as caught,
        Ranks(rank=1, world_size=2).peer_errors(),
    ):
        raise RuntimeError(text)
    assert is_lost or str(caught.value) == text


@pytest.mark.parametrize("device, keeps", [("cpu", 1), ("cuda", 0)])
def test_nothing_is_read_after_a_lost_peer_on_cuda(device, keeps):
    """The device waits for the lost rank, and reading from it would wait too."""
    model = SimpleNamespace(device=torch.device(device), zero_grad=lambda set_to_none: None)
    state, kept = SimpleNamespace(model=model), []

    def keep() -> None:
        kept.append(None)

    with pytest.raises(LostProcessError), stopped_by(keep, state, Devices(), keep):  # type: ignore[arg-type]
        raise LostProcessError("rank 1 has ended")
    assert len(kept) == keeps
    with pytest.raises(Stop), stopped_by(keep, state, Devices(), keep):  # type: ignore[arg-type]
        raise Stop
    assert len(kept) == keeps + 1


def test_a_hang_names_four_ranks_and_counts_the_others():
    four = str(_hung([0, 1, 2, 3], 8))
    assert four.startswith("rank 0, 1, 2, 3 did not answer in time; all 8 processes end\n")
    six = str(_hung([0, 1, 2, 3, 5, 6], 8))
    assert six.startswith("rank 0, 1, 2, 3 and 2 more did not answer in time; all 8")


@pytest.mark.parametrize(
    "noticed, timed_out, message",
    [
        ({0: b"hang", 3: b"end"}, True, "rank 1, 2 did not answer in time; all 4 processes end"),
        ({0: b"end", 1: b"hang", 2: b"end"}, False, "rank 3 did not answer in time"),
        ({0: b"end", 1: b"end"}, False, None),  # lost, and nobody has waited in vain
        ({}, True, "rank 1, 2, 3 did not answer"),
    ],
)
def test_ranks_that_do_not_notice_a_hang_are_named(monkeypatch, noticed, timed_out, message):
    from torch.distributed import HashStore

    monkeypatch.setattr("efftrain_cli.training.ranks.ANSWER", 0.5)
    store = HashStore()
    for rank, what in noticed.items():
        store.set(f"noticed/{rank}", what)
    found = Ranks(rank=0, world_size=4, store=store)._find_hang(timed_out)
    assert (found is None) == (message is None)
    assert message is None or message in str(found)
    if 0 not in noticed:
        assert (
            Ranks(rank=2, world_size=4, store=store)._find_hang(timed_out) is None
        )  # rank 0 says it
