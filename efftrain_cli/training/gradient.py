"""What a recipe is made into: model, optimizer, and the function that computes a step's gradient."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from efftrain_cli.methods.growth_operators import small_model_scales
from efftrain_cli.methods.simigrad import accumulate_by_halves
from efftrain_cli.model.gpt import GPT, run_eagerly
from efftrain_cli.model.kernels import (
    attention_kernels,
    choose_determinism,
    choose_matmul_precision,
)
from efftrain_cli.model.linear import Seen, clear_seen, seen_by_layers, set_draws
from efftrain_cli.optim.adamw import AdamW
from efftrain_cli.optim.gradients import fill_gradients, take_gradients
from efftrain_cli.optim.muon import Muon
from efftrain_cli.optim.optimizer import Optimizer
from efftrain_cli.plan.plan import model_config, optimizer_flops
from efftrain_cli.plan.step import Batch, MicroBatch, StepPlan, StepResult
from efftrain_cli.recipe.recipe import Recipe
from efftrain_cli.training.buckets import EarlySum
from efftrain_cli.training.compiling import (
    CompiledParts,
    Objective,
    compile_parts,
    compile_whole,
    compiles,
    compiles_blocks,
    full_micro_batch,
)
from efftrain_cli.training.memory import checkpoints_activations
from efftrain_cli.training.ouroboros import LateGradients, cut_gpt
from efftrain_cli.training.ranks import ALONE, Ranks
from efftrain_cli.training.ring import Ring
from efftrain_cli.training.state import TrainState
from efftrain_cli.training.watch import FIRST

OVERLAPPING = frozenset({"cuda"})
"""Kinds of devices on which the sum over the ranks begins during the backward pass. A CPU's cores have that pass to
do."""
ForwardBackward = Callable[[Batch, StepPlan], StepResult]
"""Computes a step's gradient, divided by the step's tokens, into the parameters' `.grad`."""


def compute_dtype(dtype: str, device: torch.device) -> str:
    """ "bf16", "tf32" or "fp32" for the recipe's train.dtype on this device; "auto" is bf16 where its matmuls have bf16
    units."""
    if dtype == "tf32":  # from Ampere on; elsewhere the products are exact ones
        capable = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
        return "tf32" if capable else "fp32"
    if dtype != "auto":
        return dtype
    if device.type == "cuda":
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp32"
    # Without these instructions bf16 on a CPU is emulated and slower than fp32.
    has_bf16 = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return "bf16" if has_bf16 else "fp32"


def autocast(dtype: str, device: torch.device) -> AbstractContextManager[None]:
    """Mixed precision with fp32 master weights; nothing for fp32 and tf32."""
    if dtype != "bf16":
        return nullcontext()
    return torch.autocast(device.type, dtype=torch.bfloat16)


def build_model(recipe: Recipe, vocab_size: int, device: torch.device, stage: int = 0) -> GPT:
    """The GPT of the recipe (of a stage, where it has stages) on `device`, initialized from the recipe's seed."""
    model = GPT(model_config(recipe, vocab_size, stage=stage))
    model.init_weights(recipe.seed)
    if device.type == "cuda":  # on CPUs layer norms would then compute in bf16 too
        model.residual_dtype = torch.bfloat16
    model = model.to(device)
    if recipe.chunked_accumulation is not None:
        recipe.chunked_accumulation.attach(model, device)
    return model


def build_optimizer(
    recipe: Recipe, model: GPT, parameters: Mapping[str, nn.Parameter] | None = None
) -> Optimizer:
    """The recipe's optimizer over `model`, which may be that of any stage; over `parameters`, by the model's names,
    where they are a share of it."""
    optim = recipe.optim
    parameters = dict(model.named_parameters()) if parameters is None else parameters
    kinds = model.parameter_kinds()
    if optim.name == "muon":
        assert optim.muon_lr is not None  # a rule of the recipe
        return Muon(
            parameters,
            kinds,
            lr_ratio=optim.muon_lr / optim.lr,
            betas=optim.betas,
            eps=optim.eps,
            weight_decay=optim.weight_decay,
            fused_rows=model.config.qkv_rows,
        )
    scales = None
    if (
        recipe.stages
        and recipe.staged_growth is not None
        and recipe.staged_growth.dynamics == "small"
    ):
        factor = model.config.n_embd // recipe.model_at(0).n_embd
        scales = {name: small_model_scales(kind, factor) for name, kind in kinds.items()}
    return AdamW(
        parameters,
        kinds,
        betas=optim.betas,
        eps=optim.eps,
        weight_decay=optim.weight_decay,
        scales=scales,
    )


