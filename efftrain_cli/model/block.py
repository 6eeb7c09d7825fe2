"""The layers of a GPT: norms, rotary positions, attention, MLP, and the block that they make.

Shapes: B sequences, T tokens in each, C = n_embd channels, H query heads of D = head_dim channels,
K heads of keys and values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import assert_never

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from efftrain_cli.model.config import GPTConfig
from efftrain_cli.model.gelu import gelu
from efftrain_cli.model.losses import at_least_fp32

See = Callable[[str, Tensor], None]
"""(name, activation) -> nothing: shown the outputs of linear layers and the inputs of norms, by the
layer's name in its block (`attn.c_attn`, `attn.c_proj`, `mlp.c_fc`, `mlp.c_proj`; `ln_1`, `ln_2`),
each (B, T, channels); and `attn.q`, `attn.k` as the attention multiplies them, (B, H, T, D)."""
ActivationTerm = Callable[[str, Tensor], Tensor | None]
"""(name, activation) -> its term of the objective (0-d), None where the activation is not asked
for."""


def ignore(name: str, activation: Tensor) -> None:
    """Do nothing with an activation."""


class KeyValueCache:
    """Keys and values of the positions that one block has read, for generation: each (B, K,
    positions, D).

    Keys are kept rotated, so that a new token rotates only its own.
    """

    def __init__(self) -> None:
        self.pair: tuple[Tensor, Tensor] | None = None

    @property
    def length(self) -> int:
        """Positions read."""
        if self.pair is None:
            return 0
        return self.pair[0].shape[2]

    def extend(
        self,
        keys: Tensor,
        values: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Append (B, K, new, D) and return all keys and values so far."""
        if self.pair is not None:
            keys = torch.cat([self.pair[0], keys], dim=2)
            values = torch.cat([self.pair[1], values], dim=2)
        self.pair = keys, values
        return self.pair


def make_norm(config: GPTConfig) -> nn.Module:
    """Return a norm, or the identity."""
    if config.norm == "layernorm":
        return nn.LayerNorm(
            config.n_embd,
            config.norm_eps,
            bias=config.bias,
        )
    if config.norm == "rmsnorm":
        return RMSNorm(config.n_embd, config.norm_eps)
    if config.norm == "none":
        return nn.Identity()
    assert_never(config.norm)


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) times a learned gain, in fp32: (..., channels) -> (..., channels).

    Source: Zhang and Sennrich 2019, arXiv 1910.07467.
    """

    def __init__(self, channels: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(channels))

    def forward(self, x: Tensor) -> Tensor:
        wide = at_least_fp32(x)
        mean_square = wide.square().mean(-1, keepdim=True)
        normalized = wide * torch.rsqrt(mean_square + self.eps)
        return (normalized * self.weight).to(x.dtype)


class Rope(nn.Module):
    """Rotary positions, half-rotated as in transformers, shared by all blocks.

    Channels i and i + D / 2 of position p turn by p theta^(-2 i / D), i < D / 2.

    Source: Su et al. 2021, arXiv 2104.09864.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        exponents = torch.arange(0, config.head_size, 2).float() / config.head_size
        angles = torch.arange(config.seq_len)[:, None] * config.rope_theta**-exponents
        # (positions, 1, D / 2), in fp32 whatever the compute type.
        angles = angles[:, None]
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, x: Tensor, position: int) -> Tensor:
        """Rotate x (B, T, heads, D), whose first token stands at `position`."""
        end = position + x.shape[1]
        cos = self.cos[position:end]
        sin = self.sin[position:end]
        a, b = x.chunk(2, dim=-1)
        turned_a = a * cos - b * sin
        turned_b = b * cos + a * sin
        return torch.cat([turned_a, turned_b], dim=-1).to(x.dtype)


