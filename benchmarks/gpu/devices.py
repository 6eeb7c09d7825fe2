"""Every visible device trained on alone, so that its seconds are its own; then several of them
together, in each way that there is."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from benchmarks.gpu.measuring import (
    Bench,
    Figure,
    Part,
    child_environment,
    figure,
    recipe_for,
    training,
    wait_for,
)
from efftrain_cli.training.session import choose_device

SMALL = (
    "model.n_layer=2",
    "model.n_head=2",
    "model.n_embd=32",
    "model.seq_len=32",
    "train.micro_batch_tokens=64",
    "data.tokenizer=bpe:512",
)
"""Of a smoke run."""


def each(bench: Bench) -> Iterator[Figure]:
    names = (
        [f"cuda:{i}" for i in range(torch.cuda.device_count())]
        if bench.device.type == "cuda"
        else ["cpu"]
    )
    for name in names:
        there = replace(bench, device=choose_device(name))
        run = training(there, recipe_for(there))
        run.rows(3)
        wait_for(there.device)
        start = time.perf_counter()
        rows = run.rows(3 if bench.smoke else 30)
        wall = time.perf_counter() - start
        seconds = sum(float(str(row["seconds"])) for row in rows)
        rate = sum(int(str(row["seq_len"])) * int(str(row["batch_size"])) for row in rows) / seconds
        verdict = "ok" if 0.5 < seconds / wall <= 1.02 else "WRONG"
        yield figure(
            f"117M on {name}",
            rate,
            "tokens/s",
            f"{verdict}, training seconds are {seconds / wall:.1%} of the wall's",
        )


def count(bench: Bench) -> int:
    """Devices to be used together: at most eight, two processes in a smoke run."""
    there = 2 if bench.smoke else torch.cuda.device_count()
    return min(there, 8)


WAYS: dict[str, tuple[str, ...]] = {
    "replicas": (),
    "shards": ("parallel.strategy=shard",),
}
"""Overrides by the name of each way to share a step."""


def command(
    bench: Bench, name: str, devices: int, sets: tuple[str, ...], *more: str
) -> subprocess.CompletedProcess[str]:
    """`efftrain NAME` of GPT-2 117M on so many devices."""
    sets = (
        *sets,
        *(
            (*SMALL, "train.batch_size=8", "train.compile=off")
            if bench.smoke
            else ("train.batch_size=512",)
        ),
    )
    words = [word for key in sets for word in ("--set", key)]
    line = [
        sys.executable,
        "-m",
        "efftrain_cli",
        name,
        "--recipe",
        "gpt2-117m",
        *words,
        "--device",
        bench.device.type,
    ]
    environment = child_environment(bench)
    return subprocess.run(
        [*line, "--devices", str(devices), *more],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def benched(bench: Bench, devices: int, sets: tuple[str, ...]) -> dict[str, Any]:
    done = command(
        bench, "bench", devices, sets, "--steps", "3" if bench.smoke else "10", "--format", "json"
    )
    if done.returncode:
        raise RuntimeError(
            f"bench on {devices} devices: exit {done.returncode}\n{done.stderr[-1500:]}"
        )
    return json.loads(done.stdout)


def together(bench: Bench) -> Iterator[Figure]:
    devices = count(bench)
    if devices == 1:
        yield figure(
            "several devices", None, "", "skipped: there is one device, and two or more are needed"
        )
        return
    alone = benched(bench, 1, ())
    for name, sets in WAYS.items():
        found = benched(bench, devices, sets)
        efficiency = alone["seconds_per_step"] / found["seconds_per_step"] / devices
        parts = ", ".join(
            f"{phase} {1000 * seconds:.1f} ms" for phase, seconds in found["phases"].items()
        )
        note = f"{efficiency:.0%} of {devices} times one device; {parts}"
        yield figure(
            f"117M on {devices} devices, {name}", found["tokens_per_second"], "tokens/s", note
        )


def repeats(bench: Bench) -> Iterator[Figure]:
    devices = count(bench)
    if devices == 1:
        yield figure(
            "resumed on several devices",
            None,
            "",
            "skipped: there is one device, and two or more are needed",
        )
        return
    text = bench.folder / "text.txt"
    draw = random.Random(1)
    words = ["".join(draw.choices("etaoinshrdlu", k=draw.randint(2, 7))) for _ in range(2000)]
    text.write_text(
        "\n".join(" ".join(draw.choices(words, k=12)) for _ in range(20_000))
    )  # about 1 MB
    common = (
        "train.deterministic=true",
        f"data.train={json.dumps(str(text))}",
        "data.tokenizer=bpe:512",
    )
    for name, sets in WAYS.items():
        done = command(bench, "verify-resume", devices, (*sets, *common), "--steps", "2")
        verdict = (
            "ok, bit for bit"
            if done.returncode == 0
            else f"WRONG, exit {done.returncode}: {done.stderr.strip()[-300:]}"
        )
        yield figure(f"resumed on {devices} devices, {name}", done.returncode, "exit code", verdict)


PARTS = (
    Part("each device", each, 120),
    Part("together", together, 240),
    Part("stopped and resumed", repeats, 150),
)
