"""Starting, killing and examining `efftrain` processes, for the tests of faults."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tests.conftest import REPOSITORY, typed
from tests.fake_runs import without_times

BASELINE = """
[model]
n_layer = 2
n_head = 2
n_embd = 64
seq_len = 32

[data]
train = "TEXT"
tokenizer = "bpe:300"
valid_fraction = 0.05

[optim]
lr = 3e-3
min_lr = 3e-4
warmup_steps = 5

[train]
tokens = 2560
batch_size = 4
micro_batch_tokens = 64
dtype = "fp32"

[eval]
every = 5
windows = 4

[checkpoint]
every = 5
keep = 2
"""
"""20 steps of two micro-batches."""


def made_text(size: int = 200_000) -> str:
    """Text of `size` characters in which some words follow others, always the same."""
    generator = random.Random(5)
    words = [
        "".join(generator.choices("etaoinshrdlu", k=generator.randint(2, 7))) for _ in range(200)
    ]
    lines, length, word = [], 0, 0
    while length < size:
        line = []
        for _ in range(12):
            word = (word * 7 + 3) % 200 if generator.random() < 0.7 else generator.randrange(200)
            line.append(words[word])
        lines.append(" ".join(line))
        length += len(lines[-1]) + 1
    return "\n".join(lines)


def write_recipe(folder: Path, name: str = "r", extra: str = "", **replaced: str) -> Path:
    """Write made text, unless `folder` has some, and BASELINE on it, with `key = value` lines
    replaced and sections added."""
    text = folder / "text.txt"
    if not text.exists():
        text.write_text(made_text())
    lines = BASELINE.replace("TEXT", str(text)).splitlines()
    for key, value in replaced.items():
        assert any(line.startswith(f"{key} = ") for line in lines), key
        lines = [f"{key} = {value}" if line.startswith(f"{key} = ") else line for line in lines]
    path = folder / f"{name}.toml"
    path.write_text("\n".join(lines) + "\n" + extra)
    return path


def start_ranks(
    zygote: Zygote, folder: Path, world_size: int, *arguments: str, inject: str = ""
) -> list[Process]:
    """`efftrain ARGUMENTS` in `folder` as the ranks of one run, which have one output; `inject` is
    run first in each."""
    zygote.ask(do="import", module="torch._dynamo")  # once, for all that divide a model
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    ranks = []
    for rank in range(world_size):
        process = zygote.start(
            *arguments,
            cwd=folder,
            out=folder / "ranks.out",
            err=folder / "ranks.err",
            inject=inject,
            WORLD_SIZE=str(world_size),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=port,
            RANK=str(rank),
            LOCAL_RANK=str(rank),
        )
        ranks.append(process)
    return ranks


def run_ranks(
    zygote: Zygote, folder: Path, world_size: int, *arguments: str, script: str = ""
) -> None:
    """Run `efftrain ARGUMENTS` in `folder`, or a script of the repository with them, in so many
    processes, each with a rank in its environment; fails the test with what they said unless all
    end well."""
    inject = ""
    if script:
        inject = f"import runpy\nrunpy.run_path({str(REPOSITORY / script)!r}, run_name='__main__')"
        inject += "\nraise SystemExit"
    ranks = start_ranks(zygote, folder, world_size, *arguments, inject=inject)
    codes = [rank.wait(600) for rank in ranks]
    assert not any(codes), ranks[0].said()[-4000:]


def start_efftrain(folder: Path, *args: str, **env: str) -> subprocess.Popen[str]:
    """`efftrain ARGS` in a new interpreter, in `folder`, with runs in its folder `runs`."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(REPOSITORY),
        "EFFTRAIN_RUNS": str(folder / "runs"),
        **env,
    }
    command, pipe = [sys.executable, "-m", "efftrain_cli", *args], subprocess.PIPE
    return subprocess.Popen(
        command, cwd=folder, env=environment, stdout=pipe, stderr=pipe, text=True
    )


