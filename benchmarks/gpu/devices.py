"""Every visible device trained on alone: its seconds are its own, and as many as the clock on the wall shows."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

import torch

from benchmarks.gpu.measuring import Bench, Figure, Part, figure, recipe_for, training, wait_for
from efftrain_cli.training.session import choose_device


def each(bench: Bench) -> Iterator[Figure]:
    names = [f"cuda:{i}" for i in range(torch.cuda.device_count())] if bench.device.type == "cuda" else ["cpu"]
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
        yield figure(f"117M on {name}", rate, "tokens/s", f"{verdict}, training seconds are {seconds / wall:.1%} of the wall's")
    if len(names) == 1:
        yield figure("several devices", None, "", "there is one device")


PARTS = (Part("each device", each, 120),)
