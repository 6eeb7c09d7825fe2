"""The device that a plan is for: the one here, as the system describes it, or an assumed one.

No torch, and nothing runs on the device.
"""

from __future__ import annotations

import re
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from shutil import which

from efftrain_cli.foundation.environment import planned_device
from efftrain_cli.foundation.errors import UsageError, nearest
from efftrain_cli.foundation.files import machine_memory
from efftrain_cli.model.flops import peak_flops

CPU_INFO = Path("/proc/cpuinfo")
GPUS = {
    "A10": ("A10", 24),
    "A100": ("A100-SXM4-80GB", 80),
    "A100-40GB": ("A100-SXM4-40GB", 40),
    "B200": ("B200", 180),
    "GH200": ("GH200 480GB", 96),
    "H100": ("H100 80GB HBM3", 80),
    "H200": ("H200", 141),
    "L4": ("L4", 24),
    "L40S": ("L40S", 48),
    "MI300X": ("AMD Instinct MI300X", 192),
    "RTX 3090": ("GeForce RTX 3090", 24),
    "RTX 4090": ("GeForce RTX 4090", 24),
    "RTX 5090": ("GeForce RTX 5090", 32),
    "T4": ("Tesla T4", 16),
    "V100": ("Tesla V100-SXM2-32GB", 32),
}
"""Name for --assume -> (PyTorch's name, memory in GB)."""
SHARE = 0.4
"""Share of a device's peak that is assumed if none is given."""


@dataclass(frozen=True, kw_only=True)
class PlannedDevice:
    """A device, of which there may be several."""

    memory: int
    """Bytes; 0 if unknown."""
    has_bf16: bool = False
    """Whether it has units for bf16 matrix products."""
    has_tf32: bool = False
    torch_name: str = ""
    """PyTorch's name of an assumed device; "" for the one here."""
    count: int = 1
    share: float = SHARE
    """Assumed share of the peak rate."""

    def dtype(self, setting: str) -> str:
        """Return the number type of training by train.dtype: "bf16", "tf32" or "fp32"."""
        if setting == "tf32" and not self.has_tf32:
            return "fp32"
        if setting != "auto":
            return setting
        return "bf16" if self.has_bf16 else "fp32"

    def peak(self, dtype: str) -> float | None:
        """Return the peak rate of an assumed device, FLOP/s; None for the device here."""
        return peak_flops(self.torch_name, dtype) if self.torch_name else None


def device_here(device: str) -> PlannedDevice:
    """Return the device that training on `device`, as --device names it, takes here."""
    kind = planned_device(device)
    tool = None if kind == "cpu" else which("nvidia-smi")
    if tool is not None:
        query = [tool, "--query-gpu=memory.total,compute_cap", "--format=csv,noheader,nounits"]
        with suppress(OSError, ValueError, subprocess.TimeoutExpired):  # a driver that hangs
            done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=False)
            found = [line.split(",") for line in done.stdout.splitlines()]
            sizes = [int(size) * 2**20 for size, _ in found]
            is_ampere = min(float(version) for _, version in found) >= 8
            return PlannedDevice(memory=min(sizes), has_bf16=is_ampere, has_tf32=is_ampere)
    if kind.startswith("cuda"):
        return PlannedDevice(memory=0)
    flags = ""
    with suppress(OSError, UnicodeDecodeError):
        flags = CPU_INFO.read_text(encoding="ascii")
    return PlannedDevice(
        memory=machine_memory() or 0,
        has_bf16="avx512_bf16" in flags or "amx_tile" in flags,
    )


def assumed_device(text: str) -> PlannedDevice:
    """Return the devices that "H100 x 8 at 40%" names; one at SHARE if it says only the name.

    Raises:
        UsageError: the text names no device of GPUS, no device at all, or no share of a peak.
    """
    found = re.fullmatch(r"(.+?)(?: *x *(\d+))?(?: +at +(\d+(?:\.\d+)?) *%)?", text.strip())
    name = found[1].upper() if found else ""
    if found is None or name not in GPUS:
        hint = nearest(name, GPUS) or f"known devices: {', '.join(GPUS)}"
        raise UsageError(
            f'--assume "{text}" names no known device\n  write "H100 x 8 at 40%"; {hint}'
        )
    count = int(found[2] or 1)
    share = float(found[3] or 100 * SHARE) / 100
    if count < 1 or not 0 < share <= 1:
        raise UsageError(
            f'--assume "{text}" needs a device or more, and above 0 to 100 % of its peak\n'
            '  write "H100 x 8 at 40%"'
        )
    torch_name, memory = GPUS[name]
    return PlannedDevice(
        memory=memory * 10**9,
        has_bf16=peak_flops(torch_name, "bf16") is not None,
        has_tf32=peak_flops(torch_name, "tf32") is not None,
        torch_name=torch_name,
        count=count,
        share=share,
    )
