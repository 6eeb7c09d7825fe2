"""What the device is, and ceilings measured on it."""

from __future__ import annotations

import platform
from collections.abc import Iterator

import torch

from benchmarks.gpu.measuring import Bench, DeviceReadings, Figure, Part, figure, repeated_seconds


def facts(bench: Bench) -> Iterator[Figure]:
    yield figure("torch", torch.__version__)
    yield figure("python", platform.python_version())
    if bench.device.type == "cuda":
        properties = torch.cuda.get_device_properties(bench.device)
        yield figure(
            "device", properties.name, "", f"capability {properties.major}.{properties.minor}"
        )
        yield figure("memory", properties.total_memory / 2**30, "GiB")
        yield figure("multiprocessors", properties.multi_processor_count)
        yield figure("devices", torch.cuda.device_count())
        yield figure("CUDA, cuDNN", f"{torch.version.cuda}, {torch.backends.cudnn.version()}")


def ceilings(bench: Bench) -> Iterator[Figure]:
    small = bench.smoke
    size, rows, width = (256, 64, 64) if small else (8192, 32768, 768)
    for m, k, n in ((size, size, size), (rows, width, 4 * width), (rows, 4 * width, width)):
        a, b = (torch.randn(shape, device=bench.device).bfloat16() for shape in ((m, k), (k, n)))
        with DeviceReadings(bench.device) as readings:
            seconds = repeated_seconds(bench, lambda a=a, b=b: a @ b, 3 if small else 200)
        note = "random data" + "".join(
            f", {name} {value:.0f}" for name, value in readings.medians.items()
        )
        yield figure(
            f"bf16 matmul {m} x {k} x {n}", 2 * m * k * n / seconds / 1e12, "TFLOP/s", note
        )
    source = torch.empty(2**20 if small else 2**31, dtype=torch.uint8, device=bench.device)
    target = torch.empty_like(source)
    seconds = repeated_seconds(bench, lambda: target.copy_(source))
    yield figure(
        "device copy", 2 * source.numel() / seconds / 1e12, "TB/s", "bytes read and written"
    )


PARTS = (Part("facts", facts, 5), Part("ceilings", ceilings, 20))
