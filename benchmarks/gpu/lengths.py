"""Sequence length warmup over every multiple of 8 up to the full length: graphs, stalls, memory,
tokens/s by length; and whether it pays to keep cuDNN's attention away from changing shapes."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from unittest import mock

import torch

from benchmarks.gpu.measuring import Bench, Figure, Part, Training, figure, recipe_for, training
from efftrain_cli.methods.seq_len_warmup import SeqLenWarmup
from efftrain_cli.plan.preview import summarize_plan
from efftrain_cli.training.compiling import compile_seconds, compiled_graphs
from efftrain_cli.training.session import Session, probe


def warmup(
    bench: Bench,
    probed: bool = False,
    by_length: bool = False,
) -> Iterator[Figure]:
    recipe = recipe_for(bench, micro_batches=1)
    full = recipe.model.seq_len
    steps, after = full // 4, 2 if bench.smoke else 20
    recipe = replace(recipe, seq_len_warmup=SeqLenWarmup(start=8, steps=steps))
    seconds, graphs = compile_seconds(), compiled_graphs()
    run = training(bench, recipe)
    if probed:  # as pretrain does: the full shape is compiled and run before the first step
        unused: object = None
        session = Session(
            recipe=recipe, corpus=unused, train_data=unused, val_windows=unused, device=bench.device
        )  # type: ignore
        probe(session, run.state, summarize_plan(recipe, until=steps + after))
    rows = run.rows(steps + after)
    compiled = [row for row in rows if row["compile_seconds"]]
    note = f"{compile_seconds() - seconds:.0f} s, in {len(compiled)} steps"
    yield figure(
        "lengths seen",
        len({row["seq_len"] for row in rows}),
        "",
        f"8 to {full} in steps of 8",
    )
    yield figure("graphs", compiled_graphs() - graphs, "", note)
    yield figure(
        "shortest step",
        min(float(str(row["seconds"])) for row in rows) * 1000,
        "ms",
        "must be positive",
    )
    yield from stalls(rows, compiled)
    quiet = [row for row in rows if not row["compile_seconds"]]
    time = sum(float(str(row["seconds"])) for row in quiet)
    tokens = sum(int(str(row["seq_len"])) * int(str(row["batch_size"])) for row in quiet)
    yield figure(
        "tokens/s over the warmup",
        tokens / time,
        "tokens/s",
        f"{len(quiet)} steps that compiled nothing",
    )
    yield from memory(bench, run)
    if by_length:
        for length in sorted({8, full // 16, full // 8, full // 4, full // 2, full}):
            near = [
                row
                for row in quiet
                if abs(int(str(row["seq_len"])) - length) <= (8 if length < full else 0)
            ]
            if near:
                rate = statistics.median(float(str(row["tokens_per_second"])) for row in near)
                yield figure(f"at length {length}", rate, "tokens/s", f"{len(near)} steps")


def stalls(rows: list[dict[str, object]], compiled: list[dict[str, object]]) -> Iterator[Figure]:
    """What the first step at a length takes, relative to the second: plans and kernels that are
    made for a shape."""
    ratios = []
    for before, row, after in zip(rows, rows[1:], rows[2:], strict=False):
        same_length = row["seq_len"] == after["seq_len"]
        if (
            same_length
            and before["seq_len"] != row["seq_len"]
            and row not in compiled
            and after not in compiled
        ):
            ratios.append(float(str(row["seconds"])) / float(str(after["seconds"])))
    if ratios:
        note = f"largest {max(ratios):.2f}, of {len(ratios)}"
        yield figure("first step at a length / second", statistics.median(ratios), "times", note)


def memory(bench: Bench, run: Training) -> Iterator[Figure]:
    if bench.device.type == "cuda":
        peak, reserved = (
            torch.cuda.max_memory_allocated(bench.device),
            torch.cuda.max_memory_reserved(bench.device),
        )
        retries = torch.cuda.memory_stats(bench.device)["num_alloc_retries"]
        yield figure(
            "memory reserved",
            reserved / 2**30,
            "GiB",
            f"{peak / 2**30:.1f} allocated, {retries} retries",
        )
    assert not bool(run.state.nonfinite)


def own_order(bench: Bench) -> Iterator[Figure]:
    with mock.patch(
        "efftrain_cli.training.gradient.attention_kernels", lambda device, same_shape: nullcontext()
    ):
        yield from warmup(bench)


PARTS = (
    Part("probe first", lambda bench: warmup(bench, probed=True, by_length=True), 110),
    Part("cuDNN may be chosen at every length", own_order, 110),
)
