"""Weights & Biases as a second reader of metrics.jsonl.

wandb never runs inside training: a child process follows the file while it grows, so that a slow
network, a missing key or a crash of wandb costs the run nothing. `efftrain wandb-sync` is the same
code on a file that is already there.

wandb keeps the first value that it is given for a step and drops later ones. While a run is
followed, rows that a resume writes anew are therefore not sent again. `sync` makes a clean run from
the rows that count: each step once, the last write wins.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from efftrain_cli.foundation.console import say
from efftrain_cli.foundation.errors import DataError, UsageError
from efftrain_cli.foundation.files import make_folder, write_whole
from efftrain_cli.foundation.records import digest_of, read_json, text_digest
from efftrain_cli.recipe.toml import flatten
from efftrain_cli.run.columns import AXES, COLUMNS
from efftrain_cli.run.metrics import latest_rows
from efftrain_cli.run.small_files import SmallFiles, read_run
from efftrain_cli.trackers.rows import follow_run, grouped

if TYPE_CHECKING:
    import wandb

INIT_SECONDS = 15.0
"""Longest wait for wandb's server before the metrics are kept offline instead."""
STOP_SECONDS = 10.0
"""Longest wait for the child at the end of a run: with a stop's own work well below the 30 s that
schedulers allow."""
LOG = "follow.log"
"""File in <run>/wandb that holds what the child had to say."""
TENSORBOARD_LOG = "tensorboard.log"
"""The same of the child that writes for TensorBoard."""
MODES = {"online": "online", "offline": "offline", "dryrun": "offline", "disabled": "off"}
"""Values of WANDB_MODE -> `wandb.mode` of a recipe."""
PROGRAM = (sys.executable, "-P", "-m", "efftrain_cli")
"""Without the working folder's modules: a random.py there is not Python's."""
STATE = "followed.json"
"""File in <run>/wandb that says up to which step the run has been sent."""


@dataclass(frozen=True)
class Synced:
    """What was handed to wandb."""

    rows: int
    id: str
    mode: str
    """"online" or "offline"."""


def sync(run: Path, mode: str = "offline", project: str | None = None) -> Synced:
    """Make a clean wandb run from the rows of metrics.jsonl that count.

    Its id follows from the rows: the same rows give the same id, and a run that went on gives a new
    one, since wandb cannot take back what it was sent.

    Args:
        mode: "offline" or "online".
        project: default: the recipe's wandb.project.

    Raises:
        UsageError: wandb is not installed, or "online" cannot be reached.
        DataError: the run is damaged.
    """
    directory = read_run(run)
    rows = latest_rows(run)
    run_id = f"{directory.name}-{digest_of(rows)[:8]}"
    session = _init(directory, mode, project, run_id, is_new=mode == "online")
    for row in rows:
        session.log(grouped(row), step=int(row["step"]))
    session.summary.update(_scores(run))
    _finish(session)
    return Synced(len(rows), run_id, mode)


def follow(run: Path, mode: str, project: str | None = None) -> Synced:
    """Send rows to wandb as they are written until standard input closes, then the rest.

    One wandb run per run directory: a resumed run continues it. If "online" cannot be reached
    within INIT_SECONDS, the metrics are kept offline, with one warning.

    Raises:
        UsageError: wandb is not installed.
        DataError: the run is damaged.
    """
    directory = read_run(run)
    created = f"{directory.name} {directory.origin.get('started')}"
    run_id = f"{directory.name}-{text_digest(created)[:8]}"
    try:
        session = _init(directory, mode, project, run_id)
    except UsageError as error:
        if mode == "offline":
            raise
        # The parent prints what the child says once it has ended.
        say(
            f"warning: {error}; metrics are kept offline,"
            f" `efftrain wandb-sync {directory.name}` sends them later"
        )
        mode = "offline"
        session = _init(directory, mode, project, run_id)

    state = run / "wandb" / STATE
    sent = -1
    with contextlib.suppress(DataError, OSError):
        sent = int(read_json(state)["last_step"])
    count = 0
    for row in follow_run(run):
        if row["step"] > sent:
            sent = row["step"]
            session.log(grouped(row), step=sent)
            count += 1
    _finish(session)
    write_whole(state, json.dumps({"last_step": sent}))
    return Synced(count, run_id, mode)


@contextlib.contextmanager
def followed(run: Path, mode: str, *, tensorboard: bool) -> Iterator[None]:
    """Let a child process send the rows of `run` to wandb during the block, unless `mode`, or
    WANDB_MODE in its place, is "off".

    With `tensorboard` another one writes them for TensorBoard.

    Whatever befalls the children, the block is not disturbed; what one had to say is printed as one
    warning at the end.
    """
    mode = chosen_mode(mode)
    with contextlib.ExitStack() as children:
        if tensorboard:
            children.enter_context(
                _followed(run, "TensorBoard", ["--tensorboard"], TENSORBOARD_LOG)
            )
        if mode != "off":
            children.enter_context(_followed(run, "wandb", ["--mode", mode], LOG))
        yield
    if tensorboard:
        print(f"tensorboard --logdir {run / 'tensorboard'}")
    copies = (run / "wandb").glob("offline-run-*")
    copy = max(copies, key=lambda path: path.stat().st_mtime, default=None)
    if mode != "off" and copy is not None:
        print(f"wandb   offline copy in {copy}; send it with: wandb sync {copy}")


