"""A training session: a recipe with its data and its device. Every rank makes its own."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from efftrain_cli import __version__
from efftrain_cli.data.corpus import Corpus
from efftrain_cli.data.prepare import limits_of, prepare
from efftrain_cli.data.windows import Windows
from efftrain_cli.foundation.console import human, make_console
from efftrain_cli.foundation.errors import UsageError
from efftrain_cli.foundation.records import text_digest
from efftrain_cli.foundation.step import Batch, Progress, StepPlan
from efftrain_cli.model.flops import flops_per_token
from efftrain_cli.plan.plan import accumulation_steps, full_plan
from efftrain_cli.plan.preview import PlanSummary, summarize_plan
from efftrain_cli.recipe.recipe import Recipe, dump_recipe
from efftrain_cli.training import dist
from efftrain_cli.training.build import build_state
from efftrain_cli.training.compiling import compiles
from efftrain_cli.training.device import has_bf16, wait_for
from efftrain_cli.training.evaluation import gradient_norms
from efftrain_cli.training.gradient import Gradient
from efftrain_cli.training.memory import building_errors
from efftrain_cli.training.state import TrainState

SLOW_TO_VERIFY = 10**9
"""From so many tokens on, verification takes seconds and is announced."""
BF16_WIDTH = 256
"""Narrowest model, n_embd, that gains by bf16: conversions cost more than products save below."""


@dataclass(frozen=True, kw_only=True)
class Session:
    """The inputs of training other than the state."""

    recipe: Recipe
    corpus: Corpus
    train_data: Windows
    val_windows: Tensor
    """(n, seq_len + 1) token ids."""
    device: torch.device


def choose_device(name: str) -> torch.device:
    """Return the device for "auto", "cpu", "cuda" or "cuda:N"; of several ranks, "auto" and "cuda"
    are each one's own.

    Raises:
        UsageError: there is no such device.
    """
    count = torch.cuda.device_count()
    if "," in name:
        raise UsageError(
            f"--device {name}: names one device\nuse --devices N to train on N of them"
        )
    if name == "auto":
        name = "cpu"
        if count:
            name = "cuda"
    elif dist.world_size() > 1 and name not in ("cpu", "cuda"):
        raise UsageError(
            f"--device {name}: each of the {dist.world_size()} processes takes its own device\n"
            "use --device cuda or cpu"
        )
    if name == "cuda":
        index = dist.local_rank()
        # srun may show each process its own device only.
        if count == 1 and "SLURM_LOCALID" in os.environ:
            index = 0
        name = f"cuda:{index}"
    missing = UsageError(
        f"there is no device {name}: this PyTorch ({torch.__version__}) sees {count} of CUDA\n"
        "  give auto, cpu, cuda or cuda:N, and no more --devices than there are;"
        " CUDA_VISIBLE_DEVICES may hide some"
    )
    try:
        device = torch.device(name)
    except RuntimeError:
        raise missing from None
    if device.type == "cuda":
        if device.index >= count:
            raise missing
        # What names no device (allocations, timers, messages, the compiler) then uses it.
        torch.cuda.set_device(device)
    return device


def prepare_session(
    recipe: Recipe,
    device: torch.device,
    corpus: Corpus | None = None,
    verify: Literal["lazy", "full"] = "lazy",
) -> Session:
    """Verify every token of a corpus and lay it out for training.

    Args:
        corpus: None: the recipe's, which is prepared unless the cache has it. Of several ranks on a
            machine the first to come prepares; the others wait for its lock.
        verify: "lazy": compare only shards whose files have changed with their sha256.

    Raises:
        DataError: the data is missing, damaged, or smaller than the budget needs.
        UsageError: the ranks have other recipes, data or versions.
    """
    if recipe.train.deterministic:
        dist.fix_sums()
    if corpus is None:
        corpus = prepare(recipe.data, limits=limits_of(recipe), console=make_console())
    if dist.is_main():
        if corpus.train.tokens >= SLOW_TO_VERIFY:
            make_console().print(f"verifying {human(corpus.train.tokens)} tokens")
        # Here rather than in the first steps, whose seconds are measured.
        corpus.verify(full=verify == "full")
    if dist.world_size() > 1:
        dist.check_alike(
            {
                "efftrain": __version__,
                "source": source_hash(),
                "torch": torch.__version__,
                "device": device.type,
                "recipe": text_digest(dump_recipe(recipe)),
                "training data": corpus.train.sha256,
                "validation data": corpus.valid.sha256,
                "tokenizer": corpus.tokenizer_sha256,
            }
        )
    seq_len = recipe.model.seq_len
    on_cuda = device.type == "cuda"
    validation = Windows(corpus.valid, seq_len, 0)
    return Session(
        recipe=recipe,
        corpus=corpus,
        train_data=Windows(corpus.train, seq_len, recipe.seed, pin_memory=on_cuda),
        val_windows=validation.validation(recipe.eval.windows),
        device=device,
    )


def source_hash() -> str:
    """Return a hash of this package's Python files: the version does not change with edits."""
    package = Path(__file__).resolve().parent.parent
    texts = []
    for path in sorted(package.rglob("*.py")):
        texts.append(f"{path.relative_to(package)}\n{path.read_text()}")
    return text_digest("".join(texts))


