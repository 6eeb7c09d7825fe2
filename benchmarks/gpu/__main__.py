"""Everything that is to be measured on a GPU, in calls of nine minutes; the last prints the page's
table.

    python benchmarks/gpu device speed reference correctness     the figures that matter most
    python benchmarks/gpu largest lengths resume
    python benchmarks/gpu levers methods                         these three fit into thirty minutes
    python benchmarks/gpu evidence pair                          a pair of runs; seconds for
                                                                 docs/evidence's FLOPs
    python benchmarks/gpu devices                                needs several GPUs
    python benchmarks/gpu table                                  docs/performance.md's CUDA table

    --out DIR         results go to DIR/gpu.json (default bench-out), after every figure
    --earlier FILE    reads the gpu.json of an earlier call, and the compiled graphs beside it, on a
                      machine that keeps nothing
    --wheels DIR      installs the wheels in DIR for this call, on a machine that lacks packages and
                      has no network
    --smoke           tiny shapes on a CPU: tests the script itself

A piece consists of parts. Each part has its seconds and is stopped after them; what it has measured
until then is kept. The same command run again does the parts that are missing, stopped or failed.
Run it from the checkout's root. Needs no network and no data: random tokens, and the standard
library's source where runs are resumed.

FLOPs per token are 6 N + 12 n_layer n_embd seq_len, logits included; MFU is their share of the data
sheet's dense peak. Compilation is not part of any rate; its seconds stand beside it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path


def set_environment() -> None:
    """Set what PyTorch and its compiler read when they are loaded; a setting of the user's own
    stands."""
    here = Path(__file__).resolve()
    # The checkout's own code, and the plain loop's folder.
    sys.path[:0] = [str(here.parents[2]), str(here.parents[1] / "speed")]
    cache = Path(tempfile.gettempdir()) / f"efftrain-inductor-{os.getuid()}"
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache))
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(min(16, os.cpu_count() or 1)))
    if not any(name in os.environ for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")):
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"  # as the command line does


def install_wheels(folder: Path) -> None:
    """Install the wheels of a folder where only this call and its child processes find them."""
    wheels = sorted(map(str, folder.glob("*.whl")))
    if not wheels:
        sys.exit(f"--wheels {folder}: there are no wheels")
    target = Path(tempfile.gettempdir()) / f"efftrain-wheels-{os.getuid()}"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
    subprocess.run([*pip, "--upgrade", "--target", str(target), *wheels], check=True)
    sys.path.insert(0, str(target))
    known = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(target), *([known] if known else [])])


def wheels_folder(arguments: list[str]) -> Path | None:
    """The folder that `--wheels` names: it is needed before anything else can be imported."""
    for option, value in zip(arguments, [*arguments[1:], ""], strict=True):
        if option == "--wheels":
            return Path(value)
        if option.startswith("--wheels="):
            return Path(option.partition("=")[2])
    return None


if __name__ == "__main__":
    set_environment()
    wheels = wheels_folder(sys.argv[1:])
    if wheels is not None:
        install_wheels(wheels)
    from benchmarks.gpu.command import main

    main(__doc__ or "")
