"""Text from a trained GPT, token by token, keeping keys and values of what it has read.

`generate` is a generator of token columns, so its caller decides when to stop. The padding of the
vocabulary is never sampled: the head cuts it off.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from efftrain_cli.model.gpt import GPT
from efftrain_cli.model.kernels import attention_kernels


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is drawn."""

    temperature: float = 0.8
    """Logits are divided by it; 0 takes the most probable token."""
    top_k: int | None = None
    """Draw among the k most probable tokens only; None draws among all."""
    top_p: float | None = None
    """Draw among the fewest most probable tokens whose probabilities, after `temperature` and
    `top_k`, add up to this or more (nucleus sampling, Holtzman et al. 2020, arXiv 1904.09751); None
    draws among all."""
    seed: int = 0
    """Same seed, same text, on the same device type."""


GREEDY = Sampling(temperature=0)


def generate(
    model: GPT,
    prompt: Tensor,
    sampling: Sampling,
    context_length: int | None = None,
) -> Iterator[Tensor]:
    """Continue `prompt` (batch, n >= 1) without end: yields int64 (batch,), one token per row and
    step.

    At most `context_length` (default: the model's) positions are used. When they are full, reading
    starts anew with the later half of them, so the text goes on with less context behind it.
    """
    length = context_length or model.config.seq_len
    # Drawn on the CPU, so that a device has no say in the random numbers.
    generator = torch.Generator().manual_seed(sampling.seed)
    text = prompt[:, -length:]
    unread = text
    caches = model.new_caches()

    while True:
        # Entered for each step and left before `yield`: the caller's own torch code is not to run
        # in this mode.
        with torch.inference_mode(), attention_kernels(prompt.device, same_shape=False):
            if caches[0].length + unread.shape[1] > length:
                half = max(1, length // 2)
                unread = text[:, -half:]
                caches = model.new_caches()

            last = model.hidden(unread, caches)[:, -1]
            logits = model.head(last).float()
            token = draw(logits, sampling, generator)

            unread = token[:, None]
            text = torch.cat([text, unread], dim=1)[:, -length:]
        yield token


def draw(
    logits: Tensor,
    sampling: Sampling,
    generator: torch.Generator,
) -> Tensor:
    """Draw one token per row of `logits` (batch, vocab_size): int64 (batch,) on their device."""
    if sampling.temperature == 0:
        return logits.argmax(-1)

    logits = logits / sampling.temperature
    if sampling.top_k is not None:
        largest = logits.topk(min(sampling.top_k, logits.shape[1])).values
        smallest_kept = largest[:, -1:]
        logits = logits.masked_fill(logits < smallest_kept, -torch.inf)

    probabilities = logits.softmax(-1)
    if sampling.top_p is not None:
        falling, order = probabilities.sort(descending=True)
        # Those before it already add up to top_p.
        before = falling.cumsum(-1) - falling
        is_dropped = before >= sampling.top_p
        in_order_of_tokens = is_dropped.gather(-1, order.argsort())
        probabilities = probabilities.masked_fill(in_order_of_tokens, 0.0)

    drawn = torch.multinomial(
        probabilities.cpu(),
        1,
        generator=generator,
    )
    return drawn[:, 0].to(logits.device)
