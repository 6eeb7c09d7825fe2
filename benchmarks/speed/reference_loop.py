"""A minimal GPT training loop in the style of nanoGPT, as the yardstick: no planning, no measures,
no records.

Same arithmetic as ours (GPT-2, tanh GELU, AdamW with decay on matrices, clipping at 1.0, cosine
schedule), written the plain way: one process, one batch per step, loss printed now and then.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F


@dataclass
class Shape:
    n_layer: int
    n_head: int
    n_embd: int
    seq_len: int
    batch_size: int
    vocab_size: int


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        d = shape.n_embd
        self.n_head = shape.n_head
        self.ln_1, self.ln_2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.c_attn, self.c_proj = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.c_fc, self.mlp_proj = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, d = x.shape
        q, k, v = self.c_attn(self.ln_1(x)).split(d, dim=2)
        q, k, v = (z.view(b, t, self.n_head, d // self.n_head).transpose(1, 2) for z in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).contiguous().view(b, t, d))
        return x + self.mlp_proj(F.gelu(self.c_fc(self.ln_2(x)), approximate="tanh"))


class ReferenceGPT(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.wte = nn.Embedding(shape.vocab_size, shape.n_embd)
        self.wpe = nn.Embedding(shape.seq_len, shape.n_embd)
        self.h = nn.ModuleList(Block(shape) for _ in range(shape.n_layer))
        self.ln_f = nn.LayerNorm(shape.n_embd)
        self.lm_head = nn.Linear(shape.n_embd, shape.vocab_size, bias=False)
        self.lm_head.weight = self.wte.weight
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))


class ReferenceLoop:
    """nanoGPT's train.py without its options: `step()` trains one step and returns the loss
    tensor."""

    def __init__(
        self, shape: Shape, tokens: np.ndarray, device: torch.device, dtype: str, compiled: bool
    ) -> None:
        torch.manual_seed(1337)
        self.shape, self.tokens, self.device = shape, tokens, device
        self.model = ReferenceGPT(shape).to(device)
        self.forward = torch.compile(self.model) if compiled else self.model
        decay = [p for p in self.model.parameters() if p.dim() >= 2]
        rest = [p for p in self.model.parameters() if p.dim() < 2]
        self.optimizer = torch.optim.AdamW(
            [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}],
            lr=6e-4,
            betas=(0.9, 0.95),
            fused=device.type == "cuda",  # as nanoGPT does: fused on CUDA only
        )
        self.autocast = torch.autocast(device.type, dtype=torch.bfloat16, enabled=dtype == "bf16")
        self.iteration = 0
        self.next_batch = self._batch()

    def _batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        shape = self.shape
        starts = torch.randint(len(self.tokens) - shape.seq_len - 1, (shape.batch_size,))
        x = torch.stack(
            [torch.from_numpy(self.tokens[i : i + shape.seq_len].astype(np.int64)) for i in starts]
        )
        y = torch.stack(
            [
                torch.from_numpy(self.tokens[i + 1 : i + 1 + shape.seq_len].astype(np.int64))
                for i in starts
            ]
        )
        if self.device.type == "cuda":
            return (
                x.pin_memory().to(self.device, non_blocking=True),
                y.pin_memory().to(self.device, non_blocking=True),
            )
        return x, y

    def step(self) -> torch.Tensor:
        lr = 6e-4 * 0.5 * (1 + math.cos(math.pi * min(1.0, self.iteration / 10_000)))
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        x, y = self.next_batch
        with self.autocast:
            loss = self.forward(x, y)
        self.next_batch = self._batch()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.iteration += 1
        return loss
