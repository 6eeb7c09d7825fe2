"""Fixtures that every test may use."""

from __future__ import annotations

import functools
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import typer.main
import typer.testing
from typer.testing import CliRunner, Result

from efftrain_cli.cli.commands import register

if TYPE_CHECKING:
    from efftrain_cli.run.directory import RunDirectory
    from tests.launch import Laboratory, Zygote

# One thread a process: tests run side by side, and threads that wait for each other by spinning
# would starve them.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# No test cuts the power, so a flush to the disk would only cost milliseconds. Tests that watch
# flushes, or let them fail, wrap this one.
os.fsync = lambda descriptor: None

register()


def pytest_configure() -> None:
    """End as by Ctrl-C on SIGTERM, so that `pytest_sessionfinish` is called."""
    if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
        signal.signal(signal.SIGTERM, lambda *_: pytest.exit("terminated"))


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(exitstatus: int) -> None:
    """End the processes that an aborted run's tests have started."""
    if exitstatus == pytest.ExitCode.INTERRUPTED:
        import psutil

        for child in psutil.Process().children(recursive=True):
            child.kill()


REPOSITORY = Path(__file__).resolve().parent.parent
SHARED = REPOSITORY.parent / "shared"
Efftrain = Callable[..., "subprocess.CompletedProcess[str]"]
"""`efftrain(line, *words, code=0, timeout=seconds, **environment)`."""


def python(
    source: str, *args: str, cwd: Path = REPOSITORY, code: int | None = 0, **env: str
) -> subprocess.CompletedProcess[str]:
    """Run Python source in a new interpreter that finds the package, and check its exit code; None:
    any."""
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), **env}
    command = [sys.executable, "-c", source, *args]
    done = subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert code in (None, done.returncode), done.stdout + done.stderr
    return done


@pytest.fixture(scope="session", autouse=True)
def _cache_root(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Token shards go to a temporary cache that all tests of a session share; runs go to the test's
    own folder."""
    os.environ.setdefault("EFFTRAIN_CACHE", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path) -> Iterator[None]:
    """Let each test work in `tmp_path` and have runs of its own, in `tmp_path`/runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        patch.setenv("EFFTRAIN_RUNS", str(tmp_path / "runs"))
        yield


def typed(line: str, *words: str) -> list[str]:
    """Return the words of a command line as it is typed, and those that follow it as they are."""
    return [*shlex.split(line), *words]


read_signatures = functools.cache(typer.main.get_command)


def invoke(line: str, *words: str, **options: Any) -> Result:
    """Run `efftrain LINE WORDS` in this process, with options of typer's `CliRunner.invoke`.

    Typer reads all commands' signatures for each, 0.04 s; here once, but for a help text, which a
    narrow terminal changes.
    """
    from efftrain_cli.cli.app import app

    args = typed(line, *words)
    read = typer.main.get_command if "--help" in args else read_signatures
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(typer.testing, "_get_command", read)
        return CliRunner().invoke(app, args, **options)


def sets(*overrides: str) -> list[str]:
    """Return `--set OVERRIDE` for each."""
    return [word for override in overrides for word in ("--set", override)]


def cli(line: str, *words: str, **options: Any) -> Result:
    """Run `efftrain LINE WORDS` in this process to its end, or raise its error."""
    result = invoke(line, *words, **options)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result


@pytest.fixture
def efftrain(zygote: Zygote, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Efftrain:
    """Runs `efftrain LINE WORDS` in a process of its own, in tmp_path, with EFFTRAIN_RUNS there,
    and checks its exit code. It is forked from one that has PyTorch, so what PyTorch reads at its
    import is the test session's."""

    def run(
        line: str, *words: str, code: int = 0, timeout: float = 120, **env: str
    ) -> subprocess.CompletedProcess[str]:
        output = tmp_path_factory.mktemp("output")
        args = typed(line, *words)
        process = zygote.start(*args, cwd=tmp_path, out=output / "out", err=output / "err", **env)
        assert process.wait(timeout) == code, process.said()
        return subprocess.CompletedProcess(
            args, code, process.out.read_text(), process.err.read_text()
        )

    return run


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real text beside the repository; the test skips where it is absent."""
    if not (SHARED / "data").is_dir():
        pytest.skip("the folder of shared test data is not beside the repository")
    return SHARED / "data"


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    """One process that forks the `efftrain` processes of all tests of faults."""
    from tests.launch import Zygote

    process = Zygote()
    yield process
    process.close()


@pytest.fixture
def lab(zygote: Zygote, tmp_path: Path) -> Laboratory:
    """A folder with made text, and quick `efftrain` processes in it."""
    from tests.launch import Laboratory, made_text

    (tmp_path / "text.txt").write_text(made_text())
    return Laboratory(zygote, tmp_path)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The test's folder of runs."""
    (tmp_path / "runs").mkdir()
    return tmp_path / "runs"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the test's own: nothing is prepared, and no speed was measured."""
    monkeypatch.setenv("EFFTRAIN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def folder(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The test's folder with two recipes that can be trained in a second; a `TrialRunner` does not
    wait between two looks at its processes."""
    from efftrain_cli.trials import runner
    from tests.trials.stubs import write_recipes

    monkeypatch.setattr(runner, "TICK", 0.0)
    return write_recipes(tmp_path)


@pytest.fixture
def random_run(tmp_path: Path) -> Path:
    """A run with random weights and a checkpoint of step 10, called r."""
    from tests.trained_run import make_run

    return make_run(tmp_path, "r")


@pytest.fixture
def run() -> Iterator[RunDirectory]:
    """A run with checkpoints of steps 5 and 10, open."""
    from efftrain_cli.run.directory import RunDirectory, new_run
    from tests.faults.damage import save_step

    with new_run("r", "", {}) as run:
        for step in (5, 10):
            save_step(run, step)
    with RunDirectory.open("r") as run:
        yield run
