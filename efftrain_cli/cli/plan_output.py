"""How `efftrain pretrain --plan` prints a schedule."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import islice
from shutil import which
from typing import Any

from efftrain_cli.data.text import find_text
from efftrain_cli.foundation.console import (
    counted,
    human_bytes,
    human_count,
    human_flops,
    human_seconds,
    make_console,
    print_json,
    print_labelled,
    say,
    table_lines,
)
from efftrain_cli.foundation.environment import planned_device
from efftrain_cli.foundation.errors import DataError
from efftrain_cli.foundation.files import machine_memory
from efftrain_cli.foundation.step import Progress, StepPlan
from efftrain_cli.plan.cost import PlanCost, plan_cost, vocabulary_of
from efftrain_cli.plan.preview import assumptions, csv_lines, staged_warnings, turning_points
from efftrain_cli.recipe.recipe import Recipe
from efftrain_cli.run.rates import measured_rate


def print_plan(recipe: Recipe, until: int | None, form: str, device: str = "auto") -> None:
    """Print every step as CSV, or the turning points with the costs as JSON or as a table;
    assumptions go to stderr."""
    for line in assumptions(recipe):
        say(f"assumed: {line}")
    # FLOPs may decide when a model grows; without stages a plan of 300,000 steps is quicker without
    # them.
    vocab_size = vocabulary_of(recipe.data.tokenizer) if recipe.stages else None
    if form == "csv":
        # One write per few thousand lines: a plan of 300,000 steps is printed in seconds.
        lines = csv_lines(recipe, until, vocab_size)
        while chunk := list(islice(lines, 4096)):
            sys.stdout.write("\n".join([*chunk, ""]))
        return
    points, left_out = turning_points(recipe, until, vocab_size)
    for warning in staged_warnings(recipe, points[-1][2]):
        say(f"warning: {warning}")
    if form == "json":
        print_json(_as_json(recipe, points, plan_cost(recipe, until), device))
        return
    rows = []
    for reason, plan, after in points:
        size = (f"{plan.seq_len:,}", f"{plan.batch_size:,}", f"{plan.batch_size * plan.seq_len:,}")
        rows.append((f"{plan.step:,}", f"{after.tokens:,}", *size, f"{plan.lr:.3g}", reason))
    # Plain lines: in a narrow terminal a table of Rich's would cut numbers short.
    header = ("step", "tokens", "seq_len", "batch", "tokens/step", "lr", "")
    table = table_lines(header, rows, ("tokens/step",))
    if left_out:
        table.append(f"... {counted(left_out, 'more change')}; every step: --format csv")
    print("\n".join([*table, ""]))
    print_labelled(make_console(result=True), cost_lines(recipe, until, device))


def _as_json(
    recipe: Recipe,
    points: Sequence[tuple[str, StepPlan, Progress]],
    cost: PlanCost | None,
    device: str,
) -> dict[str, Any]:
    """Return the plan as plain values; `cost` is None if only preparing the data shows the
    vocabulary."""
    steps = []
    for reason, plan, after in points:
        counts = {"reason": reason, "tokens": after.tokens, "windows": after.windows}
        steps.append(plan._asdict() | counts)
    costs = None
    if cost is not None:
        rate = measured_rate(device, recipe)
        costs = {
            "steps": cost.summary.steps,
            "flops": cost.summary.flops,
            "seconds": None if rate is None else cost.summary.flops / rate.flops_per_second,
            "parameters": cost.parameters,
            "vocab_size": cost.vocab_size,
            "memory_bytes": cost.memory_bytes,
            "disk_bytes": recipe.checkpoint.keep * cost.checkpoint_bytes,
        }
    return {"schema_version": 1, "steps": steps, "cost": costs}


def cost_lines(recipe: Recipe, until: int | None, device: str) -> Iterator[str]:
    """Describe FLOPs, time, memory and disk of a plan, as far as they are known before the data is
    prepared."""
    try:
        find_text(recipe.data)
    except DataError as error:
        yield f"text       missing: {error}"
    cost = plan_cost(recipe, until)
    if cost is None:
        yield (
            "cost       known once the data is prepared:"
            f" the vocabulary of {recipe.data.tokenizer} decides"
        )
        return
    model, checkpoint = recipe.model, recipe.checkpoint
    yield (
        f"compute    {human_flops(cost.summary.flops)}s in {counted(cost.summary.steps, 'step')}: "
        f"{human_count(cost.parameters)} parameters with a vocabulary of {cost.vocab_size:,}"
    )
    rate = measured_rate(device, recipe)
    if rate is None:
        yield (
            "time       not known: nothing was measured here yet;"
            " `efftrain bench` with the same recipe measures it"
        )
    else:
        same = (rate.n_layer, rate.n_embd) == (model.n_layer, model.n_embd)
        rough = (
            "" if same else f", a model of {rate.n_layer} x {rate.n_embd}: take it as a rough guess"
        )
        yield (
            f"time       about {human_seconds(cost.summary.flops / rate.flops_per_second)}"
            f" of training, at the {human_flops(rate.flops_per_second)}/s"
            f" of {rate.source} ({rate.device}, {rate.time[:10]}){rough}"
        )
    sequences, seq_len = cost.summary.largest_micro_batch
    yield (
        f"memory     about {human_bytes(cost.memory_bytes)}"
        f" in {cost.dtype} for micro-batches of {sequences:,} x {seq_len:,} tokens"
    )
    whose, there = memory_of(device)
    if there and cost.memory_bytes > there:
        yield f"           does not fit: {whose} has {human_bytes(there)} in all"
    yield (
        f"disk       {counted(checkpoint.keep, 'checkpoint')}"
        f" of {human_bytes(cost.checkpoint_bytes)}"
    )


def memory_of(device: str) -> tuple[str, int]:
    """Return whose memory training on `device` takes, and its bytes; 0 if no system says so. Import
    no PyTorch."""
    device = planned_device(device)
    tool = None if device == "cpu" else which("nvidia-smi")
    if tool is not None:
        query = [tool, "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
        with suppress(OSError, subprocess.TimeoutExpired):  # a driver that hangs
            done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=False)
            sizes = [int(line) for line in done.stdout.split() if line.isdigit()]
            if sizes:
                return "the GPU", min(sizes) * 2**20
    if device.startswith("cuda"):
        return "the GPU", 0
    return "this machine", machine_memory() or 0
