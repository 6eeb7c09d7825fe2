"""A pre-norm transformer decoder: GPT-2 (Radford et al. 2019), Llama (Touvron et al. 2023) and what
lies between.

Every choice is a field of `GPTConfig`. Whatever they are, parameters have GPT-2's names (`wte wpe
h.N.ln_1 attn.c_attn attn.c_proj ln_2 mlp.c_fc mlp.c_proj ln_f`), beside which there are
`attn.q_norm attn.k_norm` with norms of q and k, `mlp.c_up` with a gate (c_fc is then the gate's),
and `lm_head` if it is not tied. Embedding, blocks and head can be called apart: a block that is not
called costs nothing. There is no dropout.

Shapes: B sequences, T tokens in each, C = n_embd channels, V = vocab_size token ids.

    tokens (B, T) -> embed -> (B, T, C) -> blocks -> (B, T, C) -> head -> logits (B, T, V)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from efftrain_cli.model.block import Block, KeyValueCache, Rope, make_norm
from efftrain_cli.model.config import GPTConfig as GPTConfig
from efftrain_cli.model.config import ParameterKind, parameter_kind
from efftrain_cli.model.losses import capped, summed_cross_entropy

Gates = Sequence[bool] | None
"""The blocks that a micro-batch runs, one flag per block; None: all."""
RunBlock = Callable[[Block, Tensor, Tensor | None], Tensor | tuple[Tensor, Tensor]]
"""(block, x, scale) -> what the block returns: how `GPT.run_blocks` computes one, for code that
compiles blocks."""


def run_eagerly(
    block: Block,
    x: Tensor,
    scale: Tensor | None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute a block, not compiled."""
    return block(x, scale)