def wait_until(
    condition: Callable[[], object],
    process: subprocess.Popen[str] | None = None,
    timeout: float = 300,
) -> None:
    """Returns once `condition` holds, which another process brings about; fails the test where
    `process` ends before."""
    end = time.monotonic() + timeout
    while not condition():
        assert process is None or process.poll() is None, process.communicate()
        assert time.monotonic() < end, f"still waiting after {timeout} s"
        time.sleep(0.01)


def processes_in(folder: Path) -> list[Path]:
    """Return other processes whose working folder this is, without zombies."""
    found = []
    own = str(os.getpid())
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if process.name != own and (process / "cwd").readlink() == folder:
                found.append(process)
    return found


@dataclass
class Process:
    """One `efftrain` that was started."""

    zygote: Zygote
    pid: int
    out: Path
    err: Path
    code: int | None = None

    def wait(self, timeout: float = 60) -> int:
        """Its exit code; negative for a signal. Fails the test where it does not end."""
        if self.code is None:
            self.code = self.zygote.ask(do="wait", pid=self.pid, timeout=timeout)["code"]
        if self.code is None:
            self.kill(signal.SIGKILL)
            raise AssertionError(f"still running after {timeout} s:\n{self.said()}")
        return self.code

    @property
    def errors(self) -> str:
        """Standard error so far."""
        return self.err.read_text()

    @property
    def output(self) -> str:
        """Standard output so far."""
        return self.out.read_text()

    def said(self) -> str:
        """Both outputs, where they are files: a pipe or a device cannot be read back."""
        return "\n".join(path.read_text() for path in (self.out, self.err) if path.is_file())

    def ended(self) -> bool:
        if self.code is None:
            self.code = self.zygote.ask(do="wait", pid=self.pid, timeout=0)["code"]
        return self.code is not None

    def kill(self, number: int = signal.SIGTERM) -> None:
        os.kill(self.pid, number)

    def wait_for(self, condition: Callable[[], bool], timeout: float = 60) -> None:
        """Waits until `condition`; fails the test where the process ends before."""
        end = time.monotonic() + timeout
        while not condition():
            if self.ended() or time.monotonic() > end:
                raise AssertionError(f"ended too early ({self.code}):\n{self.said()}")
            time.sleep(0.005)


class Zygote:
    """The process that forks the others."""

    def __init__(self) -> None:
        self.trained: dict[tuple[str, str], Path] = {}
        """Runs of tests that have ended, by recipe and more words of the command."""
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).parent / "zygote.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        )
        assert "ready" in self.process.stdout.readline()

    def ask(self, **request: Any) -> dict[str, Any]:
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def start(
        self, *args: str, cwd: Path, out: Path, err: Path, inject: str = "", **env: str
    ) -> Process:
        """`efftrain ARGS` in `cwd`, with runs in its folder `runs`, the test's environment changed
        by `env`, and output in files; `inject` is run in it first."""
        environment = {
            **os.environ,
            "PYTHONPATH": str(REPOSITORY),
            "EFFTRAIN_RUNS": str(cwd / "runs"),
            **env,
        }
        answer = self.ask(
            do="start",
            args=args,
            out=str(out),
            err=str(err),
            cwd=str(cwd),
            env=environment,
            inject=inject,
        )
        return Process(self, answer["pid"], out, err)

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait(timeout=30)


