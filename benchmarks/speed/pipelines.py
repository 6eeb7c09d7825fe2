"""A ring of Ouroboros, and other ways to train the same model on the same processes: seconds per
step.

    python -m torch.distributed.run --nproc-per-node 3 benchmarks/speed/pipelines.py --recipe
    small-ouroboros-k4

GPipe and 1F1B are PyTorch's (torch.distributed.pipelining), over as many stages as the ring has
devices, split as evenly, the embedding with the first and the head with the last; each has a copy
of the tied matrix, whose gradient the two add up. Neither has late gradients. Norms are not clipped
there, which costs little. Data parallel is the recipe without the section. Give each process a core
or GPU of its own.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path

import torch
from torch import Tensor, nn

from efftrain_cli.bench import bench, random_windows, started_state
from efftrain_cli.data.windows import Windows
from efftrain_cli.methods.ouroboros import head_in_blocks
from efftrain_cli.model.config import GPTConfig
from efftrain_cli.model.gpt import GPT
from efftrain_cli.plan.cost import likely_vocabulary
from efftrain_cli.plan.plan import full_plan
from efftrain_cli.recipe.recipe import Recipe, load_recipe
from efftrain_cli.training import dist
from efftrain_cli.training.build import build_state
from efftrain_cli.training.loop import train
from efftrain_cli.training.record import read_records
from efftrain_cli.training.session import choose_device
from efftrain_cli.training.stopwatch import wait_for

MICRO_BATCHES = 8


class Stage(nn.Module):
    """Consecutive blocks of a GPT, with the embeddings before the first."""

    def __init__(self, model: GPT, blocks: Sequence[bool]) -> None:
        super().__init__()
        self.model, self.blocks = model, list(blocks)

    def forward(self, x: Tensor) -> Tensor:
        return self.model.run_blocks(
            x if x.is_floating_point() else self.model.embed(x), self.blocks
        )


def chain_split(stages: int, shape: GPTConfig) -> tuple[int, ...]:
    """Blocks of each of a chain's stages, the last of which has the head: the busiest has least to
    do."""
    head = head_in_blocks(shape)
    choices = []
    for last in range(shape.n_layer + 1):
        each, more = divmod(shape.n_layer - last, stages - 1)
        split = (*(each + (number < more) for number in range(stages - 1)), last)
        choices.append((max(*split[:-1], last + head), split))
    return min(choices)[1]


def rivals(recipe: Recipe, windows: Windows, steps: int, device: torch.device) -> dict[str, float]:
    """Return the median seconds of a step, by name. All ranks call it; fp32 on CPUs and
    whatever the device multiplies fp32 in.

    1F1B and GPipe need a batch of several micro-batches and are left out of a batch that cannot be
    cut.
    """
    vocab_size = likely_vocabulary(recipe.data.tokenizer)
    batch_size, found = recipe.train.batch_size, {}
    if batch_size >= dist.world_size():
        alike = replace(recipe, ouroboros=None)
        found["data parallel"] = _data_parallel(alike, vocab_size, windows, steps, device)
    micro_batches = next(
        n for n in range(min(MICRO_BATCHES, batch_size), 0, -1) if batch_size % n == 0
    )
    if micro_batches >= dist.world_size():
        for name in ("GPipe", "1F1B"):
            seconds = _pipeline(name, recipe, vocab_size, windows, steps, device, micro_batches)
            found[f"{name}, {micro_batches} micro-batches"] = seconds
    return found


def _data_parallel(
    recipe: Recipe,
    vocab_size: int,
    windows: Windows,
    steps: int,
    device: torch.device,
) -> float:
    state, ends = started_state(recipe, vocab_size, device), []
    for record in islice(train(state, recipe, windows, windows.validation(1)), steps + 2):
        read_records(state, recipe, [record])
        ends.append(time.perf_counter())
    return statistics.median(after - before for before, after in pairwise(ends[1:]))


def _pipeline(
    name: str,
    recipe: Recipe,
    vocab_size: int,
    windows: Windows,
    steps: int,
    device: torch.device,
    micro_batches: int,
) -> float:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

    state = build_state(replace(recipe, ouroboros=None), vocab_size, device)
    model, optimizer = state.model, state.optimizer
    split = chain_split(dist.world_size(), model.config)
    begin = sum(split[: dist.rank()])
    blocks = [begin <= block < begin + split[dist.rank()] for block in range(len(model.h))]
    plan = full_plan(recipe, recipe.train.batch_size, recipe.model.seq_len, recipe.model.n_layer)
    batch = windows.batch(plan).to(device)

    def loss(x: Tensor, targets: Tensor) -> Tensor:
        return model.head_loss_sum(x, targets) / plan.tokens

    stage = PipelineStage(Stage(model, blocks), dist.rank(), dist.world_size(), device)
    kind = ScheduleGPipe if name == "GPipe" else Schedule1F1B
    schedule = kind(stage, micro_batches, loss_fn=loss, scale_grads=False)
    first, last = dist.rank() == 0, dist.rank() == dist.world_size() - 1
    tied = torch.distributed.new_group([0, dist.world_size() - 1])
    nonfinite, times = torch.zeros((), device=device), []
    for _ in range(steps + 2):
        start = time.perf_counter()
        if first:
            schedule.step(batch.tokens)
        elif last:
            schedule.step(target=batch.targets, losses=[])
        else:
            schedule.step()
        if (first or last) and model.config.tied and model.wte.weight.grad is not None:
            torch.distributed.all_reduce(model.wte.weight.grad, group=tied)
        optimizer.step(0.0, found_inf=nonfinite)
        model.zero_grad(set_to_none=True)
        wait_for(device)
        dist.barrier()  # a step is over when all are
        times.append(time.perf_counter() - start)
    return statistics.median(times[2:])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--recipe", default="small-ouroboros-k4")
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args()
    recipe = load_recipe(options.recipe, options.set)
    section = recipe.delayed_gradients
    with dist.joined(), tempfile.TemporaryDirectory() as folder:
        if section is None or dist.world_size() != section.devices:
            parser.error(
                "the recipe needs [ouroboros], and as many processes as one ring has devices"
            )
        device = choose_device("auto")
        ring = bench(recipe, device, options.steps).seconds_per_step
        recipe = replace(recipe, train=replace(recipe.train, tokens=10**15))
        windows = random_windows(recipe, likely_vocabulary(recipe.data.tokenizer), Path(folder))
        found = {"ring of late gradients": ring} | rivals(recipe, windows, options.steps, device)
        if dist.rank() == 0:
            for name, seconds in found.items():
                print(f"{name:32s} {1000 * seconds:9.2f} ms a step")


if __name__ == "__main__":
    main()
