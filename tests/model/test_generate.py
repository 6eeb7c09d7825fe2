"""Generation: the cache changes nothing, seeds repeat, padding is never sampled, end-of-text
ends."""

from __future__ import annotations

from itertools import islice

import pytest
import torch

from efftrain_cli.data.tokenizer import train_tokenizer
from efftrain_cli.model.generate import GREEDY, Sampling, draw, generate
from efftrain_cli.model.gpt import GPT
from efftrain_cli.training.loading import generate_text
from tests.tiny import config_of
from tests.trained_run import random_gpt

CONFIG = config_of(vocab_size=50)


@pytest.fixture(scope="module")
def model() -> GPT:
    return random_gpt(CONFIG, spread=0.3, seed=5)


def generated(model: GPT, prompt: list[int], count: int, sampling: Sampling = GREEDY) -> list[int]:
    tokens = islice(generate(model, torch.tensor([prompt]), sampling), count)
    return [int(token) for token in tokens]


@torch.no_grad()
def likeliest(model: GPT, text: list[int]) -> int:
    return int(model(torch.tensor([text]))[0, -1].argmax())


def test_greedy_with_cache_equals_greedy_without_beyond_the_positions(model):
    """With 32 tokens read, the 33rd no longer fits: reading starts anew with the last 16."""
    text = [7]
    for _ in range(32):
        text.append(likeliest(model, text))
    for _ in range(3):
        text.append(likeliest(model, text[17:]))
    assert generated(model, [7], 35) == text[1:]
    alone = generate(model, torch.tensor([[3, 7]]), GREEDY, context_length=1)
    assert [int(token) for token in islice(alone, 2)] == [text[1], likeliest(model, text[1:2])]


def test_rows_are_generated_as_each_alone(model):
    prompts = [[1, 2, 3], [40, 41, 42]]
    both = list(islice(generate(model, torch.tensor(prompts), GREEDY), 10))
    for row, prompt in enumerate(prompts):
        assert [int(tokens[row]) for tokens in both] == generated(model, prompt, 10)


def test_seeds_repeat_and_differ(model):
    def text(seed: int) -> list[int]:
        return generated(model, [1], 40, Sampling(temperature=1.0, seed=seed))

    torch.manual_seed(1)
    first = text(0)
    torch.manual_seed(2)  # the global generator has no say
    assert text(0) == first
    assert text(1) != first
    assert max(first) < CONFIG.vocab_size


def shares(logits: torch.Tensor, **settings: float) -> torch.Tensor:
    """Return how often each of four tokens is drawn."""
    sampling = Sampling(**{"temperature": 1.0, **settings})
    generator = torch.Generator().manual_seed(0)
    return draw(logits.expand(20_000, 4), sampling, generator).bincount(minlength=4) / 20_000


def test_draw_follows_the_softmax_and_top_k():
    logits = torch.tensor([0.0, 1.0, 2.0, 3.0])
    expected = (logits / 2).softmax(0)
    assert torch.allclose(shares(logits, temperature=2.0), expected, atol=0.015)
    top = shares(logits, temperature=2.0, top_k=2)
    assert torch.allclose(top[2:], expected[2:] / expected[2:].sum(), atol=0.015)
    assert not top[:2].any()


@pytest.mark.parametrize(
    "top_p, kept", [(0.75, [1, 3]), (0.9, [0, 1, 2, 3]), (0.01, [1]), (1.0, [0, 1, 2, 3])]
)
def test_top_p_draws_among_the_fewest_tokens_that_reach_it(top_p, kept):
    probabilities = torch.tensor([0.125, 0.5, 0.125, 0.25], dtype=torch.float64)
    found = shares(probabilities.log(), top_p=top_p)
    assert found.nonzero().flatten().tolist() == kept
    expected = probabilities[kept] / probabilities[kept].sum()
    assert torch.allclose(found[kept].double(), expected, atol=0.015)


def test_text_is_whole_characters_and_ends_at_end_of_text():
    tokenizer = train_tokenizer(280, ["the cat sat on the mat. "] * 20)
    size = tokenizer.vocab_size
    config = config_of(n_layer=1, n_head=1, n_embd=8, seq_len=64, vocab_size=size)
    model = random_gpt(config, spread=0.3, seed=5)
    sampling = Sampling(temperature=1.0, seed=1)
    text = "".join(generate_text(model, tokenizer, "the cat", sampling, max_tokens=50))
    prompt = tokenizer.encode(["the cat"])[0].tolist()
    tokens = generated(model, prompt, 50, sampling)
    if tokenizer.eot_id in tokens:
        tokens = tokens[: tokens.index(tokenizer.eot_id)]
    # Bytes that are no character yet wait for those that make them one.
    assert len(text) > 5
    assert tokenizer.decode([*prompt, *tokens]).startswith("the cat" + text.rstrip("\ufffd"))

    # A model that can only write end-of-text writes nothing.
    with torch.no_grad():
        model.ln_f.weight.zero_()
        model.ln_f.bias.copy_(model.wte.weight[tokenizer.eot_id] * 100)
    assert list(generate_text(model, tokenizer, "", GREEDY, max_tokens=50)) == []
