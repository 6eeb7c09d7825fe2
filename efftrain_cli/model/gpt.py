"""GPT-2 (Radford et al. 2019): pre-LN transformer decoder, learned positions, tied head; or the same without layer
norms.

Parameter names are GPT-2's (`wte wpe h.N.ln_1 attn.c_attn attn.c_proj ln_2 mlp.c_fc mlp.c_proj ln_f`), so that weights
and optimizer moments can be read beside the released ones. Embedding, blocks and head can be called apart: a block
that is not called costs nothing. There is no dropout.

Shapes: B sequences, T tokens in each, C = n_embd channels, H heads of C / H channels, V = vocab_size token ids.

    tokens (B, T) -> embed -> (B, T, C) -> blocks -> (B, T, C) -> head -> logits (B, T, V)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from efftrain_cli.model.cross_entropy import summed_cross_entropy
from efftrain_cli.model.flops import CHANNELS, FlopsPerToken, flops_per_token
from efftrain_cli.model.gelu import gelu
from efftrain_cli.model.linear import NarrowHead
from efftrain_cli.model.parameter_kinds import ParameterKind, parameter_kind


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """Shape of a GPT."""

    n_layer: int
    n_head: int
    n_embd: int
    seq_len: int
    """Positions, in tokens."""
    vocab_size: int
    """Token ids that exist."""
    padded_vocab_size: int
    """Rows of the embedding matrix: vocab_size rounded up for the matmul. The rest never reaches a loss or a sample."""
    norm: Literal["layernorm", "none"] = "layernorm"
    """With "none" there are no layer norms: each is the identity."""
    init: Literal["gpt2", "unit"] = "gpt2"
    """How weights are initialized: see `GPT.init_weights`. With "unit" the logits are divided by sqrt(n_embd),
    always."""
    affine: tuple[str, ...] = ()
    """Activations (of `flops.CHANNELS`) that a learned scale and shift follow; "ln_1", "ln_2" and "ln_f" only without
    layer norms."""

    @property
    def logit_scale(self) -> float:
        """What the product with the vocabulary is multiplied by."""
        return 1 / math.sqrt(self.n_embd) if self.init == "unit" else 1.0


See = Callable[[str, Tensor], None]
"""(name, activation) -> nothing: shown the outputs of linear layers and the inputs of layer norms, by the layer's name
in its block (`attn.c_attn`, `attn.c_proj`, `mlp.c_fc`, `mlp.c_proj`; `ln_1`, `ln_2`), each (B, T, channels)."""
ActivationTerm = Callable[[str, Tensor], Tensor | None]
"""(name, activation) -> its term of the objective (0-d), None where the activation is not asked for."""


def ignore(name: str, activation: Tensor) -> None:
    """Sees nothing."""


class KeyValueCache:
    """Keys and values of the positions one block has seen, for generation: each (B, H, positions, C / H)."""

    def __init__(self) -> None:
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    @property
    def length(self) -> int:
        """Positions seen."""
        return 0 if self.keys is None else self.keys.shape[2]

    def extend(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Appends (B, H, new, C / H) and returns all keys and values so far."""
        if self.keys is not None and self.values is not None:
            keys = torch.cat([self.keys, keys], dim=2)
            values = torch.cat([self.values, values], dim=2)
        self.keys, self.values = keys, values
        return keys, values


