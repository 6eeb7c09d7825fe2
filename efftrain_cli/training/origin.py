"""Where a run is trained: device, software and data, for its events and its origin."""

from __future__ import annotations

import contextlib
import os
import platform
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import torch

from efftrain_cli import __version__
from efftrain_cli.data.tokenizer import bytes_per_target
from efftrain_cli.foundation.console import printable, say
from efftrain_cli.foundation.environment import environment_number
from efftrain_cli.foundation.records import utc_now
from efftrain_cli.plan.rates import FEWEST_STEPS, Rate, digest_of_training, remember_rate
from efftrain_cli.run.directory import Run
from efftrain_cli.run.metrics import last_row
from efftrain_cli.training import dist
from efftrain_cli.training.precision import compute_dtype
from efftrain_cli.training.session import Session

LIBRARIES = (
    "ATEN_",
    "CUBLAS_",
    "DNNL_",
    "KMP_",
    "MKL_",
    "NVIDIA_",
    "OMP_",
    "ONEDNN_",
    "OPENBLAS_",
    "TORCH",
)
"""Beginnings of the variables that decide how PyTorch's libraries compute."""


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
        "devices": dist.world_size(),
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
            changed[key] = f"{key} {printable(before[key])} -> {value}"
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
        "folder": str(Path.cwd()),
        "started": utc_now(),
        "efftrain": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "platform": platform.platform(),
    }


def origin_of(session: Session, recipe_name: str) -> dict[str, Any]:
    """Return the origin of a run: all facts that could explain a difference between two runs.

    Of the environment it holds only what libraries read at their import, so no keys.
    """
    corpus = session.corpus
    return {
        **software_origin(recipe_name),
        "git_commit": package_commit(),
        "variables": library_variables(),
        "device": device_name(session.device),
        "device_kind": session.device.type,
        "threads": torch.get_num_threads(),
        # Number of runs that a sweep trains side by side on this machine: they slow each other
        # down.
        "jobs": environment_number("EFFTRAIN_JOBS", 1),
        # Hash of the registration whose runs these are.
        "study": os.environ.get("EFFTRAIN_STUDY") or None,
        "world_size": dist.world_size(),
        "dtype": compute_dtype(session.recipe, session.device),
        "data": {
            "corpus": corpus.key,
            "train_hash": corpus.train.sha256,
            "valid_hash": corpus.valid.sha256,
            "tokenizer_hash": corpus.tokenizer_sha256,
            "vocab_size": corpus.vocab_size,
            "eot_id": corpus.eot_id,
            "valid_windows": int(session.val_windows.shape[0]),
            "seq_len": session.recipe.model.seq_len,
            "valid_bytes_per_token": bytes_per_target(
                corpus.tokenizer_path, session.val_windows.numpy()
            ),
        },
    }


@cache
def library_variables() -> dict[str, str]:
    """Return the environment variables of `LIBRARIES`. Later calls return the first one's."""
    found = {}
    for name in sorted(os.environ):
        if name.startswith(LIBRARIES):
            found[name] = os.environ[name]
    return found


@cache
def package_commit() -> str | None:
    """Return the commit of the repository that this package runs from; None if it is installed
    without one. Later calls return the first one's."""
    root = Path(__file__).resolve().parent.parent.parent
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "rev-parse", "HEAD"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None  # no git here, or a file system that does not answer
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


def keep_rate(run: Run, session: Session) -> None:
    """Keep the speed of a run that one device trained in one go, for later estimates."""
    row = last_row(run.path)
    in_one_go = dist.world_size() == 1 and row.get("segment") == 0
    if not in_one_go or row["step"] < FEWEST_STEPS or not row["train_seconds"]:
        return
    model = session.recipe.model
    remember_rate(
        Rate(
            device=device_name(session.device),
            device_kind=session.device.type,
            source=f"run {run.name}",
            n_layer=model.n_layer,
            n_embd=model.n_embd,
            flops_per_second=row["total_flops"] / row["train_seconds"],
            flops_per_token=row["total_flops"] / row["tokens"],
            trained=digest_of_training(session.recipe),
            tokens_per_second=row["tokens"] / row["wall_seconds"],
        )
    )
