"""Where a run is trained: device, software and data, for its events and its origin."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch

from efftrain_cli import __version__
from efftrain_cli.data.tokenizer import load_tokenizer
from efftrain_cli.foundation.console import printable, say
from efftrain_cli.foundation.environment import environment_number
from efftrain_cli.foundation.files import write_whole
from efftrain_cli.foundation.records import utc_now
from efftrain_cli.recipe.recipe import dump_recipe
from efftrain_cli.run.directory import RunDirectory
from efftrain_cli.run.lines import read_lines
from efftrain_cli.run.origin import origin_data, read_origin, write_origin
from efftrain_cli.training import dist
from efftrain_cli.training.device import compute_dtype, device_name
from efftrain_cli.training.loading import Loaded, read_recipe
from efftrain_cli.training.resuming import Differences, dropped_in_flight, rate_change
from efftrain_cli.training.session import Session
from efftrain_cli.training.state import TrainState

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
        "device": device_name(session.device),
        "device_kind": session.device.type,
        "efftrain": __version__,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "dtype": compute_dtype(session.recipe, session.device),
        "world_size": dist.world_size(),
    }


def environment_now(run: RunDirectory, session: Session) -> dict[str, object]:
    """Return the environment of a continued run; print changes and their effect on last bits."""
    now = environment_of(session)
    before: dict[str, object] = {}
    for event in read_lines(run.path / "events.jsonl"):
        if event.get("event") in ("start", "resume"):
            before |= event
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
    if "world_size" in changed and cut:
        meaning = f"[{cut[0]}] reads micro-batches: the results may differ by more than rounding"
    say(f"note: continued with {', '.join(changed.values())}: {meaning}")
    return {**now, "changed": list(changed.values())}


def begin_segment(
    run: RunDirectory | None,
    state: TrainState,
    session: Session,
    loaded: Loaded,
    changes: Differences,
) -> None:
    """Drop gradients in flight that the recipe cannot use. Record, on rank 0, that the run goes on
    from a checkpoint or from its beginning."""
    recipe = session.recipe
    step = state.progress.step
    dropped = dropped_in_flight(loaded.recipe, recipe)
    if dropped:
        state.in_flight.clear()
    if run is None:
        return
    change = rate_change(run.row_of(step).get("lr"), state.progress, loaded.recipe, recipe)
    if change:
        print(change)
    for path, reason in loaded.passed_over.items():
        run.corrupt.add(path)
        run.event("fallback", {"checkpoint": path.name, "reason": reason})
    after = -1
    name = None
    if loaded.path is not None:
        run.verified.add(loaded.path)
        after = state.progress.segment
        name = loaded.path.name
    if changes:
        run.event("override", {"differences": changes})
    text = dump_recipe(recipe)
    if text != dump_recipe(read_recipe(run.path)):
        write_whole(run.path / "recipe.toml", text)
    if dropped:
        say(f"warning: {dropped}")
        run.event("in_flight_dropped", {"step": step, "reason": dropped})
    origin = read_origin(run.path)
    data: dict[str, object] = {"corpus": session.corpus.folder.name}
    if origin_data(run.path)["train_hash"] is None:  # imported, and first trained now
        data |= origin_of(session, run.name)["data"]
    if not data.items() <= origin["data"].items():
        write_origin(run.path, {**origin, "data": origin["data"] | data})
    run.report_gaps(step)
    segment = run.next_segment(after)
    state.progress = state.progress._replace(segment=segment)
    facts = {"step": step, "segment": segment, "checkpoint": name}
    run.event("resume", {**facts, **environment_now(run, session)})


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
        **environment_of(session),
        "git_commit": package_commit(),
        "variables": library_variables(),
        # Number of runs that a sweep trains side by side on this machine: they slow each other
        # down.
        "jobs": environment_number("EFFTRAIN_JOBS", 1),
        # Hash of the registration whose runs these are.
        "study": os.environ.get("EFFTRAIN_STUDY") or None,
        "data": {
            "corpus": corpus.folder.name,
            "train_hash": corpus.train.sha256,
            "valid_hash": corpus.valid.sha256,
            "tokenizer_hash": corpus.tokenizer_sha256,
            "vocab_size": corpus.vocab_size,
            "eot_id": corpus.eot_id,
            "valid_windows": int(session.val_windows.shape[0]),
            "seq_len": session.recipe.model.seq_len,
            "valid_bytes_per_token": load_tokenizer(corpus.tokenizer_path).bytes_per_target(
                session.val_windows.numpy()
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
    # No git here, another user's folder, or a file system that does not answer.
    with suppress(OSError, subprocess.SubprocessError):
        output = subprocess.check_output(command, text=True, stderr=subprocess.DEVNULL, timeout=10)
        return output.strip()
    return None