def chosen_mode(mode: str) -> str:
    """Return what WANDB_MODE sets in place of a recipe's mode; a recipe that sends nothing stays
    "off"."""
    chosen = os.environ.get("WANDB_MODE", "")
    if mode == "off" or not chosen:
        return mode
    if chosen not in MODES:
        raise UsageError(
            f"the environment variable WANDB_MODE = {chosen[:40]!r} is not usable\n"
            f"  set it to {', '.join(MODES)}, or unset it"
        )
    return MODES[chosen]


@contextlib.contextmanager
def _followed(run: Path, what: str, options: list[str], log: str) -> Iterator[None]:
    try:
        follower = start_follower(run, options, log)
    except OSError as error:
        say(f"warning: {what} could not be started: {error}")
        yield
        return
    try:
        yield
    finally:
        # Its input ends: there will be no more rows. One that is still busy is not killed: it goes
        # on sending, and what it cannot send stays offline.
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            follower.communicate(timeout=STOP_SECONDS)
        said = _said(run, log)
        again = f"efftrain wandb-sync {run.name}{' --tensorboard' * (what != 'wandb')}"
        if said:
            fix = f"\n  metrics.jsonl has every row: {again} sends them"
            if "wandb-sync" in said:
                fix = ""
            say(f"warning: {what}: {said}{fix}")
        elif follower.returncode is None:
            say(
                f"warning: {what} is still busy in process {follower.pid}\n"
                f"  if it does not finish: {again} sends the metrics again"
            )


def start_follower(run: Path, options: list[str], log: str) -> subprocess.Popen[bytes]:
    """Start the child process, `wandb-sync` with options, that follows `run`, and ends whenever
    this one does."""
    folder = run / "wandb"
    make_folder(folder)
    # A file and no pipe: whoever waits for the end of our own output must not wait for wandb's.
    with (folder / log).open("wb") as file:
        return subprocess.Popen(
            [*PROGRAM, "wandb-sync", str(run), "--follow", *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=file,
            # Ctrl-C is for the training; the child ends when its input closes.
            start_new_session=True,
        )


def _said(run: Path, log: str) -> str:
    """Return what the child itself wrote; wandb's own lines are greetings mostly."""
    lines: list[str] = []
    with contextlib.suppress(OSError):
        lines = (run / "wandb" / log).read_text(errors="replace").splitlines()
    own = [line for line in lines if not line.startswith("wandb: ")]
    return "\n".join(own).removeprefix("warning: ").removeprefix("error: ")


def _init(
    directory: SmallFiles, mode: str, project: str | None, run_id: str, is_new: bool = False
) -> wandb.Run:
    """Begin a wandb run, or continue it unless it `is_new`."""
    # wandb writes its crash reports and statistics about the machine without being asked.
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    try:
        import wandb
    except ImportError as error:
        raise UsageError(
            f"wandb cannot be imported ({error}); install it with: pip install wandb"
        ) from None
    make_folder(directory.path / "wandb")
    recipe = directory.recipe
    try:
        # What is given here wins over wandb's own variables, so these are asked first. WANDB_ENTITY
        # is left to wandb.
        session = wandb.init(
            project=project
            or os.environ.get("WANDB_PROJECT")
            or recipe.get("wandb", {}).get("project", "efftrain"),
            name=os.environ.get("WANDB_NAME") or directory.name,
            id=run_id,
            resume="never" if is_new else "allow",
            group=os.environ.get("WANDB_RUN_GROUP")
            or str(directory.origin.get("recipe") or directory.name),
            dir=str(directory.path),
            config=flatten({**recipe, "origin": directory.origin}),
            mode="online" if mode == "online" else "offline",
            settings=wandb.Settings(
                silent=True,
                console="off",
                disable_git=True,
                disable_code=True,
                disable_job_creation=True,
                save_code=False,
                x_disable_meta=True,
                x_disable_stats=True,
                init_timeout=INIT_SECONDS,
            ),
        )
    # wandb raises errors of many kinds, among them its own and the network's.
    except Exception as error:
        # Its own process still holds the id, and would refuse it to the offline run that takes this
        # one's place.
        with contextlib.suppress(Exception):
            wandb.teardown()
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise UsageError(f"wandb ({mode}): {lines[0]}") from None
    for axis in AXES.values():
        session.define_metric(axis)
    session.define_metric("*", step_metric=AXES["tokens"])
    for column in COLUMNS:
        if column.summary:
            session.define_metric(column.series, step_metric=AXES["tokens"], summary=column.summary)
    return session


def _scores(run: Path) -> dict[str, Any]:
    """Return the zero-shot scores of a run, by wandb's names; the newest of a task counts."""
    scores = {}
    with contextlib.suppress(DataError, OSError):
        for entry in read_json(run / "zeroshot.json"):
            if entry["limit"] is None and entry["value"] is not None:
                scores[f"zeroshot/{entry['task']}/{entry['metric']}"] = entry["value"]
    return scores


def _finish(session: wandb.Run) -> None:
    import wandb

    session.finish()
    # finish() returns before wandb's own process has written the last rows of an offline run; its
    # end is waited for here.
    wandb.teardown()
