"""The head's one-buffer cross-entropy against the plain form."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from efftrain_cli.model import losses
from efftrain_cli.model.losses import capped, summed_cross_entropy
from tests.tiny import drawn

VOCAB, ROWS = 5000, 5056


def plain(x: Tensor, weight: Tensor, targets: Tensor, softcap: float | None) -> Tensor:
    logits = F.linear(x, weight)[:, :VOCAB].float()
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return F.cross_entropy(logits, targets, reduction="sum")


def ours(x: Tensor, weight: Tensor, targets: Tensor, softcap: float | None) -> Tensor:
    return summed_cross_entropy(x, weight, targets, VOCAB, softcap)


def relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize(
    "bf16, scale, softcap, loss_error, gradient_error",
    [
        (False, 1.0, None, 1e-6, 1e-5),
        (True, 1.0, None, 1e-3, 1e-2),
        (False, 1.0, 2.0, 1e-6, 1e-5),
        # Logits far apart neither overflow nor vanish.
        (False, 100.0, None, 1e-6, 1e-5),
    ],
)
def test_agrees_with_the_plain_form(monkeypatch, bf16, scale, softcap, loss_error, gradient_error):
    generator = torch.Generator().manual_seed(5)
    x = (scale * torch.randn(130, 32, generator=generator)).requires_grad_()
    weight = torch.randn(ROWS, 32, generator=generator).requires_grad_()
    targets = drawn(VOCAB, 130, seed=5)
    found = []
    for form in (ours, plain):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16):
            loss = form(x, weight, targets, softcap)
        found.append((loss.detach(), *torch.autograd.grad(loss / 1000, (x, weight))))
    (loss, *gradients), (expected, *expected_gradients) = found
    assert loss.dtype == torch.float32 and loss.dim() == 0
    assert relative(loss, expected) < loss_error
    for gradient, wanted in zip(gradients, expected_gradients, strict=True):
        assert relative(gradient, wanted) < gradient_error
    assert not gradients[1][VOCAB:].any(), "padding gets no gradient at all"
    if not bf16:
        # Evaluation: in several chunks, a token at a time, on a device without its own size.
        for sizes in ({"cpu": 1 << 18}, {"cpu": ROWS - 1}, {}):
            monkeypatch.setattr(losses, "_CHUNK", sizes)
            with torch.no_grad():
                assert relative(ours(x, weight, targets, softcap), expected) < 1e-6


@pytest.mark.parametrize(
    "softcap, expected",
    [
        (15.0, [1.98823183, -0.99852115, 14.4604137]),
        (30.0, [1.9970423, -0.99962979, 22.84782468]),
        (None, [2.0, -1.0, 30.0]),
    ],
)
def test_capped_logits_by_hand(softcap, expected):
    logits = torch.tensor([2.0, -1.0, 30.0])
    assert capped(logits, softcap).tolist() == pytest.approx(expected, rel=1e-6)


def test_a_nan_reaches_loss_and_gradient():
    x = torch.full((3, 4), float("nan"), requires_grad=True)
    weight = torch.ones(8, 4, requires_grad=True)
    loss = summed_cross_entropy(x, weight, torch.zeros(3, dtype=torch.int64), 6)
    loss.backward()
    assert loss.isnan() and x.grad.isnan().all()
