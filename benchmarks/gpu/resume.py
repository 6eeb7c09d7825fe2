"""Runs stopped and resumed in processes of their own, with deterministic kernels and without."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence

from benchmarks.gpu.measuring import Bench, Figure, Part, check, child_environment


def halves(bench: Bench) -> Iterator[Figure]:
    half = 3 if bench.smoke else 50
    sizes = [] if bench.smoke else ["model.n_embd=256", "train.dtype=bf16"]
    environment = child_environment(bench)

    def begin(*arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "efftrain_cli", *arguments]
        return subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def finish(processes: Sequence[subprocess.Popen[str]]) -> None:
        try:
            for process in processes:
                output, _ = process.communicate()
                if process.returncode:
                    raise RuntimeError(
                        f"{process.args}: exit {process.returncode}\n{output[-1500:]}"
                    )
        finally:
            for process in processes:
                process.kill()

    def losses(name: str) -> list[float]:
        lines = (bench.folder / "runs" / name / "metrics.jsonl").read_text().splitlines()
        by_step = {row["step"]: row["loss"] for row in map(json.loads, lines) if "loss" in row}
        return [by_step[step] for step in range(half + 1, 2 * half + 1)]

    ways = (
        {"deterministic": "true"}
        if bench.smoke
        else {"deterministic": "true", "any kernels": "false"}
    )
    settings = [part for size in sizes for part in ("--set", size)]
    finish([begin("prepare", "--recipe", "quickstart")])
    first = []
    for i, value in enumerate(ways.values()):
        common = [
            "--recipe",
            "quickstart",
            *settings,
            "--set",
            f"train.deterministic={value}",
            "--no-probe",
        ]
        first.append(begin("pretrain", *common, "--name", f"whole{i}", "--steps", str(2 * half)))
        first.append(begin("pretrain", *common, "--name", f"halves{i}", "--steps", str(half)))
    finish(first)
    finish(
        [
            begin("pretrain", "--resume", f"halves{i}", "--steps", str(2 * half), "--no-probe")
            for i in range(len(ways))
        ]
    )
    for i, way in enumerate(ways):
        error = max(
            abs(a - b) / abs(b)
            for a, b in zip(losses(f"halves{i}"), losses(f"whole{i}"), strict=True)
        )
        limit = 0.0 if way == "deterministic" else 1e-3
        yield check(f"resumed after {half} steps, {way}: loss, largest of {half}", error, limit)


PARTS = (Part("two halves", halves, 160),)