class Affine(nn.Module):
    """A learned scale and shift of each channel: (..., channels) -> (..., channels)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addcmul(self.bias, x, self.weight)


def _affine(config: GPTConfig, name: str) -> nn.Module:
    """What follows the activation `name`: its scale and shift, or the identity."""
    return Affine(CHANNELS[name] * config.n_embd) if name in config.affine else nn.Identity()


def _norm(config: GPTConfig, name: str) -> nn.Module:
    """The layer norm `name`, or what stands in its place."""
    return nn.LayerNorm(config.n_embd) if config.norm == "layernorm" else _affine(config, name)


class CausalSelfAttention(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.n_head = config.n_head
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd)
        self.c_attn_affine = _affine(config, "attn.c_attn")
        self.c_proj = nn.Linear(config.n_embd, config.n_embd)
        self.c_proj_affine = _affine(config, "attn.c_proj")

    def forward(self, x: Tensor, cache: KeyValueCache | None = None, see: See = ignore) -> Tensor:
        batch, seq_len, n_embd = x.shape
        qkv = self.c_attn(x)
        see("attn.c_attn", qkv)
        qkv = self.c_attn_affine(qkv)
        # Split before the heads are taken apart: the backward pass then joins the three gradients in one copy.
        q, k, v = (
            part.view(batch, seq_len, self.n_head, -1).transpose(1, 2)
            for part in qkv.split(n_embd, dim=2)
        )
        past = 0
        if cache is not None:
            past = cache.length
            k, v = cache.extend(k, v)
        if past == 0:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            mask = torch.ones(seq_len, past + seq_len, dtype=torch.bool, device=x.device).tril(past)
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        y = self.c_proj(y.transpose(1, 2).reshape(batch, seq_len, n_embd))
        see("attn.c_proj", y)
        return self.c_proj_affine(y)


class MLP(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd)
        self.c_fc_affine = _affine(config, "mlp.c_fc")
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd)
        self.c_proj_affine = _affine(config, "mlp.c_proj")

    def forward(self, x: Tensor, see: See = ignore) -> Tensor:
        x = self.c_fc(x)
        see("mlp.c_fc", x)
        x = self.c_proj(gelu(self.c_fc_affine(x)))
        see("mlp.c_proj", x)
        return self.c_proj_affine(x)


class Block(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.ln_1 = _norm(config, "ln_1")
        self.attn = CausalSelfAttention(config)
        self.ln_2 = _norm(config, "ln_2")
        self.mlp = MLP(config)
        self.term: ActivationTerm | None = None
        """A method's term of the objective, of each of this block's activations that it asks for, where gradients are
        wanted."""

    def forward(
        self, x: Tensor, scale: Tensor | None = None, cache: KeyValueCache | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """The block's output, (B, T, C); beside it its terms, (activations asked for,), where it has a term and
        gradients are wanted. `scale` (0-d) multiplies both residual branches; None is 1."""
        terms: list[Tensor] = []
        see: See = ignore
        if self.term is not None and torch.is_grad_enabled():
            term = self.term

            def see(name: str, activation: Tensor) -> None:
                if (value := term(name, activation)) is not None:
                    terms.append(value)

        see("ln_1", x)
        attended = self.attn(self.ln_1(x), cache, see)
        x = x + (attended if scale is None else attended * scale)
        see("ln_2", x)
        transformed = self.mlp(self.ln_2(x), see)
        x = x + (transformed if scale is None else transformed * scale)
        return (x, torch.stack(terms)) if terms else x


RunBlock = Callable[[Block, Tensor, Tensor | None], Tensor | tuple[Tensor, Tensor]]
"""(block, x, scale) -> what the block returns: how `GPT.run_blocks` computes one, for code that compiles blocks."""


def run_eagerly(block: Block, x: Tensor, scale: Tensor | None) -> Tensor | tuple[Tensor, Tensor]:
    """The block's output, not compiled."""
    return block(x, scale)