class GPT(nn.Module):
    """The model. `forward` gives logits; training uses `loss_sum`.

    Raises:
        ValueError: its sizes do not fit together.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        if validation_errors := list(config.validation_errors()):
            raise ValueError("; ".join(rule for _, rule in validation_errors))
        self.config = config
        self.wte = nn.Embedding(config.padded_vocab_size, config.n_embd)
        self.wpe: nn.Embedding | None = None
        if config.position_facts.has_table:
            self.wpe = nn.Embedding(config.seq_len, config.n_embd)
        rope = None
        if config.position_facts.rotates:
            rope = Rope(config)
        self.h = nn.ModuleList(Block(config, rope) for _ in range(config.n_layer))
        self.ln_f = make_norm(config)
        self.lm_head: nn.Linear | None = None
        if not config.tied:
            self.lm_head = nn.Linear(
                config.n_embd,
                config.padded_vocab_size,
                bias=False,
            )
        self.with_squares = False
        """Training also asks for the squares of log-sum-exp, the z-loss."""
        self.residual_dtype = torch.float32
        """Type of the residual stream where autocast is on: in bf16 half the bytes pass between
        matmuls. Layer norms compute in fp32 on CUDA anyway, on a CPU in this type."""

    @property
    def device(self) -> torch.device:
        return self.wte.weight.device

    @property
    def head_weight(self) -> Tensor:
        """The matrix that makes the logits, (padded_vocab_size, n_embd): the embedding's if it is
        tied."""
        if self.lm_head is not None:
            return self.lm_head.weight
        return self.wte.weight

    @property
    def parameter_count(self) -> int:
        """Parameters, a tied matrix counted once."""
        return sum(parameter.numel() for parameter in self.parameters())

    def parameter_kinds(self) -> dict[str, ParameterKind]:
        """Map every parameter's name to its kind, by which growth, weight decay and Muon go."""
        return {name: parameter_kind(name) for name, _ in self.named_parameters()}

    def initial_weights(self, seed: int) -> Iterator[tuple[str, Tensor]]:
        """Draw the configured initialization, a function of `seed`, a whole parameter at a time, on
        the CPU, so that every device starts from the same weights. The model's own are not read,
        and may be on the meta device.

        Matrices and tables are N(0, std) with `InitFacts.std`; without it, for models without
        norms, the sum of token and position embedding has variance 1 and matrices are N(0, 1 /
        sqrt(inputs)). Biases are 0, norms and scales 1, rows of padding 0.
        """
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            drawn = torch.ones(parameter.shape)
            if name.endswith("bias"):
                drawn.zero_()
            elif parameter.dim() > 1:
                drawn = torch.randn(parameter.shape, generator=generator)
                drawn *= self._init_std(name, parameter)
            if name in ("wte.weight", "lm_head.weight"):
                drawn[self.config.vocab_size :] = 0.0
            yield name, drawn

    def _init_std(self, name: str, parameter: Tensor) -> float:
        """Return the standard deviation that a matrix or table is drawn with."""
        config = self.config
        std = config.init_facts.std
        if std is None and name in ("wte.weight", "wpe.weight", "lm_head.weight"):
            std = 1.0
            if config.position_facts.has_table:
                std = math.sqrt(0.5)
        elif std is None:
            std = 1 / math.sqrt(parameter.shape[1])
        if config.init_facts.shrinks_projections and name.endswith("c_proj.weight"):
            std /= math.sqrt(2 * config.n_layer)
        return std

    def embed(self, tokens: Tensor, position: int = 0) -> Tensor:
        """Embed token ids (B, T) in the residual stream (B, T, C), the first token at `position`.

        Raises:
            ValueError: the sequence reaches beyond the model's positions.
        """
        end = position + tokens.shape[1]
        if end > self.config.seq_len:
            raise ValueError(f"{end} positions asked of a model that has {self.config.seq_len}")
        x = self.wte(tokens)
        if self.wpe is not None:
            x = x + self.wpe.weight[position:end]
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(self.residual_dtype)
        return x

    def run_blocks(
        self,
        x: Tensor,
        gates: Gates = None,
        scales: Tensor | None = None,
        recompute: bool = False,
        run_block: RunBlock = run_eagerly,
        terms: list[Tensor] | None = None,
    ) -> Tensor:
        """Pass the residual stream (B, T, C) through the blocks.

        Args:
            gates: a block whose gate is False is skipped, not masked.
            scales: (n_layer,), of each block's branches; None: 1.
            recompute: compute a block's activations again in the backward pass instead of storing
                them.
            run_block: computes one block.
            terms: each block's terms, (activations asked for,), are appended to it, in the order of
                the blocks.
        """
        for i, module in enumerate(self.h):
            block = cast(Block, module)
            if gates is not None and not gates[i]:
                continue
            scale = None
            if scales is not None:
                scale = scales[i]

            if recompute:
                out = checkpoint(
                    run_block,
                    block,
                    x,
                    scale,
                    use_reentrant=False,
                    preserve_rng_state=False,  # blocks draw no random numbers
                )
            else:
                out = run_block(block, x, scale)
            if not isinstance(out, tuple):
                x = out
                continue
            x, block_terms = out
            if terms is not None:
                terms.append(block_terms)
        return x

    def before_head(self, x: Tensor) -> Tensor:
        """Return what is multiplied with the vocabulary, (..., C), of the residual stream (...,
        C)."""
        x = self.ln_f(x)
        if self.config.logit_scale != 1:
            x = x * self.config.logit_scale
        return x

    def head(self, x: Tensor) -> Tensor:
        """Compute logits (..., V) of the residual stream (..., C), padding columns cut off."""
        x = self.before_head(x)
        logits = F.linear(x, self.head_weight)
        return capped(logits[..., : self.config.vocab_size], self.config.softcap)

    def head_loss_sum(self, x: Tensor, targets: Tensor) -> Tensor:
        """Sum the cross-entropy, nats (0-d fp32), of the residual stream (B, T, C) against targets
        (B, T).

        While gradients are wanted of a model `with_squares`, return its two sums, (2,).
        """
        return summed_cross_entropy(
            self.before_head(x).flatten(0, -2),
            self.head_weight,
            targets.flatten(),
            vocab_size=self.config.vocab_size,
            softcap=self.config.softcap,
            with_squares=self.with_squares and torch.is_grad_enabled(),
        )

    def loss_sum(
        self,
        tokens: Tensor,
        targets: Tensor,
        run_block: RunBlock = run_eagerly,
    ) -> Tensor:
        """Sum the cross-entropy of tokens (B, T) against targets (B, T), nats, 0-d fp32."""
        x = self.run_blocks(self.embed(tokens), run_block=run_block)
        return self.head_loss_sum(x, targets)

    def new_caches(self) -> list[KeyValueCache]:
        """Make an empty cache for each block."""
        return [KeyValueCache() for _ in self.h]

    def hidden(
        self,
        tokens: Tensor,
        caches: Sequence[KeyValueCache] | None = None,
    ) -> Tensor:
        """Compute the residual stream (B, T, C) after the last block, of which `head` makes logits.

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
        """Compute logits (B, T, V)."""
        return self.head(self.hidden(tokens))
