"""Text from a trained GPT: tokens of `model/generate.py`, turned into characters."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from efftrain_cli.data.tokenizer import Tokenizer
from efftrain_cli.model.generate import Sampling, generate
from efftrain_cli.model.gpt import GPT


def generate_text(
    model: GPT, tokenizer: Tokenizer, prompt: str, sampling: Sampling, max_tokens: int
) -> Iterator[str]:
    """Pieces of the text that follows `prompt`, as they become whole characters; ends at end-of-text or max_tokens.

    An empty prompt stands for the beginning of a document. "<|endoftext|>" in a prompt is plain text, as in training
    data.
    """
    from tokenizers.decoders import DecodeStream

    ids = tokenizer.encode([prompt])[0].tolist() or [tokenizer.eot_id]
    # The stream reads the prompt too: a piece's leading space depends on what stands before it.
    stream = DecodeStream(ids=ids, skip_special_tokens=True)
    tokens = generate(model, torch.tensor([ids], device=model.device), sampling)
    for _ in range(max_tokens):
        token = int(next(tokens))
        if token == tokenizer.eot_id:
            return
        piece = stream.step(tokenizer.backend, token)
        if piece is not None:
            yield piece
