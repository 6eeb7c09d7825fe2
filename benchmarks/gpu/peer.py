"""modded-nanogpt's plain 124M file, a process of its own, on random tokens."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import statistics
import subprocess
import sys
from collections.abc import Iterable

import numpy as np

from benchmarks.gpu.measuring import VOCAB, Bench
from benchmarks.gpu.process import NeedsCuda, Note

FLOPS = 854.7e6
"""A token, 6 N + 12 L C T: 12 x 768, 50,304 words, T = 1024."""
CHANGES = {
    "train_steps = 3250": "train_steps = 60",
    "val_tokens = 20 * 524288": "val_tokens = 524288",
}


def peer_seconds(lines: Iterable[str], most: int, tail: list[str]) -> list[float]:
    """The peer's own times of its steps from the sixth on, as it prints them."""
    totals: list[float] = []
    with contextlib.suppress(TimeoutError):  # what was printed until then counts
        for line in lines:
            tail.append(line)
            if found := re.match(r"step:\d+/\d+ train_time:([\d.]+)s step_avg", line):
                totals.append(float(found[1]))
            if len(totals) == most:
                break
    return [later - earlier for earlier, later in itertools.pairwise(totals[4:])]


def peer(bench: Bench, note: Note) -> None:
    """Time its steps; its rate in tokens and in FLOPs."""
    if bench.peer_file is None and bench.smoke:
        raise NeedsCuda
    if bench.peer_file is None:
        raise FileNotFoundError("no --peer FILE")
    text = bench.peer_file.read_text()
    for old, new in CHANGES.items():
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    name = bench.peer_file.name
    compile(text, name, "exec")
    folder = bench.folder / "peer"
    (folder / "data/fineweb10B").mkdir(parents=True)
    (folder / name).write_text(text)
    for split, tokens in (("train", 34_000_000), ("val", 600_000)):
        tokens = 5000 if bench.smoke else tokens
        header = np.zeros(256, dtype=np.int32)
        header[:3] = 20240520, 1, tokens
        ids = np.random.default_rng(0).integers(0, VOCAB, tokens, dtype=np.uint16)
        path = folder / f"data/fineweb10B/fineweb_{split}_000.bin"
        path.write_bytes(header.tobytes() + ids.tobytes())
    if bench.smoke:
        raise NeedsCuda
    bench.free()
    ours = ("PYTORCH_ALLOC_CONF", "CUBLAS_WORKSPACE_CONFIG")
    theirs = {name: value for name, value in os.environ.items() if name not in ours}
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    process = subprocess.Popen(
        [sys.executable, "-u", name],
        cwd=folder,
        env={**theirs, **alone, "MASTER_PORT": "29511"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    tail: list[str] = []
    try:
        assert process.stdout is not None
        times = peer_seconds(process.stdout, 34, tail)
    finally:
        process.kill()
        process.wait()
    if len(times) < 5:
        raise RuntimeError("too few steps; its last lines:\n" + "".join(tail[-12:]))
    rate = 524288 / statistics.median(times)
    note(tokens_per_second=rate, step_seconds=statistics.median(times), steps=len(times))
    note(mfu=rate * FLOPS / bench.peak, flops_per_token=FLOPS)