def build_state(
    recipe: Recipe, vocab_size: int, device: torch.device, stage: int = 0
) -> TrainState:
    """The state before step 1, in the size of a stage where the recipe has stages."""
    model = build_model(recipe, vocab_size, device, stage)
    return TrainState(
        model, build_optimizer(recipe, model), nonfinite=torch.zeros((), device=device)
    )


def build_objective(
    recipe: Recipe, model: GPT, device: torch.device, ranks: Ranks = ALONE
) -> Objective:
    """What is minimized, for one micro-batch, compiled where the recipe asks for it. "ce", the cross-entropy, comes
    first: it alone is the logged loss, and what divergence and comparisons read."""
    dtype = compute_dtype(recipe.train.dtype, device)
    compiled = compiles(recipe, device) and not model.lockstep
    by_blocks = compiled and compiles_blocks(recipe, len(model.h))
    world = ranks.world_size
    recompute = checkpoints_activations(
        recipe, model.config, device, dtype=dtype, compiled=compiled, ranks=world
    )
    parts = CompiledParts(run_eagerly, model.head_loss_sum)
    if by_blocks:
        parts = compile_parts(recipe, model, ranks=world)
    standardization = recipe.standardization_loss
    if standardization is not None:
        standardization.attach(model)

    def objective(
        tokens: Tensor, targets: Tensor, gates: Sequence[bool] | None, scales: Tensor | None
    ) -> dict[str, Tensor]:
        with autocast(dtype, device):
            if model.lockstep:
                return {"ce": model.loss_sum(tokens, targets, gates, scales, recompute)}
            terms: list[Tensor] = []
            x = model.run_blocks(model.embed(tokens), gates, scales, recompute, parts.block, terms)
            losses = {"ce": parts.head_loss_sum(x, targets)}
            if standardization is not None:
                divergences = standardization.of_sites(terms, gates, x, len(model.h))
                losses["standardization_loss"] = divergences * targets.numel()
            return losses

    return (
        compile_whole(recipe, objective, ranks=world) if compiled and not by_blocks else objective
    )


