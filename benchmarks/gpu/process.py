"""Results, and the processes that compute them.

A worker computes figures, one after the other. Its parent watches the limits, ends a worker that
passes one or dies, and starts another for the figures that are left.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
import traceback
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

SCRATCH = Path(tempfile.gettempdir()) / f"efftrain-gpu-{os.getuid()}"
CACHE = SCRATCH / "inductor"
GRACE = 10
"""Seconds after its limit in which a figure may still end by itself."""
LEAST = 8
"""Seconds that must be left for a figure to begin."""
LARGEST_FILE = 16 << 20

Note = Callable[..., None]
"""Keeps named values of the running figure."""


class NeedsCuda(Exception):
    """The figure, or the rest of it, exists on a CUDA device only."""


class Results:
    """DIR/figures.json: figure -> its values; beside them which one runs, and since when."""

    def __init__(self, out: Path) -> None:
        self.path = out / "figures.json"
        self.figures: dict[str, dict[str, Any]] = {}
        self.running: list[Any] = []
        if self.path.exists():
            content = json.loads(self.path.read_text())
            self.figures = content["figures"]
            self.running = content["running"]

    def write(self) -> None:
        content = {"figures": self.figures, "running": self.running}
        temporary = self.path.with_suffix(".new")
        temporary.write_text(json.dumps(content, indent=1, default=str))
        temporary.replace(self.path)

    def end(self, name: str, status: str, error: str = "") -> None:
        figure = self.figures.setdefault(name, {})
        figure["status"] = status
        if error:
            figure["error"] = error
        self.running = []
        self.write()


def set_environment(wheels: Path | None) -> None:
    """Set what PyTorch reads when it is loaded; unpack wheels, for this call alone."""
    SCRATCH.mkdir(parents=True, exist_ok=True)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(CACHE)
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")  # as the command does
    # PyTorch's own choice on Hopper. It is read once, and deterministic kernels need it named.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    paths = []
    if wheels is not None:
        for wheel in sorted(wheels.glob("*.whl")):
            folder = SCRATCH / "site" / wheel.stem
            if not folder.exists():
                zipfile.ZipFile(wheel).extractall(folder)
            paths.append(str(folder))
    sys.path += paths
    known = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [*paths, known]))


def work(
    bench: Any,
    figures: Mapping[str, Callable[[Any, Note], None]],
    limits: Mapping[str, int],
    end: float,
) -> None:
    """Compute figures in this process until the time `end`.

    Args:
        limits: seconds that each may take, by name, in their order.
    """

    def too_late(*_: object) -> None:
        raise TimeoutError("its time is over")

    signal.signal(signal.SIGALRM, too_late)
    import torch._dynamo

    results = bench.results
    for name, seconds in limits.items():
        limit = min(seconds, end - time.time())
        if limit < LEAST:
            results.end(name, "no time left")
            continue
        results.figures[name] = {}
        results.running = [name, time.time(), limit]
        results.write()

        def note(name: str = name, **values: object) -> None:
            results.figures[name] |= values
            results.write()

        torch._dynamo.reset()  # every graph counts towards a limit of recompilations
        began = time.time()
        bench.deadline = began + limit
        status = "ok"
        error = ""
        signal.alarm(round(limit))
        try:
            figures[name](bench, note)
        except NeedsCuda:
            status = "needs CUDA"
        except Exception as problem:
            status = "failed"
            error = "".join(traceback.format_exception(problem)[-4:])[-1500:]
            traceback.clear_frames(problem.__traceback__)
            print(f"{name} failed:\n{error}", flush=True)
        finally:
            signal.alarm(0)
        note(seconds=time.time() - began)
        results.end(name, status, error)
        print(line_of(name, results.figures[name]), flush=True)
        if "CUDA error" in error:
            sys.exit("the device is lost to this process")


def supervise(
    command: Sequence[str],
    names: Sequence[str],
    out: Path,
    end: float,
) -> None:
    """Run workers until every figure has ended."""
    left = list(names)
    while left:
        before = list(left)
        worker = subprocess.Popen([*command, "--only", ",".join(left)], process_group=0)
        reason = ""
        while worker.poll() is None and not reason:
            time.sleep(0.3)
            running = Results(out).running
            if running and time.time() > running[1] + running[2] + GRACE:
                reason = "stopped after its limit"
            elif time.time() > end + GRACE:
                reason = "stopped at the call's end"
        with contextlib.suppress(ProcessLookupError):
            os.killpg(worker.pid, signal.SIGKILL)
        worker.wait()
        results = Results(out)
        if results.running:
            error = reason or f"exit code {worker.returncode}"
            results.end(results.running[0], "failed", error)
        left = [name for name in left if "status" not in results.figures.get(name, {})]
        # It cannot even start, or nothing more can.
        if left == before or time.time() > end:
            for name in left:
                results.end(name, "failed", f"not begun; exit code {worker.returncode}")
            return


def unpack_cache(earlier: Path) -> None:
    """Put back what an earlier call compiled, unless this machine still has it."""
    archive = earlier.parent / "cache.tgz"
    if archive.exists() and not CACHE.exists():
        with contextlib.suppress(OSError, tarfile.TarError), tarfile.open(archive) as tar:
            tar.extractall(CACHE, filter="data")


def pack_cache(out: Path) -> None:
    """Write what was compiled to cache.tgz, if it is small."""
    archive = out / "cache.tgz"
    size = sum(file.stat().st_size for file in CACHE.rglob("*") if file.is_file())
    print(f"compiled graphs: {size >> 20} MiB")
    if 0 < size < 20 * LARGEST_FILE:
        with tarfile.open(archive, "w:gz", compresslevel=4) as tar:
            tar.add(CACHE, ".")
        if archive.stat().st_size > LARGEST_FILE:
            archive.unlink()


def line_of(name: str, figure: Mapping[str, Any]) -> str:
    """Return a figure as a line of the table."""
    parts = []
    for key, value in figure.items():
        if isinstance(value, dict):
            value = " ".join(f"{k}={_short(v)}" for k, v in value.items())
        if key not in ("status", "seconds", "error"):
            parts.append(f"{key} {_short(value)}")
    parts += str(figure.get("error", "")).strip().splitlines()[-1:]
    status = figure.get("status", "")
    return f"{name:10} {status:10} {figure.get('seconds', 0.0):4.0f} s  {', '.join(parts)}"


def _short(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return str(value)
