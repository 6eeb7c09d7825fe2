"""The head's one-buffer cross-entropy against the plain form."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from efftrain_cli.model.cross_entropy import summed_cross_entropy

VOCAB, ROWS = 5000, 5056


def plain(x: Tensor, weight: Tensor, targets: Tensor, vocab_size: int) -> Tensor:
    return F.cross_entropy(F.linear(x, weight)[:, :vocab_size].float(), targets, reduction="sum")


def loss_and_gradients(
    form: Callable[..., Tensor], bf16: bool, scale: float = 1.0
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    x = (scale * torch.randn(130, 32, generator=generator)).requires_grad_()
    weight = torch.randn(ROWS, 32, generator=generator).requires_grad_()
    targets = torch.randint(VOCAB, (130,), generator=generator)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16):
        loss = form(x, weight, targets, VOCAB)
    (loss / 1000).backward()
    assert x.grad is not None and weight.grad is not None
    return loss.detach(), x.grad, weight.grad


def relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize(
    "bf16, loss_error, gradient_error", [(False, 1e-6, 1e-5), (True, 1e-3, 1e-2)]
)
def test_agrees_with_the_plain_form(bf16, loss_error, gradient_error):
    loss, x, weight = loss_and_gradients(summed_cross_entropy, bf16)
    plain_loss, plain_x, plain_weight = loss_and_gradients(plain, bf16)
    assert loss.dtype == torch.float32 and loss.dim() == 0
    assert relative(loss, plain_loss) < loss_error
    assert relative(x, plain_x) < gradient_error and relative(weight, plain_weight) < gradient_error
    assert weight.dtype == torch.float32


def test_padding_gets_no_gradient_at_all():
    for bf16 in (False, True):
        _, _, weight = loss_and_gradients(summed_cross_entropy, bf16)
        assert torch.equal(weight[VOCAB:], torch.zeros(ROWS - VOCAB, 32))
        assert (weight[:VOCAB] != 0).any(dim=1).all()


def test_logits_far_apart_neither_overflow_nor_vanish():
    loss, x, weight = loss_and_gradients(summed_cross_entropy, bf16=False, scale=100.0)
    plain_loss, plain_x, plain_weight = loss_and_gradients(plain, bf16=False, scale=100.0)
    torch.testing.assert_close(loss, plain_loss, rtol=1e-6, atol=0)
    assert relative(x, plain_x) < 1e-5 and relative(weight, plain_weight) < 1e-5


def test_without_gradient_it_is_the_same_loss(monkeypatch):
    loss, _, _ = loss_and_gradients(summed_cross_entropy, bf16=False)
    several_chunks = {"cpu": 1 << 20}
    monkeypatch.setattr("efftrain_cli.model.cross_entropy._CHUNK_BYTES", several_chunks)
    generator = torch.Generator().manual_seed(5)
    x, weight = (
        torch.randn(130, 32, generator=generator),
        torch.randn(ROWS, 32, generator=generator),
    )
    targets = torch.randint(VOCAB, (130,), generator=generator)
    with torch.no_grad():
        torch.testing.assert_close(
            summed_cross_entropy(x, weight, targets, VOCAB), loss, rtol=1e-6, atol=0
        )


def test_a_nan_reaches_loss_and_gradient():
    x = torch.full((3, 4), float("nan"), requires_grad=True)
    loss = summed_cross_entropy(
        x, torch.ones(8, 4, requires_grad=True), torch.zeros(3, dtype=torch.int64), 6
    )
    loss.backward()
    assert loss.isnan() and x.grad is not None and x.grad.isnan().all()
