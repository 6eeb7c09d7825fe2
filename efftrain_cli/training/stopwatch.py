"""Seconds on a device's time line, the time of ranks for each other, and the speed of the machine."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from statistics import median

import torch


def wait_for(device: torch.device) -> None:
    """Return once a CUDA device has done all it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Stopwatch:
    """Seconds between two points of the device's own time line; reading them waits for the device, so read late.

    `idle`: start only when the device has done all it was given. Else host work that holds back the next kernels, as
    compilation does, may pass while the device still has earlier work to do: subtracting it would leave too little.
    """

    def __init__(self, device: torch.device, idle: bool = False) -> None:
        self._device = device
        if idle:
            wait_for(device)
        self.cpu_seconds = -time.process_time()
        """Processor seconds of this process between construction and `stop`."""
        self._start: float | torch.cuda.Event = self._now()
        self._end: float | torch.cuda.Event = self._start

    def _now(self) -> float | torch.cuda.Event:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        # Without its stream an event is recorded on the current device, which need not be this one.
        event.record(torch.cuda.current_stream(self._device))
        return event

    def stop(self) -> Stopwatch:
        """Mark the end; return this stopwatch."""
        self._end = self._now()
        self.cpu_seconds += time.process_time()
        return self

    def seconds(self) -> float:
        """Return the seconds between construction and `stop`; wait for the device."""
        if isinstance(self._start, float) and isinstance(self._end, float):
            return self._end - self._start
        assert isinstance(self._start, torch.cuda.Event) and isinstance(self._end, torch.cuda.Event)
        self._end.synchronize()
        return self._start.elapsed_time(self._end) / 1000


@dataclass
class CommStats:
    """Time that one rank spent on the others."""

    sums: list[Stopwatch] = field(default_factory=list)
    """Stopwatches of the gradient all-reduces, copies into flat buckets included; none if the passes add up."""
    wait_seconds: float = 0.0
    """Seconds that the host waited until the last rank was done; on CUDA the host runs ahead of its device."""

    def comm_seconds(self) -> float | None:
        """Return the seconds of `sums`, if there are any; wait for the device."""
        return sum(watch.seconds() for watch in self.sums) if self.sums else None


_SIZE = {"cpu": 256, "cuda": 2048}
_REPEATS = 5


def calibrated_gflops(device: torch.device) -> float:
    """Measure the rate of square fp32 matrix products, 10^9 FLOPs per second: the median of five stretches of 10 ms.

    It has nothing to do with the recipe. It is recorded before and after training, so that seconds of runs are judged
    only if the machine was equally fast. It draws nothing from a random generator.
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
