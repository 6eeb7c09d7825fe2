"""Seconds on a device's time line, and the time of ranks for each other."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch


def wait_for(device: torch.device) -> None:
    """Return once a CUDA device has done all it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Stopwatch:
    """Seconds between two points of the device's own time line; reading them waits for the device,
    so read late.

    `idle`: start only when the device has done all it was given. Else host work that holds back the
    next kernels, as compilation does, may pass while the device still has earlier work to do:
    subtracting it would leave too little.
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
    """Stopwatches of the gradient all-reduces, copies into flat buckets included; none if the
    passes add up."""
    wait_seconds: float = 0.0
    """Seconds that the host waited until the last rank was done; on CUDA the host runs ahead of its
    device."""

    def comm_seconds(self) -> float | None:
        """Return the seconds of `sums`, if there are any; wait for the device."""
        return sum(watch.seconds() for watch in self.sums) if self.sums else None
