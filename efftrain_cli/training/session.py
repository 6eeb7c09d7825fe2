"""A training session: a recipe with its data, its device and its run directory.

Every command that trains (pretrain, tune-warmup, grow, verify-resume) uses these functions.
"""

from __future__ import annotations

import contextlib
import os
import platform
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from efftrain_cli import __version__
from efftrain_cli.data.corpus import Corpus
from efftrain_cli.data.prepare import limits_of, prepare
from efftrain_cli.data.tokenizer import bytes_per_target
from efftrain_cli.data.windows import Windows
from efftrain_cli.foundation.console import counted, human_count, make_console, printable, say
from efftrain_cli.foundation.environment import environment_number
from efftrain_cli.foundation.errors import UsageError
from efftrain_cli.foundation.records import utc_now
from efftrain_cli.foundation.signals import interruptible
from efftrain_cli.foundation.step import Batch
from efftrain_cli.model.flops import flops_per_token
from efftrain_cli.plan.plan import full_plan
from efftrain_cli.plan.preview import PlanSummary
from efftrain_cli.recipe.recipe import Recipe
from efftrain_cli.run.directory import Run
from efftrain_cli.training.build import build_state, compute_dtype
from efftrain_cli.training.gradient import build_forward_backward
from efftrain_cli.training.memory import building_errors
from efftrain_cli.training.ranks import ALONE, Ranks
from efftrain_cli.training.state import TrainState
from efftrain_cli.training.stopwatch import wait_for
from efftrain_cli.training.strategy import loading_device, single_device

_SLOW_TO_VERIFY = 10**9
"""From so many tokens on, verification takes seconds and is announced."""


@dataclass(frozen=True, kw_only=True)
class Session:
    """A recipe with its data and device: the inputs of training other than the state."""

    recipe: Recipe
    corpus: Corpus
    train_data: Windows
    val_windows: Tensor
    """(n, seq_len + 1) token ids."""
    device: torch.device
    ranks: Ranks = ALONE


def choose_device(name: str, ranks: Ranks = ALONE) -> torch.device:
    """Return the device for "auto", "cpu", "cuda" or "cuda:N"; of several ranks, each CUDA device
    is its local rank's.

    Raises:
        UsageError: there is no such device, or one is named for several ranks.
    """
    if "," in name:
        raise UsageError(
            f"--device {name}: names one device\nuse --devices N to train on N of them"
        )
    if not ranks.is_single_process and name not in ("auto", "cpu", "cuda"):
        what = f"each of the {ranks.world_size} processes takes its own device"
        raise UsageError(f"--device {name}: {what}\nuse --device cuda or cpu")
    if name == "auto":
        name = "cpu"
        if torch.cuda.is_available():
            name = "cuda"
    if name == "cuda" and not ranks.is_single_process and torch.cuda.is_available():
        name = f"cuda:{_local_index(ranks)}"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UsageError(f"there is no device {name!r}\n  give auto, cpu, cuda or cuda:N") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UsageError(
            f"--device {name}: this PyTorch ({torch.__version__}) sees no CUDA device\n"
            "  use --device cpu"
        )
    if device.type == "cuda" and device.index is not None:
        count = torch.cuda.device_count()
        if device.index >= count:
            existing = f"there are cuda:0 to cuda:{count - 1}"
            if count == 1:
                existing = "there is only cuda:0"
            hidden = "CUDA_VISIBLE_DEVICES may hide others"
            raise UsageError(
                f"--device {name}: {existing}; {hidden}\n  use --device cuda for the first"
            )
        # Allocations, timers and compilation without a named device then use this one.
        torch.cuda.set_device(device)
    return device


def _local_index(ranks: Ranks) -> int:
    """Return the index of this rank's CUDA device: 0 if srun shows each process only its own."""
    count = torch.cuda.device_count()
    processes = environment_number("LOCAL_WORLD_SIZE", 0)  # set by torchrun and --devices
    if processes > count:
        raise UsageError(
            f"{processes} processes on this machine, and {counted(count, 'CUDA device')}\n"
            f"use --devices {max(1, count)}, or --device cpu; CUDA_VISIBLE_DEVICES may hide others"
        )
    if count == 1:
        return 0
    return ranks.local_rank


def prepare_session(recipe: Recipe, device: torch.device) -> Session:
    """Read or prepare the recipe's data, verify every token and lay it out for training.

    Raises:
        DataError: the data is missing, damaged, or smaller than the budget needs.
    """
    corpus = prepare(recipe.data, limits=limits_of(recipe), console=make_console())
    if corpus.train.tokens >= _SLOW_TO_VERIFY:
        make_console().print(f"verifying {human_count(corpus.train.tokens)} tokens")
    corpus.verify()  # here rather than in the first steps, whose seconds are measured
    train_data = Windows(
        corpus.train, recipe.model.seq_len, recipe.seed, pin_memory=device.type == "cuda"
    )
    val_windows = Windows(corpus.valid, recipe.model.seq_len, 0).validation(recipe.eval.windows)
    return Session(
        recipe=recipe,
        corpus=corpus,
        train_data=train_data,
        val_windows=val_windows,
        device=device,
    )


def fresh_state(session: Session, stage: int = 0, trains: bool = True) -> TrainState:
    """Build the state before step 1, in the size of stage `stage` if the recipe has stages.

    Args:
        trains: it will be trained, and not only grown.

    Raises:
        OutOfMemoryError: the model alone does not fit the device or the host.
    """
    device = loading_device(session.recipe, session.ranks, session.device)
    trains_on = None
    if trains:
        trains_on = session.device
    with building_errors(session.recipe, session.corpus.vocab_size, device, stage, trains_on):
        return build_state(session.recipe, session.corpus.vocab_size, device, stage)


