"""CPU seconds of whole training steps of several recipes, taken in turns so that a busy machine
disturbs all alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from efftrain_cli.foundation.step import Batch, StepPlan
from efftrain_cli.recipe.recipe import Recipe
from efftrain_cli.recipe.sections import Model, Optim, Train
from efftrain_cli.training.build import build_state
from efftrain_cli.training.loop import train

CPU = torch.device("cpu")


class RandomTokens:
    """Stands in for a corpus: uniform tokens, a function of the step."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def batch(self, plan: StepPlan, rank: int = 0, world_size: int = 1) -> Batch:
        generator = torch.Generator().manual_seed(plan.step)
        ids = torch.randint(
            self.vocab_size, (plan.batch_size, plan.seq_len + 1), generator=generator
        )
        return Batch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())


@dataclass(frozen=True, slots=True)
class Step:
    seconds: float
    """CPU seconds of this process, one thread."""
    flops: float


def six_by_384(micro_batch_tokens: int = 2048) -> Recipe:
    """The benchmark's shape: n_layer 6, n_embd 384, n_head 6, seq_len 256, batch 8."""
    return Recipe(
        model=Model(n_layer=6, n_head=6, n_embd=384, seq_len=256),
        optim=Optim(lr=1e-4, schedule="constant"),
        train=Train(
            tokens=10**9, batch_size=8, micro_batch_tokens=micro_batch_tokens, dtype="fp32"
        ),
    )


def take_turns(recipes: Mapping[str, Recipe], vocab_size: int, steps: int) -> dict[str, list[Step]]:
    """`steps` steps of each recipe, one after the other in turns; the first of each is a warmup and
    left out."""
    torch.set_num_threads(1)
    records = {}
    for name, recipe in recipes.items():
        state = build_state(recipe, vocab_size, CPU)
        validation = torch.zeros((1, recipe.model.seq_len + 1), dtype=torch.int64)
        records[name] = train(state, recipe, RandomTokens(vocab_size), validation)  # type: ignore[arg-type]
        next(records[name])  # step 0: the validation loss before training
    taken: dict[str, list[Step]] = {name: [] for name in recipes}
    for step in range(steps + 1):
        for name in recipes:
            start = time.process_time()
            record = next(records[name])
            seconds = time.process_time() - start
            assert record.result is not None
            if step:
                taken[name].append(Step(seconds, record.result.flops))
    return taken


def median_ratio(steps: Sequence[Step], baseline: Sequence[Step]) -> float:
    """Median over the turns of a step's seconds relative to the baseline's in the same turn."""
    return statistics.median(a.seconds / b.seconds for a, b in zip(steps, baseline, strict=True))
