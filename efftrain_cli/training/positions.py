"""The validation loss by position in the context: is what stands far back in a long context used?"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor
from torch.nn import functional as F

from efftrain_cli.model.gpt import GPT
from efftrain_cli.model.kernels import attention_kernels
from efftrain_cli.training.gradient import autocast
from efftrain_cli.training.ranks import ALONE, Ranks


def position_starts(seq_len: int) -> list[int]:
    """Where the stretches of positions begin whose losses are averaged: at 0, then at 1/16, 1/8, 1/4 and 1/2 of the
    context."""
    return sorted({seq_len * part // 16 for part in (0, 1, 2, 4, 8)})


def loss_by_position(
    model: GPT, windows: Tensor, micro_batch_tokens: int, dtype: str, ranks: Ranks = ALONE
) -> dict[str, Tensor]:
    """Mean cross-entropy of validation windows (n, seq_len + 1) by stretch of positions, at full length with all
    blocks: column `val_loss_from_POSITION` -> 0-d fp32, nats per token. It is a second forward pass over them; the
    ranks share the windows."""
    device = next(model.parameters()).device
    seq_len = windows.shape[1] - 1
    chunks = windows.split(max(1, micro_batch_tokens // seq_len))
    sums = torch.zeros(len(chunks), seq_len, device=device)
    with torch.no_grad(), autocast(dtype, device), attention_kernels(device, same_shape=True):
        for number in range(ranks.rank, len(chunks), ranks.world_size):
            chunk = chunks[number].to(device, non_blocking=True)
            logits = model.head(model.hidden(chunk[:, :-1])).float()
            losses = F.cross_entropy(logits.flatten(0, 1), chunk[:, 1:].flatten(), reduction="none")
            sums[number] = losses.view(-1, seq_len).sum(0)
    ranks.add_up([sums])
    means = sums.sum(0) / windows.shape[0]
    starts = position_starts(seq_len)
    return {f"val_loss_from_{start}": means[start:end].mean() for start, end in itertools.pairwise([*starts, seq_len])}
