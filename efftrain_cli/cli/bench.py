"""`efftrain bench`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

from typer import Option

from efftrain_cli.cli.app import app
from efftrain_cli.cli.options import (
    Device,
    Devices,
    Overrides,
    RecipeArgument,
    RecipeOption,
    TableOrJson,
    chosen_recipe,
    share,
)
from efftrain_cli.foundation.errors import UsageError


@app.command(
    rich_help_panel="Machine",
    examples=(
        "efftrain bench small",
        "efftrain bench gpt2-117m --device cuda --set train.compile=on",
    ),
)
def bench(
    recipe_argument: RecipeArgument = None,
    recipe_option: RecipeOption = None,
    set_: Overrides = None,
    device: Device = "auto",
    devices: Devices = 1,
    steps: Annotated[int, Option(min=1, help="Steps to time, after three to warm up.")] = 10,
    profile: Annotated[
        Path | None, Option(help="Write torch.profiler's trace of three steps here.")
    ] = None,
    format_: TableOrJson = "table",
) -> None:
    """Measure tokens/s, MFU, memory and the time of each phase of a step on this device."""
    from efftrain_cli.recipe.recipe import load_recipe

    recipe = chosen_recipe(recipe_argument, recipe_option)
    loaded = load_recipe(recipe, set_ or [])
    # torch.profiler reports its own start and end on standard error, unless told before torch is
    # imported.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    share(device, devices)
    from dataclasses import asdict
    from statistics import median

    from efftrain_cli.bench import bench as measure
    from efftrain_cli.foundation.console import (
        counted,
        human,
        print_folded,
        print_json,
        table_lines,
    )
    from efftrain_cli.plan.describe import LABEL
    from efftrain_cli.plan.preview import summarize_plan
    from efftrain_cli.plan.rates import Rate, remember_rate
    from efftrain_cli.training import dist
    from efftrain_cli.training.session import check_ranks, choose_device

    with dist.joined():
        if profile is not None:
            if dist.world_size() > 1:
                raise UsageError(
                    "--profile follows the steps of one device\n  leave it out, or bench one device"
                )
            # torch.profiler does not report a file that it cannot write.
            try:
                profile.open("a").close()
            except OSError as error:
                raise UsageError(
                    f"--profile {profile}: {error.strerror}\n  name another file"
                ) from None
        chosen = choose_device(device)
        check_ranks(loaded, summarize_plan(loaded, until=1))
        result = measure(loaded, chosen, steps, profile=profile)
        if not dist.is_main():
            return
    devices = len(result.peak_memory_bytes)
    if devices == 1:  # plans are of one device, with all threads of its machine
        remember_rate(
            Rate(
                device=result.device,
                device_kind=chosen.type,
                source=f"bench of {recipe}",
                n_layer=loaded.model.n_layer,
                n_embd=loaded.model.n_embd,
                flops_per_second=result.flops_per_second,
                flops_per_token=result.flops_per_token,
            )
        )
    if format_ == "json":
        print_json({"recipe": recipe, **asdict(result)})
        return
    mfu = "N/A (peak of this device is not known)" if result.mfu is None else f"{result.mfu:.1%}"
    peaks = [human(peak, "B") for peak in result.peak_memory_bytes]
    milliseconds = [1000 * seconds for seconds in sorted(result.step_seconds)]
    lines = [
        (
            f"recipe  {recipe}: {human(result.parameters)} parameters, vocabulary"
            f" {result.vocab_size:,}, {result.batch_size} x {result.seq_len} tokens in"
            f" {counted(result.accumulation_steps, 'accumulation step')}"
        ),
        (
            f"device  {f'{devices} x ' if devices > 1 else ''}{result.device},"
            f" {result.dtype}, {'compiled' if result.compiled else 'eager'}, torch {result.torch},"
            f" {counted(result.threads, 'thread')}"
        ),
        (
            f"speed   {human(result.tokens_per_second)} tokens/s,"
            f" {median(milliseconds):.1f} ms a step (median of {len(milliseconds)};"
            f" {milliseconds[0]:.1f} to {milliseconds[-1]:.1f})"
        ),
        f"FLOPs   {human(result.flops_per_token, 'FLOP')}s per token by 6 N + 12 L d T,"
        f" logits included: {human(result.flops_per_second, 'FLOP')}/s, MFU {mfu}",
        f"memory  {', '.join(peaks)} at the peak",
        f"compile {result.compile_seconds:.1f} s, {counted(result.compiled_graphs, 'graph')}",
    ]
    print_folded("\n".join(lines), LABEL)
    print()
    total = sum(result.phases.values())
    rows = []
    for phase, seconds in result.phases.items():
        rows.append((phase, f"{1000 * seconds:.2f} ms", f"{seconds / total:.1%}"))
    print("\n".join(table_lines(("phase", "a step", "share"), rows)))
