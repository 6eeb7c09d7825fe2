"""Scores against the plain computation: one request at a time, every logit."""

from __future__ import annotations

import pytest
import torch

from efftrain_cli.model.gpt import GPT
from efftrain_cli.zeroshot.score import Evaluator, Request, Score, windows
from tests.tiny import config_of
from tests.trained_run import random_gpt

CONFIG = config_of(seq_len=24, vocab_size=50)


@pytest.fixture(scope="module")
def model() -> GPT:
    return random_gpt(CONFIG, spread=0.5, seed=7)


def plain_score(model: GPT, request: Request, length: int) -> Score:
    whole = (request.context + request.continuation)[-(length + 1) :]
    with torch.no_grad():
        logprobs = model(torch.tensor([whole[:-1]]))[0].log_softmax(-1)
    n = len(request.continuation)
    wanted = torch.tensor(request.continuation)
    picked = logprobs[-n:].gather(1, wanted[:, None])
    return Score(picked.sum().item(), bool((logprobs[-n:].argmax(-1) == wanted).all()))


def some_requests(model: GPT) -> list[Request]:
    """Shared contexts with continuations of 1 to 5 tokens, lone ones, one too long, and ones that
    greedy decoding writes."""
    generator = torch.Generator().manual_seed(11)

    def draw(n: int) -> tuple[int, ...]:
        return tuple(torch.randint(CONFIG.vocab_size, (n,), generator=generator).tolist())

    requests = []
    for length in (3, 3, 8, 12, 12, 12):
        context = draw(length)
        requests += [Request(context, draw(n)) for n in (1, 5, 2, 1)]
    requests += [Request(draw(n), draw(3)) for n in (1, 4, 9, 20, 21, 22, 23, 40)]
    shared_but_too_long = draw(30)
    requests += [Request(shared_but_too_long, draw(2)) for _ in range(2)]
    for context in (draw(5), draw(6)):
        written: tuple[int, ...] = ()
        for _ in range(3):
            with torch.no_grad():
                written += (int(model(torch.tensor([context + written]))[0, -1].argmax()),)
        requests += [Request(context, written), Request(context, written[:1])]
    return requests


@pytest.mark.parametrize("batch_tokens", [1, 40, 4096])
def test_every_batching_equals_the_plain_computation(model, batch_tokens):
    """1 is one request at a time."""
    requests = some_requests(model)
    evaluator = Evaluator(model=model, context_length=CONFIG.seq_len, batch_tokens=batch_tokens)
    scores = evaluator.score(requests)
    for request, found in zip(requests, scores, strict=True):
        expected = plain_score(model, request, CONFIG.seq_len)
        assert found.logprob == pytest.approx(expected.logprob, abs=1e-5)
        assert found.greedy == expected.greedy
    assert sum(score.greedy for score in scores) >= 4
    # 22 + 3 - 1 = 24 inputs fit, 23 + 3 - 1 do not.
    assert sum(map(evaluator.is_truncated, requests)) == 4


def test_a_shorter_context_length_cuts_from_the_left(model):
    request = Request(tuple(range(20)), (7, 8))
    found = Evaluator(model=model, context_length=8).score([request])[0]
    assert found.logprob == pytest.approx(plain_score(model, request, 8).logprob, abs=1e-5)


def test_a_shared_context_is_computed_once(model):
    """Tokens that go through the blocks: the context once, and of each continuation all but its
    last token."""
    seen = []
    handle = model.h[0].register_forward_hook(
        lambda module, inputs, output: seen.append(inputs[0].shape)
    )
    context = tuple(range(10))
    Evaluator(model=model, context_length=CONFIG.seq_len).score(
        [Request(context, (1,)), Request(context, (2, 3, 4)), Request(context, (5, 6, 7))]
    )
    handle.remove()
    assert [tuple(shape[:2]) for shape in seen] == [(1, 10), (2, 2)]


def test_only_needed_positions_reach_the_head(model):
    seen = []
    handle = model.ln_f.register_forward_hook(
        lambda module, inputs, output: seen.append(inputs[0].shape[0])
    )
    Evaluator(model=model, context_length=CONFIG.seq_len).score(
        [Request(tuple(range(20)), (1, 2)), Request((3,), (4,))]
    )
    handle.remove()
    assert sum(seen) == 3


def test_impossible_requests_are_refused(model):
    evaluator = Evaluator(model=model, context_length=4)
    with pytest.raises(ValueError, match="empty"):
        evaluator.score([Request((), (1,))])
    with pytest.raises(ValueError, match="does not fit 4 positions"):
        evaluator.score([Request((1,), (1, 2, 3, 4, 5))])


@pytest.mark.parametrize("n", [1, 7, 8, 9, 16, 17, 40])
def test_disjoint_windows_are_the_harness_rolling_windows(n):
    lm_eval_utils = pytest.importorskip("lm_eval.utils")
    tokens = list(range(100, 100 + n))
    theirs = [
        Request(tuple(context), tuple(continuation))
        for context, continuation in map(
            lm_eval_utils.make_disjoint_window,
            lm_eval_utils.get_rolling_token_windows(
                tokens, prefix_token=0, max_seq_len=8, context_len=1
            ),
        )
    ]
    assert windows(tokens, length=8, stride=8, prefix=0) == theirs


def test_strided_windows_predict_each_token_once_with_full_context():
    requests = windows(range(30), length=8, stride=3, prefix=None)
    assert [token for request in requests for token in request.continuation] == list(range(1, 30))
    assert all(len(request.context) + len(request.continuation) - 1 <= 8 for request in requests)
    assert [len(request.continuation) for request in requests[:3]] == [8, 3, 3]
    assert requests[1] == Request((3, 4, 5, 6, 7, 8), (9, 10, 11))
    with pytest.raises(ValueError, match="stride"):
        windows(range(30), length=8, stride=9, prefix=None)