def build_forward_backward(
    recipe: Recipe,
    model: GPT,
    device: torch.device,
    method_tensors: dict[str, Tensor] | None = None,
    ranks: Ranks = ALONE,
    ring: Ring | None = None,
) -> ForwardBackward:
    """The step's gradient by accumulation over micro-batches, added up over the ranks.

    Each micro-batch's summed losses are divided by the tokens of the whole step, so loss and gradient do not depend on
    how the step is cut, nor on how many ranks share it. Before the first sum the ranks agree to go on. On CUDA that sum
    begins during the backward pass of a rank's last micro-batch.

    Args:
        method_tensors: `TrainState.method_tensors`, for a method whose gradient depends on tensors of earlier steps.
            They are read in each step, and not changed: `StepResult.method_tensors` are those after it.
        ring: where each rank computes a module only.
    """
    choose_determinism(recipe.train.deterministic)
    choose_matmul_precision(compute_dtype(recipe.train.dtype, device), device)
    objective = build_objective(recipe, model, device, ranks)
    full_shape = full_micro_batch(recipe, ranks.world_size)
    layer_drop, accumulation = recipe.progressive_layer_drop, recipe.chunked_accumulation
    lanes = recipe.lanes
    late = late_gradients(recipe, model, device)
    parameters = list(model.parameters())
    nothing = {"ce": torch.zeros((), device=device)}
    """Every loss, of a rank or lane without micro-batches."""
    standardization, n_layer = recipe.standardization_loss, len(model.h)
    if standardization is not None:
        site_shares = torch.tensor(standardization.shares(model.config), device=device)
        nothing["standardization_loss"] = torch.zeros_like(site_shares)

    def forward_backward(batch: Batch, plan: StepPlan) -> StepResult:
        scales = None
        if plan.branch_scales is not None:
            on_host = torch.tensor(plan.branch_scales, pin_memory=device.type == "cuda")
            scales = on_host.to(device, non_blocking=True)
        gates: list[tuple[bool, ...] | None] = [None] * plan.accumulation_steps
        if layer_drop is not None:
            paired = recipe.simigrad is not None
            gates = [
                layer_drop.gates(
                    plan.keep, seed=recipe.seed, step=plan.step, micro_step=number, paired=paired
                )
                for number in range(plan.accumulation_steps)
            ]
        if accumulation is not None:
            clear_seen(model)
        losses: dict[str, Tensor] = {}
        agreed = False
        # A step that sums more than once, or in another order, does so after its passes.
        may_begin_early = device.type in OVERLAPPING and not (
            ranks.alone
            or model.lockstep
            or lanes is not None
            or ring is not None
            or late is not None
            or plan.measure_similarity
        )
        early: EarlySum | None = None
        phase = ranks.phase if ranks.phase in (FIRST, "compile") else "forward and backward"

        def begin_sum(sums: dict[str, Tensor]) -> None:
            """Every rank does, in any case: they send the same buckets in the same order."""
            nonlocal agreed, early
            ranks.go_on(plan.step)
            agreed = True
            ranks.enter(phase)
            sums |= {
                name: sums[name].clone() for name in nothing
            }  # not what the backward pass may read
            early = EarlySum(ranks, parameters, [sums[name] for name in nothing])

        def accumulate_here(micro_batches: Sequence[MicroBatch]) -> dict[str, Tensor]:
            """Adds the gradient of these micro-batches to `.grad`; returns the sums of their losses."""
            sums: dict[str, Tensor] = {}
            for number, tokens, targets in micro_batches:
                ranks.enter(phase)
                weight = 1.0
                if not len(
                    tokens
                ):  # this rank has none left, and the others cannot compute theirs without it
                    tokens = targets = tokens.new_zeros(1, plan.seq_len)
                    weight = 0.0
                if accumulation is not None and accumulation.rounding == "stochastic":
                    set_draws(model, recipe.seed, plan.step, number)
                with attention_kernels(device, same_shape=tokens.shape == full_shape):
                    shares = {
                        name: weight * loss / plan.tokens if model.lockstep else loss / plan.tokens
                        for name, loss in objective(tokens, targets, gates[number], scales).items()
                    }
                    minimized = shares["ce"]
                    if standardization is not None and standardization.weight:
                        divergence = (shares["standardization_loss"] * site_shares).sum()
                        minimized = minimized + standardization.weight * divergence
                    for name, share in shares.items():
                        sums[name] = sums[name] + share.detach() if name in sums else share.detach()
                    if may_begin_early and number == micro_batches[-1].number:
                        begin_sum(sums)
                    minimized.backward()
            return sums

        def accumulate(micro_batches: Sequence[MicroBatch]) -> None:
            """Leaves the gradient of these micro-batches and of the other ranks' in `.grad`, and adds the losses to
            `losses`."""
            nonlocal agreed
            if lanes is not None:
                here = range(
                    lanes * ranks.rank // ranks.world_size,
                    lanes * (ranks.rank + 1) // ranks.world_size,
                )
                sums = add_lanes(
                    accumulate_here, micro_batches, parameters, plan, here, lanes, nothing
                )
            else:
                sums = accumulate_here(micro_batches)
            if may_begin_early and early is None:  # this rank has no micro-batch
                sums = {name: zero.clone() for name, zero in nothing.items()}
                begin_sum(sums)
            elif not agreed:
                ranks.go_on(plan.step)
                agreed = True
            if layer_drop is not None or not (ranks.alone or model.lockstep):
                fill_gradients(parameters)
            if early is not None:
                early.finish()
            elif not ranks.alone:
                # A rank without one of the terms must still take part in its sum.
                sums = {
                    name: sums[name] if name in sums else zero.clone()
                    for name, zero in nothing.items()
                }
                # Of a model in lockstep the gradients are added up already.
                gradients = [
                    p.grad for p in parameters if p.grad is not None and not model.lockstep
                ]
                (ranks.add_up if lanes is None else ranks.add_up_by_pairs)(
                    [*gradients, *sums.values()]
                )
            for name, share in sums.items():
                losses[name] = losses[name] + share if name in losses else share

        micro_batches = cut(batch, plan, ranks if ring is None else ring.rings, model.lockstep)
        dots, step, grad_norm = None, None, None
        if plan.measure_similarity:
            dots = accumulate_by_halves(accumulate, micro_batches, parameters, plan)
        elif ring is not None:
            step = ring.step(micro_batches, plan)
        elif late is not None and late.delays_at(plan.step):
            step = late.step(micro_batches, plan, method_tensors or {}, accumulate_here)
        else:
            accumulate(micro_batches)
        if step is not None:
            losses, grad_norm = {**losses, **step.losses}, step.grad_norm
        blocks_times_sequences = sum(
            plan.sequences_of(number) * (len(plan.keep) if gate is None else sum(gate))
            for number, gate in enumerate(gates)
        )
        blocks = blocks_times_sequences / plan.batch_size
        per_token = model.flops_per_token(plan.seq_len, blocks)
        of_optimizer = optimizer_flops(recipe, model.config)
        loss = losses.pop("ce")
        if standardization is not None:
            losses = standardization.measures(
                losses["standardization_loss"], site_shares, plan, gates, n_layer
            )
        if accumulation is not None:
            losses |= accumulation.seen_columns(_seen_everywhere(model, ranks))
        return StepResult(
            tokens=plan.tokens,
            flops=per_token.with_logits * plan.tokens + of_optimizer,
            flops_without_logits=per_token.without_logits * plan.tokens + of_optimizer,
            optimizer_flops=of_optimizer,
            blocks_executed=blocks,
            scalars={"loss": loss, **losses, **({} if late is None else late.scalars(step))},
            simigrad_dots=dots,
            grad_norm=grad_norm,
            method_tensors=None if step is None else step.in_flight,
        )

    return forward_backward