def cut_warning(recipe: Recipe, summary: PlanSummary) -> str:
    """Return which methods compute something else on this number of ranks than on one; "" if none
    does."""
    ranks = dist.world_size()
    methods = [name for name, method in recipe.methods.items() if method.cut_matters()]
    if recipe.delayed_gradients is not None or not methods:
        return ""
    shapes = set(summary.shapes)
    if "steps" in recipe.varies:
        for method in recipe.methods.values():
            least, most = method.batch_bounds(recipe.train.batch_size)
            sizes = range(least, most + 1)
            shapes |= set(product(sizes, {seq_len for _, seq_len in summary.shapes}))
    alike = all(
        accumulation_steps(recipe, *shape, ranks) == accumulation_steps(recipe, *shape, 1)
        for shape in shapes
    )
    draws = recipe.is_sharded and "blocks" in recipe.varies
    if ranks == 1 or (alike and not draws):
        return ""
    return (
        f"[{methods[0]}] depends on how a step is cut into micro-batches, which {ranks} devices cut"
        " differently from one: the results differ by more than rounding"
    )


def fresh_state(session: Session, stage: int = 0, trains: bool = True) -> TrainState:
    """Build the state before step 1, or this rank's part of it, in the size of stage `stage` if the
    recipe has stages.

    Args:
        trains: it will be trained, and not only grown.

    Raises:
        OutOfMemoryError: the model does not fit the device or the host.
    """
    recipe = session.recipe
    vocab_size = session.corpus.vocab_size
    with building_errors(recipe, vocab_size, session.device, stage, trains):
        return build_state(recipe, vocab_size, session.device, stage)


def plan_run(
    session: Session,
    until: int | None,
    progress: Progress,
) -> PlanSummary:
    """Plan the run from `progress`; check that data and devices suffice."""
    recipe = session.recipe
    summary = summarize_plan(recipe, progress, session.corpus.vocab_size, until)
    check_ranks(recipe, summary)
    session.train_data.check_budget(summary.windows, recipe.data)
    return summary


def check_ranks(recipe: Recipe, summary: PlanSummary) -> None:
    """Check that as many ranks as there are can share a run.

    Raises:
        UsageError: they cannot; the message says how many can.
    """
    ranks = dist.world_size()
    if ranks == 1:
        return
    ring = recipe.delayed_gradients
    if ring is None:
        smallest = summary.smallest_batch
        for method in recipe.methods.values():
            least, _ = method.batch_bounds(recipe.train.batch_size)
            smallest = min(smallest, least)
        if smallest < ranks:
            raise UsageError(
                f"a step of {smallest} sequences cannot be shared by {ranks} devices\n"
                f"use at most --devices {smallest}, or raise train.batch_size"
            )
        return
    if ranks != ring.devices:
        raise UsageError(
            f"ouroboros.modules = {ring.modules} makes a ring of {ring.devices} devices, not"
            f" {ranks}\nstart {ring.devices}, or one, which computes the same numbers"
        )
    looks = recipe.eval
    if looks.internals or looks.positions or looks.sample is not None:
        raise UsageError(
            "eval.internals, eval.positions and eval.sample need a whole model, and each device of"
            " a ring has a part\nset them to false, or train on one device"
        )


