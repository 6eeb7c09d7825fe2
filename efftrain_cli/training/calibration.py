"""How fast the machine is at the moment, by a short fixed computation that has nothing to do with the recipe."""

from __future__ import annotations

import time
from statistics import median

import torch

from efftrain_cli.training.stopwatch import wait_for

_SIZE = {"cpu": 256, "cuda": 2048}
_REPEATS = 5


def calibrated_gflops(device: torch.device) -> float:
    """Rate of square fp32 matrix products, 10^9 FLOPs per second: the median of five stretches, about 50 ms in all.

    Recorded before and after training, so that seconds of runs are judged only where the machine was equally fast.
    Draws nothing from a random generator and keeps nothing.
    """
    n = _SIZE.get(device.type, _SIZE["cpu"])
    a = torch.linspace(-1.0, 1.0, n * n, device=device).view(n, n)
    out = torch.empty_like(a)
    products = 10
    rates = []
    for stretch in range(_REPEATS + 1):
        wait_for(device)
        start = time.perf_counter()
        for _ in range(products):
            torch.matmul(a, a, out=out)
        wait_for(device)
        if stretch:  # the first one warms up
            rates.append(products * 2 * n**3 / (time.perf_counter() - start) / 1e9)
    return round(median(rates), 3)
