"""Twelve figures of efftrain on one GPU, in two calls of eight and four minutes.

    python benchmarks/gpu 1 --out DIR [--peer FILE] [--wheels FOLDER]
    python benchmarks/gpu 2 --out DIR --earlier EARLIER/figures.json     goes on from call 1

Run it from the project's root; benchmarks/README.md says how to prepare a machine without a
network, and what each figure means. Every figure has its limit; one that fails prints its last
lines, and the next begins. DIR/figures.json is written after every value. `--only peer,llama`
computes some of them; `--smoke` runs the same code at tiny shapes on a CPU.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.gpu.process import (
    Results,
    line_of,
    pack_cache,
    set_environment,
    supervise,
    unpack_cache,
    work,
)

SECONDS = {"1": 455, "2": 228}
"""Seconds of a call in all, which leaves some of 8 and of 4 minutes."""

LIMITS = {
    "1": {
        "device": 25,
        "peer": 90,
        "gpt2": 110,
        "llama": 90,
        "gradients": 70,
        "resume": 70,
        "host_reads": 70,
        "gpt2_32": 80,
    },
    "2": {
        "lengths": 75,
        "methods": 60,
        "large": 95,
        "checkpoint": 45,
        "medium": 70,
        "pair": 150,
    },
}
"""The figures of each call in their order, and the seconds that each may take, the compiler's
included. The last ones are computed if time is left."""


def main() -> None:
    parser = argparse.ArgumentParser(
        "python benchmarks/gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("call", choices=("1", "2"))
    parser.add_argument("--out", type=Path, required=True, help="folder of figures.json")
    parser.add_argument("--earlier", type=Path, help="figures.json of call 1")
    parser.add_argument("--peer", type=Path, help="modded-nanogpt's train_gpt_simple.py")
    parser.add_argument("--wheels", type=Path, help="folder of wheels that the machine lacks")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--seconds", type=float, help="of the call in all")
    parser.add_argument("--only", help="figures by name, with commas")
    parser.add_argument("--end", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    out = options.out.resolve()
    set_environment(options.wheels)
    if options.end:
        from benchmarks.gpu.figures import FIGURES
        from benchmarks.gpu.measuring import Bench

        bench = Bench(out, options.smoke, options.peer)
        limits = {name: LIMITS[options.call][name] for name in options.only.split(",")}
        return work(bench, FIGURES, limits, options.end)

    end = time.time() + (options.seconds or SECONDS[options.call])
    out.mkdir(parents=True, exist_ok=True)
    if options.earlier:
        if options.earlier.resolve() != out / "figures.json":
            shutil.copyfile(options.earlier, out / "figures.json")
        unpack_cache(options.earlier)
    names = list(LIMITS[options.call])
    if options.only:
        names = options.only.split(",")
    results = Results(out)
    results.running = []
    for name in names:
        results.figures.pop(name, None)
    results.write()
    command = [sys.executable, __file__, options.call, "--out", str(out), "--end", str(end)]
    if options.smoke:
        command.append("--smoke")
    if options.peer:
        command += ["--peer", str(options.peer.resolve())]
    supervise(command, names, out, end)
    if options.call == "1" and not options.smoke:
        pack_cache(out)
    print()
    for name, figure in Results(out).figures.items():
        print(line_of(name, figure))


main()
