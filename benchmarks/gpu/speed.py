"""GPT-2 117M as its recipe trains it: rate, phases, cost of the stability measures, profile, idle
share."""

from __future__ import annotations

from collections.abc import Iterator

from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.measuring import (
    Bench,
    Figure,
    Part,
    Training,
    figure,
    rate_figure,
    rates,
    recipe_for,
    repeated_seconds,
    training,
    wait_for,
)
from efftrain_cli.bench import phase_seconds
from efftrain_cli.training.record import read_records


def as_shipped(bench: Bench) -> Iterator[Figure]:
    run = training(bench, recipe_for(bench, micro_batches=16))  # the recipe's own batch of 512
    rate = rates(bench, run)
    yield rate_figure("117M, 16 x 32 x 1024, as shipped", rate)
    measures = repeated_seconds(bench, run.state.optimizer.columns)
    yield figure(
        "stability measures",
        measures / float(str(rate["seconds_per_step"])),
        "of a step",
        f"{1000 * measures:.2f} ms",
    )
    rows = (read_records(run.state, run.recipe, [record])[0] for record in run.stepping)
    step_seconds = float(str(rate["seconds_per_step"]))
    for name, value in phase_seconds(rows, bench.device, step_seconds).items():
        yield figure(f"phase {name}", 1000 * value, "ms a step")
    yield from profiled(bench, run)


def profiled(bench: Bench, run: Training, steps: int = 2, most: int = 14) -> Iterator[Figure]:
    """Where the device's time goes, by kernel, and how long it waits for work."""
    cuda = bench.device.type == "cuda"
    run.rows(1)
    wait_for(bench.device)
    with profile(
        activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    ) as profiler:
        for _ in range(steps):
            next(run.stepping)
        wait_for(bench.device)
    wanted = DeviceType.CUDA if cuda else DeviceType.CPU
    # Annotations (a compiled graph's name, say) span the kernels inside them: counted too, those
    # would count twice.
    kernels = [e for e in profiler.events() if e.device_type == wanted and not e.is_user_annotation]
    seconds: dict[str, list[float]] = {}
    for event in kernels:
        seconds.setdefault(event.name, []).append(
            event.time_range.elapsed_us() if cuda else event.self_cpu_time_total
        )
    total = sum(map(sum, seconds.values())) or 1.0
    if cuda:
        busy, end = 0.0, 0.0
        for start, stop in sorted((e.time_range.start, e.time_range.end) for e in kernels):
            busy += max(0.0, stop - max(start, end))
            end = max(end, stop)
        span = end - min(e.time_range.start for e in kernels)
        yield figure(
            "device idle", 1 - busy / span, "of the time", f"over {steps} steps, profiler on"
        )
    for name, times in sorted(seconds.items(), key=lambda item: -sum(item[1]))[:most]:
        note = f"{len(times) / steps:.0f} calls, {sum(times) / steps / 1000:.2f} ms a step"
        yield figure(f"  {name[:70]}", sum(times) / total, "of device time", note)


PARTS = (Part("as shipped", as_shipped, 130),)