def probe_seconds(session: Session, state: TrainState, summary: PlanSummary) -> float:
    """Return the seconds that the ranks need for the rest of the plan, by probes.

    The largest stage must fit into memory too, and its rate is that of most FLOPs.
    """
    recipe = session.recipe
    seconds = probe(session, state, summary) * (summary.tokens - state.progress.tokens)
    if state.progress.stage + 1 >= len(recipe.stages):
        return seconds
    last = fresh_state(session, stage=len(recipe.stages) - 1)
    config = last.model.config
    per_token = flops_per_token(config, config.seq_len, config.n_layer).with_logits
    of_optimizer = recipe.optim.facts.step_flops(config)
    per_token += of_optimizer / (recipe.train.batch_size * config.seq_len)
    flops_left = summary.flops - state.progress.flops
    return probe(session, last, summary) * flops_left / per_token


def bf16_speedup(
    session: Session,
    state: TrainState,
    summary: PlanSummary,
    seconds: float,
) -> float | None:
    """Return how many times as fast the plan would be in bf16 on this CPU, by a probe.

    None if the run computes in another type than fp32, the CPU has no units for bf16, or the model
    is too narrow to gain; and for recipes that would need more than one probe, or a compilation.

    Args:
        seconds: of the rest of the plan, as `probe_seconds` returns them.
    """
    recipe = session.recipe
    device = session.device
    special = recipe.stages or recipe.chunked_accumulation is not None or compiles(recipe, device)
    if special or recipe.model.n_embd < BF16_WIDTH or dist.world_size() > 1:
        return None
    if device.type != "cpu" or state.dtype != "fp32" or not has_bf16(device):
        return None
    per_token = probe(session, replace(state, dtype="bf16"), summary)
    return seconds / (per_token * (summary.tokens - state.progress.tokens))


def probe(session: Session, state: TrainState, summary: PlanSummary) -> float:
    """Run the largest planned micro-batch forward and backward on every rank, so that memory fails
    now or never.

    Return the seconds per token of a second, warm run. Leave the state as it was.
    """
    recipe = session.recipe
    sequences, seq_len = summary.largest_micro_batch
    ranks = state.sharing[1]
    count = ranks
    if "steps" in recipe.varies:
        # A step that measures holds the gradient of one half while it computes the other's.
        count *= 2
    n_layer = state.model.config.n_layer
    plan = full_plan(recipe, sequences * count, seq_len, n_layer, micro_batches=count)
    share = (sequences * count // ranks, seq_len)
    tokens = torch.zeros(share, dtype=torch.int64, device=session.device)
    compute_gradient = Gradient(recipe, state)
    for _ in range(2):
        # The second pass holds the gradients of the first beside its own, as accumulation does.
        start = time.perf_counter()
        compute_gradient(Batch(tokens, tokens), plan)
        wait_for(session.device)
        seconds = time.perf_counter() - start
    for parameter in state.parameters.values():
        parameter.grad = None
    return seconds / plan.tokens


def compute_again(
    session: Session, state: TrainState, plan: StepPlan
) -> tuple[float, dict[str, float]]:
    """Return the loss of a planned step, and the l2 norm of the gradient of each block and of each
    table outside. All ranks call it; nothing changes."""
    batch = session.train_data.batch(plan, *state.sharing)
    result = Gradient(session.recipe, state)(batch.to(state.device), plan)
    norms = gradient_norms(state)
    for parameter in state.parameters.values():
        parameter.grad = None
    values = torch.stack(list(norms.values())).tolist()
    return float(result.scalars["loss"]), dict(zip(norms, values, strict=True))