class CausalSelfAttention(nn.Module):
    def __init__(self, config: GPTConfig, rope: Rope | None = None) -> None:
        super().__init__()
        self.head_size = config.head_size
        self.rows = config.qkv_rows
        self.queries_per_key = config.n_head // config.kv_heads
        self.c_attn = nn.Linear(
            config.n_embd,
            sum(self.rows),
            bias=config.bias,
        )
        self.q_norm: nn.Module = nn.Identity()
        self.k_norm: nn.Module = nn.Identity()
        if config.qk_norm:
            self.q_norm = RMSNorm(self.head_size, config.norm_eps)
            self.k_norm = RMSNorm(self.head_size, config.norm_eps)
        self.rope = rope
        self.c_proj = nn.Linear(
            config.attention_size,
            config.n_embd,
            bias=config.bias,
        )

    def forward(
        self,
        x: Tensor,
        cache: KeyValueCache | None = None,
        see: See = ignore,
    ) -> Tensor:
        batch, seq_len, _ = x.shape
        past = 0
        if cache is not None:
            past = cache.length

        qkv = self.c_attn(x)
        see("attn.c_attn", qkv)
        # Split before the heads are taken apart: the backward pass then joins the three gradients
        # in one copy.
        parts = qkv.split(self.rows, dim=2)
        q, k, v = (part.view(batch, seq_len, -1, self.head_size) for part in parts)
        q = self.q_norm(q)
        k = self.k_norm(k)
        if self.rope is not None:
            q = self.rope(q, past)
            k = self.rope(k, past)
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        if cache is not None:
            k, v = cache.extend(k, v)

        if self.queries_per_key != 1:
            # Query head j reads head j // queries_per_key. Repeated, as not every kernel knows
            # groups.
            k = k.repeat_interleave(self.queries_per_key, dim=1)
            v = v.repeat_interleave(self.queries_per_key, dim=1)
        see("attn.q", q)
        see("attn.k", k)

        mask = None
        if past:
            ones = torch.ones(
                seq_len,
                past + seq_len,
                dtype=torch.bool,
                device=x.device,
            )
            mask = ones.tril(past)
        y = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            is_causal=mask is None,
        )
        y = y.transpose(1, 2).reshape(batch, seq_len, -1)
        y = self.c_proj(y)
        see("attn.c_proj", y)
        return y


def relu_squared(x: Tensor) -> Tensor:
    """Return max(x, 0)^2, elementwise."""
    return F.relu(x).square()


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": gelu,
    "swiglu": F.silu,
    "relu2": relu_squared,
}
"""Function of the hidden units, of the gate where there is one, by `model.mlp`."""


class MLP(nn.Module):
    """GELU, SwiGLU (Shazeer 2020, arXiv 2002.05202) or squared ReLU (So et al. 2021, arXiv
    2109.08668)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[config.mlp]
        self.c_fc = nn.Linear(
            config.n_embd,
            config.ff_size,
            bias=config.bias,
        )
        self.c_up: nn.Linear | None = None
        if config.mlp_facts.is_gated:
            self.c_up = nn.Linear(
                config.n_embd,
                config.ff_size,
                bias=config.bias,
            )
        self.c_proj = nn.Linear(
            config.ff_size,
            config.n_embd,
            bias=config.bias,
        )

    def forward(self, x: Tensor, see: See = ignore) -> Tensor:
        hidden = self.c_fc(x)
        see("mlp.c_fc", hidden)
        hidden = self.activation(hidden)
        if self.c_up is not None:
            hidden = hidden * self.c_up(x)
        y = self.c_proj(hidden)
        see("mlp.c_proj", y)
        return y


class Block(nn.Module):
    def __init__(self, config: GPTConfig, rope: Rope | None = None) -> None:
        super().__init__()
        self.ln_1 = make_norm(config)
        self.attn = CausalSelfAttention(config, rope)
        self.ln_2 = make_norm(config)
        self.mlp = MLP(config)
        self.term: ActivationTerm | None = None
        """A method's term of the objective, of each of this block's activations that it asks for,
        where gradients are wanted."""

    def forward(
        self,
        x: Tensor,
        scale: Tensor | None = None,
        cache: KeyValueCache | None = None,
        see: See = ignore,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return the block's output (B, T, C), and its terms (activations asked for,) if it has a
        term and gradients are wanted: `see` is not called then.

        Args:
            scale: 0-d factor of both residual branches; None: 1.
        """
        terms: list[Tensor] = []
        if self.term is not None and torch.is_grad_enabled():
            term = self.term

            def see(name: str, activation: Tensor) -> None:
                if (value := term(name, activation)) is not None:
                    terms.append(value)

        see("ln_1", x)
        attended = self.attn(self.ln_1(x), cache, see)
        if scale is not None:
            attended = attended * scale
        x = x + attended
        see("ln_2", x)
        transformed = self.mlp(self.ln_2(x), see)
        if scale is not None:
            transformed = transformed * scale
        x = x + transformed
        if terms:
            return x, torch.stack(terms)
        return x
