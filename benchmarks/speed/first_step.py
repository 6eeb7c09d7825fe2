"""Seconds from the command `efftrain pretrain --recipe quickstart` to its first update, the data
prepared.

    python benchmarks/speed/first_step.py [--rounds 3]

Wall time counts from before the interpreter starts; CPU time is what a busy machine does not
stretch as much.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time

CHILD = """
import os, sys, time
import efftrain_cli.__main__ as program
import efftrain_cli.cli.pretrain  # the command, not yet PyTorch
sys.argv = ["efftrain", "pretrain", "--recipe", "quickstart", "--name", sys.argv[1], "--steps", "1"]

class Watch:
    def find_spec(self, name, path=None, target=None):
        if name == "efftrain_cli.training.logbook":  # imported by pretrain, before the loop
            import efftrain_cli.training.loop as loop
            update = loop.update
            def timed(*arguments):
                seconds = time.time() - float(os.environ["STARTED"])
                print("FIRST", seconds, time.process_time(), flush=True)
                return update(*arguments)
            loop.update = timed

sys.meta_path.insert(0, Watch())
program.main()
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as runs:
        environment = {**os.environ, "EFFTRAIN_RUNS": runs}
        subprocess.run([sys.executable, "-m", "efftrain_cli", "prepare", "--recipe", "quickstart"],
                       env=environment, check=True, capture_output=True)  # fmt: skip
        for i in range(rounds):
            environment["STARTED"] = str(time.time())
            command = [sys.executable, "-c", CHILD, f"run{i}"]
            out = subprocess.run(
                command, env=environment, check=True, capture_output=True, text=True
            ).stdout
            wall, cpu = next(line for line in out.splitlines() if line.startswith("FIRST")).split()[
                1:
            ]
            print(
                f"first update after {float(wall):.2f} s, {float(cpu):.2f} s of CPU time, load"
                f" {os.getloadavg()[0]:.1f}"
            )


if __name__ == "__main__":
    main()
