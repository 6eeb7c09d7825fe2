"""Everything that is to be measured on a GPU, in calls of under nine minutes each; the last prints the page's table.

    python benchmarks/gpu device speed correctness
    python benchmarks/gpu lengths reference resume
    python benchmarks/gpu largest levers methods
    python benchmarks/gpu evidence pair                   what docs/evidence counts in FLOPs, in seconds; a pair of runs
    python benchmarks/gpu devices                          where there are several GPUs
    python benchmarks/gpu table                            docs/performance.md's CUDA table from what was measured

    --out DIR         results go to DIR/gpu.json (default bench-out), after every figure
    --earlier FILE    carries the gpu.json of an earlier call in, for machines that keep nothing
    --smoke           on a CPU with tiny shapes: that the script itself works

A piece consists of parts. What one part has measured is kept whatever happens to the next; the same command run again
does the parts that are missing, failed or had no time left. Run it from the checkout's root, with efftrain installed or
PYTHONPATH=. set. Needs no network and no data: random tokens, and the standard library's source where runs are resumed.

FLOPs per token are 6 N + 12 n_layer n_embd seq_len, logits included; MFU is their share of the data sheet's dense peak.
Compilation is not part of any rate; its seconds stand beside it.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path


def set_environment() -> None:
    """What PyTorch and its compiler read when they are loaded; a setting of the user's own stands."""
    here = Path(__file__).resolve()
    # The checkout's own code, and benchmarks/ for the plain loop beside this folder.
    sys.path[:0] = [str(here.parents[2]), str(here.parents[1])]
    cache = Path(tempfile.gettempdir()) / f"efftrain-inductor-{os.getuid()}"
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache))
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(min(16, os.cpu_count() or 1)))
    if not any(name in os.environ for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")):
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"  # as the command line does


if __name__ == "__main__":
    set_environment()
    from benchmarks.gpu.command import main

    main(__doc__ or "")
