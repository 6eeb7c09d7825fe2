"""The protocols of our own: against counts and likelihoods worked out the plain way."""

from __future__ import annotations

import math

import pytest
import torch

from efftrain_cli.data.tokenizer import Tokenizer, train_tokenizer
from efftrain_cli.zeroshot.own_tasks import (
    CLOZE_ITEMS,
    CLOZE_WORDS,
    cloze_passages,
    fingerprint,
    lambada_last_token,
    offline_bytes,
    offline_cloze,
    wikitext_strided,
)
from efftrain_cli.zeroshot.score import Evaluator
from efftrain_cli.zeroshot.task_score import mean_and_error, perplexity_and_error
from tests.tiny import config_of
from tests.trained_run import random_gpt

TEXT = (
    "Anna found the lantern near the harbour and walked home again, because the evening was rather"
    " cold. " * 12
)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(300, [TEXT])


@pytest.fixture(scope="module")
def evaluator(tokenizer: Tokenizer) -> Evaluator:
    config = config_of(n_layer=1, vocab_size=tokenizer.vocab_size, padded_vocab_size=320)
    return Evaluator(model=random_gpt(config, spread=0.3, seed=2), context_length=32)


def logprobs(evaluator: Evaluator, tokens: list[int]) -> torch.Tensor:
    """Log-probability of every next token of a sequence that fits the context."""
    with torch.no_grad():
        found = evaluator.model(torch.tensor([tokens[:-1]]))[0].log_softmax(-1)
    return found.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]


def test_last_token(evaluator, tokenizer):
    texts = ["Anna found the lantern", "the evening was cold", "a"]
    score = lambada_last_token(evaluator, tokenizer, texts, limit=2)
    assert (score.scored, score.total) == (2, 3)
    for text, item in zip(texts, score.items, strict=False):
        tokens = tokenizer.encode([text])[0].tolist()
        assert item["perplexity"] == pytest.approx(logprobs(evaluator, tokens)[-1].item(), abs=1e-5)
    assert score.values["perplexity"] == pytest.approx(
        math.exp(-sum(item["perplexity"] for item in score.items) / 2), rel=1e-6
    )


def test_strided_counts_each_token_once(evaluator, tokenizer):
    pages = [
        (" = Anna = \n walked , home . \n", " = Anna = \nwalked, home.\n"),
        (" cold \n", " cold\n"),
    ]
    score = wikitext_strided(evaluator, tokenizer, pages, limit=None, stride=5)
    tokens = tokenizer.encode([" = Anna = \nwalked, home.\n cold\n"])[0].tolist()
    assert len(tokens) <= 33
    nll = -logprobs(evaluator, tokens).sum().item()
    assert score.values["token_perplexity"] == pytest.approx(
        math.exp(nll / (len(tokens) - 1)), rel=1e-4
    )
    original = " = Anna = \n walked , home . \n cold \n"
    # Split at single spaces: "", "=", "Anna", "=", "\n", "walked", ",", "home", ".", "\n", "cold",
    # "\n" are twelve words.
    assert score.values["word_perplexity"] == pytest.approx(math.exp(nll / 11), rel=1e-4)
    assert score.values["bits_per_byte"] == pytest.approx(
        nll / math.log(2) / len(original.encode()), rel=1e-4
    )


def test_overlap_lowers_nothing_but_the_missing_context(evaluator, tokenizer):
    """Every window's tokens are predicted once, whatever the stride."""
    pages = [(TEXT, TEXT)]
    count = len(tokenizer.encode([TEXT])[0]) - 1
    for stride in (1, 7, 32):
        score = wikitext_strided(evaluator, tokenizer, pages, limit=None, stride=stride)
        assert sum(item["tokens"] for item in score.items) == count
        assert score.protocol == f"strided WikiText-2 window 32 stride {stride}"


def test_bytes(evaluator, tokenizer):
    documents = ["Anna walked home.", "Übel"]
    score = offline_bytes(evaluator, tokenizer, documents, limit=None)
    assert score.protocol == f"offline bytes, documents {fingerprint(documents)} window 32"
    assert fingerprint(documents) != fingerprint(documents[::-1])
    nll = 0.0
    for document in documents:
        nll -= (
            logprobs(evaluator, [tokenizer.eot_id, *tokenizer.encode([document])[0].tolist()])
            .sum()
            .item()
        )
    assert score.values["bits_per_byte"] == pytest.approx(nll / math.log(2) / (17 + 5), rel=1e-5)
    assert score.values["byte_perplexity"] == pytest.approx(
        2 ** score.values["bits_per_byte"], rel=1e-6
    )


def test_cloze_passages_end_before_a_word_and_do_not_overlap():
    passages = cloze_passages([TEXT, "too short to ask anything"])
    assert len(passages) >= 3
    at = 0
    for context, word in passages:
        assert word[0] == " " and word[1:].isalpha() and len(word) >= 4
        assert context == context.strip() and len(context.split()) >= CLOZE_WORDS
        found = TEXT.index(context + word, at)
        at = found + len(context + word)
    assert cloze_passages([TEXT]) == passages
    many = cloze_passages([TEXT * 400])
    assert len(many) == CLOZE_ITEMS and len(set(many)) < CLOZE_ITEMS  # evenly from the whole of it
    assert cloze_passages(["x\ny\n" * 1000]) == []


def test_cloze_scores_the_whole_word(evaluator, tokenizer):
    score = offline_cloze(evaluator, tokenizer, [TEXT], limit=2)
    context, word = cloze_passages([TEXT])[1]
    tokens = tokenizer.encode([context + word])[0].tolist()
    length = len(tokens) - len(tokenizer.encode([context])[0])
    expected = logprobs(evaluator, tokens[-33:])[-length:].sum().item()
    assert score.items[1]["perplexity"] == pytest.approx(expected, abs=1e-5)
    assert score.boundary_mismatches == 0 and score.truncated == 2


def test_standard_errors():
    """Mean 0.25, s = sqrt(4 * 3/16 / 3) for 1, 0, 0, 0; the perplexity's by the delta method
    against a bootstrap."""
    assert mean_and_error([1, 0, 0, 0]) == pytest.approx((0.25, 0.25))
    assert mean_and_error([0.5]) == (0.5, None)
    generator = torch.Generator().manual_seed(0)
    values = -torch.rand(400, generator=generator) * 4
    value, error = perplexity_and_error(values.tolist())
    draws = values[torch.randint(400, (4000, 400), generator=generator)].mean(1).neg().exp()
    assert value == pytest.approx(values.mean().neg().exp().item(), rel=1e-5)
    assert error == pytest.approx(draws.std().item(), rel=0.06)
