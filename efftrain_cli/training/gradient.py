"""What a recipe is made into: model, optimizer, and the function that computes a step's gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from efftrain_cli.methods.growth_operators import small_model_scales
from efftrain_cli.methods.simigrad import half_dots
from efftrain_cli.model.flops import flops_per_token
from efftrain_cli.model.gpt import GPT, GPTConfig, run_eagerly
from efftrain_cli.model.kernels import attention_kernels, choose_determinism, choose_matmul_precision
from efftrain_cli.model.parameter_kinds import parameter_kind
from efftrain_cli.optim.adamw import AdamW
from efftrain_cli.optim.muon import Muon
from efftrain_cli.optim.optimizer import Optimizer
from efftrain_cli.plan.plan import padded_vocab_size
from efftrain_cli.plan.step import Batch, StepPlan
from efftrain_cli.recipe.recipe import Recipe
from efftrain_cli.training.compiling import (
    CompiledParts,
    LossSum,
    compile_parts,
    compile_whole,
    compiles,
    compiles_blocks,
    full_micro_batch,
)
from efftrain_cli.training.memory import checkpoints_activations


@dataclass(frozen=True, slots=True, kw_only=True)
class Gradient:
    """What the backward pass left behind: gradients lie in the parameters' `.grad`, already divided by the step's tokens."""

    loss: Tensor
    """0-d fp32, mean over the step's targets, nats per token."""
    tokens: int
    flops: float
    flops_without_logits: float
    blocks_executed: float
    """Blocks computed per sequence, averaged over the step."""
    simigrad_dots: tuple[float, float, float] | None = None


ForwardBackward = Callable[[Batch, StepPlan], Gradient]


def compute_dtype(dtype: str, device: torch.device) -> str:
    """"bf16", "tf32" or "fp32" for the recipe's train.dtype on this device; "auto" is bf16 where its matmuls have bf16 units."""
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
    shape = recipe.model_at(stage)
    config = GPTConfig(
        n_layer=shape.n_layer,
        n_head=shape.n_head,
        n_embd=shape.n_embd,
        seq_len=shape.seq_len,
        vocab_size=vocab_size,
        padded_vocab_size=padded_vocab_size(recipe, vocab_size),
    )
    model = GPT(config)
    model.init_weights(recipe.seed)
    # On CPUs layer norms would then compute in bf16 too.
    model.narrow_stream = device.type == "cuda"
    return model.to(device)


def build_optimizer(recipe: Recipe, model: GPT) -> Optimizer:
    """The recipe's optimizer over `model`, which may be that of any stage."""
    optim = recipe.optim
    parameters = dict(model.named_parameters())
    kinds = {name: parameter_kind(name) for name in parameters}
    if optim.name == "muon":
        assert optim.muon_lr is not None  # a rule of the recipe
        return Muon(
            parameters,
            kinds,
            lr_ratio=optim.muon_lr / optim.lr,
            betas=optim.betas,
            eps=optim.eps,
            weight_decay=optim.weight_decay,
        )
    scales = None
    if recipe.stages and recipe.staged_growth is not None and recipe.staged_growth.dynamics == "small":
        factor = model.config.n_embd // recipe.model_at(0).n_embd
        scales = {name: small_model_scales(name, factor) for name in parameters}
    return AdamW(
        parameters, kinds, betas=optim.betas, eps=optim.eps, weight_decay=optim.weight_decay, scales=scales
    )


def build_loss_sum(recipe: Recipe, model: GPT, device: torch.device) -> LossSum:
    """The objective of one micro-batch, compiled where the recipe asks for it."""
    dtype = compute_dtype(recipe.train.dtype, device)
    compiled = compiles(recipe, device)
    by_blocks = compiled and compiles_blocks(recipe, len(model.h))
    recompute = checkpoints_activations(recipe, model.config, device, dtype=dtype, compiled=compiled)
    parts = compile_parts(recipe, model) if by_blocks else CompiledParts(run_eagerly, model.head_loss_sum)

    def loss_sum(tokens: Tensor, targets: Tensor, gates: Sequence[bool] | None, scales: Tensor | None) -> Tensor:
        with autocast(dtype, device):
            x = model.run_blocks(model.embed(tokens), gates, scales, recompute, parts.block)
            return parts.head_loss_sum(x, targets)

    return compile_whole(recipe, loss_sum) if compiled and not by_blocks else loss_sum


