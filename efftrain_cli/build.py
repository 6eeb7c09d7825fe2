"""What a recipe is made into: model, optimizer, and the function that computes a step's gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from efftrain_cli.metrics import flops_per_token
from efftrain_cli.model import GPT, GPTConfig
from efftrain_cli.optim import build_adamw
from efftrain_cli.plan import padded_vocab_size
from efftrain_cli.recipe import Recipe
from efftrain_cli.step import Batch, StepPlan

LossSum = Callable[[Tensor, Tensor, Sequence[bool] | None, Tensor | None], Tensor]
"""(tokens, targets, gates, scales) -> summed cross-entropy of a micro-batch, nats, 0-d fp32."""


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
    """"bf16" or "fp32" for the recipe's train.dtype on this device; "auto" is bf16 where its matmuls have bf16 units."""
    if dtype != "auto":
        return dtype
    if device.type == "cuda":
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp32"
    # Without these instructions bf16 on a CPU is emulated and slower than fp32.
    has_bf16 = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return "bf16" if has_bf16 else "fp32"


def autocast(dtype: str, device: torch.device) -> AbstractContextManager[None]:
    """Mixed precision with fp32 master weights; nothing for fp32."""
    if dtype == "fp32":
        return nullcontext()
    return torch.autocast(device.type, dtype=torch.bfloat16)


def build_model(recipe: Recipe, vocab_size: int, device: torch.device) -> GPT:
    """The recipe's GPT on `device`, initialized from the recipe's seed."""
    config = GPTConfig(
        n_layer=recipe.model.n_layer,
        n_head=recipe.model.n_head,
        n_embd=recipe.model.n_embd,
        seq_len=recipe.model.seq_len,
        vocab_size=vocab_size,
        padded_vocab_size=padded_vocab_size(recipe, vocab_size),
    )
    model = GPT(config)
    model.init_weights(recipe.seed)
    return model.to(device)


def build_optimizer(recipe: Recipe, model: GPT) -> torch.optim.AdamW:
    """The recipe's AdamW over `model`."""
    optim = recipe.optim
    return build_adamw(model, betas=optim.betas, eps=optim.eps, weight_decay=optim.weight_decay)


def build_loss_sum(recipe: Recipe, model: GPT, device: torch.device) -> LossSum:
    """The objective of one micro-batch, compiled where the recipe asks for it."""
    dtype = compute_dtype(recipe.train.dtype, device)

    def loss_sum(tokens: Tensor, targets: Tensor, gates: Sequence[bool] | None, scales: Tensor | None) -> Tensor:
        with autocast(dtype, device):
            return model.loss_sum(tokens, targets, gates, scales, recipe.train.activation_checkpointing)

    return loss_sum


def build_forward_backward(recipe: Recipe, model: GPT, device: torch.device) -> ForwardBackward:
    """The step's gradient by accumulation over micro-batches.

    Each micro-batch's summed loss is divided by the tokens of the whole step, so loss and gradient do not depend on
    how the step is cut.
    """
    loss_sum = build_loss_sum(recipe, model, device)

    def forward_backward(batch: Batch, plan: StepPlan) -> Gradient:
        total_tokens = batch.targets.numel()
        loss = torch.zeros((), device=device)
        micro_batches = zip(
            batch.tokens.tensor_split(plan.accumulation_steps),
            batch.targets.tensor_split(plan.accumulation_steps),
            strict=True,
        )
        for tokens, targets in micro_batches:
            micro_loss = loss_sum(tokens, targets, None, None) / total_tokens
            micro_loss.backward()
            loss += micro_loss.detach()
        blocks = float(model.config.n_layer)
        per_token = flops_per_token(model.config.n_embd, plan.seq_len, model.config.padded_vocab_size, blocks)
        return Gradient(
            loss=loss,
            tokens=total_tokens,
            flops=per_token.with_logits * total_tokens,
            flops_without_logits=per_token.without_logits * total_tokens,
            blocks_executed=blocks,
        )

    return forward_backward