@dataclass
class Laboratory:
    """A folder with made text, recipes and runs, and processes that work in it."""

    zygote: Zygote
    folder: Path
    started: int = field(default=0)

    def recipe(self, name: str = "tiny", extra: str = "", **replaced: str) -> str:
        """Return the path of a recipe as `write_recipe` writes it."""
        return str(write_recipe(self.folder, name, extra, **replaced))

    def start(self, *args: str, inject: str = "", **env: str) -> Process:
        """`efftrain ARGS` in a process of its own; `inject` is run in it first."""
        self.started += 1
        out, err = (self.folder / f"{self.started}.{kind}" for kind in ("out", "err"))
        return self.zygote.start(*args, cwd=self.folder, out=out, err=err, inject=inject, **env)

    def call(
        self,
        line: str,
        *words: str,
        code: int | None = 0,
        inject: str = "",
        timeout: float = 60,
        **env: str,
    ) -> Process:
        """Run `efftrain LINE WORDS` to its end, without a traceback; `code` is its exit code, None:
        any."""
        process = self.start(*typed(line, *words), inject=inject, **env)
        process.wait(timeout)
        assert code in (None, process.code), process.said()
        assert "Traceback" not in process.errors, process.errors
        return process

    def words(self, name: str = "r", recipe: str = "") -> tuple[str, ...]:
        """Return the command that trains a new run, of BASELINE without `recipe`."""
        recipe = recipe or self.recipe()
        return ("pretrain", "--recipe", recipe, "--name", name, "--no-probe")

    def train(
        self, name: str = "r", line: str = "", *words: str, recipe: str = "", **options: Any
    ) -> Process:
        """Train a new run of `recipe` (default BASELINE), with the arguments of `call`."""
        return self.call(*self.words(name, recipe), *typed(line, *words), **options)

    def train_whole(self, recipe: str = "", line: str = "") -> None:
        """Train the run `whole`, or copy it from an earlier test that has trained the same."""
        recipe = recipe or self.recipe()
        text = Path(recipe).read_text().replace(str(self.folder), "")
        kept = self.zygote.trained.setdefault((text, line), self.run("whole"))
        if kept == self.run("whole"):
            self.train("whole", line, recipe=recipe)
        else:
            shutil.copytree(kept, self.run("whole"))

    def resume(self, name: str = "r", line: str = "", *words: str, **options: Any) -> Process:
        """Continue a run, with the arguments of `call`."""
        return self.call("pretrain --no-probe --resume", name, *typed(line, *words), **options)

    def run(self, name: str) -> Path:
        return self.folder / "runs" / name

    def rows(self, name: str) -> list[dict[str, Any]]:
        """The rows that count, by step, without times."""
        rows: dict[int, dict[str, Any]] = {}
        for line in (self.run(name) / "metrics.jsonl").read_text().splitlines():
            row = json.loads(line)
            if row["step"] not in rows or row["segment"] >= rows[row["step"]]["segment"]:
                rows[row["step"]] = row
        return [without_times(rows[step]) for step in sorted(rows)]

    def last_step(self, name: str) -> int:
        """Of the rows so far, -1 where there is none."""
        try:
            text = (self.run(name) / "metrics.jsonl").read_text()
        except FileNotFoundError:
            return -1
        return max((json.loads(line)["step"] for line in text.split("\n")[:-1]), default=-1)

    def events(self, name: str, kind: str | None = None) -> list[dict[str, Any]]:
        lines = (self.run(name) / "events.jsonl").read_text().splitlines()
        return [event for event in map(json.loads, lines) if kind in (None, event["event"])]

    def checkpoint(self, name: str, step: int) -> Path:
        return self.run(name) / "checkpoints" / f"step-{step:08d}"

    def checkpoints(self, name: str) -> list[str]:
        folder = self.run(name) / "checkpoints"
        return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []

    def tensors(self, name: str, step: int) -> dict[str, torch.Tensor]:
        """Weights and moments of a checkpoint."""
        folder = self.checkpoint(name, step)
        return {
            **load_file(folder / "model.safetensors"),
            **load_file(folder / "optimizer.safetensors"),
        }

    def assert_equal_runs(
        self, name: str, other: str, step: int, evaluated: tuple[int, ...] = ()
    ) -> None:
        """Rows and the tensors after `step` are the same, bit for bit. The first run's parts ended
        with the steps `evaluated`, which `other` does not evaluate."""
        have, want = self.rows(name), self.rows(other)
        assert len(have) == len(want)
        for a, b in zip(have, want, strict=True):
            if a["step"] in evaluated:
                assert a["val_loss"] is not None
                a["val_loss"] = None
            assert a == b
        tensors, expected = self.tensors(name, step), self.tensors(other, step)
        assert tensors.keys() == expected.keys()
        for key, tensor in tensors.items():
            assert torch.equal(tensor, expected[key]), key