def build_forward_backward(recipe: Recipe, model: GPT, device: torch.device) -> ForwardBackward:
    """The step's gradient by accumulation over micro-batches.

    Each micro-batch's summed loss is divided by the tokens of the whole step, so loss and gradient do not depend on
    how the step is cut.
    """
    choose_determinism(recipe.train.deterministic)
    choose_matmul_precision(compute_dtype(recipe.train.dtype, device), device)
    loss_sum = build_loss_sum(recipe, model, device)
    full_shape = full_micro_batch(recipe)
    layer_drop, simigrad = recipe.progressive_layer_drop, recipe.simigrad
    parameters = list(model.parameters())

    def forward_backward(batch: Batch, plan: StepPlan) -> Gradient:
        total_tokens = batch.targets.numel()
        tokens = batch.tokens.tensor_split(plan.accumulation_steps)
        targets = batch.targets.tensor_split(plan.accumulation_steps)
        micro_steps: Sequence[int] = range(plan.accumulation_steps)
        gates, scales = None, None
        if layer_drop is not None:
            on_host = torch.tensor(layer_drop.branch_scales(plan.step, len(plan.keep)), pin_memory=device.type == "cuda")
            scales = on_host.to(device, non_blocking=True)
        measures = simigrad is not None and simigrad.measures_at(plan.step)
        if measures:
            # Even micro-batches, then odd: so taken, the two halves differ by one sequence at most.
            micro_steps = (*micro_steps[::2], *micro_steps[1::2])
            first_half: list[Tensor] = []

        loss = torch.zeros((), device=device)
        blocks_times_tokens = 0
        for micro_step in micro_steps:
            if measures and micro_step == 1:
                first_half = take_gradients(parameters)
            micro_tokens = targets[micro_step].numel()
            if micro_tokens == 0:  # SimiGrad rounds the number of micro-batches up to an even one
                continue
            if layer_drop is not None:
                gates = layer_drop.gates(
                    plan.keep,
                    seed=recipe.seed,
                    step=plan.step,
                    micro_step=micro_step,
                    paired=simigrad is not None,
                )
            with attention_kernels(device, same_shape=tokens[micro_step].shape == full_shape):
                micro_loss = loss_sum(tokens[micro_step], targets[micro_step], gates, scales) / total_tokens
                micro_loss.backward()
            loss += micro_loss.detach()
            blocks_times_tokens += micro_tokens * (len(plan.keep) if gates is None else sum(gates))

        dots = None
        if layer_drop is not None:
            fill_gradients(parameters)
        if measures:
            second_half = take_gradients(parameters)
            sequences_b = sum(len(part) for part in tokens[1::2])
            dots = half_dots(first_half, second_half, len(batch.tokens) - sequences_b, sequences_b)
            torch._foreach_add_(second_half, first_half)
            for parameter, gradient in zip(parameters, second_half, strict=True):
                parameter.grad = gradient
        blocks = blocks_times_tokens / total_tokens
        per_token = flops_per_token(model.config.n_embd, plan.seq_len, model.config.padded_vocab_size, blocks)
        return Gradient(
            loss=loss,
            tokens=total_tokens,
            flops=per_token.with_logits * total_tokens,
            flops_without_logits=per_token.without_logits * total_tokens,
            blocks_executed=blocks,
            # The one read from the device inside training: three numbers, once per SimiGrad's interval.
            simigrad_dots=None if dots is None else tuple(dots.tolist()),
        )

    return forward_backward


def fill_gradients(parameters: Sequence[Tensor]) -> None:
    """Gives each parameter of a block that no micro-batch ran the gradient that it has: zero.

    AdamW skips a parameter without `.grad`: neither decay nor momentum would act on it, and its step count would fall behind.
    """
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)


def take_gradients(parameters: Sequence[Tensor]) -> list[Tensor]:
    """The parameters' gradients, zeros where there is none; `.grad` is None afterwards, so that a new sum can begin."""
    fill_gradients(parameters)
    gradients = []
    for parameter in parameters:
        assert parameter.grad is not None
        gradients.append(parameter.grad)
        parameter.grad = None
    return gradients
