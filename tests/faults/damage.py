"""Checkpoints that a test may damage, commands in this process, and deaths at a moment."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import torch
from typer.testing import Result

from efftrain_cli.foundation.errors import EfftrainError
from efftrain_cli.foundation.files import disk_error, sha256_of
from efftrain_cli.run.directory import RunDirectory
from efftrain_cli.run.manifest import MANIFEST, write_manifest
from efftrain_cli.training.checkpoint import save
from efftrain_cli.training.loading import load_newest
from tests.conftest import invoke
from tests.tiny import fresh, tiny_recipe

RECIPE = tiny_recipe(
    "model.n_embd=64", "model.seq_len=32", "train.batch_size=4", "checkpoint={every = 5, keep = 2}"
)


def save_step(run: RunDirectory, step: int) -> float:
    """Save a fresh state as that of a step and return the seconds it took."""
    state = fresh(RECIPE, 300)
    state.progress = state.progress._replace(step=step)
    return save(run, state, RECIPE)


def step_of(path: Path | None) -> int | None:
    return None if path is None else int(path.name[5:])


def newest_checkpoint(run: RunDirectory) -> Path | None:
    """Load the newest checkpoint that is whole, as a resume does, and return it."""
    loaded = load_newest(run.path, fresh(RECIPE, 300), RECIPE)
    run.corrupt |= loaded.passed_over.keys()
    if loaded.path is not None:
        run.verified.add(loaded.path)
    return loaded.path


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def seal(checkpoint: Path) -> None:
    """Gives a checkpoint that was tampered with a manifest that fits."""
    write_manifest(
        checkpoint,
        {path.name: sha256_of(path) for path in checkpoint.iterdir() if path.name != MANIFEST},
    )


def call(*words: str) -> tuple[int, str]:
    """(exit code, message) of a command, in this process. Anything but an error for the user fails
    the test."""
    result: Result = invoke(*words)
    if isinstance(result.exception, EfftrainError):
        return result.exception.exit_code, str(result.exception)
    if isinstance(result.exception, OSError):  # as the command line's own end
        error = disk_error(result.exception)
        return error.exit_code, str(error)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


def in_a_child(body: Callable[[], None]) -> int:
    """Exit code of `body` in a forked process, 0 if it returns; negative for a signal."""
    child = os.fork()
    if child == 0:
        code = 1
        # pytest's own handlers are no part of what is tested.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        torch.set_num_threads(1)
        try:
            body()
            code = 0
        except BaseException as error:
            print(repr(error))
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


DIED = 9
DISK = [(os, name) for name in ("fsync", "rename", "replace", "mkdir", "link", "unlink", "rmdir")]
"""Modules and their functions that change what is on the disk."""


def die_at(number: int, *more: tuple[Any, str]) -> None:
    """Make this process end, with no cleaning up, just before its `number`th call of `DISK` or
    `more`."""
    seen = 0

    def counted(real: Callable[..., object]) -> Callable[..., object]:
        def operation(*args: object, **options: object) -> object:
            nonlocal seen
            seen += 1
            if seen == number:
                os._exit(DIED)
            return real(*args, **options)

        return operation

    for module, name in (*DISK, *more):
        setattr(module, name, counted(getattr(module, name)))


def deaths(work: Callable[[int], None]) -> Iterator[int]:
    """Call `work(1)`, `work(2)`, ..., each in a process of its own that calls `die_at`; yield after
    each, until one ends well."""
    for number in count(1):
        code = in_a_child(lambda number=number: work(number))  # type: ignore[misc]
        assert code in (0, DIED)
        yield number
        if code == 0:
            return


def contents(folder: Path) -> dict[Path, bytes]:
    return {
        path: path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != "lock"
    }