def late_gradients(
    recipe: Recipe, model: GPT, device: torch.device, ranks: Ranks = ALONE
) -> LateGradients | None:
    """Ouroboros's gradients on one device; None where no module's gradient is late. `ranks` says how many share a
    step."""
    section = recipe.late_gradients
    if section is None:
        return None
    dtype, compiled = compute_dtype(recipe.train.dtype, device), compiles(recipe, device)
    recompute = checkpoints_activations(
        recipe, model.config, device, dtype=dtype, compiled=compiled
    )
    parts = (
        compile_parts(recipe, model)
        if compiled
        else CompiledParts(run_eagerly, model.head_loss_sum)
    )
    full_shape = full_micro_batch(recipe, max(1, ranks.world_size // section.devices))

    def run(x: Tensor, blocks: Sequence[bool], targets: Tensor | None) -> Tensor:
        with (
            autocast(dtype, device),
            attention_kernels(device, same_shape=x.shape[:2] == full_shape),
        ):
            x = x if x.is_floating_point() else model.embed(x)
            x = model.run_blocks(x, blocks, None, recompute, parts.block)
            return x if targets is None else parts.head_loss_sum(x, targets)

    split = section.blocks(model.config)
    return LateGradients(section, model, cut_gpt(model, split, run), split, recipe.optim.grad_clip)


def _seen_everywhere(model: GPT, ranks: Ranks) -> Tensor:
    """What the narrow layers of all ranks saw in this step."""
    seen = seen_by_layers(model)
    if ranks.alone:
        return seen
    everyone = seen.new_zeros(ranks.world_size, len(seen))
    everyone[ranks.rank] = seen
    ranks.add_up([everyone])
    return torch.cat([everyone[:, : Seen.LARGEST].sum(0), everyone[:, Seen.LARGEST :].amax(0)])


def build_ring(recipe: Recipe, state: TrainState, ranks: Ranks) -> Ring | None:
    """This rank's share of Ouroboros's rings; None on one device, and where no gradient is late."""
    late = late_gradients(recipe, state.model, state.model.device, ranks)
    if late is None or ranks.alone:
        return None
    mixed = compute_dtype(recipe.train.dtype, state.model.device) == "bf16"
    return Ring(late, state, ranks, boundary=state.model.residual_dtype if mixed else torch.float32)


def cut(
    batch: Batch, plan: StepPlan, ranks: Ranks = ALONE, keep_empty: bool = False
) -> list[MicroBatch]:
    """The micro-batches of a step that are this rank's, numbered in the whole step; empty ones are left out unless
    asked for."""
    first, last = (
        plan.accumulation_steps * r // ranks.world_size for r in (ranks.rank, ranks.rank + 1)
    )
    sizes = [plan.sequences_of(number) for number in range(first, last)]
    parts = zip(batch.tokens.split(sizes), batch.targets.split(sizes), strict=True)
    return [
        MicroBatch(number, *part)
        for number, part in enumerate(parts, first)
        if keep_empty or part[0].numel()
    ]


def add_lanes(
    accumulate: Callable[[Sequence[MicroBatch]], dict[str, Tensor]],
    micro_batches: Sequence[MicroBatch],
    parameters: Sequence[Tensor],
    plan: StepPlan,
    here: range,
    lanes: int,
    nothing: dict[str, Tensor],
) -> dict[str, Tensor]:
    """Leaves the gradient of these micro-batches in `.grad`, added up in a balanced tree over the lanes `here`, and
    returns the sums of their losses, added up likewise. A lane is an equal share of the step's micro-batches, in order;
    the losses of an empty one are `nothing`."""
    each = plan.accumulation_steps // lanes
    waiting: list[
        tuple[int, list[Tensor], dict[str, Tensor]]
    ] = []  # (leaves, gradients, losses): trees not yet paired
    for lane in here:
        losses = accumulate([part for part in micro_batches if part.number // each == lane])
        tree = (
            1,
            take_gradients(parameters),
            losses or {name: zero.clone() for name, zero in nothing.items()},
        )
        while waiting and waiting[-1][0] == tree[0]:
            leaves, gradients, sums = waiting.pop()
            torch._foreach_add_(gradients, tree[1])
            tree = (2 * leaves, gradients, {name: sums[name] + tree[2][name] for name in sums})
        waiting.append(tree)
    ((_, gradients, losses),) = waiting  # a power of two of lanes
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    return losses