class GPT(nn.Module):
    """GPT-2. `forward` gives logits; training uses `loss_sum`."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        if config.n_embd % config.n_head:
            raise ValueError(f"n_embd {config.n_embd} is not a multiple of n_head {config.n_head}")
        self.config = config
        self.wte = nn.Embedding(config.padded_vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.seq_len, config.n_embd)
        self.h = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.ln_f = _norm(config, "ln_f")
        self.lockstep = False
        """Several ranks make each call of `loss_sum` together, because each keeps a share of the weights."""
        self.narrow_head: NarrowHead | None = None
        """Computes the product with the vocabulary in an accumulator of its choice; None: as PyTorch does."""
        self.residual_dtype = torch.float32
        """Type of the residual stream where autocast is on: in bf16 half the bytes pass between matmuls. Layer norms
        compute in fp32 on CUDA anyway, on a CPU in this type."""

    @property
    def device(self) -> torch.device:
        return self.wte.weight.device

    @property
    def parameter_count(self) -> int:
        """Parameters, the tied matrix counted once."""
        return sum(parameter.numel() for parameter in self.parameters())

    def parameter_kinds(self) -> dict[str, ParameterKind]:
        """The kind of every parameter by name; growth, weight decay and Muon go by it."""
        return {name: parameter_kind(name) for name, _ in self.named_parameters()}

    def flops_per_token(
        self, seq_len: int | None = None, blocks: float | None = None
    ) -> FlopsPerToken:
        """FLOPs per trained token at `seq_len` (default: the full length) where `blocks` blocks ran (default: all)."""
        config = self.config
        return flops_per_token(
            config.n_embd,
            config.seq_len if seq_len is None else seq_len,
            config.padded_vocab_size,
            config.n_layer if blocks is None else blocks,
            config.norm,
            config.affine,
        )

    def init_weights(self, seed: int) -> None:
        """The configured initialization, a function of `seed` alone. Biases 0, layer norms and scales 1.

        "gpt2": matrices and embeddings N(0, 0.02), projections into the residual stream N(0, 0.02 / sqrt(2 n_layer)).
        "unit", for models without layer norms: the sum of token and position embedding has variance 1, matrices are
        N(0, 1 / sqrt(inputs)), projections into the residual stream that over sqrt(2 n_layer). The standard deviation
        is given. Drawn on the CPU, so that every device starts from the same weights. Padding rows are 0.
        """
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if name.endswith("bias"):
                    parameter.zero_()
                elif parameter.dim() == 1:
                    parameter.fill_(1.0)
                else:
                    std = 0.02
                    if self.config.init == "unit":
                        embedding = name in ("wte.weight", "wpe.weight")
                        std = math.sqrt(0.5) if embedding else 1 / math.sqrt(parameter.shape[1])
                    if name.endswith("c_proj.weight"):
                        std /= math.sqrt(2 * self.config.n_layer)
                    parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)
            self.wte.weight[self.config.vocab_size :].zero_()

    def replace_linears(self, make: Callable[[str, nn.Linear], nn.Module]) -> None:
        """Puts `make(name, layer)` in the place of every linear layer of the blocks, in order; `name` is that of its
        module, as "h.0.attn.c_attn". A replacement keeps the layer's parameters under their names. The tied head is not
        among them: it shares its matrix with the embedding."""
        for name, module in [
            (name, m) for name, m in self.h.named_modules() if isinstance(m, nn.Linear)
        ]:
            parent, _, child = name.rpartition(".")
            setattr(self.h.get_submodule(parent), child, make(f"h.{name}", module))

    def embed(self, tokens: Tensor, position: int = 0) -> Tensor:
        """Token ids (B, T) -> residual stream (B, T, C); the first token stands at `position`.

        Raises:
            ValueError: the sequence reaches beyond the model's positions.
        """
        end = position + tokens.shape[1]
        if end > self.config.seq_len:
            raise ValueError(f"{end} positions asked of a model that has {self.config.seq_len}")
        x = self.wte(tokens) + self.wpe.weight[position:end]
        return x.to(self.residual_dtype) if torch.is_autocast_enabled(x.device.type) else x

    def run_blocks(
        self,
        x: Tensor,
        gates: Sequence[bool] | None = None,
        scales: Tensor | None = None,
        recompute: bool = False,
        run_block: RunBlock = run_eagerly,
        terms: list[Tensor] | None = None,
    ) -> Tensor:
        """Residual stream (B, T, C) through the blocks.

        A block whose gate is False is skipped, not masked. `scales` is (n_layer,) or None for 1. With `recompute`, a
        block's activations are computed again in the backward pass instead of stored. `run_block` computes one block.
        Each block's terms, (activations asked for,), are appended to `terms`, in the order of the blocks that ran.
        """
        for i, module in enumerate(self.h):
            block = cast(Block, module)
            if gates is not None and not gates[i]:
                continue
            arguments = block, x, None if scales is None else scales[i]
            out = (
                checkpoint(run_block, *arguments, use_reentrant=False)
                if recompute
                else run_block(*arguments)
            )
            x, *found = out if isinstance(out, tuple) else (out,)
            if terms is not None:
                terms += found
        return x

    def before_head(self, x: Tensor) -> Tensor:
        """Residual stream (..., C) -> what is multiplied with the vocabulary, (..., C)."""
        x, scale = self.ln_f(x), self.config.logit_scale
        return x if scale == 1 else x * scale

    def head(self, x: Tensor) -> Tensor:
        """Residual stream (..., C) -> logits (..., V), padding columns cut off."""
        x = self.before_head(x)
        logits = (
            F.linear(x, self.wte.weight)
            if self.narrow_head is None
            else self.narrow_head(x, self.wte.weight)
        )
        return logits[..., : self.config.vocab_size]

    def head_loss_sum(self, x: Tensor, targets: Tensor) -> Tensor:
        """Summed cross-entropy, nats (0-d fp32), of the residual stream (B, T, C) against targets (B, T)."""
        x = self.before_head(x).flatten(0, -2)
        if self.narrow_head is not None:
            logits = self.narrow_head(x, self.wte.weight)[:, : self.config.vocab_size]
            return F.cross_entropy(logits.float(), targets.flatten(), reduction="sum")
        return summed_cross_entropy(x, self.wte.weight, targets.flatten(), self.config.vocab_size)

    def loss_sum(
        self,
        tokens: Tensor,
        targets: Tensor,
        gates: Sequence[bool] | None = None,
        scales: Tensor | None = None,
        recompute: bool = False,
    ) -> Tensor:
        """Summed cross-entropy of tokens (B, T) against targets (B, T), nats, 0-d fp32."""
        return self.head_loss_sum(
            self.run_blocks(self.embed(tokens), gates, scales, recompute), targets
        )

    def new_caches(self) -> list[KeyValueCache]:
        """An empty cache for each block."""
        return [KeyValueCache() for _ in self.h]

    def hidden(self, tokens: Tensor, caches: Sequence[KeyValueCache] | None = None) -> Tensor:
        """Residual stream (B, T, C) after the last block; `head` makes logits of it, or of the positions that matter.

        With `caches` (one per block) only the tokens are given that follow those already seen.

        Raises:
            ValueError: the sequence reaches beyond the model's positions.
        """
        if caches is None:
            return self.run_blocks(self.embed(tokens))
        x = self.embed(tokens, caches[0].length)
        for block, cache in zip(self.h, caches, strict=True):
            x = block(x, None, cache)
        return x

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits (B, T, V)."""
        return self.head(self.hidden(tokens))
