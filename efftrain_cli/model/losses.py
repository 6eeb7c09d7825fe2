"""The terms that training minimizes, each with little memory: cross-entropy over a large
vocabulary, and the divergence of activations from N(0, 1).

Plain autograd holds three arrays of (tokens, vocabulary): the log-softmax, the gradient of what it
picks, and the gradient of the logits. Here the logits are turned into their own gradient, chunk by
chunk, in the forward pass; the backward pass is then two matrix products. Nothing is computed
twice. `torch.compile` fuses the plain form as well as this, so compiled code does not come here.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

_CHUNK = {"cpu": 1 << 24, "cuda": 1 << 28}
"""Logits that are turned into their gradient, or exist without one, at once; 1 << 26 on other
devices."""


def _chunk_tokens(x: Tensor, rows: int) -> int:
    """Return the tokens whose logits over `rows` of the vocabulary are worked on at once."""
    size = _CHUNK.get(x.device.type, 1 << 26)
    return max(1, size // rows)


def at_least_fp32(x: Tensor) -> Tensor:
    """Return `x` in fp32, or in fp64 if it is."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def capped(logits: Tensor, softcap: float | None) -> Tensor:
    """Return `softcap` tanh(logits / softcap), in fp32 (fp64 if they are); the logits themselves if
    it is None.

    Source: Gemma Team 2024, arXiv 2408.00118, section 2.
    """
    if softcap is None:
        return logits
    return softcap * torch.tanh(at_least_fp32(logits) / softcap)


def summed_cross_entropy(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    vocab_size: int,
    softcap: float | None = None,
    with_squares: bool = False,
) -> Tensor:
    """Sum the cross-entropy, nats, 0-d fp32, of the logits `x @ weight.T`, `capped`, against
    `targets`.

    With `with_squares`, return it and the summed squares of log-sum-exp, (2,): Chowdhery et al.
    2022 (PaLM), arXiv 2204.02311, section 5.

    Args:
        x: (tokens, n_embd).
        weight: (rows, n_embd); rows from `vocab_size` on are padding, enter nothing and get a
            gradient of exactly 0.
        targets: int64 (tokens,).
    """
    if with_squares or torch.compiler.is_compiling():
        logits = F.linear(x, weight)[:, :vocab_size].float()
        logits = capped(logits, softcap)
        loss = F.cross_entropy(logits, targets, reduction="sum")
        if not with_squares:
            return loss
        squares = torch.logsumexp(logits, dim=1).square().sum()
        return torch.stack([loss, squares])
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        x = x.to(dtype)
        weight = weight.to(dtype)
    if torch.is_grad_enabled():
        return _SummedCrossEntropy.apply(
            x,
            weight,
            targets,
            vocab_size,
            softcap,
        )

    loss = torch.zeros((), device=x.device)
    tokens = _chunk_tokens(x, weight.shape[0])
    parts = x.split(tokens)
    for part, target in zip(parts, targets.split(tokens), strict=True):
        logits = F.linear(part, weight)[:, :vocab_size].float()
        loss += F.cross_entropy(
            capped(logits, softcap),
            target,
            reduction="sum",
        )
    return loss


class _SummedCrossEntropy(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        targets: Tensor,
        vocab_size: int,
        softcap: float | None,
    ) -> Tensor:
        logits = x @ weight.t()
        tokens = _chunk_tokens(x, logits.shape[1])
        chunks = logits[:, :vocab_size].split(tokens)
        columns = targets.unsqueeze(1).split(tokens)
        losses = []
        for chunk, target in zip(chunks, columns, strict=True):
            # The chunk itself, or narrow types in fp32, so that only the gradient is rounded, as in
            # autocast's plain form.
            work = at_least_fp32(chunk)
            if softcap is not None:
                work.div_(softcap).tanh_()
                slope = 1 - work.square()
                work.mul_(softcap)

            # log-sum-exp minus the logit of the target
            largest = work.amax(dim=1, keepdim=True)
            work.sub_(largest)
            of_target = work.gather(1, target)
            total = work.exp_().sum(dim=1, keepdim=True)
            loss = total.log() - of_target
            losses.append(loss.sum())

            # softmax minus one at the target: the gradient of the loss by the logits
            work.mul_(total.reciprocal())
            probability = work.gather(1, target)
            work.scatter_(1, target, probability - 1.0)
            if softcap is not None:
                work.mul_(slope)
            chunk.copy_(work)  # does nothing to itself

        logits[:, vocab_size:] = 0.0
        ctx.save_for_backward(x, weight, logits)
        return torch.stack(losses).sum().float()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        x, weight, grad_logits = ctx.saved_tensors
        # The factor goes to the small sides of the products; the gradient of the logits is left as
        # it is.
        grad_x = (grad_logits @ weight).mul_(grad_loss)
        grad_weight = grad_logits.t() @ (x * grad_loss)
        return grad_x, grad_weight, None, None, None


class _Divergence(Function):
    """Mean divergence of the channels of x (samples, channels), 0-d fp32 or fp64.

    For the backward pass it saves the moments and x itself, which other layers save anyway;
    autograd would save a copy of x in fp32. Each of m channels has n samples. So d/dx = (mu + (x -
    mu) (1 - 1 / (v + eps))) / (n m), and n m is the number of elements of x.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        eps: float,
    ) -> Tensor:
        wide = at_least_fp32(x)
        mean = wide.mean(0, keepdim=True)
        # In place: a second large tensor costs more than the sums.
        variance = (wide - mean).square_().mean(0, keepdim=True)

        ctx.save_for_backward(x, mean, variance)
        ctx.eps = eps
        divergences = mean.square() + variance - (variance + eps).log() - 1
        return 0.5 * divergences.mean()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        x, mean, variance = ctx.saved_tensors
        share = grad / x.numel()
        slope = 1 - 1 / (variance + ctx.eps)
        # mu + (x - mu) slope = mu (1 - slope) + x slope: one pass over x
        grad_x = torch.addcmul(
            share * mean * (1 - slope),
            x.to(mean.dtype),
            share * slope,
        )
        return grad_x.to(x.dtype), None


def standardization_loss(x: Tensor, eps: float = 0.0) -> Tensor:
    """Return the mean divergence of the channels of activations x (..., channels) from N(0, 1), in
    nats: 0-d, in fp64 if x is, else in fp32.

    That of N(mu, v) is (mu^2 + v - log v - 1) / 2. Moments are over all sequences and positions.
    `eps` is added to the variance in the logarithm.

    Source: Collins, Balle, Shlens 2019, arXiv 1903.00925, section 2.
    """
    return _Divergence.apply(x.flatten(0, -2), eps)
