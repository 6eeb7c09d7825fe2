"""Damage to files, as a disk or a cable does it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path


def flip(path: Path, bit: int) -> None:
    """Flip one bit of a file, counted from its first; from its end if negative. A second flip
    undoes it."""
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


def flips(path: Path, n: int, *, seed: object = 0, spared: int = 0) -> Iterator[None]:
    """Flip `n` random bits of a file in turn, each while the loop's body runs, but none of the last
    `spared` bytes."""
    bits = 8 * (path.stat().st_size - spared)
    dice = random.Random(str(seed))
    for _ in range(n):
        bit = dice.randrange(bits)
        flip(path, bit)
        yield
        flip(path, bit)
