"""Generation: the cache changes nothing, seeds repeat, padding is never sampled, end-of-text
ends."""

from __future__ import annotations

from itertools import islice

import pytest
import torch

from efftrain_cli.data.tokenizer import Tokenizer, train_tokenizer
from efftrain_cli.model.generate import GREEDY, Sampling, draw, generate
from efftrain_cli.model.gpt import GPT
from efftrain_cli.training.trained_model import generate_text
from tests.tiny import config_of
from tests.trained_run import random_gpt

CONFIG = config_of(vocab_size=50)


@pytest.fixture(scope="module")
def model() -> GPT:
    return random_gpt(CONFIG, spread=0.3, seed=5)


def test_greedy_with_cache_equals_greedy_without(model):
    prompt = torch.tensor([[1, 2, 3], [40, 41, 42]])
    found = torch.stack(list(islice(generate(model, prompt, GREEDY), 29)), dim=1)
    text = prompt
    with torch.no_grad():
        for _ in range(29):
            text = torch.cat([text, model(text)[:, -1].argmax(-1, keepdim=True)], dim=1)
    assert torch.equal(found, text[:, 3:])


def test_text_goes_on_beyond_the_positions(model):
    """Token 33 and later see the later half of the positions, and the cache built anew agrees with
    no cache."""
    prompt = torch.tensor([[7]])
    found = [int(token) for token in islice(generate(model, prompt, GREEDY), 60)]
    text = [7, *found]
    # With 32 tokens read, the 33rd no longer fits: reading starts anew with the last 16.
    with torch.no_grad():
        assert found[31] == int(model(torch.tensor([text[:32]]))[0, -1].argmax())
        assert found[32] == int(model(torch.tensor([text[17:33]]))[0, -1].argmax())
        assert found[33] == int(model(torch.tensor([text[17:34]]))[0, -1].argmax())
    short = [int(token) for token in islice(generate(model, torch.arange(50)[None], GREEDY), 2)]
    assert len(short) == 2


def test_seeds_repeat_and_differ(model):
    def text(seed: int) -> list[int]:
        sampling = Sampling(temperature=1.0, seed=seed)
        return [int(token) for token in islice(generate(model, torch.tensor([[1]]), sampling), 40)]

    torch.manual_seed(1)
    first = text(0)
    torch.manual_seed(2)  # the global generator has no say
    assert text(0) == first
    assert text(1) != first
    assert max(first) < CONFIG.vocab_size


def test_draw_follows_the_softmax_and_top_k():
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0]]).expand(20_000, 4)
    generator = torch.Generator().manual_seed(0)
    shares = draw(logits, Sampling(temperature=2.0), generator).bincount(minlength=4) / 20_000
    assert torch.allclose(shares, (logits[0] / 2).softmax(0), atol=0.015)
    top = draw(logits, Sampling(temperature=2.0, top_k=2), generator).bincount(minlength=4) / 20_000
    expected = torch.cat([torch.zeros(2), (logits[0, 2:] / 2).softmax(0)])
    assert torch.allclose(top, expected, atol=0.015)
    assert top[:2].sum() == 0


def test_top_p_draws_among_the_fewest_tokens_that_reach_it():
    """Probabilities .5 .3 .15 .05, not in order: 0.7 needs the first two, 0.8 exactly them, 0.81
    three."""
    logits = torch.log(torch.tensor([[0.05, 0.5, 0.15, 0.3]], dtype=torch.float64)).expand(4000, 4)

    def drawn(top_p: float) -> dict[int, float]:
        tokens = draw(
            logits, Sampling(temperature=1.0, top_p=top_p, seed=1), torch.Generator().manual_seed(1)
        )
        return {
            token: float((tokens == token).double().mean())
            for token in sorted(set(tokens.tolist()))
        }

    two = drawn(0.7)
    assert two.keys() == {1, 3}
    assert two[1] == pytest.approx(0.5 / 0.8, abs=0.04)
    assert drawn(0.81).keys() == {1, 2, 3}
    assert drawn(0.01).keys() == {1}, "the likeliest token always stays"
    assert drawn(1.0).keys() == {0, 1, 2, 3}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(280, ["the cat sat on the mat. "] * 20)


def test_text_is_whole_characters_and_ends_at_end_of_text(tokenizer):
    size = tokenizer.vocab_size
    config = config_of(n_layer=1, n_head=1, n_embd=8, seq_len=64, vocab_size=size)
    model = random_gpt(config, spread=0.3, seed=5)
    sampling = Sampling(temperature=1.0, seed=1)
    pieces = list(generate_text(model, tokenizer, "the cat", sampling, max_tokens=50))
    prompt = torch.tensor(tokenizer.encode(["the cat"])[0].tolist())[None]
    tokens = [int(token) for token in islice(generate(model, prompt, sampling), 50)]
    if tokenizer.eot_id in tokens:
        tokens = tokens[: tokens.index(tokenizer.eot_id)]
    assert len(tokens) > 5
    # Bytes that are no character yet wait for those that make them one.
    whole = tokenizer.decode([*prompt[0].tolist(), *tokens])
    assert whole.startswith("the cat" + "".join(pieces).rstrip("\ufffd"))
    assert len("".join(pieces)) > 5

    # A model that can only write end-of-text writes nothing.
    with torch.no_grad():
        model.ln_f.weight.zero_()
        model.ln_f.bias.copy_(model.wte.weight[tokenizer.eot_id] * 100)
    assert list(generate_text(model, tokenizer, "", GREEDY, max_tokens=50)) == []