def probe_seconds(session: Session, state: TrainState, summary: PlanSummary) -> float:
    """Return the seconds that one device needs for the rest of the plan, by probes.

    The largest stage must fit into memory too, and its rate is that of most FLOPs.
    """
    recipe = session.recipe
    tokens_left = summary.tokens - state.progress.tokens
    seconds = probe(session, state, summary) * tokens_left
    if state.progress.stage + 1 >= len(recipe.stages):
        return seconds
    last = fresh_state(session, stage=len(recipe.stages) - 1)
    config = last.model.config
    per_token = flops_per_token(config, config.seq_len, config.n_layer).with_logits
    of_optimizer = recipe.optim.facts.step_flops(config)
    per_token += of_optimizer / (recipe.train.batch_size * config.seq_len)
    flops_left = summary.flops - state.progress.flops
    return probe(session, last, summary) * flops_left / per_token


def probe(session: Session, state: TrainState, summary: PlanSummary) -> float:
    """Run the largest planned micro-batch forward and backward, so that memory fails now or never.

    Return the seconds per token of a second, warm run. Leave the state as it was.
    """
    recipe = session.recipe
    sequences, seq_len = summary.largest_micro_batch
    devices = single_device(recipe, state.model, state.method_tensors)
    forward_backward = build_forward_backward(
        recipe, state.model, session.device, devices, session.ranks
    )
    micro_batches = 1
    if "steps" in recipe.varies:
        # A step that measures needs memory for the gradient of one half while it computes the
        # other's.
        micro_batches = 2
    sequences *= micro_batches

    tokens = torch.zeros((sequences, seq_len), dtype=torch.int64, device=session.device)
    plan = full_plan(recipe, sequences, seq_len, state.model.config.n_layer, micro_batches)
    seconds = 0.0
    for _ in range(2):
        start = time.perf_counter()
        with interruptible(rescuable=True):
            forward_backward(Batch(tokens, tokens), plan)
        wait_for(session.device)
        seconds = time.perf_counter() - start
    # Only now: the second pass had to hold the gradients of the first beside its own, as
    # accumulation does.
    state.model.zero_grad(set_to_none=True)
    return seconds / (sequences * seq_len)


def environment_of(session: Session) -> dict[str, object]:
    """Return the facts that may change the last bits of a result although recipe and data are the
    same."""
    return {
        "device": str(session.device),
        "device_name": device_name(session.device),
        "efftrain": __version__,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "dtype": compute_dtype(session.recipe, session.device),
        "devices": session.ranks.world_size,
    }


def environment_now(run: Run, session: Session) -> dict[str, object]:
    """Return the environment of a continued run; print changes and their effect on last bits."""
    now = environment_of(session)
    before: dict[str, object] = {}
    for event in run.events():
        if event.get("event") in ("start", "resume"):
            before |= event
    # The index of a device decides nothing: its name is compared too.
    if str(before.get("device")).partition(":")[0] == session.device.type:
        del before["device"]
    if session.device.type != "cpu":
        before.pop("threads", None)
    changed = {}
    for key, value in now.items():
        if before.get(key) not in (None, value):
            changed[key] = f"{key} {printable(str(before[key]))} -> {value}"
    if not changed:
        return now
    meaning = "the last bits of the results may differ"
    cut = [name for name, method in session.recipe.methods.items() if method.cut_matters()]
    if "devices" in changed and cut:
        meaning = f"[{cut[0]}] reads micro-batches: the results may differ by more than rounding"
    say(f"note: continued with {', '.join(changed.values())}: {meaning}")
    return {**now, "changed": list(changed.values())}


def software_origin(recipe_name: str) -> dict[str, object]:
    """Return a run's command, start time and software versions, for its origin.json."""
    return {
        "recipe": recipe_name,
        "command": ["efftrain", *sys.argv[1:]],
        "started": utc_now(),
        "efftrain": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "platform": platform.platform(),
    }


def origin_of(session: Session, recipe_name: str) -> dict[str, object]:
    """Return the origin of a run: all facts that could explain a difference between two runs.

    It holds no environment variables, so no keys.
    """
    corpus = session.corpus
    recipe = session.recipe
    return {
        **software_origin(recipe_name),
        "git_commit": package_commit(),
        "device": device_name(session.device),
        "device_kind": session.device.type,
        "threads": torch.get_num_threads(),
        # Number of runs that a sweep trains side by side on this machine: they slow each other
        # down.
        "jobs": environment_number("EFFTRAIN_JOBS", 1),
        # Hash of the registration whose runs these are.
        "study": os.environ.get("EFFTRAIN_STUDY") or None,
        "world_size": session.ranks.world_size,
        "dtype": compute_dtype(recipe, session.device),
        "data": {
            "train_hash": corpus.train.sha256,
            "valid_hash": corpus.valid.sha256,
            "tokenizer_hash": corpus.tokenizer_sha256,
            "vocab_size": corpus.vocab_size,
            "eot_id": corpus.eot_id,
            "valid_windows": int(session.val_windows.shape[0]),
            "seq_len": recipe.model.seq_len,
            "valid_bytes_per_token": bytes_per_target(
                corpus.tokenizer_path, session.val_windows.numpy()
            ),
        },
    }


def package_commit() -> str | None:
    """Return the commit of the repository that this package runs from; None if it is installed
    without one."""
    root = Path(__file__).resolve().parent.parent.parent
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "rev-parse", "HEAD"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None  # no git here, or a file system that does not answer
    if result.returncode:
        return None
    return result.stdout.strip()


def device_name(device: torch.device) -> str:
    """Return the device's model, as its maker calls it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or "cpu"
